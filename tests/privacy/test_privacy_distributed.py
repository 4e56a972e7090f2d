"""Local noise, and noise that clients share under secure aggregation."""

import functools
import math
import re

import dp_accounting
import jax
import jax.numpy as jnp
import linear
import numpy as np
import optax
import pytest
import running
import scipy.linalg
import scipy.stats
import toy
from closeness import approx, assert_close, roughly
from internals import summation, tree
from options import session_options
from protection import BASES, FEDAVG, federation, showing

import fedjax_peft as fp
from fedjax_peft import InputError, aggregators, algorithms
from fedjax_peft.privacy.distributed import discrete_gaussian, grid, hadamard, rounded, senders

pytestmark = pytest.mark.slow

CLIENTS = 5
SIZES = (7, 4, 12, 1, 9)
FACTS = federation("uniform", 20, fewest_examples=1)
DELTA = 1e-5


def protected(privacy, base, facts=FACTS):
    return privacy.protect(FEDAVG._replace(aggregator=showing(base)), facts).aggregator


def uploads(size=1.0, seed=0):
    """Returns (uploads ``[clients, ...]``, template, fixed leaves)."""
    rng = np.random.default_rng(seed)
    leaves = {n: np.asarray(x) for n, x in toy.lora_model().trainable.items()}
    fixed = {n: x for n, x in leaves.items() if n.endswith("scale")}
    template = {n: x for n, x in leaves.items() if n not in fixed}
    change = {n: size * rng.normal(size=(CLIENTS, *x.shape)) for n, x in template.items()}
    sent = {n: (x + change[n]).astype(np.float32) for n, x in template.items()}
    return sent, template, fixed


def combine(aggregator, sent, template, fixed, weights=(1,) * CLIENTS, seed=0):
    """Returns the result of one round; to be jitted."""
    none = summation.empty(aggregator, template, fixed, CLIENTS)
    keys = jax.random.split(jax.random.key(seed) if isinstance(seed, int) else seed, CLIENTS)
    weights = jnp.asarray(weights, jnp.float32)
    places = (weights, jnp.arange(CLIENTS), template, fixed, keys, jnp.int32(3))
    total = summation.add(aggregator, none, sent, *places)
    context = toy.context()._replace(fixed=fixed, round_index=jnp.int32(3))
    return aggregator.finish(summation.summed(total), template, context, ())


def combined(aggregator, *arguments, **options):
    """Returns the result of one round."""
    return jax.jit(functools.partial(combine, aggregator))(*arguments, **options)


@functools.partial(jax.jit, static_argnums=0)
def draws(aggregator, sent, template, fixed):
    """Returns the result of one round a thousand times, with other keys."""
    keys = jax.random.split(jax.random.key(1), 1000)
    return jax.vmap(lambda key: combine(aggregator, sent, template, fixed, seed=key))(keys)


def flat(tree):
    return np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)])


# ----------------------------------------------------------------------------------------- local


@pytest.mark.parametrize("base", BASES)
@pytest.mark.sample("fra")
def test_local_noise_on_the_mean_is_what_is_claimed(base):
    """Over 1,000 draws, in every leaf of the aggregator's space, within 1 %."""
    sent, template, fixed = uploads()
    clip, z = 0.5, 3.0
    private, silent = (protected(fp.privacy.local(clip, x), BASES[base]()) for x in (z, 0.0))
    expected = combined(silent, sent, template, fixed).update
    drawn = draws(private, sent, template, fixed)
    noise = jax.tree.map(lambda x, y: np.asarray(x) - np.asarray(y), drawn.update, expected)
    wanted = clip * z / math.sqrt(CLIENTS)
    every = flat(noise)
    assert np.std(every) == roughly(wanted, rel=0.01)
    for x in jax.tree.leaves(noise):
        assert np.std(x) == roughly(wanted, rel=0.03 if x.size < 10000 else 0.01)
    assert_close(drawn.metrics["privacy_noise_std"], wanted, rtol=1e-5)


@pytest.mark.parametrize("base", BASES)
def test_clipped_changes_are_no_longer_than_the_clip_norm(base):
    sent, template, fixed = uploads(size=30.0)
    silent = protected(fp.privacy.local(0.5, 0.0), BASES[base]())
    without = {n: x.copy() for n, x in sent.items()}
    for n, x in template.items():
        without[n][2] = x
    both = jax.tree.map(lambda *xs: np.stack(xs), sent, without)
    result = jax.jit(jax.vmap(lambda x: combine(silent, x, template, fixed).update))(both)
    moved, still = (jax.tree.map(lambda x, i=i: x[i], result) for i in (0, 1))
    change = jax.tree.map(lambda x, y: CLIENTS * (np.float64(x) - np.float64(y)), moved, still)
    assert 0.4 < np.linalg.norm(flat(change)) <= 0.5 * (1 + 1e-4)


