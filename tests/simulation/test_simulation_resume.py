"""Interrupted runs continue to the same numbers, wherever they were interrupted."""

import errno
import functools
import json
import os
import shutil
import signal

import jax
import optax
import orbax.checkpoint as ocp
import pytest
import running
import toy
from internals import Checkpoints, programs, read_metrics, record
from internals import load_run as load_record
from killing import children
from refusals import refused
from running import PRIVATE

import fedjax_peft as fp
from fedjax_peft import InputError
from fedjax_peft.simulation import rows as history
from fedjax_peft.simulation.storage import checkpoint
from fedjax_peft.support.processor import processor

pytestmark = pytest.mark.slow

ROUNDS = 8


def child(out, at):
    """Runs in a process that kills itself while it saves a checkpoint."""
    save = Checkpoints.save

    def die_while_saving(self, number, state):
        if number == at:  # orbax writes in the background
            self._manager.wait_until_finished = lambda: os.kill(os.getpid(), signal.SIGKILL)
        save(self, number, state)

    Checkpoints.save = die_while_saving
    run(out)


def run(out, *, rounds=ROUNDS, **options):
    """Runs the toy problem with private heads, so that server and clients have states."""
    clients, test = toy.clients([7, 4, 12, 1, 9, 16, 3, 5, 10, 2]), toy.dataset(20, seed=3)
    given = {"clients": clients, "test": test, "clients_per_round": 4, "checkpoint_every": 2}
    return running.run(
        options.pop("algorithm", PRIVATE), rounds=rounds, out=out, **given, **options
    )


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """Returns the run without interruption."""
    return run(tmp_path_factory.mktemp("straight") / "run")


@pytest.fixture
def copy(straight, tmp_path):
    """Returns a copy of its directory."""
    shutil.copytree(straight.out, tmp_path / "run")
    return tmp_path / "run"


