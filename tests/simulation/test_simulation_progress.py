"""Progress: the phases of a run, and their display in Python."""

import io
import itertools
import sys
import types

import pytest
import running
import toy
from internals import Phase
from running import model

from fedjax_peft.simulation.progress import describe, phase_display

CLIENTS, TEST = toy.clients([7, 4, 12, 1]), toy.dataset(20, seed=3)


class Terminal(io.StringIO):
    """A stderr that is a terminal."""

    def isatty(self):
        """Returns True."""
        return True


def run(**options):
    """Runs a model whose programs are not compiled yet."""
    options = {"rounds": 4, "eval_every": 2, "eval_batch_size": 4, "progress": "auto", **options}
    return running.run(model=toy.model(), clients=CLIENTS, test=TEST, **options)


def test_a_run_sends_every_phase_before_it_begins(tmp_path):
    seen = []
    run(on_phase=seen.append, on_round=lambda row: seen.append(row["round"]), out=tmp_path / "run")
    order = [p if isinstance(p, int) else p.name for p in seen]
    order = [kind for kind, _ in itertools.groupby(order)]
    assert order[:5] == ["starting", "compiling", "evaluating", 0, "compiling"]
    assert order[5:8] == ["training", 1, "training"]
    assert order[-2:] == ["saving", "finished"]
    phases = [p for p in seen if isinstance(p, Phase)]
    start = phases[0].details
    assert (start["clients"], start["clients_per_round"], start["train_examples"]) == (4, 4, 24)
    assert (start["parameters"], start["out"]) == (model().counts(), tmp_path / "run")
    assert [p.details["program"] for p in phases if p.name == "compiling"] == ["test", "round"]
    evaluating = [p for p in phases if p.name == "evaluating"]
    assert {p.round_index for p in evaluating} == {0, 2, 4}
    assert {(p.total, p.details["evaluation"]) for p in evaluating} == {(20, "test")}
    done = [p.done for p in evaluating if p.round_index == 0]
    assert done == sorted(set(done))
    assert (done[0], done[-1], len(done) > 2) == (0, 20, True)
    training = [p for p in phases if p.name == "training"]
    assert [p.round_index for p in training] == [1, 2, 3, 4]
    assert training[0].seconds_left is None
    assert all(p.seconds_left > 0 for p in training[1:])
    assert phases[-1].seconds_left == 0


def test_progress_prints_nothing_without_a_terminal(monkeypatch, capsys):
    run()
    assert capsys.readouterr().err == ""
    for stream, show, shown in (
        (io.StringIO(), "auto", False),
        (io.StringIO(), True, True),
        (Terminal(), "auto", True),
        (Terminal(), False, False),
    ):
        monkeypatch.setattr(sys, "stderr", stream)
        assert (phase_display(show) is not None) == shown


@pytest.mark.parametrize("stream", [Terminal, io.StringIO])
def test_progress_names_the_phases(stream, monkeypatch):
    screen = stream()
    monkeypatch.setattr(sys, "stderr", screen)
    run(progress=True)
    text = screen.getvalue()
    for expected in ("compiling (test)", "compiling (round)", "finished"):
        assert expected in text
    assert ("\r" in text) == (stream is Terminal)


def test_phases_read_as_words():
    phase = Phase("evaluating", 2, 5, done=8, total=20, details={"evaluation": "test"})
    assert describe(phase) == "evaluating test 8 of 20"
    assert describe(Phase("training", 2, 5)) == "training round 2 of 5"
    stopped = Phase("finished", 2, 5, details={"stopped": "the target is reached"})
    assert describe(stopped) == "stopped: the target is reached"


def test_a_notebook_is_shown_progress_though_its_stderr_is_no_terminal(monkeypatch):
    def shell(**fields):
        return types.SimpleNamespace(get_ipython=lambda: types.SimpleNamespace(**fields))

    screen = io.StringIO()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setitem(sys.modules, "IPython", shell())  # of a terminal
    assert phase_display("auto") is None
    monkeypatch.setitem(sys.modules, "IPython", shell(kernel=object()))
    display = phase_display("auto")
    display(Phase("starting", 0, 3, details={"algorithm": "fedavg"}))
    display(Phase("training", 2, 3, seconds_left=61))
    with display.hidden():
        pass
    display.close()
    text = screen.getvalue()
    assert "fedavg" in text
    assert "1/3" in text
    assert "1 min 01 s left  training round 2 of 3" in text
