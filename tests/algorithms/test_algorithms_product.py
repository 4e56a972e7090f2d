"""Server optimizers with aggregators that factor anew: refused on A and B, correct on the product.

The reference is a loop in NumPy float64 over dense products, which shares no code with the library.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
import toy
from closeness import assert_close
from internals import check_method, config, fedopt
from refusals import refused
from small_config import small

import fedjax_peft as fp

pytestmark = pytest.mark.slow

SGD = optax.sgd(0.3)


def check(algorithm, model=None):
    check_method(model or toy.model(), algorithm, 4, None, ())


def test_the_error_names_the_alternative_before_any_file_is_written(tmp_path):
    algorithm = fp.algorithms.fedavgm(SGD, aggregator=fp.aggregators.fra())
    with pytest.raises(fp.InputError, match="Set space = 'product'"):
        fp.simulate(toy.model(), algorithm, toy.clients([4]), rounds=1, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_user_aggregators_declare_their_properties():
    own = fp.aggregators.mean()._replace(name="my_svd", refactors=True)
    refused("'my_svd'", check, fp.algorithms.fedavgm(SGD, aggregator=own))
    with pytest.raises(fp.InputError, match="'my_svd'"):  # it cannot factor for others
        fp.algorithms.fedavgm(SGD, aggregator=own, space="product")
    with pytest.raises(fp.InputError, match="not 'mean'"):
        fp.algorithms.fedavgm(SGD, aggregator=fp.aggregators.mean(), space="product")
    refused("product", fp.algorithms.fedavgm, SGD, space="products")


@pytest.mark.parametrize(
    "algorithm",
    [
        fp.algorithms.fedavg(SGD, aggregator=fp.aggregators.fra()),
        fp.algorithms.fedavg(SGD, aggregator=fp.aggregators.flexlora()),
        fp.algorithms.fedavg(SGD, aggregator=fp.aggregators.ilora()),
        fp.algorithms.fra_ffa(SGD),
        fp.algorithms.fedavgm(SGD, space="product"),
        fp.algorithms.fedavg(SGD, aggregator=fp.aggregators.mean()._replace(truncates=True)),
    ],
)
def test_truncating_aggregators_warn_after_an_svd_start(algorithm):
    svd = toy.model().replace(method=fp.lora(rank=2, init="svd"))
    with pytest.warns(UserWarning, match=r"truncates .* SVD start"):
        check(algorithm, svd)
    check(fp.algorithms.fedavg(SGD), svd)  # warnings are errors


# ------------------------------------------------------------------------ against a slow reference

SIZES = (7, 4, 12, 3)
FEDERATION, MODEL = toy.clients(SIZES), toy.model(dropout=0)
RANK, SCALE = toy.RANK, 1.5
A, B = "layer.lora_a", "layer.lora_b"


class Slow(reference.Slow):
    """FedOpt on the product; ``serve(name, change)`` returns the server's step."""

    model, federation, shared = MODEL, FEDERATION, toy.SHARED
    optimizer = functools.partial(reference.Sgd, 0.3)
    split, rank = "balanced", RANK

    def aggregate(self, uploads, weights, number):
        theta, rank = self.leaves, self.rank
        product = theta[A] @ theta[B]
        average = np.average([u[A] @ u[B] for u in uploads], axis=0, weights=weights)
        u, sigma, vt = reference.svd(product + self.serve("product", average - product), rank)
        to_a, to_b = {"balanced": (sigma**0.5, sigma**0.5), "B": (sigma**0, sigma)}[self.split]
        for n in toy.HEAD:
            change = np.average([u[n] for u in uploads], axis=0, weights=weights) - theta[n]
            theta[n] = theta[n] + self.serve(n, change)
        theta[A], theta[B] = (np.zeros_like(theta[n]) for n in (A, B))
        theta[A][:, :rank], theta[B][:rank] = u * to_a, to_b[:, None] * vt
        if rank < RANK:
            theta[A][:, rank:] = np.nan  # revived directions, which the reference does not know


def slow(serve, rounds, **options):
    """Returns the server's leaves after some rounds."""
    cohorts = reference.cohorts(FEDERATION, 3, rounds)
    return Slow(serve=serve, **options).run(cohorts).leaves


