"""Ctrl-C and SIGTERM end a run at a safe place, from which it continues to the same numbers."""

import gc
import os
import signal
import threading

import optax
import orbax.checkpoint as ocp
import pytest
import running
import toy
from internals import Terminated, read_metrics
from running import PRIVATE

import fedjax_peft as fp
from fedjax_peft.engine.calls import Call
from fedjax_peft.simulation import points
from fedjax_peft.simulation.interrupts import noted
from fedjax_peft.simulation.simulate import arguments

pytestmark = pytest.mark.usefixtures("interrupts")

CLIENTS, TEST = toy.clients([7, 4, 12, 9]), toy.dataset(20, seed=3)
ENDS = {signal.SIGINT: KeyboardInterrupt, signal.SIGTERM: Terminated}


def run(out, **options):
    options |= {"clients": CLIENTS, "test": TEST, "eval_every": 3, "checkpoint_every": 4}
    return running.run(PRIVATE, rounds=4, out=out, **options)


def send(number, times=1):
    for _ in range(times):
        os.kill(os.getpid(), number)


def in_round(index, action):
    """Returns an ``on_round`` that acts in one round."""
    return lambda row: action() if row["round"] == index else None


def rows(metrics):
    return [{k: v for k, v in row.items() if k != "time"} for row in metrics]


@pytest.fixture(scope="module")
def straight():
    return rows(run(None).metrics)


def collect_garbage(number):
    """Sends a signal inside a callback of the garbage collector, where exceptions are lost."""

    def callback(phase, info):
        gc.callbacks.remove(callback)
        send(number)

    gc.callbacks.append(callback)
    gc.collect()


@pytest.mark.parametrize(
    ("number", "how"), [(signal.SIGINT, send), (signal.SIGTERM, collect_garbage)]
)
def test_a_signal_ends_the_run_after_the_round_with_a_checkpoint(
    number, how, straight, tmp_path, capfd
):
    """The row has neither a reason to stop nor a score that an uninterrupted run has not."""
    with pytest.raises(ENDS[number]) as caught:
        run(tmp_path / "run", on_round=in_round(1, lambda: how(number)))
    assert getattr(caught.value, "code", 143) == 143
    assert "ends after this round" in capfd.readouterr().err
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["1"]
    assert rows(read_metrics(tmp_path / "run" / "metrics.jsonl")) == straight[:2]
    assert rows(run(tmp_path / "run", resume=True).metrics) == straight


def test_a_second_signal_ends_the_run_at_once(tmp_path):
    seen = []

    def twice():
        send(signal.SIGINT, 2)
        seen.append("not reached")

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "run", on_round=in_round(1, twice))
    assert not seen
    assert not list((tmp_path / "run" / "checkpoints").iterdir())


def test_a_signal_before_the_first_row_ends_the_run_between_parts(straight, tmp_path):
    def on_phase(phase):
        if phase.name == "evaluating":
            send(signal.SIGTERM)

    with pytest.raises(Terminated):
        run(tmp_path / "run", on_phase=on_phase)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    assert rows(run(tmp_path / "run", resume=True).metrics) == straight


def test_a_signal_after_the_first_row_saves_it(straight, tmp_path):
    with pytest.raises(Terminated):
        run(tmp_path / "run", on_round=in_round(0, lambda: send(signal.SIGTERM)))
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["0"]
    assert rows(run(tmp_path / "run", resume=True).metrics) == straight


def test_a_run_without_a_directory_ends_before_its_next_program():
    phases = []

    def on_phase(phase):
        phases.append((phase.name, phase.round_index))
        if phases[-1] == ("training", 3):
            send(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run(None, on_phase=on_phase)
    assert phases[-1] == ("training", 3), "round 3 is not evaluated"


def test_a_signal_during_a_checkpoint_waits_for_its_end(straight, tmp_path, monkeypatch):
    save = ocp.CheckpointManager.save

    def interrupted(self, *args, **options):
        save(self, *args, **options)  # it goes on in the background
        send(signal.SIGINT)

    monkeypatch.setattr(ocp.CheckpointManager, "save", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "run")
    monkeypatch.undo()
    assert rows(run(tmp_path / "run", resume=True).metrics) == straight


# The block alone.


@pytest.mark.parametrize("number", ENDS)
def test_a_signal_that_nobody_asks_for_is_raised_at_the_end_of_the_block(number):
    done = []

    def work():
        with noted():
            send(number)
            done.append("whole")

    with pytest.raises(ENDS[number]):
        work()
    assert done == ["whole"]


def test_signals_of_other_threads_and_own_handlers_are_unchanged():
    done = []

    def work():
        with noted() as request:
            done.append(request.number)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()

    own = [signal.SIG_IGN, lambda number, frame: done.append(number)]
    before = [signal.signal(n, f) for n, f in zip(ENDS, own, strict=True)]
    try:
        with noted() as request:
            send(signal.SIGINT)
            send(signal.SIGTERM)
        assert request.number == 0
    finally:
        for number, handler in zip(ENDS, before, strict=True):
            signal.signal(number, handler)
    assert done == [0, signal.SIGTERM]


class Nothing:
    """A program without results."""

    def arguments_of(self, call):
        return ()

    def group(self, arguments):
        return 0

    def stacked(self, calls):
        return [None] * len(calls)


@pytest.mark.parametrize("number", ENDS)
def test_a_signal_ends_points_that_run_side_by_side(number, capfd, monkeypatch):
    begun, closed = [], []

    def endless(given):
        begun.append(1)
        if len(begun) == 2:
            send(number)
        try:
            while True:
                yield Call(Nothing(), None, None, 0)
        finally:
            closed.append(1)

    monkeypatch.setattr(points, "simulating", endless)
    given = arguments(toy.model(), fp.algorithms.local(optax.sgd(0.1)), toy.clients((2,)), rounds=1)
    jobs = [points.Job(str(i), 1, lambda *_: given) for i in range(4)]
    with pytest.raises(ENDS[number]):
        points.run_points(jobs, replicas=2)
    assert len(begun) == len(closed) == 2
    assert "end at once. They continue from their last checkpoints." in capfd.readouterr().err
