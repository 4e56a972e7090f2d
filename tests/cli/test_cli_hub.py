"""Folders for the Hugging Face hub: loaded by peft and transformers, with a card of the run."""

import html
import json
import re
import shutil
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
from closeness import approx, assert_close
from huggingface_hub import HfApi, ModelCard
from internals import cli, describe, load_run
from internals import config as configs
from markdown_it import MarkdownIt
from peft import PeftModel
from refusals import refused
from tiny_project import fails
from transformers import AutoModelForSequenceClassification

import fedjax_peft as fp
from fedjax_peft.report import hub

pytestmark = pytest.mark.slow
TEXTS = ["w9 w10 w11 w40", "w30"]


@pytest.fixture(scope="module")
def run(finished, tmp_path_factory):
    """A finished run that tests may add a folder to."""
    copy = tmp_path_factory.mktemp("hub") / "run"
    shutil.copytree(finished, copy)
    return copy


@pytest.fixture(scope="module")
def loaded(run):
    return fp.load_run(run)


@pytest.fixture(scope="module")
def folder(run, tmp_path_factory):
    out = tmp_path_factory.mktemp("folder") / "adapter"
    hub_options = ("--merged", "--license", "apache-2.0", "--base-model", "me/tiny-bert")
    command = ["export", str(run), "--format", "hub", "--out", str(out), *hub_options]
    assert cli.main(command) == 0
    return out


@pytest.fixture
def uploads(monkeypatch):
    """The calls that would reach the hub."""
    calls = []

    def create(api, name, **options):
        calls.append(("create", name, options["private"]))

    def upload(api, *, repo_id, folder_path, commit_message):
        calls.append(("upload", repo_id, sorted(p.name for p in folder_path.iterdir())))
        address = f"https://huggingface.co/{repo_id}/commit/{'0' * 40}"
        return huggingface_hub.CommitInfo(
            commit_url=address, commit_message="", commit_description="", oid="0" * 40
        )

    monkeypatch.setattr(HfApi, "create_repo", create)
    monkeypatch.setattr(HfApi, "upload_folder", upload)
    return calls


@pytest.fixture
def offline(monkeypatch):
    """A hub that refuses connections."""
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.hf_api.constants.ENDPOINT", "http://127.0.0.1:9")


def logits(model, loaded):
    encoded = loaded.model.tokenizer(TEXTS, padding=True, return_tensors="pt")
    return model.eval()(**encoded).logits.detach().numpy()


def test_peft_and_transformers_load_the_folder(folder, loaded, project):
    expected = np.asarray(loaded.predict(TEXTS))
    base = AutoModelForSequenceClassification.from_pretrained(project / "model", num_labels=4)
    adapter = PeftModel.from_pretrained(base, folder)
    assert_close(logits(adapter, loaded), expected, rtol=0, atol=1e-5)
    merged = AutoModelForSequenceClassification.from_pretrained(folder / "merged")
    assert_close(logits(merged, loaded), expected, rtol=0, atol=1e-5)


def test_the_card_says_what_the_run_was(folder, run):
    """The hub itself validates the metadata when they are uploaded; here they are only read."""
    card = ModelCard.load(folder / "README.md")
    rows = load_run(run).rows
    assert card.data.base_model == "me/tiny-bert"
    assert (card.data.license, card.data.library_name) == ("apache-2.0", "peft")
    assert card.data.pipeline_tag == "text-classification"
    (result,) = card.data.eval_results
    assert (result.metric_type, result.dataset_name) == ("accuracy", "data")
    assert result.metric_value == approx(rows[-1]["test_accuracy"], abs=1e-6)
    table = dict(re.findall(r"^\| (.+?) \| (.+) \|$", card.text, re.MULTILINE))
    assert table["Base model"] == "me/tiny-bert"
    assert table["Partition"].startswith("dirichlet (clients = 6, alpha = 1.0")
    assert table["Algorithm"].startswith("fedavg")
    assert table["Rounds"] == "2"
    assert table["Differential privacy"] == "none"
    assert re.fullmatch(r"\S+ [kM]?B from all clients .*, \S+ [kM]?B back", table["Communication"])
    score = r"[\d.]+ % after round 2; 95 % interval [\d.]+ % to [\d.]+ % over samples of test .*"
    assert re.fullmatch(score, table["Test accuracy"])
    assert "jax" in table["Versions"]
    assert "This adapter: apache-2.0." in card.text


def test_the_config_runs_again_and_has_no_path_of_this_machine(folder, run, project, tmp_path):
    for path in folder.rglob("*"):
        if path.is_file():
            assert str(project.parent).encode() not in path.read_bytes(), path
    card = (folder / "README.md").read_text()
    assert "put them beside it (data, model)" in card
    (tmp_path / "config.toml").write_bytes((folder / "config.toml").read_bytes())
    for name in ("data", "model"):
        (tmp_path / name).symlink_to(project / name)
    again = configs.resolve(configs.load(tmp_path / "config.toml"))
    first = configs.resolve(configs.load(run / "config.toml"))
    assert again["model"]["name"] == str(tmp_path / "model")
    paths = {"data": "name", "model": "name"}
    for table, key in paths.items():
        again[table][key] = first[table][key]
    assert again == first


def test_the_config_of_a_private_run_asks_for_its_epsilon(run, loaded, tmp_path):
    record, private = load_run(run), {"name": "central", "clip": 1.0, "delta": 1e-5}
    solved = {**private, "epsilon": 2.0, "noise_multiplier": 0.8}
    record = record._replace(config={**record.config, "privacy": solved})
    folder = hub.write_folder(loaded.model, loaded.params, record, tmp_path / "adapter")
    asked = configs.resolve(configs.load(folder / "config.toml"))["privacy"]
    assert (asked["epsilon"], asked["noise_multiplier"]) == (2.0, None)


