"""``fedjax-peft sweep``: a directory of ordinary runs, which survives ``kill -9``."""

import contextlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from fedjax_peft import testing
from fedjax_peft.cli import main as cli
from fedjax_peft.cli import sweeping
from fedjax_peft.simulation.rows import read_metrics
from fedjax_peft.support.toml import read_toml

pytestmark = pytest.mark.slow

CONFIG = """
rounds = 3
clients_per_round = 2
local_steps = 2
records.checkpoint_every = 1
[model]
name = "{root}/model"
[data]
name = "{root}/data"
max_length = 16
validation_share = 0.25
seed = 0
[partition]
name = "iid"
clients = 4
[peft]
name = "lora"
rank = 2
[sweep]
choose_by = "validation_accuracy"
baseline = "one"
[sweep.grid]
seed = [0, 1]
"optimizer.learning_rate" = [1e-3, 3e-2]
[methods.one]
[methods.two]
peft.rank = 3
"""
POINTS = [
    f"{method}/seed={seed},learning_rate={rate}"
    for method in ("one", "two")
    for seed in (0, 1)
    for rate in ("0.001", "0.03")
]


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A folder with a tiny model, tiny texts and the config of a sweep."""
    root = tmp_path_factory.mktemp("project")
    testing.write_tiny_checkpoint(root / "model")
    testing.write_tiny_texts(root / "data", train=40, test=8)
    (root / "sweep.toml").write_text(CONFIG.format(root=root))
    return root


@pytest.fixture(scope="module")
def straight(project):
    """The directory of a sweep that was not interrupted, and what it printed."""
    out, printed = project / "straight", io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert cli.main(["sweep", str(project / "sweep.toml"), "--out", str(out)]) == 0
    return out, printed.getvalue()


def results(path):
    """Returns the rows of a run without what depends on the clock."""
    rows = read_metrics(path / "metrics.jsonl")
    return json.dumps([{k: v for k, v in row.items() if k != "time"} for row in rows])


def test_a_sweep_is_a_directory_of_complete_runs_and_prints_each(straight):
    out, printed = straight
    assert sorted(p.relative_to(out).as_posix() for p in out.glob("*/*/")) == sorted(POINTS)
    table = read_toml(out / "sweep.toml")
    assert (table["choose_by"], table["baseline"]) == ("validation_accuracy", "one")
    assert table["keys"] == ["seed", "optimizer.learning_rate"]
    for place, name in enumerate(POINTS, 1):
        assert f"[{place}/8] {name}" in printed
        config = read_toml(out / name / "config.toml")
        assert config["name"] == name.partition("/")[0]
        assert config["runtime"] == ["optimizer.learning_rate"]
        assert "validation_accuracy" in read_metrics(out / name / "metrics.jsonl")[-1]


@pytest.mark.long("processes are killed and started again")
@pytest.mark.exhaustive  # its runs survive: test_simulation_resume
def test_a_sweep_survives_kill_9_and_repeats_no_finished_point(project, straight, capsys):
    out = project / "killed"
    command = [sys.executable, "-m", "fedjax_peft", "sweep", project / "sweep.toml", "--out", out]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as child:
        deadline = time.monotonic() + 300
        while not (out / POINTS[2] / "metrics.jsonl").exists():  # in the middle of the third point
            assert child.poll() is None, child.stderr.read()
            assert time.monotonic() < deadline
            time.sleep(0.01)
        os.kill(child.pid, signal.SIGKILL)
    finished = (out / POINTS[0] / "metrics.jsonl").stat().st_mtime_ns
    assert cli.main(["resume", str(out)]) == 0
    assert f"[1/8] {POINTS[0]}  had finished before" in capsys.readouterr().out
    assert (out / POINTS[0] / "metrics.jsonl").stat().st_mtime_ns == finished
    for name in POINTS:
        assert results(out / name) == results(straight[0] / name)


def test_a_point_can_be_resumed_reported_and_exported_like_any_run(straight, tmp_path, capsys):
    run = tmp_path / "point"
    shutil.copytree(straight[0] / POINTS[1], run)
    assert cli.main(["resume", str(run), "rounds=4"]) == 0
    assert read_metrics(run / "metrics.jsonl")[-1]["round"] == 4
    assert cli.main(["export", str(run), "--out", str(tmp_path / "adapter")]) == 0
    assert cli.main(["report", str(run), "--out", str(tmp_path)]) == 0
    assert "0.03" in (tmp_path / "report.html").read_text()


def test_finished_points_of_another_config_are_refused(project, straight, tmp_path, capsys):
    out = tmp_path / "sweep"
    shutil.copytree(straight[0], out)
    command = ["sweep", str(project / "sweep.toml"), "--resume", "--out", str(out)]
    assert cli.main(command) == 0
    assert cli.main([*command, "batch_size=2"]) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert "8 of 8 runs of the sweep failed" in error
    assert "another config: batch_size was 16, is 2" in error
    for name in POINTS:
        assert results(out / name) == results(straight[0] / name)


def test_an_existing_sweep_is_not_replaced_by_accident(
    project, straight, tmp_path, capsys, monkeypatch
):
    config, out = str(project / "sweep.toml"), str(straight[0])
    assert cli.main(["sweep", config, "--out", out]) == 2
    assert "already holds a sweep" in capsys.readouterr().err
    (tmp_path / "notes.txt").write_text("mine")
    assert cli.main(["sweep", config, "--out", str(tmp_path)]) == 2
    assert "is no sweep" in capsys.readouterr().err

    monkeypatch.setattr(sweeping, "_run", lambda *_: None)
    assert cli.main(["sweep", config, "--out", str(tmp_path / "new"), "--resume"]) == 0
    assert "so the sweep begins" in capsys.readouterr().err


def test_a_dry_run_lists_the_points(project, tmp_path, capsys):
    out = tmp_path / "new"
    arguments = ["sweep", str(project / "sweep.toml"), "peft.rank=1,2", "--dry-run"]
    assert cli.main([*arguments, "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "16 runs, swept: seed, optimizer.learning_rate, peft.rank" in printed
    assert "one/seed=0,learning_rate=0.001,rank=1" in printed
    assert not out.exists()
