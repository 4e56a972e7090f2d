"""Exports of finished runs, and runs that start from an export; command line and Python."""

import json
import shutil
import textwrap
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax
import pandas as pd
import pytest
import torch
from closeness import EXACT, approx, assert_close
from internals import cli, export, load_clients, load_trained, predict, run_of, seen_clients
from peft import PeftModel
from refusals import refused
from safetensors.numpy import load_file
from safetensors.torch import load_file as load_torch
from tiny_project import fails, rows
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import fedjax_peft as fp
from fedjax_peft import (
    algorithms,
    attach,
    heads,
    load_model,
    lora,
    testing,
)
from fedjax_peft.peft.io.describe import describe

TEXTS = ["w9 w10 w11 w40", "w30", "w50 w51 w52 w53 w54"]
CLASSES = 4
UNTESTED = "evaluation.global_test=false"
"""Spares a program, in runs of which only the models count."""

pytestmark = pytest.mark.slow


def run(project, name, *overrides):
    out = project / name
    assert cli.main(["run", str(project / "config.toml"), *overrides, "--out", str(out)]) == 0
    return out


@pytest.fixture(scope="module")
def alone(project):
    """A run with private leaves only; clients that took part have different leaves."""
    return run(project, "local", "algorithm.name=local", "local_steps=1", UNTESTED)


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


def loaded_by(printed):
    """Returns the logits of the model loaded by the printed code, and checks its labels."""
    names = {}
    code = printed.partition("Load it in Python:\n")[2]
    exec(textwrap.dedent(code), names)
    model = names["model"]
    # It has read two texts with the tokenizer of the export.
    assert names["text"] == "The kettle broke at once."
    assert names["logits"].shape == (CLASSES,)
    assert model.config.id2label == {i: f"class {i}" for i in range(CLASSES)}
    base = names["base"].config._name_or_path if "base" in names else model.config._name_or_path
    return torch_logits(model, base)


def files(directory):
    return {p.relative_to(directory) for p in directory.rglob("*") if p.is_file()}


# ---------------------------------------------------------------------------------------- formats


@pytest.mark.long("torch loads what is exported")
def test_peft(project, finished, tmp_path, capsys):
    out = tmp_path / "a"
    assert cli.main(["export", str(finished), "--out", str(out)]) == 0
    assert {path.name for path in out.iterdir()} == {
        *("README.md", "adapter_config.json", "adapter_model.safetensors"),
        *("labels.json", "tokenizer.json", "tokenizer_config.json", "trained_by.txt"),
    }
    assert run_of(out) == finished.resolve()
    printed = capsys.readouterr()
    assert printed.err == ""
    assert printed.out.startswith(f"{out}\nLoRA of rank 2.\nLoad it in Python:\n")
    card = (out / "README.md").read_text()
    assert f'base_model: "{project / "model"}"' in card
    assert 'library_name: "peft"\n' in card
    assert "PeftModel.from_pretrained(base, '.')" in card
    assert "Classes: class 0, class 1," in card
    model, params, _ = load_trained(finished)
    expected = logits(model, params)
    assert_close(loaded_by(printed.out), expected, **EXACT)
    assert_close(peft_logits(project, out), expected, **EXACT)


