"""Common misspellings of arguments are accepted, or the error gives the right spelling."""

import runpy
import sys

import pytest
from internals import cli, config, errors

from fedjax_peft import peft, testing

BASE = {
    "rounds": 2,
    "data": {"name": "20newsgroups", "max_length": 32},
    "partition": {"name": "iid", "clients": 4},
    "optimizer": {"name": "adamw", "learning_rate": 1e-3},
    "algorithm": {"name": "ditto", "lam": 0.5},
    "model": {"name": "minilm-l6"},
}


def resolved(*overrides: str) -> config.Config:
    """Returns the complete config with these overrides."""
    return config.resolve(config.methods(BASE, overrides)[""])


def test_a_string_stands_for_a_table():
    """algorithm=fedprox is algorithm.name=fedprox; options of the former function are removed."""
    assert resolved("algorithm=fedprox", "algorithm.mu=0.2")["algorithm"]["mu"] == 0.2
    assert "lam" not in resolved("algorithm=fedprox")["algorithm"]
    assert resolved("algorithm=ditto")["algorithm"]["lam"] == 0.5, "the same function: kept"
    assert resolved("data=sst2")["data"] == {**resolved()["data"], "name": "sst2"}
    assert resolved("time=fedadapters")["time"]["preset"] == "fedadapters"


def test_a_string_in_a_file_stands_for_a_table():
    """At the top level and in a method's table, also with a preset."""
    raw = {**BASE, "algorithm": "fedprox", "peft": "dora", "aggregator": "mean"}
    raw["methods"] = {"a": {"algorithm": "ditto"}, "b": {"preset": "fra_lora/ffa", "peft": "lora"}}
    a, b = (config.resolve(one) for one in config.methods(raw).values())
    assert a["algorithm"]["name"] == "ditto"
    assert a["peft"]["name"] == "dora"
    assert b["peft"]["rank"] == 16, "the preset's"


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("evaluation.diagnostics=clients", """'evaluation.diagnostics=["clients"]'"""),
        ("system.client_ranks=4", "'system.client_ranks=[4]'"),
        ("optimizer.learning_rate=.5", "'optimizer.learning_rate=0.5'"),
        ("evaluation.client_test=True", "'evaluation.client_test=true'"),
        ("rounds='3'", "'rounds=3'"),
    ],
)
def test_a_value_of_the_wrong_form(override, hint):
    """The error contains the corrected override."""
    with pytest.raises(errors.InputError) as error:
        resolved(override)
    assert hint in str(error.value)


def test_values_without_a_likely_correction_get_no_hint():
    """A wrong hint would be worse than none."""
    with pytest.raises(errors.InputError) as error:
        resolved("rounds=two")
    assert "Write" not in str(error.value)


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["run", "c.toml", "--rounds", "3"], "without dashes: rounds=3"),
        (["run", "c.toml", "--rounds=3"], "without dashes: rounds=3"),
        (["run", "c.toml", "--batch-size", "3"], "without dashes: batch_size=3"),
        (["run", "c.toml", "--onyl", "fra"], "Did you mean '--only'?"),
        (["report", "runs", "--tagret", "3"], "Did you mean '--target'"),
    ],
)
def test_an_unknown_option(capsys, words, hint):
    """A config key with dashes, or a misspelt option."""
    with pytest.raises(SystemExit) as exit_:
        cli.main(words)
    assert exit_.value.code == 2
    assert hint in capsys.readouterr().err


@pytest.mark.parametrize(
    ("targets", "hint"), [("query", 'targets = ["query"]'), ("querry", "'query'")]
)
def test_a_target_that_is_no_list(targets, hint):
    """A string is a pattern for paths; for a plain name, the error gives the list to write."""
    with pytest.raises(errors.InputError) as error:
        peft.base.attach(testing.tiny_model(), peft.lora(rank=2, targets=targets))
    assert hint in str(error.value)


def test_the_package_is_a_command(monkeypatch, capsys):
    """``python -m fedjax_peft``."""
    monkeypatch.setattr(sys, "argv", ["fedjax_peft", "--version"])
    with pytest.raises(SystemExit) as exit_:
        runpy.run_module("fedjax_peft", run_name="__main__")
    assert exit_.value.code == 0
    assert capsys.readouterr().out.startswith("fedjax_peft ")


@pytest.mark.parametrize(
    ("override", "name"),
    [
        ("algorithm=ditto", "FedLR (algorithm=ditto)"),
        ("algorithm.name=ditto", "FedLR (algorithm=ditto)"),
        ("preset=fra_lora/ffa", "FedLR (preset=fra_lora/ffa)"),
        ("peft={name='dora', rank=4}", "FedLR (peft=dora)"),
        ("peft.rank=4", "FedLR"),
        ("peft=lora", "FedLR"),
        ("name=mine", "mine"),
    ],
)
def test_a_method_that_was_replaced_keeps_no_wrong_name(override, name):
    """Tables and plots must not show another method under the name of a [methods.NAME]."""
    raw = {**BASE, "algorithm": "fedavg", "peft": "lora", "methods": {"a": {"name": "FedLR"}}}
    assert config.methods(raw, [override])["a"]["name"] == name
