"""``fedjax-peft plan``: the memory of a config, from its model's ``config.json`` alone."""

import re
from pathlib import Path

import pytest
import tomli_w
from closeness import approx
from internals import compiled_step, find_device, main
from refusals import refused
from small_config import small

import fedjax_peft as fp
from fedjax_peft import testing

CONFIG = small(
    batch_size=2,
    data={"name": "missing/texts", "max_length": 16},
    partition={"name": "iid", "clients": 5},
    optimizer={"learning_rate": 1e-3},
)
SMALL = {"hidden_size": 16, "intermediate_size": 32, "image_size": [16, 24], "patch_size": 8}
SMALL |= {"num_hidden_layers": 2, "num_attention_heads": 2}
LINE = r"together: ([\d.]+) MB \+ 2 x ([\d.]+) MB ([\d.]+) MB"
SHALLOW = {**testing.TINY_LLAMA, "num_hidden_layers": 1}
LLAMA = {"name": "tiny", "head": "causal_lm", "config": SHALLOW}


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
    assert re.search(rf"{lanes + 1} lanes: is [\d.]+ MB too large to fit into 16.78 MB", more)
    assert f"The nearest setting that fits: --lanes {lanes}." in more
    small = plan({"model": LLAMA}, "model.quantize=nf4", "model.remat=blocks")
    assert megabytes(small, "frozen weights") < megabytes(text, "frozen weights")
    assert "dequantized kernels" in small


def test_a_large_vocabulary_is_named(plan):
    model = {**LLAMA, "config": {**SHALLOW, "vocab_size": 50_000}}
    text = plan({"model": model}, "--lanes", "2")
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


def test_a_device_and_the_least_time_of_a_round(plan):
    """4 clients in 2 lanes make 3 steps each, so that a round has 6 time steps."""
    tables = {"model": LLAMA, "clients_per_round": 4, "local_steps": 3, "epochs": None}
    text = plan({k: v for k, v in tables.items() if v}, "--device", "h100", "--lanes", "2")
    assert "NVIDIA H100 SXM, 2 lanes x 2 examples, float32" in text
    assert re.search(r"memory of a round [\d.]+ MB, fits into 76.48 GB of 84.98 GB", text)
    step = float(re.search(r"a step takes at least (\S+) s \(memory traffic\)", text)[1])
    rounds = re.search(r"a round takes at least (\S+) s, 6 time steps", text)[1]
    assert float(rounds) == approx(6 * step, rel=0.01)
    limits = [float(x) for x in re.findall(r"seconds for [a-z ]+ (\S+)", text)]
    assert step == max(limits) > min(limits) > 0


def test_fewer_lanes_than_the_compiler_refused_are_named(plan, monkeypatch):
    """By arithmetic the device has room for all lanes; its compiler needs twice their memory."""
    words = ["--device", "t4", "--lanes"]
    text = plan({"model": LLAMA}, *words, "2")
    most = int(re.search(r"most lanes that fit ([\d,]+)", text)[1].replace(",", ""))

    def asked(planned, parts):
        memory = 2 * planned.memory.total(planned.lanes)
        step = compiled_step.CompiledStep(memory, 0, 1, 1, {}, {}, 0, 1.0)
        return planned._replace(compiled=step)

    monkeypatch.setattr(fp.devices, "asked", asked)
    text = plan({"model": LLAMA}, *words, str(most), "--compile")
    assert "does not fit into" in text
    named = int(re.search(r"The nearest setting that fits: --lanes (\d+)", text)[1])
    assert 0.45 * most < named <= most / 2


def test_the_plan_is_of_the_algorithms_own_step(plan):
    """Two gradients, three passes, gradients of single examples: each needs more than FedAvg."""
    methods = {name: {"algorithm": name} for name in ("fedavg", "moon", "ditto")}
    methods["private"] = {"privacy": {"name": "example", "clip": 1.0, "epsilon": 1.0}}
    tables = {"model": LLAMA, "peft": {"name": "lora", "rank": 16}, "methods": methods}
    text = plan(tables, "--device", "h100")
    arithmetic = [float(x) for x in re.findall(r"seconds for arithmetic (\S+)", text)]
    held = [float(x) for x in re.findall(r"activations of 2 x 16 tokens ([\d.]+) MB", plan(tables))]
    assert held[1] >= held[0] < held[3]
    assert held[2] == approx(2 * held[0], rel=0.1)
    assert arithmetic[1] > 1.5 * arithmetic[0]
    assert arithmetic[2] == approx(2 * arithmetic[0], rel=0.01)


