"""Only one process can write to a run directory; mixed rows of two processes are an error."""

import json
import os
import subprocess
import sys
import threading

import pytest
import running
import toy
from internals import cli, read_metrics, record

from fedjax_peft import InputError
from fedjax_peft.simulation.storage.lock import NAME, RunLock

CLIENTS = toy.clients([4, 4])
HOLD = """
import pathlib, sys
from fedjax_peft.simulation.storage.lock import RunLock
lock = RunLock.take(pathlib.Path(sys.argv[1]))
print("taken", flush=True)
input()
"""


def run(out, **options):
    return running.run(clients=CLIENTS, out=out, **options)


def content(folder):
    return {p: p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_a_second_process_cannot_run_resume_or_overwrite_until_the_first_is_gone(tmp_path):
    out = tmp_path / "run"
    run(out)
    command, pipe = [sys.executable, "-c", HOLD, str(out)], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe) as other:
        assert other.stdout.readline() == b"taken\n"
        before = content(out)
        refused = rf"in use by another run, of process {other.pid} on "
        for attempt in (
            lambda: run(out, resume=True),
            lambda: run(out),
            lambda: record.remove_run(out),
        ):
            with pytest.raises(InputError, match=refused):
                attempt()
        assert content(out) == before
        other.kill()
    assert (out / NAME).exists()
    assert len(run(out, resume=True).metrics) == 3
    assert not (out / NAME).exists()
    record.remove_run(out)
    assert not out.exists()


def test_a_run_releases_its_lock_at_every_kind_of_end(tmp_path):
    out = tmp_path / "run"

    def again(row):
        assert json.loads((out / NAME).read_text())["pid"] == os.getpid()
        run(out, resume=True)

    with pytest.raises(InputError, match="of this process"):
        run(out, on_round=again)
    assert not (out / NAME).exists()
    run(out, resume=True)
    with pytest.raises(InputError, match="another config"):
        run(out, resume=True, seed=3)
    with pytest.raises(InputError, match="already holds a run"):
        run(out)
    assert not (out / NAME).exists()


@pytest.mark.parametrize("text", ["", "{", "[1]", "\xff"])
def test_what_a_dead_process_has_left_is_replaced(text, tmp_path):
    (tmp_path / NAME).write_text(text, encoding="latin-1")
    with RunLock.take(tmp_path) as lock:
        assert json.loads((tmp_path / NAME).read_text())["pid"] == os.getpid()
        (tmp_path / NAME).write_text(text, encoding="latin-1")
        with pytest.raises(InputError, match="in use by another run"):
            RunLock.take(tmp_path)
    lock.release()  # a second time changes nothing
    assert list(tmp_path.iterdir()) == []


def test_of_many_that_want_a_lock_one_at_a_time_gets_it(tmp_path):
    holders, most, start = [], [], threading.Barrier(8)

    def take():
        start.wait()
        for _ in range(50):
            try:
                with RunLock.take(tmp_path):
                    holders.append(1)
                    most.append(len(holders))
                    holders.pop()
            except InputError:
                pass

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(most) == {1}
    assert list(tmp_path.iterdir()) == []


def test_rows_of_two_processes_are_refused(tmp_path, capsys):
    out = tmp_path / "run"
    run(out)
    metrics = out / "metrics.jsonl"
    lines = metrics.read_text().splitlines()
    metrics.write_text("".join(f"{line}\n" for line in [*lines, lines[1]]))
    with pytest.raises(InputError, match=r"line 4: round 1 occurs a second time"):
        read_metrics(metrics)
    assert cli.main(["report", str(out)]) == 2
    assert "round 1 occurs a second time" in capsys.readouterr().err
    with pytest.raises(InputError, match="occurs a second time"):
        run(out, resume=True)


def test_windows_without_such_locks_is_refused_in_a_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr("fedjax_peft.simulation.storage.lock.fcntl", None)
    with pytest.raises(InputError, match="WSL2"):
        run(tmp_path / "run")
    assert not (tmp_path / "run" / NAME).exists()
    assert len(run(None).metrics) > 1
