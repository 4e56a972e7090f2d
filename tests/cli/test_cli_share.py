"""Several processes that share one study."""

import contextlib
import errno
import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tomli_w
from internals import build_parser, cli, read_toml, record, sweeps
from made_runs import write_run
from shallow import simple_encoder, simplify  # noqa: F401
from tiny_project import fails, rows

from fedjax_peft.cli import workers
from fedjax_peft.simulation import sharing
from fedjax_peft.simulation.storage.lock import RunLock

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("simple_encoder")]

with contextlib.suppress(ModuleNotFoundError):  # its settings of logging end a capture of pytest
    import submitit  # noqa: F401

HELPERS = Path(__file__).parents[1] / "helpers"


@pytest.fixture(scope="module")
def study(project):
    """The config of a study of three points."""
    raw, path = read_toml(project / "config.toml"), project / "shared.toml"
    raw["sweep"] = {"grid": {"seed": [0, 1, 2], "optimizer.learning_rate": [3e-2]}}
    path.write_text(tomli_w.dumps(raw))
    return path


@pytest.fixture(scope="module")
def alone(project, study):
    """The directory of the study of one process."""
    with pytest.MonkeyPatch.context() as patch:
        simplify(patch)
        assert cli.main(["sweep", str(study), "--out", str(project / "alone")]) == 0
    return project / "alone"


def worker(*arguments, hold="no"):
    """Starts a command in a process of its own; ``hold``: see ``worker.py``."""
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
def test_two_workers_make_one_study_although_one_is_killed(project, study, alone):
    shared = project / "shared"
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