@pytest.mark.parametrize("name", ["squad", "ploner", "alpaca"])
def test_every_kind_of_task_is_planned(plan, name):
    """By a data set of each: question answering ended with a KeyError."""
    shape = SHALLOW if name == "alpaca" else testing.TINY_BERT
    tables = {"model": {"name": "tiny", "config": shape}, "data": {"name": name, "max_length": 16}}
    assert "together" in plan(tables, "--memory", "1GB")


SMALLEST = "model.quantize=nf4 batch_size=1 --lanes 1"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("memory", "words", "remedy"),
    [
        ("600kB", [], "The nearest setting that fits: model.remat=blocks --lanes 1."),
        ("510kB", ["model.remat=blocks"], "The nearest setting that fits: batch_size=1 --lanes 1."),
        ("300kB", ["model.remat=blocks", "batch_size=1"], f"Not even {SMALLEST} fits."),
    ],
)
def test_the_nearest_setting_that_fits(plan, memory, words, remedy):
    shape = {**testing.TINY_LLAMA, "num_hidden_layers": 4}
    model = {**LLAMA, "config": shape, "scan_layers": True}
    assert remedy in plan({"model": model}, *words, "--memory", memory)


@pytest.mark.parametrize(
    ("device", "error"),
    [
        ("v5e", "TPU v5e is not installed (libtpu, .2 GB on Linux): pip install 'jax[tpu]"),
        (
            "l4",
            "L4 is not installed (jax_cuda13_plugin, 3.4 GB on Linux): pip install 'jax[cuda13]",
        ),
        ("v100", "has the compute capability 7.0, and CUDA 13 compiles from 7.5 on."),
    ],
)
def test_a_missing_compiler_is_named(device, error, monkeypatch):
    here = object() if device == "v100" else None
    monkeypatch.setattr(compiled_step.importlib.util, "find_spec", lambda name: here)
    refused(re.escape(error), compiled_step.target_devices, find_device(device))


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--memory", "24 apples"], "The memory '24 apples' is not of the form 24GB or 16GiB."),
        (["--device", "h10"], "There is no device 'h10'. Did you mean 'h100'"),
        (["--device", "h100", "--memory", "1GB"], "--device has a memory of its own"),
        (["--lanes", "0"], "--lanes must be 1 or more, not 0."),
        (["model.quantize=nf5"], "input should be 'int8' or 'nf4'"),
        (["model.remat=all"], "'remat' cannot be 'all'"),
    ],
)
def test_what_cannot_be_is_refused(plan, words, error):
    assert error in plan({"model": LLAMA}, *words, code=2)


def test_kept_hidden_states_are_counted(plan):
    shape = {**testing.TINY_BERT, "num_hidden_layers": 4}
    tables = {"model": {"name": "tiny", "config": shape, "dropout": 0}}
    tables["peft"] = {"name": "lora", "layers": [-1]}
    whole = plan(tables)
    text = plan({**tables, "placement": {"reuse": "bfloat16"}})
    assert "Reused: 3 of 4 blocks" in text
    # [16 tokens, width 32] in 2 bytes.
    assert "hidden states need 1.02 MB for 1,000 examples" in text
    below, all_blocks = map(float, re.search(r"([\d.]+) of the ([\d.]+) GFLOP", text).groups())
    assert 0 <= below <= all_blocks
    frozen = [megabytes(x, "frozen weights") for x in (whole, text)]
    assert frozen[1] < frozen[0] / 4


@pytest.mark.parametrize(
    "device", [False, pytest.param(True, marks=pytest.mark.exhaustive)], ids=["memory", "device"]
)
def test_the_page_shows_what_the_command_prints(device, tmp_path, monkeypatch, capsys):
    """Its config, its commands and their whole output."""
    text = (Path(__file__).parents[2] / "docs" / "howto" / "plan.md").read_text()
    (tmp_path / "my.toml").write_text(re.search(r"```toml\n(.*?)```", text, re.DOTALL)[1])
    shown = re.findall(r"```console\n\$ fedjax-peft (plan .*?)```", text, re.DOTALL)[device]
    command, *lines = shown.replace("\\\n    ", "").splitlines()
    monkeypatch.chdir(tmp_path)
    assert main(command.split()) == 0
    assert capsys.readouterr().out.splitlines() == lines