def test_private_runs_say_what_is_protected(run, loaded, tmp_path):
    """Rows of a private run make the card; the guarantee of its last row counts."""
    described = {"name": "central", "unit": "client", "statement": "It compares | neighbours."}
    rows = [{**load_run(run).rows[0], "privacy": described}, *load_run(run).rows[1:]]
    rows[-1] |= {"epsilon": 1.5, "delta": 1e-5, "stopped": "the target was reached"}
    record = load_run(run)._replace(rows=rows)
    text = hub.card(loaded.model, "peft", record, client=3)
    assert "| Differential privacy | (1.5, 1e-05)-differential privacy of each client." in text
    assert r"It compares \| neighbours." in text
    assert "| Model | the personal model of client 3 |" in text
    assert "| Caution | A client's personal model was trained on its examples" in text
    assert "| Rounds | 2 (the target was reached) |" in text
    assert "None was chosen yet." in text


def test_the_metadata_have_the_score_of_the_model_in_the_folder(run, loaded):
    """Of a run with personal models, `test_accuracy` is a mean over these."""
    own = {"test_count": 4, "test_accuracy": 0.9, "global_test_accuracy": 0.25}
    found = load_run(run)
    record = found._replace(rows=[*found.rows[:-1], found.rows[-1] | own])
    card = ModelCard(hub.card(loaded.model, "peft", record))
    assert [result.metric_value for result in card.data.eval_results] == [0.25]
    one = ModelCard(hub.card(loaded.model, "peft", record, client=3))
    assert one.data.eval_results is None
    assert "| Test accuracy of personal models, a mean | 90.0 %" in one.text
    lost = [*found.rows[:-1], found.rows[-1] | {"test_accuracy": None}]
    diverged = ModelCard(hub.card(loaded.model, "peft", found._replace(rows=lost)))
    assert diverged.data.eval_results is None
    assert "| Test accuracy | not finite after round 2 |" in diverged.text


def test_push_uploads_the_folder(loaded, uploads):
    address = loaded.push_to_hub("me/adapter", private=True)
    assert address == f"https://huggingface.co/me/adapter/commit/{'0' * 40}"
    created, (_, name, files) = uploads
    assert created == ("create", "me/adapter", True)
    assert name == "me/adapter"
    assert {"README.md", "adapter_config.json", "adapter_model.safetensors", "config.toml"} <= {
        *files
    }
    assert json.loads((loaded.out / "hub" / "adapter_config.json").read_text())["r"] == 2


def test_without_a_connection_the_folder_stays_and_the_command_is_printed(
    loaded, run, offline, tmp_path, capsys
):
    out = tmp_path / "adapter"
    with pytest.warns(UserWarning, match=rf"Upload it later: hf upload me/adapter {out} \."):
        assert loaded.push_to_hub("me/adapter", directory=out) is None
    assert (out / "adapter_model.safetensors").exists()
    again = ("export", str(run), "--format", "hub", "--overwrite", "--out", str(out))
    error = fails(capsys, *again, "--push", "me/adapter")
    assert f"hf upload me/adapter {out} ." in error
    assert cli.main([*again]) == 0
    assert f"Upload it: hf upload USER/NAME {out} ." in capsys.readouterr().out
    assert hub.upload_command(Path("my run")) == "hf upload USER/NAME 'my run' ."
    assert hub.upload_command(Path("-v"), "me/x") == "hf upload me/x ./-v ."


def test_runs_without_a_directory_have_a_card_too(loaded, tmp_path):
    from dataclasses import replace

    out = replace(loaded, out=None).export(tmp_path / "adapter", format="hub")
    card = ModelCard.load(out / "README.md")
    assert "| Algorithm | fedavg |" in card.text
    assert "A program made the run" in card.text
    assert card.data.eval_results is None


def test_bad_requests_are_refused(run, loaded, tmp_path, capsys):
    refused("Name a repository as USER/NAME", loaded.push_to_hub, "me/my adapter")
    error = fails(
        capsys, "export", str(run), "--format", "hub", "--clients", "all", "--out", str(tmp_path)
    )
    assert "A repository has one model: choose it with --client N." in error


def test_names_are_no_marks_of_the_card(loaded, run):
    """Classes, data and files are shown letter by letter, whatever they look like."""
    names = ["<img src=x>", "**a**_b_ `c`", "[d](http://e)", "---\nf: &lt; | $x$ ~~g~~"]
    model = loaded.model.replace(labels=tuple(names))
    record = load_run(run)
    config = {**record.config, "data": {**record.config["data"], "name": "/x/<b>|*h*"}}
    choices = hub.Choices(license="<i>mine</i>", base_model="me/<u>base")
    card = hub.card(model, "peft", record._replace(config=config), choices)
    assert r"\<b\>\|\*h\*" in card
    for text in (
        card,
        describe.card(model, "peft", choices.base_model),
    ):
        page = MarkdownIt("commonmark").enable("table").render(ModelCard(text).text)
        shown = re.sub(r"<pre>.*?</pre>", "", page, flags=re.DOTALL)
        assert not re.search(r"<(img|b|i|u|em|a|strong)\b", shown)
        assert html.unescape(shown).count("Classes: " + ", ".join(names).replace("\n", " ")) == 1
        assert "me/<u>base" in html.unescape(shown)
        assert ModelCard(text).data.library_name == "peft"
