"""``fedjax-peft sweep``: a directory of ordinary runs, which resumes."""

import contextlib
import gc
import io
import shutil
import sys
import weakref
from types import SimpleNamespace

import pytest
import tomli_w
from internals import cli, find_runs, read_toml, sweeping
from made_runs import write_run
from shallow import simple_encoder  # noqa: F401
from tiny_project import fails, rows

from fedjax_peft.cli.sweep_display import SweepDisplay
from fedjax_peft.simulation import points
from fedjax_peft.simulation.points import Job, PointDone

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("simple_encoder")]

METHODS = ("one", "two")
POINTS = [f"{name}/seed={seed},learning_rate=0.03" for name in METHODS for seed in (0, 1)]


@pytest.fixture(scope="module")
def config(project):
    """The config of a sweep."""
    raw, path = read_toml(project / "config.toml"), project / "sweep.toml"
    raw["data"] |= {"validation_share": 0.25, "seed": 0}
    grid = {"seed": [0, 1], "optimizer.learning_rate": [3e-2]}
    raw["sweep"] = {"choose_by": "validation_accuracy", "baseline": "one", "grid": grid}
    raw["methods"] = {"one": {}, "two": {"peft": "head_only"}}
    path.write_text(tomli_w.dumps(raw))
    return str(path)


@pytest.fixture(scope="module")
def straight(project, config):
    """The directory of a sweep that was not interrupted, and what it printed."""
    out, printed = project / "a sweep", io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert cli.main(["sweep", config, "--out", str(out)]) == 0
    return out, printed.getvalue()


def test_a_sweep_is_a_directory_of_complete_runs_and_prints_each(straight):
    out, printed = straight
    assert sorted(p.relative_to(out).as_posix() for p in out.glob("*/*/")) == sorted(POINTS)
    assert f"fedjax-peft report '{out}'" in printed
    table = read_toml(out / "sweep.toml")
    assert (table["choose_by"], table["baseline"]) == ("validation_accuracy", "one")
    assert table["keys"] == ["seed", "optimizer.learning_rate"]
    for place, name in enumerate(POINTS, 1):
        assert f"[{place}/4] {name}" in printed
        recorded = read_toml(out / name / "config.toml")
        assert recorded["name"] == name.partition("/")[0]
        assert recorded["runtime"] == ["optimizer.learning_rate"]
        assert "validation_accuracy" in rows(out / name)[-1]


def test_a_sweep_resumes_and_repeats_no_finished_point(straight, tmp_path, capsys):
    out = shutil.copytree(straight[0], tmp_path / "stopped")
    for name in POINTS[2:]:
        shutil.rmtree(out / name)
    (out / POINTS[2]).mkdir()  # stopped after it began
    for name in ("environment", "fingerprint"):  # in the order in which a run writes them
        shutil.copy(straight[0] / POINTS[2] / f"{name}.json", out / POINTS[2])
    shutil.copy(straight[0] / POINTS[2] / "config.toml", out / POINTS[2])
    finished = (out / POINTS[0] / "metrics.jsonl").stat().st_mtime_ns
    assert cli.main(["resume", str(out)]) == 0
    assert f"[1/4] {POINTS[0]}  had finished before" in capsys.readouterr().out
    assert (out / POINTS[0] / "metrics.jsonl").stat().st_mtime_ns == finished
    for name in POINTS:
        assert rows(out / name) == rows(straight[0] / name)


def test_a_point_can_be_resumed_reported_and_exported(straight, tmp_path):
    run = tmp_path / "point"
    shutil.copytree(straight[0] / POINTS[1], run)
    assert cli.main(["resume", str(run), "rounds=3"]) == 0
    assert rows(run)[-1]["round"] == 3
    assert cli.main(["export", str(run), "--out", str(tmp_path / "adapter")]) == 0
    assert cli.main(["report", str(run), "--out", str(tmp_path)]) == 0
    assert "0.03" in (tmp_path / "report.html").read_text()


