"""Accounting against dp-accounting's own objects, and against the analytic Gaussian mechanism."""

import math
import operator
import sys

import dp_accounting as dp
import protection
import pytest
from closeness import approx, roughly
from internals import accounting, guarantees
from refusals import refusals, refused
from scipy import optimize, stats

import fedjax_peft as fp
from fedjax_peft.privacy import statements

Relation = dp.NeighboringRelation
# (noise multiplier, rounds, sampling probability, delta)
SETTINGS = [
    (1.0, 100, 0.01, 1e-5),
    (0.6, 30, 0.1, 1e-3),
    (2.0, 500, 0.2, 1e-6),
    (4.0, 20, 1.0, 1e-5),
    (10.0, 100, None, 1e-5),
]


def federation(sampling, clients=100, per_round=10):
    return protection.federation(sampling, clients, per_round)


def poisson(z: float, q: float | None) -> dp.DpEvent:
    event = dp.GaussianDpEvent(z)
    return event if q is None else dp.PoissonSampledDpEvent(q, event)


@pytest.mark.parametrize(("z", "rounds", "q", "delta"), SETTINGS)
def test_epsilon_is_that_of_dp_accounting(z, rounds, q, delta):
    event = accounting.gaussian_event(z, rounds, q)
    ours = accounting.epsilon(event, delta)
    theirs = dp.rdp.RdpAccountant().compose(poisson(z, q), rounds).get_epsilon(delta)
    assert ours == approx(theirs, rel=1e-12)


@pytest.mark.parametrize(("z", "rounds", "q", "delta"), [SETTINGS[0], SETTINGS[4]])
def test_pld_is_that_of_dp_accounting_and_tighter(z, rounds, q, delta):
    event = accounting.gaussian_event(z, rounds, q)
    ours = accounting.epsilon(event, delta, "pld")
    theirs = dp.pld.PLDAccountant().compose(poisson(z, q), rounds).get_epsilon(delta)
    assert ours == approx(theirs, rel=1e-12)
    assert ours < accounting.epsilon(event, delta, "rdp")


def analytic_epsilon(z: float, delta: float) -> float:
    """Balle and Wang 2018, theorem 8: the exact ε of one Gaussian release."""

    def gap(eps: float) -> float:
        a, b = 1 / (2 * z) - eps * z, -1 / (2 * z) - eps * z
        return stats.norm.cdf(a) - math.exp(eps) * stats.norm.cdf(b) - delta

    return optimize.brentq(gap, 0, 100)


@pytest.mark.parametrize("neighbours", ["add_or_remove_one", "replace_special", "replace_one"])
@pytest.mark.parametrize(("z", "rounds"), [(1.0, 1), (5.0, 1), (10.0, 100)])
def test_unsampled_rounds_equal_the_analytic_gaussian_mechanism(z, rounds, neighbours):
    exact = analytic_epsilon(z / math.sqrt(rounds), 1e-5)
    event = accounting.gaussian_event(z, rounds)
    assert accounting.epsilon(event, 1e-5, "pld", neighbours) == approx(exact, rel=1e-4)
    assert exact <= accounting.epsilon(event, 1e-5, "rdp", neighbours) < 1.2 * exact


@pytest.mark.parametrize(
    ("z", "epochs", "published"), [(1.3, 15, 1.19), (1.1, 60, 3.01), (0.7, 45, 7.10)]
)
def test_epsilon_of_the_mnist_tutorial(z, epochs, published):
    # TensorFlow Privacy's table: 60,000 examples, batches of 256, delta 1e-5. Its numbers use the
    # classic conversion of RDP; today's lies below it.
    rounds, q = epochs * 60_000 // 256, 256 / 60_000
    orders, losses = accounting._rdp(poisson(z, q), "add_or_remove_one")
    classic = min(rounds * losses + math.log(1e5) / (orders - 1))
    assert classic == roughly(published, abs=0.005)
    now = accounting.epsilon(accounting.gaussian_event(z, rounds, q), 1e-5)
    assert 0.75 * published < now < published


@pytest.mark.parametrize("accountant", ["rdp", "pld"])
def test_no_noise_is_no_guarantee(accountant):
    for q in (None, 0.1):
        event = accounting.gaussian_event(0.0, 3, q)
        assert accounting.epsilon(event, 1e-5, accountant) == math.inf


@pytest.mark.parametrize(
    ("epsilon", "rounds", "q"), [(2, 100, 0.01), (0.5, 20, 0.3), (8, 10, None)]
)
def test_noise_multiplier_is_the_smallest(epsilon, rounds, q):
    """By ε, which is dp-accounting's own (see above)."""
    z = fp.privacy.noise_multiplier(epsilon, 1e-5, rounds, q)
    found = [
        accounting.epsilon(accounting.gaussian_event(x, rounds, q), 1e-5)
        for x in (z, z * (1 - 1e-5))
    ]
    assert found[0] <= epsilon < found[1]