def test_the_guarantee_of_local_noise():
    """A client's message changes by at most 2 C."""
    event = dp_accounting.SelfComposedDpEvent(dp_accounting.GaussianDpEvent(5.0 / 2), 7)
    accountant = dp_accounting.rdp.RdpAccountant().compose(event)
    expected = accountant.get_epsilon(DELTA)
    assert fp.privacy.local(1.0, 5.0).guarantee(FACTS, 7).epsilon == approx(expected)
    turns = FACTS._replace(sampling="round_robin")  # 5 of 20 clients in turn
    assert fp.privacy.local(1.0, 5.0).guarantee(turns, 28).epsilon == approx(expected)


# ------------------------------------------------------------------------- the discrete Gaussian


@pytest.mark.parametrize("deviation", [0.7, 3.3, 150.0])
@pytest.mark.sample("3.3")
def test_discrete_gaussians_have_the_right_probabilities(deviation):
    drawn = np.asarray(
        jax.jit(discrete_gaussian, static_argnums=2)(jax.random.key(1), deviation, (200_000,))
    )
    span = np.arange(-math.ceil(12 * deviation), math.ceil(12 * deviation) + 1)
    p = np.exp(-(span**2) / (2 * deviation**2))
    p /= p.sum()
    assert np.abs(drawn).max() <= span[-1]
    edges = np.quantile(np.repeat(span, 1), np.linspace(0, 1, 2))
    cells = np.unique(np.clip(np.round(np.linspace(-3, 3, 25) * deviation), *edges)).astype(int)
    where = np.searchsorted(cells, span), np.searchsorted(cells, drawn)
    expected = np.bincount(where[0], weights=p, minlength=len(cells) + 1) * drawn.size
    counted = np.bincount(where[1], minlength=len(cells) + 1)
    _, likely = scipy.stats.chisquare(counted, expected)
    assert likely > 1e-4


def test_the_rotation_is_the_orthonormal_hadamard_matrix():
    x = np.random.default_rng(0).normal(size=32).astype(np.float32)
    expected = scipy.linalg.hadamard(32) @ x / math.sqrt(32)
    rotate = jax.jit(hadamard)
    assert_close(rotate(x), expected, atol=1e-5)
    assert_close(rotate(rotate(x)), x, atol=1e-5)


def test_rounding_is_unbiased_and_never_too_long():
    x = jnp.asarray(np.random.default_rng(0).normal(0, 2.0, 64), jnp.float32)
    keys = jax.random.split(jax.random.key(0), 4000)
    draw = jax.jit(jax.vmap(lambda k, longest: rounded(x, longest, k), (0, None)))
    free = draw(keys, 1e6)
    assert np.mean(free, axis=0) == roughly(np.asarray(x), abs=5 * 0.5 / math.sqrt(4000))
    tight = float(jnp.linalg.norm(x)) * 1.01
    held = draw(keys, tight)
    lengths = np.linalg.norm(np.asarray(held, np.float64), axis=1)
    assert lengths.max() <= tight
    assert np.linalg.norm(np.asarray(free, np.float64), axis=1).max() > tight
    assert np.abs(np.asarray(held) - np.asarray(x)).max() < 1


def paper_grid(clip, z, bits, n, least, d, k=4):
    """A transcription: γ from section 4, Δ from theorem 1; in float64."""
    local_std = z * clip / math.sqrt(least)
    numerator = math.sqrt(2 ** (2 * bits) - n * k**2)
    gamma = 2 * k * math.sqrt(clip**2 * n**2 / d + n * local_std**2) / numerator
    first = clip**2 + gamma**2 * d / 4
    first += math.sqrt(2 * 0.5) * gamma * (clip + gamma / 2 * math.sqrt(d))
    delta = math.sqrt(min(first, (clip + gamma * math.sqrt(d)) ** 2))
    return gamma, delta