def momentum(rate, beta):
    buffer = {}

    def serve(name, change):
        buffer[name] = beta * buffer.get(name, 0) + change
        return rate * buffer[name]

    return serve


def adam(rate, b1, b2, tau):
    m, v = {}, {}

    def serve(name, change):
        m[name] = b1 * m.get(name, 0) + (1 - b1) * change
        v[name] = b2 * v.get(name, 0) + (1 - b2) * change**2
        return rate * m[name] / (np.sqrt(v[name]) + tau)

    return serve


def run(algorithm, rounds=3):
    rig = toy.Engine(algorithm, FEDERATION, per_round=3, lanes=2, bound=MODEL)
    result = rig.rounds(range(1, rounds + 1))[-1]
    return algorithm.server.model(result.server), result


CASES = {
    "momentum": (
        fp.algorithms.fedavgm(SGD, server_learning_rate=0.6, momentum=0.7, space="product"),
        lambda: momentum(0.6, 0.7),
    ),
    "adam": (
        fp.algorithms.fedadam(
            SGD, server_learning_rate=0.05, b1=0.8, b2=0.9, tau=0.02, space="product"
        ),
        lambda: adam(0.05, 0.8, 0.9, 0.02),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_product_rounds_equal_the_slow_reference(name):
    algorithm, serve = CASES[name]
    model, result = run(algorithm)
    expected = slow(serve(), 3)
    for n in toy.SHARED:
        assert_close(model[n], expected[n], rtol=0, atol=2e-5)
    start = MODEL.trainable
    assert np.abs(model[A] @ model[B] - start[A] @ start[B]).max() > 1e-2
    # The error that is reported is that of the last truncation, in units of s·AB.
    assert result.aggregation["aggregation_error"] > 1e-3
    assert 0.5 < result.aggregation["spectrum_kept"] < 1


def test_split_and_rank_are_those_of_the_aggregator():
    tables = small(
        algorithm={"name": "fedavgm", "space": "product", "momentum": 0.7},
        aggregator={"name": "flexlora"},
        optimizer={"name": "sgd", "learning_rate": 0.3},
    )
    model, _ = run(config.build_algorithm(config.resolve(tables)), 2)
    expected = slow(momentum(1.0, 0.7), 2, split="B")
    for n in toy.SHARED:
        assert_close(model[n], expected[n], rtol=0, atol=2e-5)
    one = fp.algorithms.fedavgm(
        SGD, momentum=0.7, aggregator=fp.aggregators.fra(1), space="product"
    )
    model, _ = run(one, 1)
    expected = slow(momentum(1.0, 0.7), 1, rank=1)
    assert_close(model[A][:, 0], expected[A][:, 0], rtol=0, atol=2e-5)
    assert_close(model[B], expected[B], rtol=0, atol=2e-5)
    assert np.abs(model[A][:, 1]).max() > 0.1, "the other direction can learn"


@pytest.mark.parametrize(
    "algorithm",
    [
        fp.algorithms.fedavgm(optax.sgd(0.0), space="product"),
        fp.algorithms.fedadam(optax.sgd(0.0), space="product"),
        fp.algorithms.fedyogi(
            optax.sgd(0.0), aggregator=fp.aggregators.flexlora(), space="product"
        ),
        fedopt(optax.sgd(0.0), server=optax.adam(0.1), space="product"),
    ],
    ids=["fedavgm", "fedadam", "fedyogi", "optax.adam"],
)
@pytest.mark.sample("fedavgm")
def test_unchanged_uploads_do_not_change_the_server(algorithm):
    model, _ = run(algorithm, 8)
    start = jax.device_get(MODEL.trainable)
    product = start[A] @ start[B]
    assert_close(model[A] @ model[B], product, rtol=0, atol=5e-6)
    for n in toy.HEAD:
        np.testing.assert_array_equal(model[n], start[n])


def test_a_model_without_lora_is_refused():
    with pytest.raises(fp.InputError, match="needs LoRA factors"):
        fp.algorithms.fedavgm(SGD, space="product").server.init({"head.kernel": jnp.ones((2, 2))})


def test_the_baseline_that_keeps_its_optimizer_is_not_concerned():
    check_method(toy.model(), fp.algorithms.centralised(SGD), 1, None, ())
