"""Exports of finished runs, and a run that starts from one: the command line and ``Run``."""

import json
import shutil

import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from peft import PeftModel
from safetensors.numpy import load_file
from test_run_cli import CONFIG, fails
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from fedjax_peft import algorithms, attach, lora, testing
from fedjax_peft.errors import InputError
from fedjax_peft.run import cli
from fedjax_peft.run.loop import Run
from fedjax_peft.run.predict import load_clients, load_trained, predict

EXACT = {"rtol": 0, "atol": 1e-5}
TEXTS = ["w9 w10 w11 w40", "w30", "w50 w51 w52 w53 w54"]
CLASSES = 4

# peft 0.21 asks transformers 5 for an attribute that it has renamed.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    root = tmp_path_factory.mktemp("project")
    testing.write_tiny_checkpoint(root / "model")
    testing.write_tiny_texts(root / "data", train=80, test=40)
    (root / "config.toml").write_text(CONFIG.format(root=root))
    return root


def run(project, name, *overrides):
    out = project / name
    assert cli.main(["run", str(project / "config.toml"), *overrides, "--out", str(out)]) == 0
    return out


@pytest.fixture(scope="module")
def finished(project):
    """A run with a global model."""
    return run(project, "fedavg")


@pytest.fixture(scope="module")
def alone(project):
    """A run whose clients keep everything; those who took part differ."""
    return run(project, "local", "algorithm.name=local", "clients_per_round=4")


def rows(directory):
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def logits(model, params):
    return predict(model, params, TEXTS, max_length=12)


def torch_logits(model, base):
    encoded = AutoTokenizer.from_pretrained(base)(TEXTS, padding=True, return_tensors="pt")
    with torch.no_grad():
        return model.eval()(**encoded).logits.numpy()


def peft_logits(project, adapter):
    base = project / "model"
    model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=CLASSES)
    return torch_logits(PeftModel.from_pretrained(model, adapter), base)


def files(directory):
    return {p.relative_to(directory) for p in directory.rglob("*") if p.is_file()}


# ---------------------------------------------------------------------------------------- formats


def test_peft(project, finished, tmp_path, capsys):
    out = tmp_path / "a"
    assert cli.main(["export", str(finished), "--out", str(out)]) == 0
    assert capsys.readouterr() == (f"{out}\n", "")
    model, params, _ = load_trained(finished)
    expected = logits(model, params)
    np.testing.assert_allclose(peft_logits(project, out), expected, **EXACT)


def test_merged(finished, tmp_path):
    out = tmp_path / "a"
    assert cli.main(["export", str(finished), "--format", "merged", "--out", str(out)]) == 0
    model, params, _ = load_trained(finished)
    reference = AutoModelForSequenceClassification.from_pretrained(out)
    np.testing.assert_allclose(torch_logits(reference, out), logits(model, params), **EXACT)
    assert reference.config.id2label == {i: f"class {i}" for i in range(CLASSES)}


# ---------------------------------------------------------------------------------------- clients


def test_every_client(project, alone, tmp_path):
    out = tmp_path / "new" / "clients"
    assert cli.main(["export", str(alone), "--clients", "all", "--out", str(out)]) == 0
    assert [p.name for p in sorted(out.iterdir())] == [f"client_{c:04d}" for c in range(6)]
    run = load_clients(alone)
    trained = {c for row in rows(alone)[1:] for c in row["clients"]}
    assert 1 < len(trained) < 7
    for client in range(6):
        expected = logits(run.model, run.client_params(client))
        got = peft_logits(project, out / f"client_{client:04d}")
        np.testing.assert_allclose(got, expected, **EXACT)
    weights = {
        client: load_file(out / f"client_{client:04d}" / "adapter_model.safetensors")
        for client in sorted(trained)
    }
    name = "base_model.model.classifier.weight"
    assert len({x[name].tobytes() for x in weights.values()}) == len(trained)


def test_some_clients_merged(alone, tmp_path):
    arguments = ["export", str(alone), "--format", "merged", "--clients", "3,0"]
    assert cli.main([*arguments, "--out", str(tmp_path / "a")]) == 0
    assert [p.name for p in sorted((tmp_path / "a").iterdir())] == ["client_0000", "client_0003"]
    run = load_clients(alone)
    reference = AutoModelForSequenceClassification.from_pretrained(tmp_path / "a" / "client_0003")
    np.testing.assert_allclose(
        torch_logits(reference, tmp_path / "a" / "client_0003"),
        logits(run.model, run.client_params(3)),
        **EXACT,
    )


def test_adapterhub_with_a_shared_part(project, tmp_path, capsys):
    """Adapters of the server, heads of the clients' own; PEFT cannot hold these adapters."""
    given = ["peft={name='houlsby',size=4}", "algorithm.head=private", "rounds=1"]
    out = run(project, "houlsby", *given)
    arguments = ["export", str(out), "--clients", "all", "--out", str(tmp_path / "a")]
    assert "Use 'adapterhub'" in fails(capsys, *arguments)
    assert not any(tmp_path.iterdir())
    assert cli.main([*arguments, "--format", "adapterhub"]) == 0
    (taken,) = (row["clients"] for row in rows(out)[1:])
    adapters, heads = (
        {(tmp_path / "a" / f"client_{c:04d}" / name).read_bytes() for c in taken}
        for name in ("adapter.safetensors", "model_head.safetensors")
    )
    assert (len(adapters), len(heads)) == (1, len(taken))


