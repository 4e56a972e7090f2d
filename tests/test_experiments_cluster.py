"""``experiments/cluster``: the scripts run, on the CPU and with stand-ins for srun and gcloud."""

import os
import re
import shlex
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from closeness import approx
from processes import free_port, run_together

from fedjax_peft import testing
from fedjax_peft.rows import read_metrics

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).parents[1] / "experiments" / "cluster"
CONFIG = """
rounds = 2
clients_per_round = 2
local_steps = 2
model.name = "{root}/model"
data = {{name = "{root}/data", max_length = 16}}
partition = {{name = "iid", clients = 4}}
peft = {{name = "lora", rank = 2}}
optimizer.learning_rate = 3e-3
"""
SRUN = """#!/bin/bash
export SLURM_JOB_ID=$JOB SLURM_STEP_NODELIST=localhost SLURM_NTASKS=2 SLURM_STEP_NUM_NODES=1
SLURM_PROCID=1 SLURM_LOCALID=1 "$@" &
SLURM_PROCID=0 SLURM_LOCALID=0 "$@"; code=$?
wait
exit $code
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A folder with a tiny model, tiny texts, a config and programs for the PATH."""
    root = tmp_path_factory.mktemp("project")
    testing.write_tiny_checkpoint(root / "model")
    testing.write_tiny_texts(root / "data", train=24, test=8)
    (root / "config.toml").write_text(CONFIG.format(root=root))
    programs = {
        "srun": SRUN,
        "gcloud": '#!/bin/bash\nprintf "%s\\n" "$@"\n',
        "fedjax-peft": f'#!/bin/bash\nexec {shlex.quote(sys.executable)} -m fedjax_peft "$@"\n',
    }
    for name, text in programs.items():
        path = root / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return root


@pytest.fixture
def path(project, monkeypatch):
    monkeypatch.setenv("PATH", f"{project / 'bin'}:{os.environ['PATH']}")


def script(name, *arguments):
    (ended,) = run_together([["bash", FOLDER / name, *arguments]], seconds=240)
    return ended


def scores(out):
    return [row["test_loss"] for row in read_metrics(out / "metrics.jsonl")]


def test_processes_of_this_machine_and_of_slurm_run_a_config(project, path, monkeypatch):
    config = project / "config.toml"
    monkeypatch.setenv("PORT", str(free_port()))
    local = script("local.sh", 2, config, "--out", project / "local")
    # JAX takes the port from the number of the job.
    monkeypatch.setenv("JOB", str(os.getpid()))
    slurm = script("slurm.sh", config, "rounds=1", "--out", project / "slurm")
    assert local.out.count("2 processes") == 1  # the banner, of one process
    assert "Gloo" not in local.out + slurm.out
    assert len(scores(project / "local")) == 3
    assert scores(project / "slurm") == approx(scores(project / "local")[:2], rel=1e-6)


def test_the_script_of_the_guide_runs(project, path, monkeypatch):
    """``train.py`` of docs/howto/many-hosts.md, in two processes that JAX connects."""
    page = (FOLDER.parents[1] / "docs" / "howto" / "many-hosts.md").read_text()
    (text,) = re.findall(r"```\{code-block\} python\n:caption: train.py\n(.*?)```", page, re.DOTALL)
    (project / "train.py").write_text(text)
    monkeypatch.setenv("JOB", str(os.getpid() + 1))
    (ended,) = run_together([["srun", sys.executable, project / "train.py"]])
    assert ended.out == "Run(fedavg: 2 rounds)\n"


def test_a_command_without_a_cluster_says_what_to_give(project, path):
    command = ["fedjax-peft", "run", project / "config.toml", "--distributed"]
    (ended,) = run_together([command], expected=(2,))
    assert ended.err.startswith("fedjax-peft: No cluster was found")
    assert ended.err.count("\n") == 1


def test_options_of_processes_need_distributed(project, path):
    command = ["fedjax-peft", "run", project / "config.toml", "--processes", "2"]
    (ended,) = run_together([command], expected=(2,))
    assert "--process need --distributed" in ended.err


def test_a_pod_runs_the_command_on_all_workers(project, path):
    done = subprocess.run(
        ["bash", FOLDER / "tpu_pod.sh", "pod", "zone-b", "my run.toml", "name=a b", "--resume"],
        capture_output=True,
        text=True,
        check=True,
    )
    *options, command = done.stdout.splitlines()
    assert options == ["compute", "tpus", "tpu-vm", "ssh", "pod", "--zone=zone-b", "--worker=all"]
    words = shlex.split(command.removeprefix("--command="))
    assert words == ["fedjax-peft", "run", "my run.toml", "name=a b", "--resume", "--distributed"]
