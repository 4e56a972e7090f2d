"""Schedules over rounds equal optax's; an optimizer takes them without another state."""

import operator

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from closeness import ROUNDOFF, assert_close
from refusals import refusals

import fedjax_peft as fp

ROUNDS = np.arange(1, 16)


def factors(schedule):
    return np.array([schedule(jnp.int32(t)) for t in ROUNDS])


def ours_from_optax(schedule, warmup):
    """Returns the factors of optax's schedule, which counts from 0, after a linear warm-up."""
    rising = optax.linear_schedule(1 / (warmup + 1), 1.0, warmup)
    joined = optax.join_schedules([rising, schedule], [warmup])
    return np.array([joined(t - 1) for t in ROUNDS])


@pytest.mark.parametrize("warmup", [0, 3])
@pytest.mark.parametrize(
    ("make", "theirs"),
    [
        (fp.schedules.constant, lambda rest: optax.constant_schedule(1.0)),
        (
            lambda warmup: fp.schedules.cosine(12, warmup=warmup, final_factor=0.1),
            lambda rest: optax.cosine_decay_schedule(1.0, rest, alpha=0.1),
        ),
        (
            lambda warmup: fp.schedules.linear(12, warmup=warmup, final_factor=0.25),
            lambda rest: optax.linear_schedule(1.0, 0.25, rest),
        ),
        (
            lambda warmup: fp.schedules.exponential(0.7, every=2, warmup=warmup, final_factor=0.3),
            lambda rest: optax.exponential_decay(1.0, 2, 0.7, staircase=True, end_value=0.3),
        ),
    ],
    ids=["constant", "cosine", "linear", "exponential"],
)
def test_schedules_are_those_of_optax(make, theirs, warmup):
    """The run has 12 rounds, of which the warm-up takes the first."""
    expected = ours_from_optax(theirs(12 - warmup), warmup)
    # A few operations of order one; the smallest factor is .1, which multiplies their error by 10.
    assert_close(factors(make(warmup=warmup)), expected, rtol=4 * 10 * ROUNDOFF)


def test_factors_by_hand():
    """Four rounds of warm-up are fifths; the fall then takes the other four rounds."""
    linear = fp.schedules.linear(8, warmup=4)
    expected = [0.2, 0.4, 0.6, 0.8, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    assert_close(factors(linear)[:10], expected, rtol=1e-6)
    half = (1 + np.cos(np.pi / 3)) / 2  # a third of the way
    assert_close(factors(fp.schedules.cosine(3))[:2], [1.0, half], rtol=1e-6)


def test_compiled_falls_are_in_their_rounds():
    """The product with the rounded inverse of each of these is below 1."""
    lengths = (41, 47, 55, 61, 82)

    @jax.jit
    def compiled(rounds):
        made = [fp.schedules.exponential(0.5, every=e) for e in lengths]
        return [schedule(t) for schedule, t in zip(made, rounds, strict=True)]

    assert compiled([e + 1 for e in lengths]) == [0.5] * 5
    assert compiled(list(lengths)) == [1.0] * 5


def test_numbers_can_be_run_time_values():
    """A sweep over the final factor or the decay compiles once."""
    traced = []

    @jax.jit
    def compiled(c, d):
        traced.append(c)
        cosine, exponential = fp.schedules.cosine(10, final_factor=c), fp.schedules.exponential(d)
        return cosine(jnp.int32(6)), exponential(jnp.int32(3))

    for final, decay in ((0.0, 0.5), (0.4, 0.9)):
        expected = (final + (1 - final) / 2, decay**2)
        assert_close(compiled(final, decay), expected, rtol=1e-6)
    assert len(traced) == 1


PARAMS = {"a": jnp.array([[0.5, -2.0]]), "b": jnp.array([3.0])}
GRADIENT = {"a": jnp.array([[0.3, 1.0]]), "b": jnp.array([-4.0])}


@pytest.mark.parametrize(
    "make",
    [
        lambda rate: optax.adamw(rate, weight_decay=0.3),
        lambda rate: optax.sgd(rate, momentum=0.9),
        lambda rate: optax.chain(optax.clip_by_global_norm(1.0), optax.adam(rate)),
    ],
    ids=["adamw", "momentum", "clipped"],
)
def test_a_factor_is_a_factor_of_the_learning_rate(make):
    """Weight decay is scaled too, as by any schedule of the learning rate."""
    plain, half = (
        make(0.05),
        fp.schedules.at_round(fp.schedules.scheduled(make(0.1), lambda t: 1.0 / t), jnp.int32(2)),
    )
    states = [plain.init(PARAMS), half.init(PARAMS)]
    assert jax.tree.structure(states[0]) == jax.tree.structure(states[1])
    for _ in range(3):
        results = [
            o.update(GRADIENT, s, PARAMS) for o, s in zip((plain, half), states, strict=True)
        ]
        states = [state for _, state in results]
        for one, other in zip(*map(jax.tree.leaves, results), strict=True):
            assert_close(one, other, rtol=1e-6)


def test_a_factor_of_one_changes_no_bit():
    plain, whole = optax.adamw(0.1), fp.schedules.scaled(optax.adamw(0.1), jnp.float32(1))
    one, _ = plain.update(GRADIENT, plain.init(PARAMS), PARAMS)
    other, _ = whole.update(GRADIENT, whole.init(PARAMS), PARAMS)
    assert jax.tree.all(jax.tree.map(np.array_equal, one, other))
    assert fp.schedules.at_round(plain, jnp.int32(1)) is plain


def test_a_scheduled_optimizer_says_that_it_needs_the_round():
    optimizer = fp.schedules.scheduled(optax.sgd(0.1), fp.schedules.cosine(10))
    chained = optax.chain(optax.clip(1.0), optimizer)
    with pytest.raises(fp.InputError, match=r"at_round\(optimizer, context\.round_index\)"):
        chained.update(GRADIENT, chained.init(PARAMS), PARAMS)


test_bad_input_is_named = refusals(
    operator.call,
    (lambda: fp.schedules.cosine(10, warmup=10), "warmup = 10 rounds leave none of .* = 10"),
    (
        lambda: fp.schedules.scheduled(
            fp.schedules.scheduled(optax.sgd(1.0), fp.schedules.constant()),
            fp.schedules.constant(),
        ),
        "has a schedule already",
    ),
)