def test_finished_points_of_another_config_are_refused(config, straight, tmp_path, capsys):
    out = tmp_path / "sweep"
    shutil.copytree(straight[0], out)
    command = ["sweep", config, "--resume", "--out", str(out)]
    assert cli.main(command) == 0
    known = (out / "sweep.toml").read_bytes()
    assert cli.main(["resume", str(out), "batch_size=2"]) == 2
    assert "another config: batch_size: 8 -> 2" in " ".join(capsys.readouterr().err.split())
    assert (out / "sweep.toml").read_bytes() == known, "the next resume would be refused"
    assert cli.main([*command, "batch_size=2"]) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert "another config: batch_size: 8 -> 2" in error
    assert "runs of the sweep failed" not in error, "no other point is run with these settings"
    assert (out / "sweep.toml").read_bytes() == known
    for name in POINTS:
        assert rows(out / name) == rows(straight[0] / name)


def test_an_existing_sweep_is_not_replaced_by_accident(
    config, straight, tmp_path, capsys, monkeypatch
):
    assert cli.main(["sweep", config, "--out", str(straight[0])]) == 2
    assert "already holds a sweep" in capsys.readouterr().err
    (tmp_path / "notes.txt").write_text("mine")
    assert cli.main(["sweep", config, "--out", str(tmp_path)]) == 2
    assert "is no sweep" in capsys.readouterr().err

    monkeypatch.setattr(sweeping, "_run", lambda *_: None)
    assert cli.main(["sweep", config, "--out", str(tmp_path / "new"), "--resume"]) == 0
    assert "so the sweep begins" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("only", "left"), [([], []), (["--only", "one"], ["two/seed=0,learning_rate=9"])]
)
def test_a_sweep_is_replaced_with_all_its_points(config, tmp_path, monkeypatch, capsys, only, left):
    """Also those that the new sweep does not have, which the report would show and could choose.

    Nothing is removed for a sweep that cannot start.
    """
    monkeypatch.setattr(sweeping, "_run", lambda *_: None)
    command = ["sweep", config, "--out", str(tmp_path)]
    assert cli.main([*command, "batch_size=2,4"]) == 0
    for name in (POINTS[0], "one/seed=0,learning_rate=9", "two/seed=0,learning_rate=9"):
        write_run(tmp_path / name, {}, [{"round": 1}])
    assert cli.main([*command, "--overwrite", "--dry-run"]) == 0
    (tmp_path / POINTS[0] / "environment.json").write_text("{}")
    error = fails(capsys, *command, "--overwrite", "clients_per_round=7")
    assert "more than the 6 clients" in error
    assert len(find_runs(tmp_path)) == 3
    assert cli.main([*command, "--overwrite", *only]) == 0
    assert [run.relative_to(tmp_path).as_posix() for run in find_runs(tmp_path)] == left
    keys = ["seed", "optimizer.learning_rate"]
    expected = ["seed", "optimizer.learning_rate", "batch_size"] if left else keys
    assert read_toml(tmp_path / "sweep.toml")["keys"] == expected


def test_overrides_of_resume_count_for_the_next_one(config, tmp_path, monkeypatch):
    """Without them, points that have more rounds now would be those of another config."""
    rounds = []

    def run(planned, *_):
        rounds.append({point.config["rounds"] for point in planned.points})

    monkeypatch.setattr(sweeping, "_run", run)
    assert cli.main(["sweep", config, "--out", str(tmp_path)]) == 0
    for overrides in (["rounds=4"], [], ["seed=2,3"], []):
        assert cli.main(["resume", str(tmp_path), *overrides]) == 0
    assert rounds == [{2}, {4}, {4}, {4}, {4}]
    assert read_toml(tmp_path / "sweep.toml")["keys"] == ["seed", "optimizer.learning_rate"]


