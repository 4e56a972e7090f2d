"""A start that a PEFT method takes from training examples, in a config: LoRA-SB's and EVA's."""

import numpy as np
import pytest
from closeness import assert_close
from internals import activation_start, gradient_start, running
from internals import config as configs
from refusals import refused
from small_config import small

import fedjax_peft as fp
from fedjax_peft import load_run, testing
from fedjax_peft.config.loading import load_models

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("simple_encoder")]

CORE, BASES = ".sb_r", (".sb_a", ".sb_b")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("start")
    testing.write_tiny_checkpoint(folder / "model")
    rows = "".join(f"w{i} w{i % 7},{i % 3}\n" for i in range(24))
    (folder / "own.csv").write_text(f"text,label\n{rows}")
    tables = {"batch_size": 8, "local_steps": 1, "evaluation": {"global_test": False}}
    tables |= {"model": {"name": str(folder / "model")}, "algorithm": "fedsb"}
    tables |= {"data": {"name": str(folder / "own.csv"), "max_length": 8}}
    tables |= {"partition": {"name": "iid", "clients": 2}, "peft": {"name": "lora_sb", "rank": 2}}
    return small(**tables, optimizer={"name": "sgd", "learning_rate": 0.0})


def with_start(base, **changes):
    table = {"gradient_start": 0.01, "gradient_examples": 12}
    return configs.resolve({**base, "peft": {**base["peft"], **table}, **changes})


def test_a_run_begins_with_the_gradient_of_its_clients_and_is_loaded_with_it(base, tmp_path):
    config = with_start(base)
    run = configs.run(config, out=tmp_path / "run")
    bases = [n for n in run.params if n.endswith(BASES)]
    assert any(np.any(x) for n, x in run.params.items() if n.endswith(CORE))
    for loaded in (
        load_run(tmp_path / "run").params,
        load_models(tmp_path / "run", None).params(None),
    ):
        for name, x in run.params.items():
            np.testing.assert_array_equal(loaded[name], x)
    # All 20 training examples: the drawn ones are all there are, whatever their order.
    config["peft"]["gradient_examples"] = 100
    data, clients = configs.federation(config)
    task = configs.task_of(config)
    model = configs.build_model(config, data["train"].label_names)
    started = running.started(config, model, clients, task).trainable
    columns = {**data["train"].columns, "mask": np.ones(len(data["train"]), bool)}
    expected = gradient_start(model, [columns], task, step=0.01).trainable
    for name in bases:
        core = name.rpartition(".")[0]
        (a, r, b), (x, y, z) = (
            [leaves[f"{core}.sb_{n}"] for n in "arb"] for leaves in (started, expected)
        )
        assert_close(a @ r @ b, x @ y @ z, atol=1e-5)


def test_a_run_without_it_warns(base):
    with pytest.warns(UserWarning, match=r"not LoRA-SB.*peft\.gradient_start = 0\.01"):
        configs.run(configs.resolve(base))


def test_eva_takes_the_activations_of_the_clients(base, tmp_path):
    table = {"name": "lora", "rank": 2, "init": "eva", "activation_examples": 100}
    config = configs.resolve({**base, "algorithm": "fedavg", "peft": table})
    run = configs.run(config, out=tmp_path / "run")
    data, _ = configs.federation(config)
    model = configs.build_model(config, data["train"].label_names)
    columns = {**data["train"].columns, "mask": np.ones(len(data["train"]), bool)}
    expected = activation_start(model, [columns]).trainable
    loaded = load_run(tmp_path / "run").params
    for name, a in expected.items():
        if name.endswith(".lora_a"):
            assert_close(run.params[name], a, rtol=0, atol=1e-3)
        np.testing.assert_array_equal(loaded[name], run.params[name])
    private = {"name": "central", "clip": 1.0, "noise_multiplier": 1.0}
    refused("peft.init = 'eva' reads", configs.run, configs.resolve({**config, "privacy": private}))
    config["peft"]["activation_examples"] = 0
    refused("activation_examples = 0", configs.run, config)
    with pytest.raises(fp.InputError, match=r"\[peft\] 'activation_examples'"):
        configs.resolve({**base, "peft": {"name": "ia3", "activation_examples": 3}})


def test_a_start_that_cannot_be_taken_is_refused(base):
    private = {"name": "central", "clip": 1.0, "noise_multiplier": 1.0}
    refused("without noise", configs.run, with_start(base, privacy=private))
    with pytest.raises(fp.InputError, match=r"Unknown config key \[peft\] 'gradient_start'"):
        configs.resolve({**base, "peft": {"name": "lora", "gradient_start": 0.1}})


def test_which_seed_decides_what(base):
    """As the reference and the page of sharp edges say."""
    base = {**base, "algorithm": "fedavg", "peft": {"name": "lora", "rank": 2}}

    def parts(**tables):
        given = {name: {**base.get(name, {}), **table} for name, table in tables.items()}
        config = configs.resolve({**base, **given, "seed": 1})
        data, clients = configs.federation(config)
        leaves = configs.build_model(config, data["train"].label_names).trainable
        found = {
            "adapters": [x for n, x in leaves.items() if n.endswith("lora_a")],
            "head": leaves["classifier.kernel"],
            "splits": data["test"].columns["input_ids"],
            "partition": np.concatenate(clients.indices),
        }
        return {name: np.asarray(x).tolist() for name, x in found.items()}

    usual = parts()
    for table, changed in (("model", "head"), ("data", "splits"), ("partition", "partition")):
        assert parts(**{table: {"seed": 1}}) == usual
        other = parts(**{table: {"seed": 2}})
        assert [name for name in usual if other[name] != usual[name]] == [changed]
