"""``fedjax-peft plan``: the memory of a config, from its model's ``config.json`` alone."""

import re

import pytest
import tomli_w
from closeness import approx
from small_config import small

from fedjax_peft import testing
from fedjax_peft.cli.main import main

CONFIG = small(
    batch_size=2,
    data={"name": "missing/texts", "max_length": 16},
    partition={"name": "iid", "clients": 5},
    optimizer={"learning_rate": 1e-3},
)
SMALL = {"hidden_size": 16, "intermediate_size": 32, "image_size": [16, 24], "patch_size": 8}
SMALL |= {"num_hidden_layers": 2, "num_attention_heads": 2}
LINE = r"together: ([\d.]+) MB \+ 2 x ([\d.]+) MB ([\d.]+) MB"
LLAMA = {"name": "tiny", "head": "causal_lm", "config": testing.TINY_LLAMA}


@pytest.fixture
def plan(tmp_path, capsys):
    """Returns what the command prints for a config with these tables and words."""

    def run(tables, *words, code=0):
        written = {**CONFIG, **tables}
        written["model"] = {k: _without_none(v) for k, v in written["model"].items()}
        path = tmp_path / "config.toml"
        path.write_text(tomli_w.dumps(written), encoding="utf-8")
        assert main(["plan", str(path), *words]) == code
        printed = capsys.readouterr()
        return " ".join((printed.err if code else printed.out).split())

    return run


def _without_none(value):
    if not isinstance(value, dict):
        return value
    return {k: v for k, v in value.items() if v is not None}


def megabytes(text, row):
    """Returns the first figure after a row's name."""
    return float(re.search(rf"{re.escape(row)}[^.]*? ([\d,]+\.\d\d) MB", text)[1])


def test_a_language_model_without_weights_or_data(plan):
    text = plan({"model": LLAMA}, "--memory", "16MiB")
    assert "frozen weights" in text
    assert "activations of 2 x 16 tokens" in text
    assert "largest array: logits 32 x 261" in text
    assert "1 lane: fits into 16.78 MB, of which 10% are left to the driver." in text
    assert "clients keep" not in text, "terms that are nothing are left out"
    lanes = int(re.search(r"Most lanes that fit: (\d+)", text)[1])
    assert lanes > 1
    assert "A round has 5 clients; more lanes are of no use." in text
    more = plan({"model": LLAMA}, "--memory", "16MiB", "--lanes", str(lanes + 1))
    assert f"{lanes + 1} lanes: does not fit" in more
    assert 'What makes the largest part smaller: model.remat="blocks", fewer lanes' in more
    small = plan({"model": LLAMA}, "model.quantize=nf4", "model.remat=blocks")
    assert megabytes(small, "frozen weights") < megabytes(text, "frozen weights")
    assert "dequantized kernels" in small
    assert "computed again" in small


def test_a_large_vocabulary_is_named(plan):
    model = {**LLAMA, "config": {**testing.TINY_LLAMA, "vocab_size": 50_000}}
    text = plan({"model": model}, "--memory", "10MB", "--lanes", "2")
    assert "largest array: logits 32 x 50000" in text
    total = sum(float(x) for x in re.findall(r"([\d.]+) MB", text.split(" together: ")[0]))
    once, lane, both = map(float, re.search(LINE, text).groups())
    assert total == approx(once + lane, abs=0.05)
    assert both == approx(once + 2 * lane, abs=0.05)


def test_clients_states_outside_the_device(plan):
    tables = {"model": LLAMA, "algorithm": {"name": "ditto"}, "clients_per_round": 20}
    tables |= {"partition": {"name": "iid", "clients": 50}, "peft": {"name": "lora", "rank": 16}}
    row = "state that the clients keep between rounds"
    inside, outside = (
        plan({**tables, "placement": {"client_state": x}}) for x in ("device", "disk")
    )
    assert megabytes(inside, row) == approx(5 / 2 * megabytes(outside, row), abs=0.02)


@pytest.mark.parametrize(
    ("model", "data", "words"),
    [
        ({"model_type": "vit", **SMALL}, "cifar10", "2 images of 32 x 32 pixels"),
        ({"model_type": "vit", **SMALL, "num_channels": 1}, "mine/images", "2 images of 16 x 24"),
        ({"model_type": "cnn", "channels": [4], "hidden_size": 8}, "emnist", "2 images of 28 x 28"),
    ],
)
def test_models_of_images(plan, model, data, words):
    tables = {"model": {"name": "tiny", "config": model}, "data": {"name": data}}
    peft = {} if model["model_type"] == "vit" else {"peft": {"name": "head_only"}}
    text = plan(tables | peft)
    assert f"activations of {words}" in text
    assert "Most lanes" not in text, "no memory was named"


def test_a_classifier_by_its_folder_for_every_method(plan, tmp_path):
    testing.write_tiny_checkpoint(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()  # the weights are not read
    methods = {"plain": {}, "own": {"algorithm": "ditto"}}
    text = plan({"model": {"name": str(tmp_path / "model")}, "methods": methods}, "--lanes", "3")
    plain, own = text.split("own:")
    assert plain.startswith("plain:")
    assert " + 3 x " in plain
    assert "clients keep" in own
    assert "clients keep" not in plain


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--memory", "24 apples"], "The memory '24 apples' is not of the form 24GB or 16GiB."),
        (["--lanes", "0"], "--lanes must be 1 or more, not 0."),
        (["model.quantize=nf5"], "input should be 'int8' or 'nf4'"),
        (["model.remat=all"], "'remat' cannot be 'all'"),
    ],
)
def test_what_cannot_be_is_refused(plan, words, error):
    assert error in plan({"model": LLAMA}, *words, code=2)
