"""FedSVD and LoRA-FAIR equal loops over clients in NumPy float64, written from the papers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
import slow_lora
import toy
from closeness import approx, assert_close
from combining import aggregate
from internals import Cohort, Ledger, check_method
from slow_lora import (
    ADAM,
    FEDERATION,
    MODEL,
    SCALE,
    SIZES,
    A,
    B,
    S,
    Slow,
    average,
    engine,
    mean,
    product,
)

import fedjax_peft as fp
from fedjax_peft.algorithms.fedsvd import with_orthonormal_a

pytestmark = pytest.mark.slow


class SlowFedSVD(Slow):
    """The authors' order: average B, then the SVD of the product in its dense form."""

    period = 1

    def names(self, number):
        return (*toy.HEAD, B)

    def aggregate(self, uploads, weights, number):
        self.leaves |= {n: mean(uploads, weights, n) for n in self.names(number)}
        if number % self.period:
            return
        u, sigma, vt = reference.svd(self.leaves[A] @ self.leaves[B], toy.RANK)
        self.leaves |= {A: u, B: np.diag(sigma) @ vt}


class SlowEverySecond(SlowFedSVD):
    period = 2


class SlowFair(Slow):
    """Proximal gradient descent with a numerical derivative of the cosine, entry by entry."""

    lam, step_size, corrections = 5e-4, 0.1, 3

    def distance(self, exact, change):
        made = self.leaves[A] @ (self.leaves[B] + change)
        return 1 - (exact * made).sum() / np.linalg.norm(exact) / np.linalg.norm(made)

    def slope(self, exact, change):
        gradient, h = np.zeros_like(change), 1e-6
        for place in np.ndindex(*change.shape):
            one = np.zeros_like(change)
            one[place] = h
            up, down = (self.distance(exact, change + sign * one) for sign in (1, -1))
            gradient[place] = (up - down) / (2 * h)
        return gradient

    def correction(self, exact):
        change = np.zeros_like(self.leaves[B])
        step = self.step_size * (self.leaves[B] ** 2).sum()
        for _ in range(self.corrections):
            change = change - step * self.slope(exact, change)
            length = np.linalg.norm(change)
            assert length > step * self.lam, "the case should move B"
            change = change / length * (length - step * self.lam)
        return change

    def aggregate(self, uploads, weights, number):
        super().aggregate(uploads, weights, number)
        self.leaves[B] = self.leaves[B] + self.correction(average(uploads, weights) / S)


class SlowLeastSquares(SlowFair):
    """Ridge regression, column by column."""

    lam = 0.01

    def correction(self, exact):
        a, lam = self.leaves[A], self.lam
        residual = exact - a @ self.leaves[B]
        stacked = np.vstack([a, np.sqrt(lam) * np.eye(toy.RANK)])
        padded = np.vstack([residual, np.zeros((toy.RANK, residual.shape[1]))])
        return np.linalg.lstsq(stacked, padded, rcond=None)[0]


CASES = {
    "fedsvd": (lambda: fp.algorithms.fedsvd(ADAM), SlowFedSVD),
    "every_second": (lambda: fp.algorithms.fedsvd(ADAM, period=2), SlowEverySecond),
    "fair": (
        lambda: fp.algorithms.fedavg(
            ADAM, aggregator=fp.aggregators.lora_fair(lam=SlowFair.lam, steps=3)
        ),
        SlowFair,
    ),
    "squares": (
        lambda: fp.algorithms.fedavg(
            ADAM, aggregator=fp.aggregators.lora_fair(solver="least_squares")
        ),
        SlowLeastSquares,
    ),
}


@pytest.mark.parametrize("method", CASES)
def test_rounds_equal_the_slow_reference(method):
    make, slow = CASES[method]
    rig = engine(make())
    slow_lora.compare(rig, slow_lora.rounds(rig)[-1], slow().run())


# ----------------------------------------------------------------------------------------- FedSVD


def test_the_svd_changes_no_product_and_makes_a_orthonormal():
    rng = np.random.default_rng(0)

    def pair(path, n_in, n_out, rank=2):
        shapes = {"a": (n_in, rank), "b": (rank, n_out)}
        return {f"{path}.lora_{k}": jnp.float32(rng.normal(size=x)) for k, x in shapes.items()}

    leaves = {**pair("one", 5, 6), **pair("two", 5, 6), **pair("wide", 3, 7), "head": jnp.ones(2)}
    leaves["two.lora_b"] = jnp.zeros((2, 6))  # LoRA's start
    turned = jax.jit(with_orthonormal_a)(leaves)
    assert turned.keys() == leaves.keys()
    for path in ("one", "two", "wide"):
        a, b = turned[f"{path}.lora_a"], turned[f"{path}.lora_b"]
        before = np.asarray(leaves[f"{path}.lora_a"] @ leaves[f"{path}.lora_b"])
        assert_close(a @ b, before, rtol=0, atol=3e-6)
        assert_close(a.T @ a, np.eye(2), rtol=0, atol=1e-6)
        gram = np.asarray(b @ b.T)  # the rows of B are orthogonal, the longest first
        assert_close(gram, np.diag(np.diag(gram)), rtol=0, atol=1e-5)
        assert gram[0, 0] >= gram[1, 1]