def test_export_without_clients_tells_what_it_leaves_out(alone, tmp_path, capsys):
    assert cli.main(["export", str(alone), "--out", str(tmp_path / "a")]) == 0
    assert "are private to the clients" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("clients", "complaint"),
    [
        ("6", "There is no client 6: the run has 6, 0 to 5"),
        ("0,-1", "There is no client -1"),
        ("some", "'some' is neither 'all' nor numbers"),
        ("", "'' is neither"),
    ],
)
def test_clients_that_there_are_not(alone, tmp_path, capsys, clients, complaint):
    error = fails(
        capsys, "export", str(alone), f"--clients={clients}", "--out", str(tmp_path / "a")
    )
    assert complaint in error
    assert not any(tmp_path.iterdir())


def test_a_run_without_private_leaves(finished, tmp_path, capsys):
    arguments = ["export", str(finished), "--clients", "all", "--out", str(tmp_path / "a")]
    assert "keeps nothing private" in fails(capsys, *arguments)
    assert not any(tmp_path.iterdir())


def test_export_changes_nothing_in_the_run(alone, tmp_path):
    before = {p: p.stat().st_mtime_ns for p in sorted(alone.rglob("*")) if p.is_file()}
    assert cli.main(["export", str(alone), "--clients=0", "--out", str(tmp_path / "a")]) == 0
    assert {p: p.stat().st_mtime_ns for p in sorted(alone.rglob("*")) if p.is_file()} == before


def test_unreadable_checkpoints(alone, tmp_path, capsys):
    """The one before is taken; without any the run is named."""
    out = shutil.copytree(alone, tmp_path / "damaged")
    arguments = ["export", str(out), "--clients=0", "--out"]
    older, newer = sorted((out / "checkpoints").iterdir(), key=lambda p: int(p.name))
    empty(newer)
    assert cli.main([*arguments, str(tmp_path / "a")]) == 0
    empty(older)
    assert "No checkpoint in" in fails(capsys, *arguments, str(tmp_path / "b"))
    assert not (tmp_path / "b").exists()


def empty(directory):
    for path in directory.rglob("*"):
        if path.is_file():
            path.write_bytes(b"")


def test_in_python(tmp_path):
    model = attach(testing.tiny_model(), lora(2))
    private = {name: jnp.stack([x, x + 1, x + 2]) for name, x in model.trainable.items()}
    run = Run(model, algorithms.local(optax.adamw(1e-2)), model.trainable, private, {}, [])
    for client in (0, 2):
        out = run.export(tmp_path / str(client), client=client)
        stored = load_file(out / "adapter_model.safetensors")["base_model.model.classifier.weight"]
        np.testing.assert_array_equal(stored, model.trainable["classifier.kernel"].T + client)
    with pytest.raises(InputError, match="no client 3"):
        run.export(tmp_path / "x", client=3)
    run = Run(model, algorithms.fedavg(optax.adamw(1e-2)), model.trainable, {}, model.trainable, [])
    with pytest.raises(InputError, match="nothing private"):
        run.export(tmp_path / "x", client=0)
    with pytest.raises(InputError, match="'pfet' is unknown"):
        run.export(tmp_path / "x", format="pfet")
    assert run.export(tmp_path / "x", format="merged").joinpath("model.safetensors").exists()


# ------------------------------------------------------------------------------------- the way back


def test_run_that_starts_from_an_export(project, finished, tmp_path):
    """Its first evaluation is the other's last; it can be exported in turn."""
    assert cli.main(["export", str(finished), "--out", str(tmp_path / "a")]) == 0
    config = (project / "config.toml").read_text().replace("rank = 2", "")
    (project / "again.toml").write_text(config)
    out = project / "again"
    given = ["peft.name=pretrained", f"peft.adapter={tmp_path / 'a'}", "rounds=1"]
    assert cli.main(["run", str(project / "again.toml"), *given, "--out", str(out)]) == 0
    last, first = rows(finished)[-1], rows(out)[0]
    for metric in ("test_accuracy", "test_loss"):
        assert first[metric] == pytest.approx(last[metric], rel=1e-6)
    assert rows(finished)[0]["test_loss"] != pytest.approx(last["test_loss"], rel=1e-3)
    assert cli.main(["export", str(out), "--out", str(tmp_path / "b")]) == 0
    assert files(tmp_path / "a") == files(tmp_path / "b")


def test_a_bad_adapter_leaves_no_run(project, finished, tmp_path, capsys):
    assert cli.main(["export", str(finished), "--out", str(tmp_path / "a")]) == 0
    (tmp_path / "a" / "adapter_model.safetensors").write_bytes(b"no")
    (project / "bad.toml").write_text((project / "config.toml").read_text().replace("rank = 2", ""))
    given = ["peft.name=pretrained", f"peft.adapter={tmp_path / 'a'}"]
    out = project / "bad"
    error = fails(capsys, "run", str(project / "bad.toml"), *given, "--out", str(out))
    assert "not a whole safetensors file" in error
    assert not out.exists()
