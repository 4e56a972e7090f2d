"""``report --watch`` in the terminal follows the files of a study until its points have ended."""

import io
import json

import pytest
from internals import cli
from made_runs import begin_sweep, write_run
from rich.console import Console
from tiny_project import fails

from fedjax_peft.cli import results, watching
from fedjax_peft.simulation import points, sharing
from fedjax_peft.simulation.storage.lock import RunLock

POINTS = [f"seed={i}" for i in range(12)]


@pytest.fixture
def study(tmp_path):
    """A study of twelve points of one round, of which ten have ended."""
    rounds = dict.fromkeys(POINTS, 1)
    begin_sweep(tmp_path / "S", keys=["seed"], points=rounds)
    for name in POINTS[2:]:
        end(begin(tmp_path / "S", name))
    return tmp_path / "S"


def begin(study, name):
    config = {"name": "plain", "rounds": 1, "seed": int(name.partition("=")[2])}
    return write_run(study / name, config, [{"round": 0, "test_accuracy": 0.25}])


def end(run):
    row = {"round": 1, "test_accuracy": 0.5, "headline": "accuracy", "headline_better": "higher"}
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    (run / "checkpoints" / "1").mkdir(parents=True)


@pytest.fixture
def events(study, monkeypatch):
    """Lets one thing happen between two looks, and returns how often files were read."""
    read = []

    def happen():
        with RunLock.take(begin(study, "seed=0")) as lock:
            yield
            end(study / "seed=0")
        assert lock
        yield
        sharing.note_failure(study / "seed=1", "There is no [red] data set 'x'.")
        yield
        raise KeyboardInterrupt

    happening = happen()

    def rows(run):
        read.append(run.name)
        return points.read_rows(run)

    monkeypatch.setattr(watching, "read_rows", rows)
    monkeypatch.setattr(watching.time, "sleep", lambda seconds: next(happening))
    return read


def test_a_line_says_what_begins_and_ends_and_the_last_one_ends_the_command(study, events, capsys):
    assert cli.main(["report", str(study), "--watch"]) == 0
    *lines, lead = capsys.readouterr().out.split("\n\n", 1)[0].splitlines()
    assert [line.split()[:2] for line in lines[:12]] == [
        [name, "waiting" if name in POINTS[:2] else "done"] for name in POINTS
    ]
    assert [line.split()[:2] for line in lines[12:]] == [
        ["seed=0", "running"],
        ["seed=0", "done"],
        ["seed=1", "failed"],
    ]
    assert lead == "11 done, 1 failed"
    assert events == [*POINTS[2:], "seed=0", "seed=0"], "only what has changed is read again"
    assert not (study / "report.html").exists()


def test_a_terminal_shows_what_there_is_room_for(study, events, monkeypatch, capsys):
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=70, height=16, color_system=None)
    monkeypatch.setattr(watching, "redraws", lambda file: True)
    monkeypatch.setattr(results, "_console", lambda: console)
    assert cli.main(["report", str(study), "--watch"]) == 0
    first, second, *_, last, end = screen.getvalue().split("(Ctrl-C ends this")
    assert "2 waiting, 10 done" in first
    assert "seed=0   running   round 0 of 1, by process" in second
    assert "seed=1   failed    There is no [red] data set 'x'. (process" in last
    assert "more\n" in last
    assert "plain" in end
    assert "seed=1  failed" in capsys.readouterr().out


def test_ctrl_c_leaves_the_table_so_far(study, monkeypatch, capsys):
    def interrupt(seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr(watching.time, "sleep", interrupt)
    assert cli.main(["report", str(study), "--watch", "--metric", "test_accuracy"]) == 0
    printed = capsys.readouterr().out
    assert "2 waiting, 10 done" in printed
    assert "50.0" in printed


def test_what_cannot_be_watched_is_said(study, tmp_path, capsys):
    assert "nowhere does not exist" in fails(capsys, "report", str(tmp_path / "nowhere"), "--watch")
    assert "is no study" in fails(
        capsys, "report", str(tmp_path / "S" / "seed=2" / "checkpoints"), "--watch"
    )
    assert "--smooth is for the page" in fails(
        capsys, "report", str(study), "--watch", "--smooth", "3"
    )
    assert "add --watch" in fails(capsys, "report", str(study), "--port", "0")
