"""FLoRA-NA equals alternating least squares over dense matrices in NumPy float64."""

import functools

import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
import slow_lora
import toy
from closeness import ROUNDOFF, approx, assert_close
from combining import aggregate, program
from internals import mean
from slow_lora import A, B, Slow

import fedjax_peft as fp

SGD = optax.sgd(0.5)
MEAN, ONCE, OFTEN = mean(), fp.aggregators.flora_na(steps=1), fp.aggregators.flora_na()


def fitted(a, b, weights, steps):
    """Returns (p, q) of the formulas, with every product a dense vector; a is [clients, in, r]."""
    exact = np.einsum("k,kir,kro->io", weights, a, b)
    p, q = weights.copy(), weights.copy()
    for _ in range(steps):
        for which in "pq":
            now_a, now_b = np.tensordot(p, a, 1), np.tensordot(q, b, 1)
            terms = [x @ now_b for x in a] if which == "p" else [now_a @ x for x in b]
            design = np.stack([t.ravel() for t in terms], axis=1)
            m = design.T @ design
            g = design.T @ (now_a @ now_b - exact).ravel()
            moved = np.linalg.solve(m + 1e-5 * np.trace(m) / len(m) * np.eye(len(m)), g)
            p, q = (p - moved, q) if which == "p" else (p, q - moved)
    return p, q


class SlowFLoRANA(Slow):
    optimizer = functools.partial(reference.Sgd, 0.5)

    def aggregate(self, uploads, weights, number):
        super().aggregate(uploads, weights, number)
        a, b = (np.stack([u[n] for u in uploads]) for n in (A, B))
        p, q = fitted(a, b, weights, steps=5)
        self.leaves[A], self.leaves[B] = np.tensordot(p, a, 1), np.tensordot(q, b, 1)


@pytest.mark.slow
def test_rounds_equal_the_slow_reference():
    algorithm = fp.algorithms.fedavg(SGD, aggregator=fp.aggregators.flora_na(steps=5))
    slow_lora.check(slow_lora.engine(algorithm), SlowFLoRANA().run())


def uploads_of(a, b):
    return {"x.lora_a": jnp.asarray(a, jnp.float32), "x.lora_b": jnp.asarray(b, jnp.float32)}


def test_coefficients_of_an_example_by_hand():
    """Rank 1: products a_k b_k of the clients are 1·1, 2·3; the average 3.5 can be met exactly."""
    a, b = np.array([1.0, 2.0])[:, None, None], np.array([1.0, 3.0])[:, None, None]
    template = uploads_of([[1.0]], [[1.0]])
    made = aggregate(
        fp.aggregators.flora_na(), uploads_of(a, b), np.ones(2, np.float32), template, {}
    )
    new = made.update
    assert_close(new["x.lora_a"] * new["x.lora_b"], 3.5, rtol=1e-5)
    plain = aggregate(
        fp.aggregators.flora_na(steps=0), uploads_of(a, b), np.ones(2, np.float32), template, {}
    )
    assert_close(plain.update["x.lora_a"], 1.5, rtol=1e-6)
    assert_close(plain.update["x.lora_b"], 2.0, rtol=1e-6)
    assert plain.metrics["aggregation_error"] == approx(0.5, rel=1e-5)


@pytest.mark.parametrize("size", [1e-3, 1e-1, 10.0])
def test_small_and_large_changes_lower_the_error_that_is_measured(size):
    rng = np.random.default_rng(0)
    a0, b0 = rng.normal(size=(9, 2)), rng.normal(size=(2, 7))
    a, b = a0 + size * rng.normal(size=(4, 9, 2)), b0 + size * rng.normal(size=(4, 2, 7))
    sets = uploads_of(a, b), np.ones(4, np.float32), uploads_of(a0, b0), {}
    plain, once, often = (aggregate(x, *sets) for x in (MEAN, ONCE, OFTEN))
    error = often.metrics["aggregation_error"]
    assert error < once.metrics["aggregation_error"] < plain.metrics["aggregation_error"]
    assert error < 0.97 * plain.metrics["aggregation_error"]
    new = np.asarray(often.update["x.lora_a"], float) @ often.update["x.lora_b"]
    mean = np.mean(a @ b, axis=0)
    rounding = ROUNDOFF * np.linalg.norm(mean)  # the error is a difference of such products
    assert error == approx(np.linalg.norm(new - mean), rel=1e-5, abs=rounding)


def test_slots_without_an_upload_do_not_count():
    """A cohort has room for the largest round of a run, so that all rounds use one program."""
    rng, number = np.random.default_rng(0), np.arange(4, dtype=np.int32)
    a0, b0 = rng.normal(size=(9, 2)), rng.normal(size=(2, 7))
    a, b = a0 + 3 * rng.normal(size=(4, 9, 2)), b0 + 3 * rng.normal(size=(4, 2, 7))
    p, q = fitted(a, b, np.full(4, 0.25), 1)
    made = program(ONCE, (4,), spare=60)(
        uploads_of(a, b), np.ones(4, np.float32), number, number, uploads_of(a0, b0), {}, ()
    )
    rounding = 12 * ROUNDOFF * np.abs(a).max()
    assert_close(made.update["x.lora_a"], np.tensordot(p, a, 1), rtol=0, atol=rounding)
    assert_close(made.update["x.lora_b"], np.tensordot(q, b, 1), rtol=0, atol=rounding)


def test_a_model_without_lora_is_refused():
    with pytest.raises(fp.InputError, match="'flora_na' needs LoRA factors"):
        fp.aggregators.flora_na().lift({}, {"head.bias": toy.model().trainable["head.bias"]}, {})