def rows(out, last=ROUNDS):
    """Returns the metrics on disk without wall-clock times; their rounds must be contiguous."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["round"] for row in lines] == list(range(last + 1))
    return [{k: v for k, v in row.items() if k != "time"} for row in lines]


def assert_same(result, straight):
    assert rows(result.out) == rows(straight.out)
    assert [r["round"] for r in result.metrics] == list(range(ROUNDS + 1))
    name = "params.safetensors"
    assert (result.out / name).read_bytes() == (straight.out / name).read_bytes()
    running.assert_same_models(result, straight, atol=0)


def checkpoints(out):
    return sorted(path.name for path in (out / "checkpoints").iterdir())


def cut(path, keep=0.5):
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * keep)])


@pytest.mark.exhaustive  # what it leaves is made by hand below
def test_a_run_survives_kill_9_while_it_saves(straight, tmp_path):
    """Exceptions and lines that were torn, below, stand for kills at other moments."""
    out = tmp_path / "run"
    with children(__name__) as run_child:
        assert run_child(out, 4) == -signal.SIGKILL
    assert rows(out, 4) == rows(straight.out)[:5]
    assert "2" in checkpoints(out)
    assert "4" not in checkpoints(out)
    assert_same(run(out, resume=True), straight)
    assert checkpoints(out) == ["6", "8"]


def test_more_rounds_may_be_asked_for(straight, tmp_path):
    out = tmp_path / "run"
    run(out, rounds=5)
    assert checkpoints(out) == ["4", "5"]
    refused("rounds: 5 -> 4", run, out, rounds=4, resume=True)
    assert_same(run(out, resume=True), straight)


def test_a_run_that_goes_on_with_other_versions_says_so(straight, copy):
    """The environment keeps where it began, over two moves too."""
    path = copy / "environment.json"
    began = json.loads(path.read_text())
    began["versions"]["jax"] = "0.4.1"
    path.write_text(json.dumps(began))
    for _ in range(2):
        with pytest.warns(UserWarning, match=r"another environment \(jax .* instead of 0.4.1\)"):
            assert_same(run(copy, resume=True), straight)
        now = json.loads(path.read_text())
        assert now.pop("first") == began
        assert now == record.environment()


def test_a_run_that_goes_on_with_another_processor_says_so(straight, copy):
    """Its vector instructions count, not its name; runs of earlier versions do not know them."""
    path = copy / "environment.json"
    began = json.loads(path.read_text())
    assert began["processor"] == processor()
    began["processor"] = {"model": "another", "flags": [*began["processor"]["flags"], "avx99"]}
    path.write_text(json.dumps(began))
    with pytest.warns(UserWarning, match=r"\(a processor that differs in avx99\)"):
        assert_same(run(copy, resume=True), straight)
    began["processor"]["flags"].remove("avx99")
    earlier = {name: value for name, value in began.items() if name != "processor"}
    for known in (began, earlier):
        path.write_text(json.dumps(known))
        assert_same(run(copy, resume=True), straight)
        assert "first" not in json.loads(path.read_text())


def test_resuming_a_finished_run_trains_no_round(straight, copy):
    seen, fresh = [], toy.model()
    assert_same(run(copy, resume=True, on_round=seen.append, model=fresh), straight)
    assert seen == []
    assert not programs.of(fresh.apply), "nothing is compiled"


def test_a_torn_last_line_is_written_again(straight, copy):
    metrics = copy / "metrics.jsonl"
    metrics.write_bytes(metrics.read_bytes()[:-40])
    assert len(read_metrics(metrics)) == ROUNDS
    assert_same(run(copy, resume=True), straight)
    assert checkpoints(copy) == ["6", "8"]


def test_a_damaged_checkpoint_is_skipped_for_the_one_before(straight, copy, caplog):
    cut(copy / "checkpoints" / "8" / "default" / "_METADATA")
    fp.load_run(copy, model=toy.model(), algorithm=PRIVATE)
    assert "that of round 6; checkpoints skipped: ['round 8: " in caplog.text
    assert_same(run(copy, resume=True), straight)
    assert "Resumed from round 6; checkpoints skipped: ['round 8: " in caplog.text
    # The damaged one was replaced: the next resume has nothing to say.
    caplog.clear()
    assert_same(run(copy, resume=True), straight)
    assert caplog.text == ""


def test_a_checkpoint_that_was_being_written_is_none(straight, copy):
    """Orbax writes beside its place, and renames at the end."""
    half = (copy / "checkpoints" / "8").rename(copy / "checkpoints" / "8.orbax-checkpoint-tmp")
    cut(half / "default" / "_METADATA")
    assert_same(run(copy, resume=True), straight)
    assert checkpoints(copy) == ["6", "8"]


def test_without_a_readable_checkpoint_no_file_is_deleted(copy):
    before = (copy / "metrics.jsonl").read_bytes()
    for number in ("6", "8"):
        cut(copy / "checkpoints" / number / "default" / "_METADATA")
    refused(r"No checkpoint in .* round 8: .*; round 6: ", run, copy, resume=True)
    assert checkpoints(copy) == ["6", "8"]
    assert (copy / "metrics.jsonl").read_bytes() == before


def test_another_run_is_not_resumed_and_no_file_is_changed(copy):
    before = {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()}
    for changes, wrong in (
        ({"model": toy.model(width=7)}, r"kernel: float32\[5, 6\] .* -> float32\[5, 7\]"),
        (
            {"algorithm": fp.algorithms.fedavg(optax.sgd(1.0), head="private")},
            "step_size: -0.1 -> -1.0",
        ),
        ({"epochs": 2, "local_steps": 3}, "epochs: 1 -> None; local_steps: None -> 3"),
    ):
        refused(f"was run with another config: .*{wrong}", run, copy, resume=True, **changes)
    assert before == {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()}


def test_epochs_that_do_not_count_are_not_recorded(tmp_path):
    """Earlier versions have recorded them, and their runs go on."""
    out = tmp_path / "run"
    one = run(out, rounds=1, local_steps=2)
    file = out / "config.toml"
    written = file.read_text()
    assert "local_steps = 2\n" in written
    assert "epochs" not in written
    file.write_text(f"epochs = 1\n{written}")
    assert "epochs" not in load_record(out).config
    assert run(out, rounds=1, local_steps=2, resume=True).metrics == one.metrics
    assert file.read_text() == written


def test_a_run_whose_fingerprint_is_damaged_or_lost_is_not_resumed(copy):
    (copy / "fingerprint.json").write_text("{")
    refused(r"fingerprint\.json is damaged", run, copy, resume=True)
    (copy / "fingerprint.json").unlink()
    before = {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()}
    refused(r"has no fingerprint\.json, .* cannot be continued", run, copy, resume=True)
    assert before == {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()}


def test_a_run_that_died_before_its_first_row_starts_anew(straight, copy):
    (copy / "metrics.jsonl").unlink()
    refused("round 8: the metrics end at round -1", run, copy, resume=True)
    shutil.rmtree(copy / "checkpoints")
    assert_same(run(copy, resume=True), straight)


def test_a_directory_that_is_not_empty_is_not_changed(copy, tmp_path):
    before = {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()}
    refused("already holds a run: continue it with --resume", run, copy)
    assert before == {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()}
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("years of work")
    refused("exists and is no run", run, tmp_path / "other")
    (tmp_path / "other" / "config.toml").write_text(
        "rounds = 1\n"
    )  # a project, as `init` writes it
    for attempt in (run, functools.partial(run, resume=True), record.remove_run):
        refused(r"is no run|is not a run", attempt, tmp_path / "other")
    assert len(list((tmp_path / "other").iterdir())) == 2
    refused("resume=True needs the run directory", run, None, resume=True)


def test_a_run_that_died_before_its_config_begins_anew(copy, tmp_path):
    """A point of a sweep is then run without ``resume``."""
    for keep in ({"fingerprint.json", "environment.json"}, set()):
        for path in copy.iterdir():
            if path.name not in keep:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        (copy / ".environment.json.1.tmp").write_text("{")
        shutil.copytree(copy, tmp_path / "removed")
        record.remove_run(tmp_path / "removed")
        assert not (tmp_path / "removed").exists()
        assert len(run(copy, rounds=1).metrics) == 2


def test_a_run_that_failed_before_its_first_row_takes_a_mended_config(tmp_path):
    def failing(*of):
        raise ValueError("the model does not fit")

    with pytest.raises(ValueError, match="does not fit"):
        run(tmp_path / "run", algorithm=PRIVATE._replace(model=failing))
    assert (tmp_path / "run" / "config.toml").exists()
    refused("another config", run, tmp_path / "run", seed=3, resume=True)
    assert len(run(tmp_path / "run", seed=3, rounds=1).metrics) == 2
    refused("already holds a run", run, tmp_path / "run", seed=3, rounds=1)


def test_an_exception_leaves_a_run_that_can_be_resumed(straight, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "run", on_round=running.interrupt(5))
    assert_same(run(tmp_path / "run", resume=True), straight)


def test_records_are_those_of_the_whole_run(straight):
    assert {path.name for path in straight.out.iterdir()} == {
        *("checkpoints", "config.toml", "environment.json", "fingerprint.json", "metrics.jsonl"),
        *("params.safetensors", "trained_rows.safetensors"),
    }
    environment = json.loads((straight.out / "environment.json").read_text())
    assert environment["versions"]["jax"] == jax.__version__
    assert [{**r, "time": 0} for r in read_metrics(straight.out / "metrics.jsonl")] == [
        {**r, "time": 0} for r in straight.metrics
    ]


@pytest.mark.parametrize("how", ["no room", "in orbax", "in the metrics"])
def test_a_full_disk_stops_the_run_cleanly_and_it_resumes(how, straight, tmp_path, monkeypatch):
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def fails(*_, **__):
        raise full

    def fill(row):
        if row["round"] != 4:
            return
        if how == "no room":
            monkeypatch.setattr(checkpoint, "_check_room", fails)
        elif how == "in orbax":
            monkeypatch.setattr(ocp.CheckpointManager, "save", fails)
        else:
            monkeypatch.setattr(history.os, "fsync", fails)

    with pytest.raises((InputError, OSError), match="No space left") as caught:
        run(tmp_path / "run", on_round=fill)
    assert str(tmp_path / "run") in str(caught.value)
    monkeypatch.undo()
    again = run(tmp_path / "run", resume=True)
    assert_same(again, straight)
    assert not list((tmp_path / "run").rglob("*.orbax-checkpoint-tmp*"))


def test_overwrite_follows_a_link_and_leaves_it(copy, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(copy)
    record.remove_run(link)
    assert link.is_symlink()
    assert copy.is_dir()
    assert not list(copy.iterdir())
    run(link, rounds=1)
    assert (copy / "metrics.jsonl").is_file()
    record.remove_run(copy)
    assert not copy.exists()
    (tmp_path / "file").write_text("mine")
    refused("is a file", record.remove_run, tmp_path / "file")
