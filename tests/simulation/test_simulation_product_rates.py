"""What is said of bfloat16 on this processor, from rates that are given and not timed."""

import json

import pytest
import tomli_w
from internals import cli, product_rates
from small_config import small

from fedjax_peft import testing
from fedjax_peft.cli import running
from fedjax_peft.simulation.planning.product_rates import Rates

FAST, SLOW = Rates(128.0, 632.0), Rates(132.0, 119.0)


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Returns a function that makes this machine one with a processor, a JAX and a cache."""

    def make(flags=("avx2", "amx_bf16"), version="0.12.0", cache=tmp_path / "cache", model="Xeon"):
        found = {"model": model, "flags": list(flags)}
        monkeypatch.setattr(product_rates, "processor", lambda: found)
        monkeypatch.setattr(product_rates.metadata, "version", lambda package: version)
        monkeypatch.setenv("FEDJAX_PEFT_CACHE", str(cache))
        return cache

    return make


TIMED = product_rates.measure


def _found(monkeypatch, timed=None):
    """Returns the rates if a timing gives ``timed``; None: nothing may be timed."""

    def measure():
        assert timed is not None, "it was timed again"
        return timed

    monkeypatch.setattr(product_rates, "measure", measure)
    return product_rates.product_rates()


def test_rates_are_kept_for_a_processor_and_a_version(machine, monkeypatch):
    cache = machine()
    assert _found(monkeypatch, FAST) == FAST
    assert _found(monkeypatch) == FAST
    machine(model="another")
    assert _found(monkeypatch, SLOW) == SLOW
    machine(version="0.10.2")
    assert _found(monkeypatch, SLOW) == SLOW
    machine()
    assert _found(monkeypatch) == FAST
    assert len(json.loads((cache / product_rates.FILE).read_text())) == 3


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"Xeon, jaxlib 0.12.0": [1]}', '{"a": "b"}'])
def test_a_damaged_file_costs_a_timing(machine, monkeypatch, text):
    cache = machine()
    cache.mkdir()
    (cache / product_rates.FILE).write_text(text)
    assert _found(monkeypatch, FAST) == FAST
    assert _found(monkeypatch) == FAST


def test_a_cache_that_cannot_be_used(machine, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("no folder")
    machine(cache=tmp_path / "file")
    assert _found(monkeypatch, FAST) == FAST

    def no_home():
        raise product_rates.InputError("HOME")

    monkeypatch.setattr(product_rates, "cache_dir", no_home)
    assert _found(monkeypatch, SLOW) == SLOW


def test_nothing_is_timed_without_such_units_or_on_an_accelerator(machine, monkeypatch):
    machine(flags=["avx2"])
    assert _found(monkeypatch) is None
    machine()
    monkeypatch.setattr(product_rates.jax, "default_backend", lambda: "gpu")
    assert _found(monkeypatch) is None


@pytest.mark.parametrize(
    ("rates", "flags", "version", "words"),
    [
        (FAST, ["amx_bf16"], "0.12.0", ["4.9 times", 'model.dtype = "bfloat16"', 'dtype="bf']),
        (FAST, ["bf16", "asimd"], "0.10.2", ["4.9 times"]),
        (SLOW, ["amx_bf16"], "0.10.2", ["JAX 0.10.2", "make demo PYTHON=python3.12"]),
        (SLOW, ["amx_bf16"], "0.12.0", []),
        (SLOW, ["avx512_bf16"], "0.10.2", []),
        (None, [], "0.10.2", []),
    ],
)
def test_the_advice(machine, rates, flags, version, words):
    machine(flags=flags, version=version)
    text = product_rates.advice(rates)
    assert (text is not None) == bool(words)
    for word in words:
        assert word in text


@pytest.mark.parametrize("command", ["plan", "run"])
def test_commands_say_it_once_and_to_float32_alone(command, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(product_rates, "product_rates", lambda: FAST)
    monkeypatch.setattr(running, "_run_all", lambda *_: [])
    monkeypatch.setattr(running.early, "check", lambda _: None)  # of the data, which are not there
    model = {"name": "tiny", "head": "causal_lm"}
    model["config"] = {k: v for k, v in testing.TINY_LLAMA.items() if v is not None}
    two = {"methods": {"a": {"seed": 1}, "b": {"seed": 2}}} if command == "run" else {}
    path = tmp_path / "config.toml"
    path.write_text(tomli_w.dumps(small(model=model, data={"name": "x", "max_length": 8}, **two)))
    words = [command, str(path), *(["--out", str(tmp_path)] if command == "run" else [])]
    assert cli.main(words) == 0
    told = capsys.readouterr()
    lines = (told.out if command == "plan" else told.err).splitlines()
    assert [i for i, line in enumerate(lines) if "4.9 times" in line] == (
        [0] if command == "run" else [len(lines) - 1]
    )
    assert cli.main([*words, "model.dtype=bfloat16"]) == 0
    told = capsys.readouterr()
    assert "times as fast" not in told.out + told.err


def test_a_timing_gives_two_rates():
    assert all(rate > 0 for rate in TIMED())