def test_a_worker_that_a_scheduler_ends_leaves_a_checkpoint(
    project, study, alone, monkeypatch, capsys
):
    """The next worker goes on from there, and the bits are those of a run without a break."""
    shared, write = project / "ended", record.append_metrics
    command = ["sweep", str(study), "--out", str(shared), "--share"]

    def ended(path, row):
        write(path, row)
        if row["round"] == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(record, "append_metrics", ended)
        assert cli.main(command) == 143
    assert "Continue with: fedjax-peft resume" in capsys.readouterr().err
    (begun,) = shared.glob("*/metrics.jsonl")
    assert len(begun.read_text().splitlines()) == 2
    assert (begun.parent / "checkpoints" / "1").is_dir()
    assert not (begun.parent / "run.lock").exists()
    assert cli.main(command) == 0
    same_runs(alone, shared)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--devices", "0"], "add --share"),
        (["--share", "--overwrite"], "leave it out, or --share"),
        (["--share", "--take-over", "soon"], "'soon' is not a time such as 30m"),
        (["--share", "--devices", "1"], "--devices 1: this machine has 1 GPU, from 0 on"),
        (["--workers", "2"], "this machine has 1 GPU, and a worker needs one"),
        (["--workers", "0"], "1 or more"),
    ],
)
def test_impossible_options_of_workers_are_refused(
    study, tmp_path, monkeypatch, capsys, words, said
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    assert said in fails(capsys, "sweep", str(study), "--out", str(tmp_path / "new"), *words)
    assert not (tmp_path / "new").exists()


def test_a_file_system_without_locks_is_refused(study, tmp_path, monkeypatch, capsys):
    """In a paragraph, before a point runs; the points that are there stay."""
    command = ("sweep", str(study), "--out", str(tmp_path / "new"), "--share")
    for code, why in (
        (errno.ENOLCK, "are missing (No locks available)"),
        (errno.EOPNOTSUPP, "are missing (Operation not supported)"),
        (0, "do not hold"),
    ):

        def flock(*_, code=code):
            if code:
                raise OSError(code, os.strerror(code))

        monkeypatch.setattr(fcntl, "flock", flock)
        said = fails(capsys, *command)
        assert f"file system of {tmp_path / 'new'} {why}" in said
        assert "run the study in one process without --share" in said
        assert not list((tmp_path / "new").glob("**/metrics.jsonl"))


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


def submitted(study, folder, table):
    """Returns a config with a table ``[executor]``."""
    path = folder / "submitted.toml"
    path.write_text(tomli_w.dumps(read_toml(study) | ({"executor": table} if table else {})))
    return str(path)


@contextlib.contextmanager
def submitit_local(folder):
    """Submitit's processes of this machine, in place of Slurm."""
    pytest.importorskip("submitit")
    yield {"name": "slurm", "cluster": "local"}


@contextlib.contextmanager
def dask_scheduler(folder):
    distributed = pytest.importorskip("distributed")
    with distributed.LocalCluster(
        1, threads_per_worker=1, dashboard_address=None, local_directory=folder
    ) as cluster:
        yield {"name": "dask", "address": cluster.scheduler_address}


@pytest.mark.long("a process imports JAX and compiles")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # submitit's
@pytest.mark.parametrize(
    "place", [submitit_local, pytest.param(dask_scheduler, marks=pytest.mark.exhaustive)]
)
def test_a_submitted_worker_makes_a_study(place, study, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(HELPERS.parents[1]))
    out = tmp_path / "S"
    with place(str(tmp_path / "dask")) as table:
        config = submitted(study, tmp_path, table)
        assert cli.main(["sweep", config, "seed=0", "--out", str(out), "--submit"]) == 0
        printed = capsys.readouterr().out
        assert "Submitted 1 worker for 1 point: " in printed
        assert f"fedjax-peft status {out}" in printed
        end, said = time.monotonic() + 240, ""
        while "1 done" not in said and time.monotonic() < end:
            time.sleep(0.5)
            assert cli.main(["status", str(out)]) == 0
            said = capsys.readouterr().out
    assert "round 2 of 2" in said, [path.read_text() for path in out.glob("jobs/*.err")]
    assert "1 done" in said


def test_submitted_workers_of_this_machine_share_the_study(study, tmp_path, capsys, monkeypatch):
    started = []

    class Process:
        pid = 7

        def __init__(self, command, start_new_session, **_):
            assert start_new_session, "it goes on when the terminal is closed"
            started.append(command[3:])

    monkeypatch.setattr(workers.subprocess, "Popen", Process)
    config = submitted(study, tmp_path, {"name": "local", "jobs": 2})
    out = tmp_path / "S"
    command = ["sweep", config, "seed=0,1", "--out", str(out), "--submit", "--take-over", "1h"]
    assert cli.main(command) == 0
    assert "2 workers for 2 points: process 7, process 7" in capsys.readouterr().out
    words = ["sweep", config, "seed=0,1", "--out", str(out), "--share", "--take-over", "3600.0s"]
    assert started == [words, words]
    assert (out / "sweep.toml").exists()


@pytest.mark.parametrize(
    ("table", "said"),
    [
        (None, r"does not say where to submit"),
        ({"name": "slrm"}, "no executor 'slrm' for [executor] name"),
        ({"name": "local", "jobs": 0}, "must be a number of workers"),
        ({"name": "local", "partition": "gpu"}, "has no key 'partition'"),
        ({"name": "dask"}, 'needs address = "tcp://HOST:8786"'),
        ({"name": "slurm", "cluster": "local", "gpus": 1}, "took no jobs: "),
        ({"name": "slurm", "cluster": "nothing"}, "doesn't know any executor named nothing"),
    ],
)
def test_wrong_tables_of_an_executor_are_refused(study, tmp_path, capsys, table, said):
    pytest.importorskip("submitit")
    config = submitted(study, tmp_path, table)
    assert said in fails(capsys, "sweep", config, "--out", str(tmp_path / "S"), "--submit")


def test_a_missing_extra_of_an_executor_is_named(study, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "submitit", None)
    config = submitted(study, tmp_path, {"name": "slurm"})
    said = fails(capsys, "sweep", config, "--out", str(tmp_path / "S"), "--submit")
    assert "[executor] slurm needs submitit: " in said


def test_the_table_of_an_executor_is_no_setting_of_a_run(study, tmp_path):
    config = submitted(study, tmp_path, {"name": "slurm"})
    assert cli.main(["sweep", config, "--dry-run"]) == 0
    with_executor, without = (sweeps.plan(read_toml(path)) for path in (config, study))
    assert with_executor.points == without.points


def test_status_says_what_has_become_of_every_point(tmp_path, capsys):
    points = {"seed=0": 3, "seed=1": 3, "seed=2": 3, "seed=3": 3}
    (tmp_path / "sweep.toml").write_text(tomli_w.dumps({"keys": ["seed"], "points": points}))
    for name, rounds in (("seed=0", 3), ("seed=1", 1)):
        rows = [{"round": i} for i in range(rounds + 1)]
        run = write_run(tmp_path / name, {"rounds": 3}, rows)
        (run / "checkpoints" / str(rounds)).mkdir(parents=True)
    sharing.note_failure(tmp_path / "seed=2", "There is no data set 'x'.")
    with RunLock.take(tmp_path / "seed=1"):
        assert cli.main(["status", str(tmp_path)]) == 0
    first, second, third, fourth, last = capsys.readouterr().out.splitlines()
    assert first.split() == ["seed=0", "done", "round", "3", "of", "3"]
    assert f"running   round 1 of 3, by process {os.getpid()} on " in second
    assert "failed    There is no data set 'x'. (process" in third
    assert fourth.split() == ["seed=3", "waiting"]
    assert last == "1 done, 1 running, 1 failed, 1 waiting"
    assert "is no study" in fails(capsys, "status", str(tmp_path / "nothing"))


def test_status_knows_the_methods_of_a_config_that_have_not_begun(tmp_path, capsys):
    (tmp_path / "methods.toml").write_text(tomli_w.dumps({"a": {"rounds": 1}, "b": {"rounds": 2}}))
    write_run(tmp_path / "a", {"rounds": 1}, [{"round": 0}])
    assert cli.main(["status", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "a  waiting   round 0 of 1",
        "b  waiting",
        "2 waiting",
    ]
