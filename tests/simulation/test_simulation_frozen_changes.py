"""FLoRA and FedEx in bfloat16: their sums on frozen kernels are used in training and inference."""

import functools

import jax.numpy as jnp
import numpy as np
import optax
import pytest
import running
from closeness import approx, assert_close
from internals import TINY_BERT, effective, load_trained
from shallow import SHALLOW, simple_encoder  # noqa: F401

import fedjax_peft as fp
from fedjax_peft import Clients, attach, load_model, lora, random_model
from fedjax_peft.simulation.storage.record import read_params

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("simple_encoder")]

CONFIG = {**TINY_BERT, **SHALLOW}
DATA, TEST = fp.testing.tiny_dataset(32), fp.testing.tiny_dataset(32, seed=1)
BY_LABEL = np.argsort(DATA.columns["labels"], kind="stable").astype(np.int32)
CLIENTS = Clients(DATA, tuple(np.split(BY_LABEL, 2)))
METHODS = {"fedex": (fp.algorithms.fedex, 3e-3), "flora": (fp.algorithms.flora, 3e-4)}
"""Learning rates at which the change is below a bfloat16 step of a kernel, not a float32 one."""


@functools.cache
def model():
    plain = random_model(CONFIG, head=fp.heads.classification(4), dtype="bfloat16")
    return attach(plain, lora(2), seed=0)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Returns a function that returns a run of two rounds with a small learning rate."""

    @functools.cache
    def of(name):
        make, rate = METHODS[name]
        options = {"model": model(), "clients": CLIENTS, "test": TEST, "batch_size": 8}
        return running.run(make(optax.adam(rate)), out=tmp_path_factory.mktemp(name), **options)

    return of


def joint(parts):
    return np.sqrt(sum(np.sum(np.asarray(x, np.float64) ** 2) for x in parts))


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.sample("flora")
def test_all_of_the_change_reaches_the_kernels(name, run):
    result, held = run(name), model().compute_frozen()
    change = result.algorithm.server.frozen_delta(result.server)
    used = result.trained.compute_frozen()
    lost, rounded = [], []
    for leaf, x in change.items():
        assert held[leaf].dtype == jnp.bfloat16
        before = held[leaf].astype(jnp.float32)
        lost.append(effective(used[leaf], jnp.bfloat16) - before - x)
        rounded.append((before + x).astype(jnp.bfloat16).astype(jnp.float32) - before - x)
    assert joint(rounded) > 0.2 * joint(change.values()), "bfloat16 kernels would lose this"
    assert joint(lost) < 0.005 * joint(change.values())


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.sample("flora")
def test_the_error_is_measured_on_the_kernels_of_the_clients(name, run):
    """It is not 0, because bfloat16 rounds, and it is small beside what was learned."""
    params, _ = read_params(run(name).out)
    for leaf in run(name).algorithm.server.frozen_delta(run(name).server):  # also on disk
        np.testing.assert_array_equal(params[leaf], run(name).trained.frozen[leaf])
    for row in run(name).metrics[1:]:
        assert 0 < row["aggregation_error_relative"] < 0.005
        assert row["layers"]["aggregation_error"].keys() == {
            f"bert.encoder.layer.{i}.attention.self.{n}" for i in (0,) for n in ("query", "value")
        }


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.sample("flora")
def test_going_on_from_a_run_starts_where_it_ended(name, run):
    trained = run(name).trained
    options = {"clients": CLIENTS, "test": TEST, "batch_size": 8, "rounds": 1}
    options["on_round"] = lambda row: True  # it stops with the test before the first round
    after = running.run(fp.algorithms.fedavg(optax.sgd(0.0)), model=trained, **options)
    # The programs differ, because here the changes are parts of the kernels. A sum in another order
    # rounds few activations to another of bfloat16's 2**8 steps, and the loss is a mean of 32.
    rows = run(name).metrics
    tolerance = 2.0**-12 * rows[-1]["test_loss"]
    assert after.metrics[0]["test_loss"] == approx(rows[-1]["test_loss"], abs=tolerance)
    assert abs(rows[-1]["test_loss"] - rows[0]["test_loss"]) > 4 * tolerance
    for leaf, x in trained.frozen.items():
        np.testing.assert_array_equal(after.trained.frozen[leaf], x)


def test_a_merged_export_has_the_kernels_of_the_clients(run, tmp_path):
    result = run("flora")
    result.export(tmp_path / "merged", format="merged")
    loaded = load_model(str(tmp_path / "merged"), head=fp.heads.classification(4))
    path = "bert.encoder.layer.0.attention.self.query"
    a, b = (result.params[f"{path}.lora_{n}"] for n in "ab")
    expected = result.trained.frozen[f"{path}.base.kernel"] + a @ b
    assert_close(loaded.frozen[f"{path}.kernel"], expected, rtol=0, atol=1e-7)


def test_the_kernels_of_a_run_on_disk_are_read_in_full(run):
    held = load_trained(run("flora").out)[0].compute_frozen()
    moved = {name for name, x in held.items() if x.ndim == 2 and x.dtype == jnp.float32}
    assert moved == {n for n in held if n.endswith(("query.base.kernel", "value.base.kernel"))}
    assert any(np.any(held[n] != held[n].astype(jnp.bfloat16)) for n in moved)
