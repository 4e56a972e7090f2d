"""Settings that are too large are refused before anything is allocated."""

import re

import numpy as np
import optax
import pytest
import running
import toy
from internals import Shape, bench, host_rng, memory, no_larger, stream, tokenize
from options import run_options
from refusals import refused

import fedjax_peft as fp
from fedjax_peft import algorithms, peft, testing
from fedjax_peft.simulation.planning import memory_plan

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.sample("2")
def test_batches_too_large_for_memory_are_errors(monkeypatch, lanes):
    """The error names the largest batch that fits, and that batch is not refused."""
    model = fp.attach(testing.tiny_model(), peft.lora(1))
    clients = fp.Clients(testing.tiny_dataset(4096), (np.arange(2048), np.arange(2048, 4096)))
    algorithm = algorithms.fedavg(optax.sgd(0.1))
    monkeypatch.setattr(memory_plan, "available", lambda: 50_000_000)
    options = {"rounds": 1, "local_steps": 1, "lanes": lanes}

    class Started(Exception):
        pass

    def start(phase):
        raise Started

    with pytest.raises(
        fp.InputError, match=r"batch_size = 2048, .* needs about .* fits\."
    ) as error:
        fp.simulate(model, algorithm, clients, batch_size=10**9, **run_options(**options))
    most = int(re.search(r"batch_size = (\d+) fits", str(error.value))[1])
    assert 64 < most < 2048
    with pytest.raises(Started):
        fp.simulate(
            model, algorithm, clients, batch_size=most, **run_options(on_phase=start, **options)
        )


def test_a_batch_is_at_most_the_largest_client():
    """A batch that no client can fill is one of all examples of a client."""
    clients = toy.clients([7, 4, 100])
    large, whole = (running.run(clients=clients, rounds=1, batch_size=n) for n in (10**9, 128))
    running.assert_same_models(large, whole, atol=0)


def test_evaluation_steps_are_at_most_as_large_as_the_test_set():
    assert no_larger(1_000_000, 100) == 128
    assert no_larger(1_000_000, 0) == 64
    assert no_larger(64, 10) == 64
    assert no_larger(16, 10**6) == 16
    assert no_larger(1_000_000, 2**20) == 1_000_000


def test_tokens_of_another_vocabulary_are_refused():
    model = fp.attach(testing.tiny_model(vocab_size=60), peft.lora(1))
    clients = fp.Clients(testing.tiny_dataset(8, vocab=64), (np.arange(8),))
    with pytest.raises(fp.InputError, match=r"token 6\d, but the model's vocabulary has 60"):
        fp.simulate(model, algorithms.fedavg(optax.sgd(0.1)), clients, rounds=1)


def test_lengths_too_large_for_memory_are_errors(tmp_path):
    tokenizer = fp.load_tokenizer(testing.write_tiny_checkpoint(tmp_path))
    with pytest.raises(fp.InputError, match="max_length = 1000000000000 needs at least"):
        tokenize(tokenizer, ["w1", "w2"], max_length=10**12)


@pytest.mark.parametrize("seed", [-1, 2**63, 10**40])
def test_seeds_have_63_bits(seed):
    for draw in (stream, host_rng):
        refused("from 0 to", draw, seed, "x")


@pytest.mark.parametrize("rate", [float("nan"), float("inf"), -0.1])
def test_learning_rates_are_finite(rate):
    for name in fp.optimizers.__all__:
        with pytest.raises(fp.InputError, match=r"learning_rate = .* must be a number"):
            getattr(fp.optimizers, name)(rate)


def test_a_fused_projection_needs_a_part():
    config = {
        **{"model_type": "gpt2", "vocab_size": 64, "n_embd": 32, "n_layer": 1, "n_head": 2},
        "n_positions": 16,
    }
    model = fp.random_model(config, head=fp.heads.classification(2))
    refused("names no part", fp.attach, model, peft.lora(1, targets=["c_attn"], parts=[]))


@pytest.mark.parametrize("shape", [{"layers": 0}, {"layers": 10**8}, {"clients": 10**9}])
def test_benchmarks_of_impossible_shapes_are_refused(shape):
    with pytest.raises(fp.InputError, match=r"must be|needs at least"):
        bench(Shape(**{"layers": 1, "hidden": 8, "heads": 1, "ffn": 8, "vocab": 8, **shape}))


def test_settings_that_fit_into_memory_are_accepted(monkeypatch):
    memory.require(1, "x", "y")
    monkeypatch.setattr(memory, "available", lambda: None)
    memory.require(1e30, "x", "y")
