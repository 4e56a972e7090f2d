"""FedASK equals the steps of its authors' code over dense matrices, in NumPy float64."""

import functools

import jax
import numpy as np
import optax
import pytest
import reference
import slow_lora
import toy
from closeness import assert_close, assert_small
from internals import stream
from options import run_options
from slow_lora import MODEL, A, B, Slow, average, mean, product

import fedjax_peft as fp

pytestmark = pytest.mark.slow

RATE = 0.1
SGD = optax.sgd(RATE)
R = toy.RANK


class SlowFedASK(Slow):
    """Its A is [r, in] and its B [out, r]."""

    optimizer = functools.partial(reference.Sgd, RATE)

    def __init__(self, train, oversampling):
        super().__init__()
        self.train_b = train == "B"
        shape = (1, toy.FEATURES, R + oversampling)
        key = stream(0, "fedask", f"{toy.FEATURES} {R}")
        self.omega = np.asarray(jax.random.normal(key, shape), float)[0]

    def gradient(self, leaves, batch, client, number):
        by = super().gradient(leaves, batch, client, number)
        return by | ({A: 0 * by[A]} if self.train_b else {})

    def aggregate(self, uploads, weights, number):
        y = sum(w * u[B].T @ (u[A].T @ self.omega) for w, u in zip(weights, uploads, strict=True))
        q, _ = np.linalg.qr(y)
        p = sum(w * u[A] @ (u[B] @ q) for w, u in zip(weights, uploads, strict=True))
        u, sigma, vt = np.linalg.svd(p.T, full_matrices=False)
        root = np.sqrt(sigma[:R])
        b, a = q @ (u[:, :R] * root), root[:, None] * vt[:R]
        sign = np.sign(a[range(R), np.abs(a).argmax(axis=1)])
        self.leaves |= {n: mean(uploads, weights, n) for n in toy.HEAD}
        self.leaves |= {A: (sign[:, None] * a).T, B: (b * sign).T}
        self.lost = np.linalg.norm(product(self.leaves) - average(uploads, weights))


@pytest.mark.parametrize(("train", "oversampling"), [("both", 1), ("B", 0)], ids=["both", "B"])
def test_rounds_equal_the_slow_reference(train, oversampling):
    algorithm = fp.algorithms.fedask(SGD, train=train, oversampling=oversampling)
    rig, slow = slow_lora.engine(algorithm), SlowFedASK(train, oversampling).run()
    # Float32 singular vectors: rounding over the distance of the values, about 1e-2 here.
    result = slow_lora.check(rig, slow, atol=1e-4)[-1]
    assert_close(result.aggregation["aggregation_error"], slow.lost, rtol=1e-3, atol=1e-5)
    if train == "B":
        assert_small(slow.lost, 1e-12)


def test_enough_columns_give_the_products_of_fra():
    """Five clients of rank 2 and five input features: a sketch of six columns loses nothing."""
    exact, other = (
        slow_lora.rounds(slow_lora.engine(algorithm), {1: slow_lora.COHORTS[2]})[0]
        for algorithm in (
            fp.algorithms.fedask(SGD, oversampling=4),
            fp.algorithms.fedavg(SGD, aggregator=fp.aggregators.fra()),
        )
    )
    got, expected = (x.server[A] @ x.server[B] for x in (exact, other))
    assert_close(got, expected, rtol=0, atol=2e-6)


def test_the_upload_counts_both_sketches():
    options = {"rounds": 1, "batch_size": 4, "lanes": 1}
    run = fp.simulate(
        MODEL,
        fp.algorithms.fedask(SGD, oversampling=3),
        toy.clients([4, 3]),
        **run_options(**options),
    )
    head = sum(MODEL.trainable[n].nbytes for n in toy.HEAD)
    sketches = 4 * (R + 3) * (toy.FEATURES + toy.WIDTH)
    assert run.metrics[1]["bytes_up"] == 2 * (head + sketches)
