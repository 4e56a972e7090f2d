"""Measures add fields to the row of each moment of a run, and listeners can end it."""

import threading

import optax
import pytest
import toy
from internals import read_metrics
from options import run_options
from refusals import refused

import fedjax_peft as fp
from fedjax_peft.simulation import rounds
from fedjax_peft.simulation.rows import field_is_lower_better

MODEL, CLIENTS, TEST = toy.model(), toy.clients((4, 3, 5)), toy.dataset(20, seed=3)


def run(listeners=(), measures=(), **options):
    given = {"rounds": 4, "test": TEST, "eval_every": 2, "batch_size": 4, "progress": False}
    given |= {"listeners": listeners, "measures": measures}
    algorithm = fp.algorithms.fedavg(optax.sgd(0.1))
    return fp.simulate(MODEL, algorithm, CLIENTS, **run_options(**{**given, **options}))


def timeless(rows):
    return [{name: x for name, x in row.items() if name != "time"} for row in rows]


class Watch:
    """A listener that is a context manager, and ends the run after a round."""

    def __init__(self, last=None):
        self.last, self.heard, self.open = last, [], None

    def __enter__(self):
        self.open = True

    def __exit__(self, *error):
        self.open = False

    def __call__(self, moment):
        assert self.open
        known = [row["round"] for row in moment.rows]
        self.heard.append((moment.round_index, moment.last, known, "train_loss" in moment.row))
        return "enough" if moment.round_index == self.last else None


def test_a_listener_hears_of_every_moment_and_ends_the_run(tmp_path):
    watch, plain = Watch(), run()
    assert timeless(run([watch]).metrics) == timeless(plain.metrics)
    rows = [list(range(index)) for index in range(5)]
    assert watch.heard == [(i, i == 4, rows[i], i > 0) for i in range(5)]
    assert watch.open is False
    ended = run([Watch(last=1)], out=tmp_path)
    assert [row["round"] for row in ended.metrics] == [0, 1]
    assert ended.metrics[-1]["stopped"] == "enough"
    assert "test_accuracy" in ended.metrics[-1], "the last round is evaluated"
    assert timeless(read_metrics(tmp_path / "metrics.jsonl")) == timeless(ended.metrics)
    again = run(out=tmp_path, resume=True)
    assert timeless(again.metrics) == timeless(plain.metrics)


def test_a_listener_that_raises_ends_the_run_after_a_checkpoint(tmp_path):
    def breaks(moment):
        if moment.round_index == 3:
            raise ValueError("no room")

    with pytest.raises(ValueError, match="no room") as caught:
        run([breaks], out=tmp_path)
    assert caught.value.__notes__ == ["The listener breaks raised this after round 3."]
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["3"]
    assert timeless(run(out=tmp_path, resume=True).metrics) == timeless(run().metrics)


def test_a_listener_that_returns_no_sentence_ends_the_run_too():
    def enough(moment):
        return moment.round_index == 1

    rows = run([enough]).metrics
    assert (len(rows), rows[-1]["stopped"]) == (2, "enough returned True")


def test_a_listener_that_hangs_is_named(monkeypatch, capsys):
    told = threading.Event()
    monkeypatch.setattr(rounds, "PATIENCE", 0.01)
    monkeypatch.setattr(rounds, "print", lambda *x, **_: (print(*x), told.set()), raising=False)

    def slow(moment):
        assert told.wait(30)

    run([slow], rounds=1)
    assert "the listener slow has not returned for 0.01 s" in capsys.readouterr().out


def test_what_is_no_function_is_no_listener():
    with pytest.raises(fp.InputError, match="A listener is a function of a moment, not 'print'"):
        run(["print"])


def test_a_measure_adds_fields_to_every_row(tmp_path):
    def twice(moment):
        return {"twice": 2 * moment.round_index, "train": moment.row.get("train_loss")}

    twice.lower_is_better = ("twice",)
    found = run(measures=[twice], out=tmp_path).metrics
    assert field_is_lower_better(found, "twice")
    assert not field_is_lower_better(found, "train")
    assert [row["twice"] for row in found] == [0, 2, 4, 6, 8]
    assert [row["train"] for row in found] == [row.get("train_loss") for row in run().metrics]
    assert timeless(read_metrics(tmp_path / "metrics.jsonl")) == timeless(found)


def test_a_field_that_a_measure_cannot_have_is_refused_before_the_first_round(tmp_path):
    def made(field, value):
        return run(measures=[lambda moment: {field: value}], rounds=1, out=tmp_path)

    for taken in ("bytes_up", "time", "stopped"):
        refused(f"has the field '{taken}', which the row", made, taken, 1.0)
    refused("'test_confusion' = .*, but it must be a number", made, "test_confusion", [[1, 0]])
    refused("'steps' = 'few', but it must be", made, "steps", "few")
    refused("but it must not contain integers", made, "seeds", [2**63])
    refused("has the field 'twice', which", run, measures=[lambda moment: {"twice": 1}] * 2)
    assert not (tmp_path / "metrics.jsonl").exists()


def test_a_measure_replaces_only_its_own_fields_in_the_last_row():
    asked = []

    def count(moment):
        asked.append(moment.round_index)
        return {"asked": len(asked)}

    def at_last(moment):
        return {"train_loss": 0.0} if moment.last else {}

    stop = {"stop": lambda rows: len(rows) > 1, "rounds": 2}
    assert [row["asked"] for row in run(measures=[count], **stop).metrics] == [1, 3]
    refused("at_last has the field 'train_loss', which", run, measures=[at_last], **stop)