def test_nothing_is_released_in_no_rounds():
    assert fp.privacy.noise_multiplier(2.0, 1e-5, 0) == 0.0


def test_noise_multiplier_by_pld_is_the_smallest():
    z = fp.privacy.noise_multiplier(2, 1e-5, 10, accountant="pld")
    found = [
        accounting.epsilon(accounting.gaussian_event(x, 10), 1e-5, "pld")
        for x in (z, z * (1 - 1e-4))
    ]
    assert found[0] <= 2 < found[1]
    assert z < fp.privacy.noise_multiplier(2, 1e-5, 10)


def test_participations_are_the_most_of_a_simulated_schedule():
    from fedjax_peft.engine.schedule import Schedule

    indices = [[0]] * 7
    for rounds in range(12):
        schedule = Schedule(indices, 3, 1, 1, None, 0, "round_robin")
        drawn = [c for t in range(rounds) for c in schedule.members(t + 1)]
        most = max((drawn.count(c) for c in range(7)), default=0)
        assert guarantees.participations(federation("round_robin", 7, 3), rounds) == most
    assert guarantees.participations(federation("uniform"), 9) == 9
    assert guarantees.participations(federation("all", 10, 10), 9) == 9


def test_client_epsilon_of_each_sampling():
    def eps(sampling, **kwargs):
        return guarantees.client_epsilon(3.0, 1e-5, federation(sampling), 20, **kwargs)

    def gaussian(z, rounds):
        return accounting.epsilon(accounting.gaussian_event(z, rounds), 1e-5)

    assert eps("poisson") == accounting.epsilon(accounting.gaussian_event(3.0, 20, 0.1), 1e-5)
    assert eps("uniform") == eps("all") == gaussian(3.0, 20)
    assert eps("round_robin") == gaussian(3.0, 2)
    assert eps("all", neighbours="replace_one") == gaussian(1.5, 20)
    assert eps("round_robin", neighbours="replace_one") == gaussian(1.5, 2)


def test_sampling_without_replacement_is_accounted_at_twice_the_sensitivity():
    ours = guarantees.client_epsilon(4.0, 1e-5, federation("uniform"), 20, neighbours="replace_one")
    theirs = dp.rdp.RdpAccountant(neighboring_relation=Relation.REPLACE_ONE)
    theirs.compose(dp.SampledWithoutReplacementDpEvent(100, 10, dp.GaussianDpEvent(2.0)), 20)
    assert ours == approx(theirs.get_epsilon(1e-5), rel=1e-12)


def test_client_noise_multiplier_and_guarantee_agree():
    facts = federation("round_robin")
    z = guarantees.client_noise_multiplier(2.0, 1e-5, facts, 20)
    found = guarantees.client_guarantee(z, 1e-5, facts, 20)
    assert found == fp.contracts.Guarantee(approx(2.0, rel=1e-4), 1e-5)
    assert found.epsilon <= 2.0


def test_words_name_the_neighbours_and_the_sampling():
    words = statements.composition_in_words
    assert "add or remove one" in words(federation("poisson"))
    assert "probability 0.1 (Poisson sampling)" in words(federation("poisson"))
    assert "zero-out" in words(federation("uniform"))
    assert "nothing is amplified" in words(federation("uniform"))
    assert "take turns" in words(federation("round_robin"))
    assert "without replacement" in words(federation("uniform"), "replace_one")


test_bad_input_is_refused = refusals(
    operator.call,
    (lambda: accounting.gaussian_event(1.0, -1), "rounds = -1 of gaussian_event"),
    (lambda: accounting.gaussian_event(1.0, 10, 1.5), "sampling_probability = 1.5"),
    (lambda: accounting.noise_multiplier(0, 1e-5, 10), "epsilon = 0"),
    (lambda: accounting.noise_multiplier(1, 1.0, 10), "delta = 1.0"),
    (lambda: accounting.noise_multiplier(1, 1e-5, 10, accountant="rpd"), "'rpd'.* 'rdp'"),
    (
        lambda: guarantees.client_event(1.0, federation("size"), 10),
        "the number of examples of a client, which is private",
    ),
    (
        lambda: guarantees.client_event(1.0, federation("poisson"), 10, "replace_one"),
        "do not suit sampling='poisson'",
    ),
    (
        lambda: guarantees.client_epsilon(
            1.0, 1e-5, federation("uniform"), 9, accountant="pld", neighbours="replace_one"
        ),
        "'pld' cannot account",
    ),
)


@pytest.mark.slow
def test_a_missing_library_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    accounting._dp_accounting.cache_clear()
    refused(r"pip install 'dp-accounting", accounting.gaussian_event, 1.0, 1)
    monkeypatch.undo()
    accounting._dp_accounting.cache_clear()