@pytest.mark.parametrize("period", [1, 2])
def test_clients_of_fedsvd_send_b_and_fetch_b_and_the_a_that_the_server_has_turned(period):
    algorithm = fp.algorithms.fedsvd(ADAM, period=period)
    server = algorithm.server.init({n: MODEL.trainable[n] for n in toy.SHARED})
    ledger = Ledger(MODEL, algorithm, server, 4)
    sizes = {n: 4 * MODEL.trainable[n].size for n in toy.SHARED}
    whole = sum(sizes.values())
    fetched = []
    for number in range(1, 6):
        sent = algorithm.traffic.sent_leaves(algorithm.server.broadcast(server), jnp.int32(number))
        skipped = [name for name, x in sent.items() if not x]
        assert ledger.up(0, skipped) == whole - sizes[A]
        fetched.append(ledger.down(0))
        ledger.record({"round": number, "clients": [0], "skipped_leaves": skipped})
    part = whole if period == 1 else whole - sizes[A]
    assert fetched == [whole, part, whole, part, whole]


def test_a_is_no_part_of_the_gradient_that_private_training_clips():
    """With one step of SGD and no noise, the change of B and head is rate · clip / batch size."""
    facts = fp.contracts.Federation(5, 5, "all", 4, "shuffled", 3, 1, 1)
    algorithm = fp.privacy.example(0.01, 1e-9).protect(fp.algorithms.fedsvd(optax.sgd(1.0)), facts)
    rig = toy.Engine(algorithm, FEDERATION, per_round=5, lanes=1, local_steps=1, bound=MODEL)
    place = SIZES.index(1)  # a batch of one example
    cohort = Cohort(*([part[place]] for part in rig.schedule.cohort(1)))
    result = rig.run(cohort, 1)
    assert float(result.norms[result.norms > 0][0]) == approx(0.01 / 4, rel=1e-4)


# -------------------------------------------------------------------------------------- LoRA-FAIR


WEIGHTS, PLAIN = np.float32([7, 12, 1]) / 20, fp.aggregators.mean()
TEMPLATE, FIXED = ({n: MODEL.trainable[n] for n in names} for names in (toy.SHARED, (SCALE,)))


@functools.cache
def uploads():
    """Returns the leaves of three clients after the local work of the first round."""
    return [Slow().train(c, 1) for c in (0, 2, 3)]


@functools.cache
def aggregated(aggregator):
    """Returns the product of the aggregate, and the metrics."""
    stacked = {n: np.float32([u[n] for u in uploads()]) for n in toy.SHARED}
    made = aggregate(aggregator, stacked, WEIGHTS, TEMPLATE, FIXED)
    return product(made.update), made.metrics


def test_the_correction_lowers_the_aggregation_error_and_reports_what_is_left():
    wanted, (plain, _) = average(uploads(), WEIGHTS), aggregated(PLAIN)

    def cosine(x):
        return (x * wanted).sum() / np.linalg.norm(x) / np.linalg.norm(wanted)

    for aggregator in (
        fp.aggregators.lora_fair(lam=0.0),
        fp.aggregators.lora_fair(solver="least_squares", lam=0.0),
    ):
        made, metrics = aggregated(aggregator)
        error = np.linalg.norm(made - wanted)
        assert metrics["aggregation_error"] == approx(error, rel=1e-3)
        assert cosine(made) > cosine(plain)
        assert error < np.linalg.norm(plain - wanted)


def test_a_large_weight_of_the_norm_keeps_the_average():
    plain, _ = aggregated(PLAIN)
    made, _ = aggregated(fp.aggregators.lora_fair(solver="least_squares", lam=1e9))
    assert_close(made, plain, rtol=0, atol=1e-6)
    assert_close(aggregated(fp.aggregators.lora_fair(lam=1.0))[0], plain, rtol=0, atol=1e-6)


def test_zeros_stay_finite():
    """In LoRA's start B is zero, and so are all products of clients that learn nothing."""
    start = {**TEMPLATE, B: jnp.zeros_like(TEMPLATE[B])}
    same = {n: np.repeat(np.asarray(x)[None], 3, axis=0) for n, x in start.items()}
    for solver in ("gradient", "least_squares"):
        made = aggregate(
            fp.aggregators.lora_fair(solver=solver, lam=0.0), same, WEIGHTS, start, FIXED
        )
        np.testing.assert_array_equal(made.update[B], 0)
        assert made.metrics["aggregation_error"] == 0


def test_lora_fair_refuses_clients_of_other_ranks():
    with pytest.raises(fp.InputError, match="different LoRA ranks"):
        check_method(
            MODEL, fp.algorithms.fedavg(ADAM, aggregator=fp.aggregators.lora_fair()), 5, [1, 2], ()
        )
