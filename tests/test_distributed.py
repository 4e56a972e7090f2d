"""Runs of several processes: equal results, one writer, resume on other numbers, death."""

import json
import re
import shutil
import socket
import sys

import distributed_worker
import pytest
from closeness import assert_close
from internals import main, read_metrics, record, sweep, sweeping
from processes import HELPERS, free_port, run_together
from refusals import refused

import fedjax_peft as fp

WORKER = HELPERS / "distributed_worker.py"

pytestmark = [pytest.mark.slow, pytest.mark.long("processes start, connect and die")]


def run(processes, *scenarios, devices=1, expected=(0,)):
    """Returns how processes ended that did some runs together; see ``distributed_worker.py``."""
    port, text = free_port(), json.dumps(scenarios, default=str)
    commands = [
        (sys.executable, WORKER, text, process, processes, port) for process in range(processes)
    ]
    return run_together(commands, devices=devices, expected=expected)


def answer(ended, scenario=0):
    """Returns what a process said of one of its runs."""
    return json.loads(ended.out.splitlines()[scenario])


def rows_of(out):
    """Returns the rows that a run has written, without times and the reason why it stopped."""
    rows = read_metrics(out / "metrics.jsonl")
    return [{k: v for k, v in row.items() if k not in ("time", "stopped")} for row in rows]


def assert_same_rows(found, expected):
    """Compares rows: numbers to float32 rounding, everything else exactly."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key in expected:
            assert_same_rows(found[key], expected[key])
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same_rows(one, other)
    elif isinstance(expected, float):
        # The errors of an aggregation are differences of nearly equal numbers.
        assert_close(found, expected, rtol=2e-5, atol=1e-6)
    else:
        assert found == expected


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def pair(folder):
    """Two processes with a device each: a rule of process 0 stops a run, a death the next one."""
    stopped = {"out": folder / "stopped", "stop_after": 1}
    killed = {"out": folder / "killed", "end": "SIGKILL", "end_process": 1, "end_round": 2}
    return run(2, stopped, killed, expected=None)


@pytest.fixture(scope="module")
def again(pair, folder):
    """Two more, which continue the run of the dead; the coordinator dies in the last round of all.

    Each row is written before that death.
    """
    resumed = {"out": folder / "killed", "resume": True}
    straight = {"out": folder / "straight", "end": "SIGKILL", "end_process": 0, "end_round": 4}
    return run(2, resumed, straight, expected=None)


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.exhaustive)])
def asked(request, pair, folder):
    """Processes that are asked to end, as by Slurm before its time limit; their rows, and where."""
    processes, out = request.param, folder / f"asked {request.param}"
    shutil.copytree(folder / "stopped", out)
    last = {"end": "SIGTERM", "end_process": processes - 1, "end_round": 2}
    return run(processes, {"out": out, "resume": True, **last}, expected=(143,)), rows_of(out), out


@pytest.fixture(scope="module")
def alone(asked):
    """The rows of this process with one device, which then continues the others' run."""
    rows = distributed_worker.simulate({}, 0, 1)["rows"]
    distributed_worker.simulate({"out": asked[-1], "resume": True}, 0, 1)
    return json.loads(json.dumps(rows))


def test_one_process_writes(pair, folder):
    out = folder / "stopped"
    first, second = map(answer, pair)
    assert first == second  # the rows, also their times, and the run directory
    assert "stopped" in first["rows"][1]  # only process 0's rule said so
    assert len((out / "metrics.jsonl").read_text().splitlines()) == 2
    device = json.loads((out / "environment.json").read_text())["device"]
    assert re.fullmatch(r"2 x .* of 2 processes", device)
    assert not (out / "run.lock").exists()


def test_a_killed_process_ends_the_others_and_resume_goes_on(pair, again, folder):
    first, second = pair
    assert second.code == -9
    assert first.code == 2
    assert re.fullmatch(
        r"fedjax-peft: Process 1 of 2 \(.*, pid \d+\) has given no sign of life for 10 s: .*"
        r" --resume continues the run, on the same or another number of processes\.\n",
        first.err,
    )
    assert not (folder / "killed" / "run.lock").exists()
    assert answer(again[0])["rows"][-1]["round"] == 4
    assert rows_of(folder / "killed") == rows_of(folder / "straight")  # on as many: to the bit


def test_the_death_of_the_coordinator_ends_the_others(again):
    first, second = again
    assert (first.code, second.code) == (-9, 2)
    assert "fedjax-peft: Process 0, the coordinator, cannot be reached" in second.err


def test_a_run_goes_on_and_all_end_if_one_is_asked_to(asked, folder):
    ended, rows, out = asked
    assert not any(one.out for one in ended), "no run came back"
    saved = max(int(path.name) for path in (out / "checkpoints").iterdir())
    assert saved in (2, 3), "the round in which all know of the signal"
    assert [row["round"] for row in rows] == list(range(saved + 1))
    before = rows_of(folder / "stopped")
    del before[-1]["by_class"]  # the last round of a run has it
    assert rows[:2] == before


def test_one_process_gives_the_rows_of_several_and_of_a_run_by_several_and_one(
    alone, asked, again, folder
):
    assert_same_rows(rows_of(folder / "straight"), alone)
    assert_same_rows(rows_of(asked[-1]), alone)


def test_processes_with_other_settings_are_refused_by_all():
    first, second = run(2, {"seeds": [0, 1]}, expected=(1,))
    text = "Process 1 does not run the same as process 0: seed is 1 here and 0 there."
    assert f"Process 1 of 2 ({socket.gethostname()}, pid" in first.err
    assert text in first.err
    assert "Traceback" not in first.err
    assert text in second.err


def test_a_directory_that_the_processes_do_not_share_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(fp.distributed, "agree", lambda value: ["the lock of process 0", []])
    monkeypatch.setattr(record, "_VISIBLE", 0.0)
    with pytest.raises(
        fp.InputError, match=r"does not see the files that process 0 writes to .*--out"
    ):
        record.Record(None)._join(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("a:1", 2, None), "belong together, but process is missing"),
        (("a:1", 2, 2), "process = 2 is not one of 0 to 1"),
        (("a", 2, 1), "coordinator = 'a' is not of the form HOST:PORT"),
        ((f"127.0.0.1:{free_port()}", 2, 1), "did not answer within 0 s: .*refused"),
        ((None, None, None), "JAX has been used already"),
    ],
)
def test_initialize_explains_errors(arguments, message):
    import jax

    jax.devices()
    refused(message, fp.distributed.initialize, *arguments, timeout=0)


def test_a_port_in_use_is_named():
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(fp.InputError, match=f"cannot listen on port {port}: .*in use"):
            fp.distributed.initialize(f"127.0.0.1:{port}", 2, 0)


def test_sweeps_are_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("fedjax_peft.report.points.processes", lambda: 2)
    refused("A sweep runs in one process", sweep.sweep, None, None, None, points=fp.grid(seed=[0]))
    (tmp_path / sweeping.SWEEP).write_text('config = "a.toml"')
    assert main(["resume", str(tmp_path), "--distributed"]) == 2
    assert "is a sweep, which runs in one process" in capsys.readouterr().err


def test_one_process_agrees_with_itself():
    value = {"a": (1, 2)}
    assert fp.distributed.agree(value) is value
    assert (fp.distributed.is_writer(), fp.distributed.processes()) == (True, 1)
