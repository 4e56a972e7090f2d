"""``experiments/cluster``: the scripts run, on the CPU and with stand-ins for srun and gcloud."""

import os
import re
import shlex
import stat
import sys
from pathlib import Path

import numpy as np
import pytest
import tomli_w
from internals import main, read_metrics
from processes import free_port, run_together
from shallow import shallow_encoder  # noqa: F401
from small_config import small

from fedjax_peft import testing

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).parents[1] / "experiments" / "cluster"
SRUN = """#!/bin/bash
export SLURM_JOB_ID=$JOB SLURM_STEP_NODELIST=localhost SLURM_NTASKS=2 SLURM_STEP_NUM_NODES=1
SLURM_PROCID=1 SLURM_LOCALID=1 "$@" &
SLURM_PROCID=0 SLURM_LOCALID=0 "$@"; code=$?
wait
exit $code
"""
SIMPLE = """
import pytest, runpy, shallow, sys
shallow.simplify(pytest.MonkeyPatch())
runpy.run_path(sys.argv[1], run_name="__main__")
"""
"""What runs a script with the encoder of ``shallow.simple_encoder``."""
WORDS = '#!/bin/bash\nprintf "%s\\n" "$@"\n'


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A folder with a tiny model, tiny texts, a config and programs for the PATH."""
    root = tmp_path_factory.mktemp("project")
    testing.write_tiny_checkpoint(root / "model")
    testing.write_tiny_texts(root / "data", train=24, test=8)
    config = small(
        clients_per_round=2,
        local_steps=2,
        model={"name": str(root / "model")},
        data={"name": str(root / "data"), "max_length": 16},
        peft={"rank": 2},
    )
    (root / "config.toml").write_text(tomli_w.dumps(config))
    programs = {
        "bin/srun": SRUN,
        "words/srun": WORDS,
        "words/gcloud": WORDS,
        "bin/fedjax-peft": f'#!/bin/bash\nexec {shlex.quote(sys.executable)} -m fedjax_peft "$@"\n',
    }
    for name, text in programs.items():
        path = root / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return root


@pytest.fixture
def path(project, monkeypatch):
    """Programs that run."""
    monkeypatch.setenv("PATH", f"{project / 'bin'}:{os.environ['PATH']}")


@pytest.fixture
def words(project, monkeypatch):
    """Programs that print their words."""
    monkeypatch.setenv("PATH", f"{project / 'words'}:{os.environ['PATH']}")


def script(name, *arguments):
    """Returns what a script has printed."""
    (ended,) = run_together([["bash", FOLDER / name, *arguments]], seconds=240)
    return ended.out


@pytest.mark.long("two processes import the library, connect and compile")
@pytest.mark.exhaustive  # test_distributed.py runs processes too
def test_processes_of_this_machine_run_a_config(project, path, monkeypatch):
    monkeypatch.setenv("PORT", str(free_port()))
    out = script("local.sh", 2, project / "config.toml", "--out", project / "local")
    assert out.count("2 processes") == 1  # the banner, of one process
    assert "Gloo" not in out
    losses = [row["test_loss"] for row in read_metrics(project / "local" / "metrics.jsonl")]
    assert len(losses) == 2
    assert np.isfinite(losses).all()


@pytest.mark.exhaustive
@pytest.mark.long("the script starts two processes, which import and connect")
def test_the_script_of_the_guide_runs(project, path, monkeypatch):
    """``train.py`` of docs/howto/many-hosts.md, in two processes that JAX connects."""
    page = (FOLDER.parents[1] / "docs" / "howto" / "many-hosts.md").read_text()
    (text,) = re.findall(r"```\{code-block\} python\n:caption: train.py\n(.*?)```", page, re.DOTALL)
    (project / "train.py").write_text(text)
    monkeypatch.setenv("JOB", str(os.getpid() + 1))
    (ended,) = run_together([["srun", sys.executable, "-c", SIMPLE, project / "train.py"]])
    assert ended.out == "Run(fedavg: 2 rounds)\n"


def test_a_command_without_a_cluster_says_what_to_give(project, path):
    command = ["fedjax-peft", "run", project / "config.toml", "--distributed"]
    (ended,) = run_together([command], expected=(2,))
    assert ended.err.startswith("fedjax-peft: No cluster was found")
    assert ended.err.count("\n") == 1


def test_options_of_processes_need_distributed(capsys):
    assert main(["run", "config.toml", "--processes", "2"]) == 2
    assert "--process need --distributed" in capsys.readouterr().err


def test_slurm_runs_the_command_in_all_tasks(words):
    """Which find each other as those of the guide's script do."""
    out = script("slurm.sh", "my run.toml", "name=a b", "--resume")
    command = ["fedjax-peft", "run", "my run.toml", "name=a b", "--resume", "--distributed"]
    assert out.splitlines() == command


def test_a_pod_runs_the_command_on_all_workers(words):
    out = script("tpu_pod.sh", "pod", "zone-b", "my run.toml", "name=a b", "--resume")
    *options, command = out.splitlines()
    assert options == ["compute", "tpus", "tpu-vm", "ssh", "pod", "--zone=zone-b", "--worker=all"]
    assert shlex.split(command.removeprefix("--command=")) == [
        *("fedjax-peft", "run", "my run.toml", "name=a b", "--resume", "--distributed")
    ]