@pytest.mark.parametrize(
    ("bits", "n", "d", "z"), [(16, 5, 64, 1.0), (12, 100, 4096, 0.5), (20, 40, 131072, 2.0)]
)
def test_the_grid_is_that_of_the_paper(bits, n, d, z):
    gamma, delta = paper_grid(0.3, z, bits, n, n, d)
    own = grid(0.3, z, bits, n, n, d)
    assert_close(1 / own.scale, gamma, rtol=1e-5)
    assert_close(own.longest * gamma, delta, rtol=1e-5)
    assert own.deviation >= z * own.longest / math.sqrt(n) * (1 - 1e-6)
    shares = np.arange(1, n)
    tau = 10 * np.sum(np.exp(-2 * np.pi**2 * float(own.deviation) ** 2 * shares / (shares + 1)))
    assert tau * d <= 1e-10


@pytest.mark.parametrize("d", [2**10, 2**16, 2**22])
@pytest.mark.parametrize(("n", "z"), [(10, 1.0), (100, 4.0)])
def test_the_noise_of_a_sum_fits_into_the_modulus(n, z, d):
    """Otherwise the sum wraps around. The error names the fewest bits with which it fits."""

    def inside(bits):
        return jax.jit(lambda: grid(1.0, z, bits, n, n, d))()

    with pytest.raises(InputError, match=r"use bits = \d+ or more") as refused:
        inside(6)
    bits = int(re.search(r"bits = (\d+) or more", str(refused.value))[1])
    assert 2 ** (bits - 1) >= 3 * math.sqrt(n) * inside(bits).deviation
    with pytest.raises(InputError, match=f"use bits = {bits} or more"):
        inside(bits - 1)


@pytest.mark.parametrize("clients", [1, 5, 10, 25, 40, 100, 1000])
def test_the_clients_that_must_send_are_counted_without_rounding(clients):
    for percent in range(100):
        assert senders(percent / 100, clients) == clients - percent * clients // 100


# ----------------------------------------------------------------------------- a round of shares


@pytest.mark.parametrize("base", BASES)
@pytest.mark.sample("mean")
def test_the_sum_of_shares_is_the_clipped_mean_and_noise_of_the_claimed_size(base):
    sent, template, fixed = uploads()
    private = protected(fp.privacy.distributed(0.5, 2.0), BASES[base]())
    silent = protected(fp.privacy.local(0.5, 0.0), BASES[base]())
    expected = combined(silent, sent, template, fixed).update
    drawn = draws(private, sent, template, fixed)
    noise = jax.tree.map(lambda x, y: np.asarray(x) - np.asarray(y), drawn.update, expected)
    claimed = float(drawn.metrics["privacy_noise_std"][0])
    assert 2.0 * 0.5 / CLIENTS <= claimed < 1.02 * 2.0 * 0.5 / CLIENTS  # rounding at 16 bits
    assert_close(np.std(flat(noise)), claimed, rtol=0.01)
    errors = np.concatenate([np.ravel(x.mean(0)) for x in jax.tree.leaves(noise)])
    assert np.abs(errors).max() < 5 * claimed / math.sqrt(1000)


def test_messages_are_integers_below_the_modulus_and_their_sum_is_exact():
    """Against Python's integers, of any size, for messages of the largest modulus."""
    sent, template, fixed = uploads(size=30.0)
    private = protected(fp.privacy.distributed(0.5, 2.0, bits=24), aggregators.mean())
    keys = jax.random.split(jax.random.key(0), CLIENTS)

    @jax.jit
    @jax.vmap
    def message(x, key):
        return private.randomise(private.lift(x, template, fixed), key, jnp.int32(3))

    messages = message(sent, keys)
    whole = np.asarray(messages["sum"].value)
    assert whole.dtype == np.int32
    assert whole.min() >= 0
    assert whole.max() < 2**24
    none = summation.empty(private, template, fixed, CLIENTS)

    @jax.jit
    def sum_of(weights):
        """Rounds the messages in one program, whoever's are added."""
        inputs = (sent, weights, jnp.arange(CLIENTS), template, fixed, keys, jnp.int32(3))
        return summation.add(private, none, *inputs).value["sum"].value

    single = np.mod([sum_of(row) for row in jnp.eye(CLIENTS)], 2**24)
    assert np.mean(single == whole) > 0.9, "two programs round a few of the numbers differently"
    assert np.abs(single - whole).max() <= 1
    there = [i for i in range(CLIENTS) if i != 2]
    total = sum_of(jnp.asarray([1.0, 1.0, 0.0, 1.0, 1.0]))
    expected = [sum(int(single[i, j]) for i in there) % 2**24 for j in range(whole.shape[1])]
    np.testing.assert_array_equal(np.mod(total, 2**24), expected)


