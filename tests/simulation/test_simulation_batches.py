"""Batches into which every example is drawn independently (Poisson sampling)."""

import numpy as np
import optax
import pytest
import toy
from closeness import assert_close
from options import run_options
from scipy.stats import binom

import fedjax_peft as fp
from fedjax_peft.engine.plan import poisson_batches
from fedjax_peft.simulation.session import poisson_width
from fedjax_peft.support.errors import InputError

pytestmark = pytest.mark.slow

SIZES = (7, 4, 12, 1, 9)


def drawn(indices, batch_size, *, width=20, steps=2000):
    return poisson_batches(
        np.array(indices, np.int32), batch_size, width, steps=steps, rng=np.random.default_rng(0)
    )


def test_examples_are_drawn_independently_with_the_same_probability():
    rows = drawn(range(10, 20), 4)
    member = np.array([[n in row for n in range(10, 20)] for row in rows])
    assert_close(member.mean(axis=0), 0.4, atol=4 * np.sqrt(0.24 / 2000))
    sizes = member.sum(axis=1)
    assert (np.sort(rows, axis=1)[:, -4:] < 20).all()
    np.testing.assert_array_equal((rows >= 0).sum(axis=1), sizes)  # nobody twice
    # Independent draws: the variance of the size is n p (1 - p), and not 0.
    assert_close(sizes.var(), 2.4, rtol=0.15)


def test_a_client_with_few_examples_uses_them_all():
    np.testing.assert_array_equal(drawn([3, 5], 4, width=3, steps=2), [[3, 5, -1]] * 2)


def test_batches_have_room_for_all_draws_but_one_in_a_trillion():
    for n, batch_size in ((1000, 16), (5, 2), (100, 100)):
        width = poisson_width([n, 0], batch_size)
        assert binom.sf(width, n, batch_size / n) <= 1e-12
        assert width == n or binom.sf(width - 1, n, batch_size / n) > 1e-12
    assert poisson_width([1000], 16) < 64


def test_a_draw_that_does_not_fit_is_cut_at_random():
    rows = drawn(range(10), 9, width=2, steps=4000)
    share = (rows[..., None] == np.arange(10)).any(axis=1).mean(axis=0)
    assert_close(share, 0.2, atol=0.03)


def run(**options):
    return fp.simulate(
        toy.model(),
        fp.algorithms.fedavg(optax.adam(0.02), keep_optimizer=True),
        toy.clients(SIZES),
        rounds=3,
        local_steps=4,
        batch_sampling="poisson",
        **run_options(**{"batch_size": 1, "lanes": 3, **options}),
    )


def test_both_engines_agree_on_draws_that_may_be_empty():
    compiled, reference = run(), run(engine="reference")
    counts = [row["train_loss"] for row in compiled.metrics[1:]]
    assert_close(counts, [r["train_loss"] for r in reference.metrics[1:]], rtol=1e-5)
    for name, x in compiled.params.items():
        assert_close(x, reference.params[name], atol=1e-6)
    # An empty batch is a step too: Adam counts it.
    counts = {int(x) for x in np.asarray(compiled.client_state["optimizer"][0].count).tolist()}
    assert counts == {12}


def test_the_draws_depend_on_the_seed_and_not_on_the_lanes():
    one, other = run(lanes=1), run(lanes=3)
    for name, x in one.params.items():
        assert_close(x, other.params[name], atol=1e-6)
    assert run(seed=1).metrics[-1]["train_loss"] != one.metrics[-1]["train_loss"]


def test_a_wrong_name_is_refused():
    with pytest.raises(InputError, match=r"no batch_sampling 'posson'. Did you mean 'poisson'"):
        fp.simulate(
            toy.model(),
            fp.algorithms.fedavg(optax.sgd(0.1)),
            toy.clients(SIZES),
            rounds=1,
            batch_sampling="posson",
        )
