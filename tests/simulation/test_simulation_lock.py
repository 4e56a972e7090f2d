"""Only one process can write to a run directory; mixed rows of two processes are an error."""

import json
import os
import subprocess
import sys
import threading
import time

import pytest
import running
import toy

from fedjax_peft import InputError
from fedjax_peft.cli import main as cli
from fedjax_peft.simulation import lock, record
from fedjax_peft.simulation.lock import NAME, RunLock
from fedjax_peft.simulation.rows import read_metrics

CLIENTS = toy.clients([4, 4])


def run(out, **options):
    return running.run(clients=CLIENTS, out=out, **options)


@pytest.fixture
def other():
    """Returns another running process."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        yield child
        child.kill()


def write(folder, *, age=0.0, **changes):
    """Writes a lock as this process would, with changes."""
    folder.mkdir(exist_ok=True)
    (folder / NAME).write_text(json.dumps(lock._content() | {"token": "other"} | changes))
    os.utime(folder / NAME, (time.time() - age,) * 2)


def content(folder):
    return {p: p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_a_second_process_cannot_run_resume_or_overwrite(tmp_path, other):
    out = tmp_path / "run"
    run(out)
    write(out, pid=other.pid, process_start=lock._start_of(other.pid))
    before = content(out)
    refused = rf"in use by another run, of process {other.pid} on .* delete .*run\.lock"
    for attempt in (
        lambda: run(out, resume=True),
        lambda: run(out),
        lambda: record.remove_run(out),
    ):
        with pytest.raises(InputError, match=refused):
            attempt()
    assert content(out) == before
    other.kill()
    other.wait()
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


@pytest.mark.parametrize(
    ("changes", "age", "held"),
    [
        ({}, 1e6, True),  # this process: it lives, however long it has been silent
        ({"process_start": "1"}, 0, False),  # the number has been given to another process
        ({"pid": 2**22 + 1}, 0, False),  # no such process
        ({"host": "elsewhere"}, 0, True),
        ({"host": "elsewhere"}, 2 * lock.SILENCE, False),
        ({"namespace": "a container"}, 0, True),
        ({"namespace": "a container"}, 2 * lock.SILENCE, False),
        ({"pid": "no number"}, 2 * lock.SILENCE, False),
    ],
)
def test_stale_locks_are_recognised(changes, age, held, tmp_path):
    write(tmp_path, age=age, **changes)
    if held:
        with pytest.raises(InputError, match="in use by another run"):
            RunLock.take(tmp_path)
    else:
        RunLock.take(tmp_path).release()
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["", "{", "[1]", "\xff"])
def test_a_damaged_lock_counts_by_its_age(text, tmp_path):
    (tmp_path / NAME).write_text(text, encoding="latin-1")
    with pytest.raises(InputError, match="in use by another run"):
        RunLock.take(tmp_path)
    os.utime(tmp_path / NAME, (1e9, 1e9))
    RunLock.take(tmp_path).release()


def test_of_many_that_find_a_stale_lock_one_gets_it(tmp_path):
    write(tmp_path, process_start="1")
    locks, start = [], threading.Barrier(8)

    def take():
        start.wait()
        try:
            locks.append(RunLock.take(tmp_path))
        except InputError:
            locks.append(None)

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (one,) = [t for t in locks if t is not None]
    one.release()
    assert list(tmp_path.iterdir()) == []


def test_a_lock_is_refreshed_regularly(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "BEAT", 0.01)
    with RunLock.take(tmp_path):
        os.utime(tmp_path / NAME, (1e9, 1e9))
        deadline = time.monotonic() + 20
        while (tmp_path / NAME).stat().st_mtime < 2e9 and time.monotonic() < deadline:
            if (tmp_path / NAME).stat().st_mtime > 1e9 + 1:
                break
            time.sleep(0.01)
        assert (tmp_path / NAME).stat().st_mtime > 1e9 + 1


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