def test_a_sum_of_too_few_shares_is_not_released():
    sent, template, fixed = uploads()
    private = protected(fp.privacy.distributed(0.5, 2.0, dropouts=0.4), aggregators.mean())
    three, two = [1, 1, 1, 0, 0], [1, 1, 0, 0, 0]
    release = jax.jit(functools.partial(combine, private, sent, template, fixed))
    full, released, withheld = (release(np.float32(x)) for x in ([1] * CLIENTS, three, two))
    start = flat(showing(aggregators.mean()).lift(template, template, fixed))
    assert_close(flat(withheld.update), start, rtol=1e-6)
    assert np.abs(flat(released.update) - start).max() > 1e-3
    # The shares of three clients are as large as all the noise that is needed.
    needed = 2.0 * 0.5 / CLIENTS  # and rounding adds 2 % at most
    assert_close(full.metrics["privacy_noise_std"] / needed, math.sqrt(5 / 3), rtol=0.03)


def test_the_guarantee_of_the_distributed_discrete_gaussian():
    """Proposition 14 of the paper for every order, composed, against dp-accounting's Gaussian."""
    z, rounds = 2.0, 9
    found = fp.privacy.distributed(1.0, z).guarantee(FACTS, rounds).epsilon
    event = dp_accounting.SelfComposedDpEvent(dp_accounting.GaussianDpEvent(z), rounds)
    gaussian = dp_accounting.rdp.RdpAccountant().compose(event)
    assert found == approx(gaussian.get_epsilon(DELTA), rel=1e-6)
    orders = gaussian.orders
    rdp = [rounds * (order / (2 * z**2) + 1e-10) for order in orders]
    expected, _ = dp_accounting.rdp.compute_epsilon(orders, rdp, DELTA)
    assert found == approx(expected, rel=1e-9)


# ---------------------------------------------------------------------------------------- in runs


IN_SPACE = {"mean": 18 + 3 + 10 + 12, "fra": 18 + 3 + 5 * 6}
"""The numbers in the space of an aggregator."""


