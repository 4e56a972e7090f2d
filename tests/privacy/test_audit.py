"""The audit passes the correct mechanism, and catches mechanisms that are broken on purpose."""

import numpy as np
import optax
import pytest
import running
import toy
from closeness import assert_close
from refusals import refused

import fedjax_peft as fp
from fedjax_peft import Clients, InputError
from fedjax_peft.privacy import audit

pytestmark = pytest.mark.slow

CLIENTS, FEATURES, DELTA = 600, 320, 1e-5
CLIP, NOISE = 0.5, 2.0


@pytest.fixture(scope="module")
def federation():
    indices = tuple(np.array([i], np.int32) for i in range(CLIENTS))
    return Clients(toy.dataset(CLIENTS, features=FEATURES), indices)


@pytest.fixture(scope="module")
def model():
    return toy.model(features=FEATURES)


@pytest.fixture(scope="module")
def canaries(model):
    leaves = {name: model.trainable[name] for name in toy.SHARED}
    return fp.privacy.canaries(leaves, CLIENTS, seed=1)


ALGORITHM = fp.algorithms.fedavg(optax.sgd(0.1))


def mechanism(p):
    """Returns a mechanism that claims the guarantee of the correct one, whatever it does."""
    made = fp.privacy.central(p["clip"], p["noise"])
    return fp.privacy.central(CLIP, NOISE, delta=DELTA)._replace(protect=made.protect)


def run(model, federation, canaries, clip=CLIP, noise=NOISE):
    """Returns a run; one program serves all."""
    options = {"privacy": mechanism, "values": {"clip": clip, "noise": noise}}
    options |= {"attack": canaries.attack, "sampling": "all", "rounds": 1, "lanes": 60}
    return running.run(ALGORITHM, model=model, clients=federation, **options)


@pytest.mark.parametrize(
    ("clip", "noise", "correct"),
    [
        (CLIP, NOISE, True),
        # A quarter of the noise is caught with 5 of 8 seeds only, an eighth with all.
        pytest.param(CLIP, NOISE / 8, False, id="noise / 8"),
        pytest.param(1e6, CLIP * NOISE / 1e6, False, id="clip missing"),
    ],
)
def test_the_correct_mechanism_passes_and_a_broken_one_is_caught(
    model, federation, canaries, clip, noise, correct
):
    made = run(model, federation, canaries, clip, noise)
    found, epsilon = canaries.epsilon(made.params, DELTA), made.metrics[-1]["epsilon"]
    assert found > 0
    assert (found <= epsilon < 2.6) if correct else found > epsilon


def test_scores_are_the_clipped_canaries_in_the_mean(model, federation, canaries):
    found = run(model, federation, canaries, noise=0.0)
    expected = np.where(canaries.included, CLIP / CLIENTS, 0.0)
    assert_close(canaries.scores(found.params), expected, atol=2e-7)


def test_the_bound_holds_for_the_gaussian_mechanism_itself():
    """Scores drawn from N(0, 1) and N(mu, 1): exact ε by the analytic Gaussian mechanism."""
    import dp_accounting as dp

    rng = np.random.default_rng(0)
    for mu in (0.5, 2.0):
        exact = dp.get_epsilon_gaussian(1 / mu, DELTA)
        found = audit.lower_bound(rng.normal(mu, 1, 2000), rng.normal(0, 1, 2000), DELTA)
        assert 0 < found < exact
    assert found > 1.5, "the bound is of use"


@pytest.mark.parametrize(
    ("included", "excluded", "words"),
    [
        ([1.0, np.nan], [0.0, 0.1], "1 of 2 scores of canaries that took part are NaN"),
        ([1.0, 2.0], [np.nan, np.nan], "2 of 2 scores of canaries that did not take part are NaN"),
        ([], [0.0], "No canary took part"),
    ],
)
def test_scores_that_say_nothing_are_refused(included, excluded, words):
    refused(words, audit.lower_bound, np.array(included), np.array(excluded), DELTA)


def test_a_model_that_is_not_finite_has_no_bound(canaries):
    broken = {name: x * np.nan for name, x in canaries.leaves.items()}
    refused("The model that was looked up is not finite", canaries.epsilon, broken, DELTA)


def test_coins_are_fair_and_entries_differ(canaries):
    assert abs(canaries.included.mean() - 0.5) < 0.1
    assert len(set(canaries.entries.tolist())) == CLIENTS


def test_wrong_canaries_are_refused(model, federation, canaries):
    with pytest.raises(InputError, match="need an entry each, and the leaves have 3"):
        audit.canaries({"head.bias": model.trainable["head.bias"]}, 4)
    few = audit.canaries({"head.bias": model.trainable["head.bias"]}, 3)
    refused("There are 3 canaries, and 600 clients", run, model, federation, few)
