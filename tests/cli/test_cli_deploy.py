"""The command ``deploy``: an app that stands alone, and gives what ``run`` gives."""

import json
import tomllib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from closeness import assert_close
from deployed import Exchange, write_client_texts
from internals import main
from refusals import refused
from safetensors.numpy import load_file
from shallow import simple_encoder  # noqa: F401 -- a fixture

import fedjax_peft as fp
from fedjax_peft.deploy import app, nodes
from fedjax_peft.deploy.client import Client
from fedjax_peft.deploy.server import serve

pytestmark = pytest.mark.usefixtures("simple_encoder")

CONFIG = """
rounds = 1
batch_size = 4
model.name = "{folder}/model"
data.name = "{folder}/data"
data.max_length = 14
partition.name = "natural"
peft.rank = 2
optimizer.learning_rate = 0.01
system.failure_rate = 0.01
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """Returns a folder with a config, its model, and the examples of three clients."""
    folder = tmp_path_factory.mktemp("project")
    fp.testing.write_tiny_checkpoint(folder / "model")
    write_client_texts(folder, 3, train=24, test=8)
    (folder / "fed.toml").write_text(CONFIG.format(folder=folder))
    return folder


@pytest.fixture(scope="module")
def written(project):
    """Returns the folder of the app."""
    words = ["evaluation.client_holdout=0.1", "--out", str(project / "app")]
    assert main(["deploy", str(project / "fed.toml"), *words]) == 0
    return project / "app"


def test_the_app_is_complete(written):
    """Flower reads the project file; the config says all, and the README how."""
    flower = tomllib.loads((written / "pyproject.toml").read_text())["tool"]["flwr"]["app"]
    assert flower["components"] == {"serverapp": "server_app:app", "clientapp": "client_app:app"}
    for side, arguments in (("client", ""), ("server", ", 3")):
        text = (written / f"{side}_app.py").read_text()
        assert f"app = apps.{side}(Path(__file__).parent{arguments})" in text
        compile(text, side, "exec")
    config = tomllib.loads((written / "config.toml").read_text())
    assert config["model"]["labels"] == [f"class {i}" for i in range(4)]
    assert config["system"]["failure_rate"] == 0
    assert "client_holdout" not in config["evaluation"]
    readme = (written / "README.md").read_text()
    assert "seq 0 2" in readme
    assert '"client=$i data=\\"$PWD/data/client-$i.jsonl\\"' in readme
    connections = tomllib.loads((written / ".flwr" / "config.toml").read_text())
    assert connections["superlink"]["default"] == "here"
    certificate = connections["superlink"]["secure"]["root-certificates"]
    assert certificate == str(written.resolve() / "ca.crt")  # Flower takes whole paths alone


def test_the_app_gives_what_run_gives(project, written, capsys):
    """Its run directory is one like any other: ``export`` and ``report`` read it."""
    options = ["system.failure_rate=0", "--out", str(project / "simulated"), "-q"]
    assert main(["run", str(project / "fed.toml"), *options]) == 0
    config, out = app._config(written), project / "deployed"
    own = [app.own_examples(config, project / f"client-{client}.jsonl") for client in range(3)]
    clients = [Client(app._given(config, x), n, project / "state") for n, x in enumerate(own)]
    test = app.own_examples(config, project / "data" / "test.jsonl").data
    given = app._given(config, nodes.nobody(), out=out, test=test)
    serve(given, Exchange(clients), 3)
    one, two = (load_file(run / "params.safetensors") for run in (out, project / "simulated"))
    assert one.keys() == two.keys()
    for name in one:
        assert_close(one[name], two[name], rtol=0, atol=1e-6)
    rows = [fp.load_run(run).metrics[1] for run in (out, project / "simulated")]
    for field in ("bytes_up", "bytes_down", "clients", "test_accuracy"):
        assert rows[0][field] == rows[1][field]
    assert main(["report", str(out), "--out", str(project / "report")]) == 0
    assert main(["export", str(out), "--out", str(project / "adapter")]) == 0
    capsys.readouterr()


def test_what_cannot_be_deployed_is_refused(project, written, capsys):
    config = str(project / "fed.toml")
    for words, why in (
        (["--out", str(written)], f"{written} exists"),
        (["attack=sign_flip", "attack.share=0.4", "--out", "x"], "attack cannot be deployed"),
        (["--out", "x", "peft.init=eva"], "peft.init = 'eva' cannot be deployed"),
        (["--out", "x", "algorithm=fedmcp"], "fedmcp needs a model with a global and"),
        (["--out", "x", "algorithm=fedmcp", "peft=dual_lora"], "a private bottleneck adapter"),
    ):
        assert main(["deploy", config, *words]) == 2
        assert why in capsys.readouterr().err
    assert not Path("x").exists()


def test_a_file_that_does_not_fit_is_named(project, written):
    config = app._config(written)
    refused("must be a file with examples", app.own_examples, config, project / "none.jsonl")
    other = project / "other.jsonl"
    other.write_text('{"text": "w1 w2", "label": "class 9"}\n')
    said = f"{other}, with the columns text, label, does not fit the config: .*'class 9'"
    refused(said, app.own_examples, config, other)


def test_a_client_packs_its_examples_and_the_server_does_not(project, written, monkeypatch):
    """As in a simulated run, which scores completions of the prompts of single examples."""
    path = project / "requests.jsonl"
    rows = [{"prompt": f"w{i}", "completion": "w2"} for i in range(4)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = app._config(written)
    data = {**config["data"], "packing": 56, "template": "{prompt}"}
    model, task = {**config["model"], "labels": []}, {"name": "instruction_tuning"}
    config = {**config, "model": model, "task": task, "data": data}
    monkeypatch.setattr(app, "_config", lambda folder: config)
    monkeypatch.setattr(app, "_given", lambda config, clients, **more: (clients, more))
    monkeypatch.setattr(app, "client_app", lambda make: make)
    monkeypatch.setattr(app, "server_app", lambda make, clients: make)
    client, _ = app.client(written)(SimpleNamespace(node_config={"data": str(path)}))
    asked = {"test": str(path), "out": "run", "resume": False}
    _, own = app.server(written, 1)(SimpleNamespace(run_config=asked))
    assert len(client.data) == 1
    assert len(own["test"]) == 4
    assert "prompt_ids" in own["test"].columns


def test_examples_keep_their_order(project, written):
    """The batches of a client are drawn from places in its file, which makes no more clusters."""
    config = app._config(written)
    config = {**config, "data": {**config["data"], "clusters": 10}}
    found = app.own_examples(config, project / "client-1.jsonl")
    labels = [json.loads(x)["label"] for x in (project / "client-1.jsonl").read_text().splitlines()]
    assert [found.data.label_names[i] for i in found.data.labels] == labels
    np.testing.assert_array_equal(found.indices[0], np.arange(8))
