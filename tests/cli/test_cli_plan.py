"""``fedjax-peft plan``: the memory of a config, from its model's ``config.json`` alone."""

import re

import pytest
import tomli_w

from fedjax_peft import testing
from fedjax_peft.cli.main import main

CONFIG = {
    "batch_size": 2,
    "rounds": 1,
    "data": {"name": "missing/texts", "max_length": 16},
    "partition": {"name": "iid", "clients": 5},
    "optimizer": {"learning_rate": 1e-3},
}
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
    assert "together, with 1 lane " in text
    assert "This fits into 90% of 16.78 MB" in text
    assert "clients keep" not in text, "terms that are nothing are left out"
    lanes = int(re.search(r"Most lanes that fit: (\d+)", text)[1])
    assert lanes > 1
    assert "does not fit" in plan({"model": LLAMA}, "--memory", "16MiB", "--lanes", str(lanes + 1))
    small = plan({"model": LLAMA}, "model.quantize=nf4", "model.remat=blocks")
    assert megabytes(small, "frozen weights, shared by all clients") < megabytes(
        text, "frozen weights, shared by all clients"
    )


def test_a_classifier_by_its_folder_for_every_method(plan, tmp_path):
    testing.write_tiny_checkpoint(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()  # the weights are not read
    methods = {"plain": {}, "own": {"algorithm": "ditto"}}
    text = plan({"model": {"name": str(tmp_path / "model")}, "methods": methods}, "--lanes", "3")
    plain, own = text.split("own:")
    assert plain.startswith("plain:")
    assert "together, with 3 lanes" in plain
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
