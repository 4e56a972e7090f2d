"""A SuperLink and four SuperNodes as processes: the end of ``make test``, or ``make flower``."""

import contextlib
import functools
import json
import os
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import psutil
import pytest
import tomli_w
from closeness import assert_close
from deployed import write_client_texts
from internals import main
from processes import free_ports
from safetensors.numpy import load_file
from shallow import SHALLOW

import fedjax_peft as fp

pytest.importorskip("flwr", reason="in Flower's own environment: make flower")
pytestmark = [pytest.mark.slow, pytest.mark.long("each message to a client starts a process")]

CLIENTS, ROUNDS, LATE = 4, 3, 600
CONFIG = """
rounds = 3
clients_per_round = 2
batch_size = 4
model.name = "{folder}/model"
data.name = "{folder}/data"
data.max_length = 6  # all texts have as many tokens: a round has one padded length
partition.name = "natural"
peft.rank = 2
algorithm.name = "scaffold"
optimizer.name = "sgd"
optimizer.learning_rate = 0.05
transforms = ["int8"]
records.checkpoint_every = 1
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """Returns a folder with a config, a model, and the examples of each client."""
    folder = tmp_path_factory.mktemp("project")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SHALLOW.items():
            patch.setitem(fp.testing.TINY_BERT, name, value)
        fp.testing.write_tiny_checkpoint(folder / "model")
    write_client_texts(folder, CLIENTS, train=48, test=16)
    (folder / "fed.toml").write_text(CONFIG.format(folder=folder))
    return folder


class Federation:
    """The processes of a deployed run; they end with the context."""

    def __init__(self, project, app):
        self.project, self.app = project, app
        self.port, *self.ports = free_ports(1 + CLIENTS)
        self.processes: dict[str, subprocess.Popen] = {}
        connections = tomllib.loads((app / ".flwr" / "config.toml").read_text())
        connections["superlink"]["here"]["address"] = f"127.0.0.1:{self.port}"
        (app / ".flwr" / "config.toml").write_text(tomli_w.dumps(connections))
        bin_ = str(Path(sys.executable).parent)
        self.environment = os.environ | {
            "PATH": f"{bin_}{os.pathsep}{os.environ['PATH']}",
            "FLWR_HOME": str(app / ".flwr"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
        }
        for name in ("JAX_COMPILATION_CACHE_DIR", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"):
            self.environment.pop(name)  # those of the tests; clients have a folder for programs

    def start(self, name, *words):
        with (self.app / f"{name}.log").open("wb") as log:
            self.processes[name] = subprocess.Popen(
                [*map(str, words)],
                cwd=self.app,
                env=self.environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def kill(self):
        """Kills all processes, as when the power fails; Flower's own have sessions of their own."""
        home = self.environment["FLWR_HOME"]
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("FLWR_HOME") == home:
                    process.kill()
        for process in self.processes.values():
            process.wait()

    def __enter__(self):
        no_install = "--disable-runtime-dependency-installation"
        self.start("link", "flower-superlink", "--insecure", "--port", self.port, no_install)
        self.wait(lambda: "Uvicorn running" in self.said("link"), "a SuperLink")
        for client in range(CLIENTS):
            own = f'data="{self.project}/client-{client}.jsonl" state="{self.app}/state"'
            link = ("--insecure", "--superlink", f"127.0.0.1:{self.port}")
            how = ("--port", self.ports[client], "--node-config", f"client={client} {own}")
            self.start(f"node-{client}", "flower-supernode", *link, *how)
        return self

    def __exit__(self, *error):
        self.kill()

    def said(self, name):
        return (self.app / f"{name}.log").read_text(errors="replace")

    def run(self, **options):
        chosen = " ".join(f"{key}={json.dumps(value)}" for key, value in options.items())
        words = ("flwr", "run", ".", "here", "--run-config", chosen)
        subprocess.run(words, cwd=self.app, env=self.environment, check=True, timeout=LATE)

    def rows(self):
        path = self.app / "run" / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines]

    def wait(self, done, what):
        end = time.monotonic() + LATE
        while not done():
            logs = {name: self.said(name)[-2000:] for name in self.processes}
            assert time.monotonic() < end, (what, logs)
            time.sleep(0.5)


@functools.cache
def simulated(project):
    """Returns the directory of the simulated run."""
    out = project / "simulated"
    assert main(["run", str(project / "fed.toml"), "--out", str(out), "-q"]) == 0
    return out


@pytest.mark.timeout(3 * LATE)
@pytest.mark.parametrize("killed", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_four_machines_give_what_the_simulation_gives(project, killed):
    """Also after all processes were killed, and the server went on in a second run of Flower."""
    app = project / f"app-{killed}"
    assert main(["deploy", str(project / "fed.toml"), "--out", str(app)]) == 0
    test = str(project / "data" / "test.jsonl")
    if killed:
        with Federation(project, app) as federation:
            federation.run(test=test)
            federation.wait(lambda: len(federation.rows()) == 2, "round 1")
    with Federation(project, app) as federation:
        federation.run(test=test, resume=killed)
        expected = simulated(project)  # while Flower starts
        last = app / "run" / "checkpoints" / str(ROUNDS)
        federation.wait(last.exists, "the last checkpoint")
    one, two = (load_file(run / "params.safetensors") for run in (app / "run", expected))
    assert one.keys() == two.keys()
    for name in one:
        assert_close(one[name], two[name], rtol=0, atol=1e-6)
    rows = [json.loads(x) for x in (expected / "metrics.jsonl").read_text().splitlines()]
    assert [row["round"] for row in federation.rows()] == [0, 1, 2, 3]
    for got, row in zip(federation.rows(), rows, strict=True):
        assert "lost" not in got
        for name in ("clients", "bytes_up", "bytes_down"):
            assert got.get(name) == row.get(name), name
