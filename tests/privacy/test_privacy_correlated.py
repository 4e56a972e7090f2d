"""DP-FTRL: the covariance of correlated noise, its sensitivity, and runs that resume exactly."""

import itertools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toy
from closeness import assert_close, roughly
from protection import federation
from refusals import refused

import fedjax_peft as fp
from fedjax_peft import algorithms
from fedjax_peft.privacy.correlated import correlated_noise, strategy

pytestmark = pytest.mark.slow

pytest.importorskip("jax_privacy")
ROUNDS = 6
TURNS = federation("round_robin", 12, 4)


def matrix(bands, rounds=ROUNDS):
    """Returns the lower triangular Toeplitz matrix of the bands."""
    column = np.zeros(rounds)
    column[: len(bands)] = bands
    return np.array(
        [[column[i - j] if i >= j else 0 for j in range(rounds)] for i in range(rounds)]
    )


def test_the_noises_of_all_rounds_have_the_covariance_of_the_inverse_matrix():
    made, scale, draws = strategy(ROUNDS, 3, 3), 0.7, 40_000
    noise = correlated_noise(made, scale)

    def one(keys):
        zeros = {"x": jnp.zeros(())}

        def step(state, given):
            key, number = given
            drawn, state = noise.add(zeros, key, state, number)
            return state, drawn["x"]

        numbers = jnp.arange(1, ROUNDS + 1, dtype=jnp.int32)
        return jax.lax.scan(step, noise.init(lambda: zeros), (keys, numbers))[1]

    keys = jax.random.split(jax.random.key(0), (draws, ROUNDS))
    rows = np.asarray(jax.jit(jax.vmap(one))(keys), np.float64)
    inverse = scale * np.linalg.inv(matrix(made.bands))
    expected = inverse @ inverse.T
    assert np.cov(rows.T) == roughly(expected, abs=0.03 * expected.max())
    claimed = [float(noise.std(jnp.int32(i + 1))) for i in range(ROUNDS)]
    assert_close(claimed, np.sqrt(np.diag(expected)), rtol=1e-5)
    # The sum over rounds, which the model holds, has less noise than with independent noise of the
    # same guarantee: that is what it is for.
    single = strategy(ROUNDS, 1, 3)
    prefix = np.tril(np.ones((ROUNDS, ROUNDS)))
    correlated_error = made.sensitivity**2 * np.sum((prefix @ inverse / scale) ** 2)
    assert correlated_error < 0.9 * single.sensitivity**2 * np.sum(prefix**2)


@pytest.mark.parametrize(("bands", "separation"), [(1, 1), (1, 3), (2, 2), (3, 3), (3, 1), (4, 6)])
@pytest.mark.sample("1-*", "3-*")
def test_the_sensitivity_is_the_largest_over_all_ways_to_take_part(bands, separation):
    made = strategy(ROUNDS, bands, separation)
    largest = 0.0
    for chosen in itertools.product([0, 1], repeat=ROUNDS):
        turns = np.flatnonzero(chosen)
        if len(turns) < 2 or np.diff(turns).min() >= separation:
            largest = max(largest, np.linalg.norm(matrix(made.bands) @ np.array(chosen)))
    assert_close(made.sensitivity, largest, rtol=1e-5)


def test_the_whole_run_is_one_gaussian_mechanism():
    from fedjax_peft.privacy.accounting import epsilon, gaussian_event

    privacy = fp.privacy.correlated(1.0, 2.0, rounds=20)
    expected = epsilon(gaussian_event(2.0, 1), 1e-5, "rdp", "replace_special")
    assert privacy.guarantee(TURNS, 20).epsilon == expected
    assert privacy.guarantee(TURNS, 1).epsilon == expected
    assert privacy.guarantee(TURNS, 0).epsilon == 0
    assert privacy.guarantee(TURNS, 21).epsilon == np.inf
    assert "one of 3 rounds" in privacy.statement(TURNS)


def test_the_noise_of_a_run_is_correlated():
    """With a learning rate of 0 the model moves by the noise alone."""
    clients = toy.clients([4] * 6)
    model = toy.lora_model(width=40, dropout=0)  # many numbers to correlate
    options = {
        "privacy": fp.privacy.correlated(1.0, 1.0, rounds=ROUNDS),
        "sampling": "round_robin",
        "clients_per_round": 2,
    }
    arguments = (model, algorithms.fedavg(optax.sgd(0.0)), clients)
    made = strategy(ROUNDS, 3, 3)
    session = fp.session(*arguments, **options)
    state, moved = session.init(0), []
    for _ in range(4):
        before = jax.device_get(state.server)
        state, info = session.step(state)
        after = jax.device_get(state.server)
        moved.append(np.concatenate([(after[n] - before[n]).ravel() for n in sorted(after)]))
    std = np.array(made.noises) * made.sensitivity / 2
    assert_close(info.aggregation["privacy_noise_std"], std[3], rtol=1e-5)
    # T x is independent noise again: the sums of its neighbours have no correlation.
    whitened = matrix(made.bands, 4) @ np.array(moved) * 2 / made.sensitivity
    assert_close(whitened.std(axis=1), 1, atol=0.3)
    assert np.abs(np.corrcoef(whitened) - np.eye(4)).max() < 0.45
    assert np.corrcoef(moved[0], moved[1])[0, 1] < -0.2


@pytest.mark.parametrize(
    ("facts", "bands", "reason"),
    [
        (federation("poisson", 12, 4), None, "sampling='round_robin'"),
        (federation("round_robin", 12, 5), None, "evenly"),
        (TURNS, 4, "at most 3"),
    ],
)
def test_what_does_not_bound_the_turns_of_a_client_is_refused(facts, bands, reason):
    privacy = fp.privacy.correlated(1.0, 1.0, rounds=10, bands=bands)
    refused(reason, privacy.protect, algorithms.fedavg(optax.sgd(0.1)), facts)


def test_clients_that_always_take_part_pay_for_it_in_the_sensitivity():
    independent, banded = strategy(ROUNDS, 1, 1), strategy(ROUNDS, 2, 1)
    assert_close(independent.sensitivity, np.sqrt(ROUNDS), rtol=1e-6)
    assert banded.sensitivity > independent.sensitivity
    facts = federation("all", 4, 4)
    fp.privacy.correlated(1.0, 1.0, rounds=ROUNDS, bands=2).protect(
        algorithms.fedavg(optax.sgd(0.1)), facts
    )


def test_a_missing_library_is_named_with_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "jax_privacy.matrix_factorization", None)
    refused("jax-privacy: pip install 'dp-acc", strategy, 17, 2, 5)