def test_all_calls_of_a_sweep_are_resumed(config, tmp_path, monkeypatch):
    """Not the points of the last call alone."""
    asked = []

    def run(planned, *_):
        asked.append([point.folder for point in planned.points])

    monkeypatch.setattr(sweeping, "_run", run)
    command, file = ["sweep", config, "--out", str(tmp_path)], tmp_path / "sweep.toml"
    for words in (
        ["--only", "one", "seed=0"],
        ["--only", "two", "--resume"],
        ["--only", "one", "seed=1", "--share"],
        ["--only", "one,two", "seed=1", "--resume"],  # has nothing new
    ):
        assert cli.main([*command, *words]) == 0
    assert cli.main(["resume", str(tmp_path)]) == 0
    assert sorted(asked.pop()) == sorted(POINTS)
    assert cli.main([*command, "batch_size=2,4", "--only", "one", "--resume"]) == 0
    assert cli.main(["resume", str(tmp_path), "rounds=4"]) == 0
    assert len(asked.pop()) == len(POINTS) + 4
    assert read_toml(file)["keys"] == ["seed", "optimizer.learning_rate", "batch_size"]

    assert cli.main([*command, "--only", "one", "seed=0,1", "--overwrite"]) == 0
    assert cli.main(["resume", str(tmp_path)]) == 0
    assert sorted(asked.pop()) == sorted(POINTS)
    assert cli.main([*command, "--resume"]) == 0
    assert "earlier" not in read_toml(file), "the last call has all points"
    assert cli.main([*command, "seed=5", "--overwrite"]) == 0
    assert cli.main(["resume", str(tmp_path)]) == 0
    assert asked.pop() == [f"{name}/seed=5,learning_rate=0.03" for name in METHODS]


def test_runs_that_have_ended_leave_the_memory(config, tmp_path, monkeypatch):
    """Each has a model, what its clients keep, and with ``client_state = "disk"`` an open file."""

    class Ended(SimpleNamespace):
        """Which a weak reference can point to."""

    ended = []

    def simulating(given):
        gc.collect()
        assert not any(reference() for reference in ended)
        made = Ended(metrics=[{"round": 1, "validation_accuracy": 0.5}])
        write_run(given.out, given.records.config, made.metrics)
        ended.append(weakref.ref(made))
        yield from ()
        return made

    monkeypatch.setattr(points, "simulating", simulating)
    assert cli.main(["sweep", config, "--out", str(tmp_path / "sweep")]) == 0
    assert len(ended) == len(POINTS)


def test_a_damaged_table_of_a_sweep_is_named(config, tmp_path, capsys):
    (tmp_path / "sweep.toml").write_text("config = {\n")
    for command in (
        ["resume", str(tmp_path)],
        ["sweep", config, "--resume", "--out", str(tmp_path)],
    ):
        said = fails(capsys, *command)
        assert f"{tmp_path / 'sweep.toml'} cannot be read: " in said
        assert "(at line 1, column 11)" in said
    for config in ("3", '"x"'):
        table = f"title = 't'\nonly = []\nearly_stop = false\noverrides = []\nconfig = {config}\n"
        (tmp_path / "sweep.toml").write_text(table)
        assert "sweep.toml is damaged. Give the sweep's command" in fails(
            capsys, "resume", str(tmp_path)
        )


def test_a_dry_run_lists_the_points(config, tmp_path, capsys):
    out = tmp_path / "new"
    arguments = ["sweep", config, "batch_size=4,8", "--dry-run"]
    assert cli.main([*arguments, "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "8 runs, swept: seed, optimizer.learning_rate, batch_size" in printed
    assert "one/seed=0,learning_rate=0.03,batch_size=4" in printed
    assert not out.exists()


def test_a_reason_that_several_points_share_is_said_once(capsys):
    shown = SweepDisplay(3, None, quiet=False)
    reasons = ["The data are not at hand.", "The data are not at hand.", "Too many clients."]
    for place, reason in enumerate(reasons, start=1):
        job = Job(f"point {place}", 1, lambda *given: None)
        shown.point(PointDone(place, 3, job, None, None, 1.0, None, reason))
    first, second, third = capsys.readouterr().out.splitlines()
    assert "failed: The data are not at hand." in first
    assert "failed for the same reason" in second
    assert "failed: Too many clients." in third


def test_a_log_has_the_line_of_a_point_at_once(monkeypatch):
    """Python keeps what is printed into a file or a pipe."""
    seen = []
    monkeypatch.setattr(sys, "stdout", out := io.StringIO())
    monkeypatch.setattr(out, "flush", lambda: seen.append(out.getvalue()))
    job = Job("point", 1, lambda *given: None)
    SweepDisplay(1, None, quiet=False).point(PointDone(1, 1, job, None, None, 1.0, None))
    assert seen[-1].startswith("[1/1] point")