def test_merged(finished, tmp_path, capsys):
    out = tmp_path / "a"
    assert cli.main(["export", str(finished), "--format", "merged", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"{out}\nLoad it in Python:\n")
    model, params, _ = load_trained(finished)
    reference = AutoModelForSequenceClassification.from_pretrained(out)
    assert_close(torch_logits(reference, out), logits(model, params), **EXACT)
    np.testing.assert_array_equal(loaded_by(printed), torch_logits(reference, out))
    assert reference.config.id2label == {i: f"class {i}" for i in range(CLASSES)}


# ---------------------------------------------------------------------------------------- clients


def test_every_client(project, alone, tmp_path):
    out = tmp_path / "new" / "clients"
    assert cli.main(["export", str(alone), "--clients", "all", "--out", str(out)]) == 0
    assert [p.name for p in sorted(out.iterdir())] == [f"client_{c:04d}" for c in range(6)]
    run = load_clients(alone)
    trained = {c for row in rows(alone)[1:] for c in row["clients"]}
    assert 1 < len(trained) < 6
    for client in (min(trained), min({*range(6)} - trained)):
        assert run_of(out / f"client_{client:04d}") == alone.resolve()
        expected = logits(run.model, run.client_params(client))
        got = peft_logits(project, out / f"client_{client:04d}")
        assert_close(got, expected, **EXACT)
    # One client alone is exported to the directory itself.
    one = ["export", str(alone), "--client", str(min(trained)), "--out", str(tmp_path / "one")]
    assert cli.main(one) == 0
    same = out / f"client_{min(trained):04d}" / "adapter_model.safetensors"
    assert (tmp_path / "one" / same.name).read_bytes() == same.read_bytes()
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
    assert_close(
        torch_logits(reference, tmp_path / "a" / "client_0003"),
        logits(run.model, run.client_params(3)),
        **EXACT,
    )


def test_adapterhub_with_a_shared_part(project, tmp_path, capsys):
    """The adapters are shared and the heads private; PEFT does not support these adapters."""
    given = ["peft={name='houlsby',size=4}", "algorithm.head=private", "rounds=1", "local_steps=1"]
    out = run(project, "houlsby", *given, UNTESTED)
    arguments = ["export", str(out), "--clients", "all", "--out", str(tmp_path / "a")]
    assert "Use 'adapterhub'" in fails(capsys, *arguments)
    assert not any(tmp_path.iterdir())
    capsys.readouterr()
    assert cli.main([*arguments, "--format", "adapterhub"]) == 0
    (participants,) = (row["clients"] for row in rows(out)[1:])
    never = ", ".join(str(c) for c in range(6) if c not in participants)
    printed = capsys.readouterr()
    assert printed.err.startswith(f"fedjax-peft: clients {never} never trained in this run")
    assert "adapters.init(model)" in printed.out
    adapters, heads = (
        {(tmp_path / "a" / f"client_{c:04d}" / name).read_bytes() for c in participants}
        for name in ("adapter.safetensors", "model_head.safetensors")
    )
    assert (len(adapters), len(heads)) == (1, len(participants))


def test_another_adapter_is_not_replaced_without_overwrite(finished, alone, tmp_path, capsys):
    arguments = ["export", str(alone), "--client", "0", "--out", str(tmp_path / "a")]
    assert cli.main(["export", str(finished), "--out", str(tmp_path / "a")]) == 0
    assert cli.main(["export", str(finished), "--out", str(tmp_path / "a")]) == 0, "the same again"
    before = {p: p.read_bytes() for p in (tmp_path / "a").iterdir()}
    capsys.readouterr()
    assert "already holds another export" in fails(capsys, *arguments)
    assert {p: p.read_bytes() for p in (tmp_path / "a").iterdir()} == before
    assert cli.main([*arguments, "--overwrite"]) == 0
    assert {p: p.read_bytes() for p in (tmp_path / "a").iterdir()} != before


@pytest.mark.parametrize(
    ("head", "printed"),
    [
        (heads.token_classification(("O", "B-x", "I-x")), "('[CLS]', '"),
        (heads.span_classification(), "('What broke?', 'The kettle broke at once.') -> "),
    ],
    ids=["tags", "spans"],
)
def test_the_printed_lines_of_other_heads(project, tmp_path, capsys, monkeypatch, head, printed):
    """The lines of the card print tags, and answers, in the folder of the export."""
    model = attach(load_model(project / "model", head=head), lora(2))
    export(model, model.trainable, tmp_path / "a")
    monkeypatch.chdir(tmp_path / "a")
    code = Path("README.md").read_text().split("```")[1].removeprefix("python\n")
    exec(code, {})
    assert printed in capsys.readouterr().out


def test_the_rank_of_an_svd_start_is_explained(tmp_path):
    model = attach(testing.tiny_model(), lora(2, init="svd"))
    text = describe(model, export(model, model.trainable, tmp_path / "a"), "peft")
    assert text.startswith("LoRA of rank 4, trained with rank 2: the trained factors started from")


# ------------------------------------------------------------------- the model of which client


@pytest.fixture
def texts(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return path


@pytest.mark.parametrize("command", ["export", "predict"])
def test_a_global_model_without_private_leaves_is_an_error(alone, texts, tmp_path, capsys, command):
    where = ["--out", str(tmp_path / "a")]
    if command == "predict":
        where = ["--input", str(texts), "--output", str(tmp_path / "a")]
    error = fails(capsys, command, str(alone), *where)
    assert "leaves are private to the clients, such as" in error
    assert "such as --client 0, or all of them: --clients all" in error
    assert not (tmp_path / "a").exists()


def test_predictions_of_clients(alone, texts, tmp_path, capsys):
    run = load_clients(alone)
    arguments = ["predict", str(alone), "--input", str(texts), "--output"]
    folder = tmp_path / "new" / "all"
    for _ in range(2):  # also into the folder of an earlier answer
        assert cli.main([*arguments, str(folder), "--clients", "all"]) == 0
    for client in range(6):
        path = folder / f"client_{client:04d}.jsonl"
        got = [json.loads(line)["logits"] for line in path.read_text().splitlines()]
        assert_close(got, logits(run.model, run.client_params(client)), **EXACT)
    trained = min(seen_clients(run.metrics))
    capsys.readouterr()
    assert cli.main([*arguments, str(tmp_path / "one"), "--client", str(trained)]) == 0
    assert capsys.readouterr().err == ""
    same = folder / f"client_{trained:04d}.jsonl"
    assert (tmp_path / "one").read_bytes() == same.read_bytes()
    assert "no client 9" in fails(capsys, *arguments, str(tmp_path / "b"), "--client", "9")


def test_a_client_is_chosen_by_its_name(alone, texts, tmp_path, capsys):
    run, names = tmp_path / "named", [f"user {i}" for i in range(6)]
    shutil.copytree(alone, run)
    first, *others = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    first = json.dumps({**json.loads(first), "client_names": names}) + "\n"
    (run / "metrics.jsonl").write_text("".join([first, *others]))
    arguments = ["predict", str(run), "--input", str(texts), "--output"]
    assert cli.main([*arguments, str(tmp_path / "a"), "--client", "user 4"]) == 0
    assert "client 4 is 'user 4'." in capsys.readouterr().err
    assert cli.main([*arguments, str(tmp_path / "b"), "--clients", "user 4,2"]) == 0
    assert {path.name for path in (tmp_path / "b").iterdir()} == {
        *("client_0002.jsonl", "client_0004.jsonl")
    }
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b" / "client_0004.jsonl").read_bytes()
    error = fails(capsys, *arguments, str(tmp_path / "c"), "--client", "user 44")
    assert "Did you mean 'user 4'" in error


def test_predictions_of_a_table_of_any_format(finished, texts, tmp_path, capsys):
    """An answer has the line of its row, and tables in memory give the same."""
    rows = [json.loads(line)["text"] for line in texts.read_text().splitlines()]
    wanted, out = tmp_path / "wanted", tmp_path / "out"
    assert cli.main(["predict", str(finished), "--input", str(texts), "--output", str(wanted)]) == 0
    frame = pd.DataFrame({"text": rows, "label": "unknown"})
    frame.to_csv(tmp_path / "x.csv", index=False)
    spaced = "".join(f"\n\n{line}\n" for line in texts.read_text().splitlines())
    (tmp_path / "spaced.jsonl").write_text(spaced + "\n")
    for name in ("x.csv", "spaced.jsonl"):
        command = ["predict", str(finished), "--input", str(tmp_path / name), "--output", str(out)]
        assert cli.main(command) == 0
        lines = out.read_text().splitlines()
        assert [i for i, line in enumerate(lines) if line] == [
            i if name == "x.csv" else 3 * i + 2 for i in range(len(rows))
        ]
        assert [line for line in lines if line] == wanted.read_text().splitlines()
    run = fp.load_run(finished)
    expected = run.predict(rows)
    np.testing.assert_array_equal(run.predict(frame), expected)
    np.testing.assert_array_equal(run.predict(frame[["text"]].to_dict("records")), expected)
    one, other = (fp.embed(run.trained, x, max_length=12) for x in (frame, rows))
    np.testing.assert_array_equal(one, other)
    refused("one text, 'a text': give a list", run.predict, "a text")


def test_a_merged_model_in_bfloat16(finished, tmp_path, capsys):
    """Each value is rounded as torch rounds it, and the file has half the size."""
    whole, half = tmp_path / "whole", tmp_path / "half"
    command = ["export", str(finished), "--format", "merged", "--out"]
    assert cli.main([*command, str(whole)]) == 0
    assert cli.main([*command, str(half), "--dtype", "bfloat16"]) == 0
    one, other = (load_torch(path / "model.safetensors") for path in (whole, half))
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(other[name], value.to(torch.bfloat16)), name
    assert json.loads((half / "config.json").read_text())["dtype"] == "bfloat16"
    reference = AutoModelForSequenceClassification.from_pretrained(half, dtype=torch.float32)
    model = load_model(half)
    assert_close(torch_logits(reference, half), logits(model, model.trainable), **EXACT)
    capsys.readouterr()
    for format, out in (("peft", "a"), ("hub", "b")):
        options = ["--format", format, "--out", str(tmp_path / out), "--dtype", "bfloat16"]
        assert "format" in fails(capsys, "export", str(finished), *options)
        assert not (tmp_path / out).exists()


@pytest.mark.parametrize(
    ("clients", "complaint"),
    [
        ("6", "There is no client 6: the run has 6, 0 to 5"),
        ("0,-1", "There is no client -1"),
        ("some", "There is no client 'some': this run's clients have numbers, and no names"),
        ("", "There is no client ''"),
    ],
)
def test_clients_that_do_not_exist_are_errors(alone, tmp_path, capsys, clients, complaint):
    error = fails(
        capsys, "export", str(alone), f"--clients={clients}", "--out", str(tmp_path / "a")
    )
    assert complaint in error
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    "words", ["export --clients all --out", "predict --client 0 --input in.jsonl --output"]
)
def test_a_run_without_private_leaves(finished, texts, tmp_path, capsys, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    command, *options = words.split()
    assert "keeps nothing private" in fails(capsys, command, str(finished), *options, "a")
    assert not Path("a").exists()


def test_an_unfinished_run_is_exported_with_a_note(finished, tmp_path, capsys):
    run = shutil.copytree(finished, tmp_path / "run")
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    for name, kept in (("whole", lines), ("half", lines[:-1])):
        (run / "metrics.jsonl").write_text("".join(kept))
        assert cli.main(["export", str(run), "--out", str(tmp_path / name)]) == 0
        note = "is unfinished: it has done 1 of 2 rounds" in capsys.readouterr().err
        assert note == (name == "half")


def test_export_does_not_change_the_run(alone, tmp_path):
    before = {p: p.stat().st_mtime_ns for p in sorted(alone.rglob("*")) if p.is_file()}
    assert cli.main(["export", str(alone), "--clients=0", "--out", str(tmp_path / "a")]) == 0
    assert {p: p.stat().st_mtime_ns for p in sorted(alone.rglob("*")) if p.is_file()} == before


def test_unreadable_checkpoints(alone, tmp_path, capsys):
    """The previous checkpoint is used; without any, the error names the run."""
    out = shutil.copytree(alone, tmp_path / "damaged")
    trained = min(seen_clients(rows(out)))
    arguments = ["export", str(out), f"--clients={trained}", "--out"]
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
    metrics = [{"round": 0}, {"round": 1, "clients": [0, 2], "dropped": []}]
    run = fp.Run(model, algorithms.local(optax.adamw(1e-2)), model.trainable, private, {}, metrics)
    for client in (0, 2):
        out = run.export(tmp_path / str(client), client=client)
        stored = load_file(out / "adapter_model.safetensors")["base_model.model.classifier.weight"]
        np.testing.assert_array_equal(stored, model.trainable["classifier.kernel"].T + client)
    refused("no client 3", run.export, tmp_path / "x", client=3)
    refused(r"are private to the clients.*client=0 to client=2", run.export, tmp_path / "x")
    with pytest.warns(UserWarning, match="Client 1 never trained"):
        run.export(tmp_path / "1", client=1)
    run = fp.Run(
        model, algorithms.fedavg(optax.adamw(1e-2)), model.trainable, {}, model.trainable, []
    )
    refused("nothing private", run.export, tmp_path / "x", client=0)
    refused("'pfet' is unknown", run.export, tmp_path / "x", format="pfet")
    assert run.export(tmp_path / "x", format="merged").joinpath("model.safetensors").exists()


def test_predictions_in_python_are_of_the_run_s_own_length_and_client(alone):
    """A text is cut where it was cut in training."""
    run = fp.load_run(alone)
    seen = seen_clients(run.metrics)
    long = [*TEXTS, " ".join(["w9"] * 200)]
    got = run.predict(long, client=min(seen))
    expected = predict(run.trained, run.client_params(min(seen)), long, max_length=12)
    assert_close(got, expected, **EXACT)
    assert run.max_length == 12
    refused("are private to the clients", run.predict, long)
    never = min({*range(6)} - seen)
    with pytest.warns(UserWarning, match=f"Client {never} never trained"):
        other = run.predict(long, client=never)
    assert np.abs(other - got).max() > 1e-6


# ------------------------------------------------------------------------------------- the way back


def test_run_that_starts_from_an_export(project, finished, tmp_path):
    """Its first evaluation equals the last one of the exported run; it can be exported again."""
    assert cli.main(["export", str(finished), "--out", str(tmp_path / "a")]) == 0
    config = (project / "config.toml").read_text().replace("rank = 2", "")
    (project / "back.toml").write_text(config)
    out = project / "back"
    given = ["peft.name=pretrained", f"peft.adapter={tmp_path / 'a'}", "rounds=1", "local_steps=1"]
    assert cli.main(["run", str(project / "back.toml"), *given, "--out", str(out)]) == 0
    last, first = rows(finished)[-1], rows(out)[0]
    for metric in ("test_accuracy", "test_loss"):
        assert first[metric] == approx(last[metric], rel=1e-6)
    assert rows(finished)[0]["test_loss"] != approx(last["test_loss"], rel=1e-3)
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