@pytest.mark.parametrize(
    ("base", "privacy", "size"),
    [
        ("fra", fp.privacy.local(0.5, 1.0), 4 * IN_SPACE["fra"]),
        ("mean", fp.privacy.distributed(0.5, 1.0, bits=12), 64 * 12 // 8),
        ("lora_a2", fp.privacy.distributed(0.5, 1.0, bits=12), 64 * 12 // 8),
        pytest.param(
            "mean", fp.privacy.local(0.5, 1.0), 4 * IN_SPACE["mean"], marks=pytest.mark.exhaustive
        ),
        pytest.param(
            *("fra", fp.privacy.distributed(0.5, 1.0, bits=12), 64 * 12 // 8),
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_bytes_are_those_of_what_is_sent(base, privacy, size):
    """Noise is on every entry, also where a client of LoRA-A² would send a part of its upload."""
    if base == "lora_a2":
        algorithm = algorithms.lora_a2(optax.sgd(0.1), budget=1)
    else:
        algorithm = FEDAVG._replace(aggregator=BASES[base]())
    options = {"model": toy.lora_model(dropout=0), "privacy": privacy, "rounds": 1, "lanes": 1}
    run = running.run(algorithm, **options)
    assert run.metrics[1]["bytes_up"] == size * len(SIZES)
    assert np.isfinite(run.metrics[1]["epsilon"])


# ------------------------------------------------------ clients that send nothing but their noise


def sending(size, client=2):
    """Returns an attack by which one client sends what it received plus ``size``."""

    def apply(algorithm, federation):
        def tamper(upload):
            other = jax.tree.map(lambda x: x + size, upload.template)
            sent = tree.where(upload.client.number == client, other, upload.value)
            return upload._replace(value=sent)

        return fp.contracts.Wrapped(algorithm, fp.contracts.Stages(sent=(tamper,)))

    return fp.contracts.Attack("sending", apply, lambda clients: (client,))


@functools.cache
def noisy_session(make, lanes, engine):
    own = {"attack": lambda p: sending(p["size"]), "values": {"size": 0.0}, "rounds": 2}
    options = session_options(privacy=make(0.5, 1.0), **own, lanes=lanes, engine=engine)
    return fp.session(linear.model(), FEDAVG, toy.clients(SIZES), **options)


def released(make, lanes, engine, size, without=()):
    """Returns (model after a round, information about the round); client 2 sends ``size``."""
    session = noisy_session(make, lanes, engine)
    state = session.init(0, {"size": size})._replace(salt=jnp.zeros(2, jnp.uint32))  # one noise
    state, info = session.step(state, session.plan(1, 0, without))
    return jax.device_get((state.server, info))


@pytest.mark.parametrize(
    ("make", "lanes", "engine"),
    [
        (fp.privacy.local, 3, "compiled"),
        (fp.privacy.distributed, 1, "compiled"),
        pytest.param(fp.privacy.distributed, 1, "reference", marks=pytest.mark.exhaustive),
        pytest.param(fp.privacy.local, 1, "reference", marks=pytest.mark.exhaustive),
    ],
)
def test_a_client_without_a_usable_upload_sends_its_noise(make, lanes, engine):
    """One that is not finite, or late, leaves what the same client leaves by learning nothing."""
    expected, info = released(make, lanes, engine, 0.0)
    assert info.finite.all()
    for size, without in ((math.nan, ()), (math.inf, ()), (0.0, (2,)), (math.nan, (2,))):
        found, told = released(make, lanes, engine, size, without)
        for name, x in expected.items():
            assert_close(found[name], x, rtol=0, atol=2e-5)
        noise = "privacy_noise_std"
        assert told.aggregation[noise] == info.aggregation[noise]
        assert bool(told.finite.all()) == (bool(without) or math.isfinite(size))


@pytest.mark.parametrize(
    ("make", "least", "size"),
    [(fp.privacy.local, 0.5 / 2, 4 * 18), (fp.privacy.distributed, 0.5 / 4, 2 * 32)],
    ids=["local", "distributed"],
)
@pytest.mark.sample("distributed")
def test_late_clients_and_those_without_examples_send_noise_in_a_run(make, least, size):
    """With one step in time, client 2 (three steps) is late, and client 1 has no examples.

    Noise and bytes are those of four clients: a change has 18 numbers, which shares pad to 32.
    """
    options = {"privacy": make(0.5, 1.0), "model": linear.model(), "rounds": 1}
    options |= {"time_model": fp.TimeModel(seconds_per_step=1.0, latency=0.0)}
    clients = toy.clients((4, 0, 12, 3))
    with pytest.warns(UserWarning, match="measurements of single clients"):
        run = running.run(clients=clients, deadline=2.5, diagnostics=["clients"], **options)
    row = run.metrics[1]
    assert (row["late"], row["clients"], row["steps"]) == ([2], [0, 1, 2, 3], 2)
    assert row["simulated_seconds"] == 2.5
    for name, own in row["per_client"].items():  # of the two that worked
        assert [x is None for x in own] == [False, True, True, False]
        assert row[f"train_{name}_std"] == approx(np.std([own[0], own[3]]), rel=1e-5)
    norms = row["per_client"]["update_norm"]
    assert row["update_norm"] == approx((norms[0] + norms[3]) / 2, rel=1e-6)
    nobody = running.run(clients=clients, deadline=0.5, **options)
    assert nobody.metrics[1]["late"] == [0, 2, 3]
    for found in (row, nobody.metrics[1]):
        assert least * (1 - 1e-6) <= found["privacy_noise_std"] < 1.02 * least
        assert found["bytes_up"] == 4 * size
    plain = running.run(clients=clients, deadline=0.5, engine="reference", **options)
    assert plain.metrics[1].keys() == nobody.metrics[1].keys()
    start = linear.model().trainable["head.bias"]
    assert np.abs(nobody.params["head.bias"] - start).max() > 1e-5


# ---------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("make", "sampling", "words"),
    [
        (lambda: fp.privacy.distributed(1.0, 1.0), "poisson", "their number must be known"),
        (lambda: fp.privacy.distributed(1.0, 1.0), "size", "sampling='size'"),
        (lambda: fp.privacy.local(1.0, 1.0), "size", "sampling='size'"),
    ],
)
def test_a_sampling_that_does_not_fit_is_refused(make, sampling, words):
    with pytest.raises(InputError, match=words):
        protected(make(), aggregators.mean(), FACTS._replace(sampling=sampling))


def test_too_few_bits_are_refused():
    sent, template, fixed = uploads()
    private = protected(fp.privacy.distributed(0.5, 2.0, bits=5), aggregators.mean())
    with pytest.raises(InputError, match="use bits = 7 or more"):
        combined(private, sent, template, fixed)
