"""Several processes that share one study."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import tomli_w
from internals import build_parser, cli, read_toml
from shallow import simple_encoder  # noqa: F401
from tiny_project import fails, rows

from fedjax_peft.cli import workers

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("simple_encoder")]

HELPERS = Path(__file__).parents[1] / "helpers"


@pytest.fixture(scope="module")
def study(project):
    """The config of a study of three points."""
    raw, path = read_toml(project / "config.toml"), project / "shared.toml"
    raw["sweep"] = {"grid": {"seed": [0, 1, 2], "optimizer.learning_rate": [3e-2]}}
    path.write_text(tomli_w.dumps(raw))
    return path


def worker(*arguments, hold="no"):
    """Starts a command in a process of its own."""
    env = {**os.environ, "PYTHONPATH": f"{HELPERS.parents[1]}:{HELPERS}", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, HELPERS / "worker.py", hold, *arguments]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([*map(str, command)], env=env, text=True, **pipes)


def same_runs(one: Path, other: Path):
    """Raises if the runs of two studies differ by a bit."""
    found = sorted(p.parent.relative_to(one) for p in one.glob("**/metrics.jsonl"))
    assert found
    for name in found:
        assert rows(one / name) == rows(other / name)
        assert (one / name / "params.safetensors").read_bytes() == (
            other / name / "params.safetensors"
        ).read_bytes()


@pytest.mark.long("two processes import JAX")
def test_two_workers_make_one_study_although_one_is_killed(project, study, capfd):
    alone, shared = project / "alone", project / "shared"
    assert cli.main(["sweep", str(study), "--out", str(alone)]) == 0
    command = ["sweep", study, "--out", shared, "--share"]
    with worker(*command, hold="hold") as first, worker(*command) as second:
        assert first.stdout.readline() == "held\n"
        for line in second.stderr:
            if "waiting for the last points" in line:
                break
        assert "seed=0" in line or "seed=1" in line
        assert f"(process {first.pid} on " in line
        assert sum(1 for _ in shared.glob("*/params.safetensors")) >= 2
        print("", file=first.stdin, flush=True)  # which kills it in the middle of its run
        out, error = second.communicate(timeout=240)
        assert second.returncode == 0, error
    assert first.returncode == -9
    assert "[3/3]" in out
    same_runs(alone, shared)
    assert not list(shared.glob("*/run.lock"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--devices", "0"], "add --share"),
        (["--share", "--overwrite"], "leave it out, or --share"),
        (["--share", "--take-over", "soon"], "'soon' is not a time such as 30m"),
        (["--share", "--devices", "1"], "--devices 1: this machine has 1 GPUs, 0 to 0"),
        (["--workers", "2"], "this machine has 1 GPUs, and a worker needs one"),
        (["--workers", "0"], "1 or more"),
    ],
)
def test_impossible_options_of_workers_are_refused(
    study, tmp_path, monkeypatch, capsys, words, said
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    assert said in fails(capsys, "sweep", str(study), "--out", str(tmp_path / "new"), *words)
    assert not (tmp_path / "new").exists()


def test_workers_have_a_gpu_each(monkeypatch, tmp_path):
    started = []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6,7")

    class Process:
        def __init__(self, command, env, **_):
            started.append((command[3:], env["CUDA_VISIBLE_DEVICES"]))

        def wait(self):
            return 0

    monkeypatch.setattr(workers.subprocess, "Popen", Process)
    options = build_parser().parse_args(["sweep", "c.toml", "--workers", "3", "--take-over", "2h"])
    workers.choose_devices(options)
    assert options.share
    with workers.started(["sweep", "c.toml"], tmp_path, options):
        words = ["sweep", "c.toml", "--share", "--take-over", "7200.0s"]
        assert started == [(words, "6"), (words, "7")]
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "4"


def test_only_sweeps_are_shared(finished, capsys):
    assert "is no sweep" in fails(capsys, "resume", str(finished), "--share")
