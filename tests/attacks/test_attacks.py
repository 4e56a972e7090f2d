"""Attacks equal NumPy transcriptions of their papers, and change only what hostile clients send."""

import functools
import itertools
import operator

import jax
import jax.numpy as jnp
import linear
import numpy as np
import optax
import pytest
import toy
from closeness import approx, assert_close, assert_trees_close
from internals import Cohort, at_work, attack_key, mean
from options import run_options, session_options
from refusals import refusals, refused
from scipy.stats import norm
from shallow import simple_encoder  # noqa: F401

import fedjax_peft as fp
from fedjax_peft import aggregators, attacks

pytestmark = pytest.mark.slow

SIZES = (7, 4, 12, 1, 9, 5, 8)
FEDERATION = toy.clients(SIZES)
COLUMNS = tuple((name, x.shape[1:]) for name, x in FEDERATION.data.columns.items())
FACTS = fp.contracts.Federation(
    *(len(SIZES), len(SIZES), "all", 4, "shuffled", 3, 1, 1), columns=COLUMNS, classes=toy.CLASSES
)
UNLABELLED = FACTS._replace(columns=(("x", (5,)),), classes=0)
SHARE = 0.3
HOSTILE = attacks.sign_flip(SHARE).hostile(len(SIZES))
HONEST = [c for c in range(len(SIZES)) if c not in HOSTILE]
FEDAVG, EQUAL = (
    fp.algorithms.fedavg(optax.sgd(0.1)),
    fp.algorithms.fedavg(optax.sgd(0.1), weights="uniform"),
)
model = functools.cache(linear.model)
lora_model = functools.cache(functools.partial(toy.model, dropout=0))


def session(attack=None, algorithm=FEDAVG, *, lanes=3, bound=model, clients=FEDERATION, **options):
    """Returns a session; an attack by its name has the run-time value ``share``."""
    if isinstance(attack, str):
        make = CRAFTED[attack][0]
        options |= {"attack": lambda p: make(p["share"]), "values": {"share": SHARE}}
    elif attack is not None:
        options["attack"] = attack
    options = session_options(batch_size=4, lanes=lanes, **options)
    return fp.session(bound(), algorithm, clients, **options)


def a_round(made, without=(), **values):
    """Returns the server after round 1 without some clients, and the metrics of aggregation."""
    state, info = made.step(made.init(0, values or None), made.plan(1, 0, without=without))
    return jax.device_get((state.server, info.aggregation))


def flat(leaves):
    return np.concatenate([np.asarray(leaves[n], np.float64).ravel() for n in sorted(leaves)])


plain = named = functools.cache(session)
"""The same sessions for all tests: without an attack, and of an attack by its name."""


@functools.cache
def changes(bound=model):
    """Returns every client's honest change in round 1, from rounds in which it is alone."""
    made, everyone = plain(bound=bound), set(range(len(SIZES)))
    alone = [flat(a_round(made, everyone - {c})[0]) for c in sorted(everyone)]
    return np.stack(alone) - flat(made.init(0).server)


def mean_of(rows):
    return np.average(rows, axis=0, weights=SIZES)


def replaced(crafted, rows):
    """Returns the honest changes with those of hostile clients replaced."""
    rows = rows.copy()
    rows[list(HOSTILE)] = crafted
    return rows


# ----------------------------------------------------------------------------------- who is hostile


def test_the_hostile_clients_are_a_share_chosen_by_seed():
    assert len(HOSTILE) == 2 == round(SHARE * len(SIZES))
    everyone = [set(attacks.ipm(share).hostile(20)) for share in (0, 0.1, 0.2, 0.4, 1.0)]
    assert [len(found) for found in everyone] == [0, 2, 4, 8, 20]
    assert all(a < b for a, b in itertools.pairwise(everyone)), "more are added"
    assert attacks.ipm(0.2).hostile(20) == attacks.alie(0.2).hostile(20)
    assert attacks.ipm(0.2, seed=1).hostile(20) != attacks.ipm(0.2).hostile(20)


# -------------------------------------------------------------------------- each attack, by a loop


def alie_in_numpy(rows, z=None):
    n, m = len(SIZES), len(HOSTILE)
    s = np.floor(n / 2 + 1) - m
    z = norm.ppf((n - m - s) / (n - m)) if z is None else z
    return rows.mean(axis=0) - z * rows.std(axis=0)


def min_max_in_numpy(rows, direction):
    """The paper's search: the step is halved, the factor grows where the bound holds."""
    mean = rows.mean(axis=0)
    unit, std, sign = -mean / np.linalg.norm(mean), -rows.std(axis=0), -np.sign(mean)
    towards = {"unit": unit, "std": std, "sign": sign}[direction]
    largest = max(np.linalg.norm(a - b) for a in rows for b in rows)
    factor, step, best = 50.0, 25.0, 0.0
    while step > 1e-9:
        crafted = mean + factor * towards
        if max(np.linalg.norm(crafted - row) for row in rows) <= largest:
            best, factor = factor, factor + step
        else:
            factor -= step
        step /= 2
    return mean + best * towards


STD = 3.0
CRAFTED = {
    "sign_flip": (functools.partial(attacks.sign_flip, scale=2.0), lambda own, rows: -2 * own),
    "scaled": (functools.partial(attacks.scaled, factor=5.0), lambda own, rows: 5 * own),
    "alie": (attacks.alie, lambda own, rows: alie_in_numpy(rows)),
    "alie_z": (functools.partial(attacks.alie, z=1.5), lambda own, rows: alie_in_numpy(rows, 1.5)),
    "ipm": (functools.partial(attacks.ipm, epsilon=0.7), lambda own, rows: -0.7 * rows.mean(0)),
    "gaussian": (functools.partial(attacks.gaussian, std=STD), None),
    "label_flip": (attacks.label_flip, None),
    "relabel": (functools.partial(attacks.label_flip, source=0, target=2), None),
} | {
    f"min_max_{way}": (
        functools.partial(attacks.min_max, direction=way),
        lambda own, rows, way=way: min_max_in_numpy(rows, way),
    )
    for way in ("unit", "std", "sign")
}
"""Name -> the attack with a share, and what hostile clients send, from their own changes and those
of honest clients."""


@pytest.mark.parametrize("name", CRAFTED)
@pytest.mark.sample("[!rm]*[!z]", "min_max_std", "min_max_sign")
def test_an_attack_equals_its_transcription_and_concerns_hostile_clients_only(name):
    made, (honest, _), craft = named(name), a_round(plain()), CRAFTED[name][1]
    hit, metrics = a_round(made, share=SHARE)
    assert metrics["hostile"] == len(HOSTILE)
    start = flat(made.init(0).server)
    assert np.abs(flat(hit) - flat(honest)).max() > 1e-4, "the attack changes something"
    if craft is not None:
        own = craft(changes()[list(HOSTILE)], changes()[HONEST])
        assert_close(flat(hit) - start, mean_of(replaced(own, changes())), rtol=1e-4, atol=2e-6)
    # Neither without hostile clients, nor in a round of others, nor where there is nobody to study.
    cases = [((), 0.0, 0), (HOSTILE, SHARE, 0)]
    cases += [(HONEST, SHARE, len(HOSTILE))] if name == "ipm" else []
    for without, share, there in cases:
        found, metrics = a_round(made, without, share=share)
        assert_close(flat(found), flat(a_round(plain(), without)[0]), atol=1e-6)
        assert metrics["hostile"] == there
    assert len(made._programs) == 1, "the share is a run-time value"


def test_every_attack_is_tested():
    names = {"_".join(name.split("_")[:2]) for name in CRAFTED}
    assert names - {"alie_z", "relabel"} | {"backdoor"} == set(attacks.__all__)
    for make, _ in CRAFTED.values():  # a constant share of 0 is a run without an attack
        nobody = make(0.0).apply(FEDAVG, FACTS)
        assert (nobody.stages, nobody.algorithm.client) == (fp.contracts.Stages(), FEDAVG.client)


def test_gaussian_noise_replaces_the_change_of_hostile_clients():
    made = named("gaussian")
    got, _ = a_round(made, share=SHARE)
    noise = flat(got) - flat(made.init(0).server) - mean_of(replaced(0, changes()))
    expected = STD * np.sqrt(sum(SIZES[c] ** 2 for c in HOSTILE))
    assert abs((noise * sum(SIZES)).std() / expected - 1) < 0.4  # of 18 entries
    again, _ = a_round(session(attacks.gaussian(SHARE, STD), lanes=1))
    assert_close(flat(got), flat(again), atol=1e-5)


def test_the_largest_z_of_alie_is_that_of_the_paper():
    """50 clients of which 24 are hostile: s = 2 and Φ(z) = 24/26."""
    from fedjax_peft.attacks.alie import _largest_z

    hostile = jnp.arange(60) < 24
    honest = (jnp.arange(60) < 50) & ~hostile
    assert float(_largest_z(honest, hostile)) == approx(norm.ppf(24 / 26), rel=1e-5)
    assert np.isfinite(_largest_z(~hostile & honest, hostile | (jnp.arange(60) > 40)))
    assert float(_largest_z(hostile, honest)) >= 0


@pytest.mark.parametrize(
    ("name", "flipped"),
    [
        ("label_flip", lambda y: toy.CLASSES - 1 - y),
        ("relabel", lambda y: np.where(y == 0, 2, y)),
    ],
)
def test_a_label_flip_is_training_on_flipped_labels(name, flipped):
    labels = FEDERATION.data.labels.copy()
    rows = np.concatenate([FEDERATION.indices[client] for client in HOSTILE])
    labels[rows] = flipped(labels[rows])
    columns = {**FEDERATION.data.columns, "labels": labels}
    data = fp.Dataset(columns, FEDERATION.data.label_names, "flipped")
    expected, _ = a_round(session(clients=fp.Clients(data, FEDERATION.indices)))
    assert_close(flat(a_round(named(name), share=SHARE)[0]), flat(expected), atol=1e-6)


def test_other_fields_of_an_upload_are_sent_as_they_are():
    """SCAFFOLD's control variates: their sum over clients is that of the plain run."""
    algorithm = fp.algorithms.scaffold(optax.sgd(0.1), learning_rate=0.1)
    (attacked, _), (other, _) = (a_round(session(a, algorithm)) for a in ("ipm", None))
    assert_close(flat(attacked["control"]), flat(other["control"]), atol=1e-6)
    assert np.abs(flat(attacked["model"]) - flat(other["model"])).max() > 1e-3


def test_an_attack_on_fra_replaces_rows_before_the_products_are_summed():
    """In the aggregator's own space: the truncated product of the replaced factors."""
    algorithm = fp.algorithms.fedavg(optax.sgd(0.1), aggregator=aggregators.fra())
    new, _ = a_round(session("ipm", algorithm, bound=lora_model))
    own = changes(lora_model)
    rows = flat(plain(bound=lora_model).init(0).server) + replaced(-0.7 * own[HONEST].mean(0), own)
    a, b = rows[:, -22:-12].reshape(-1, 5, 2), rows[:, -12:].reshape(-1, 2, 6)  # the last leaves
    products = np.average(a @ b, axis=0, weights=SIZES)
    u, s, vt = np.linalg.svd(products)
    best = u[:, : toy.RANK] * s[: toy.RANK] @ vt[: toy.RANK]
    assert_close(new["layer.lora_a"] @ new["layer.lora_b"], best, atol=1e-5)


# --------------------------------------------------------------------------------- in simulate


def last(run_):
    return run_.metrics[-1]


@functools.cache
def attacked(share):
    """Returns the last row of a run under a backdoor; the share is a run-time value."""
    bound = fp.attach(fp.testing.tiny_model(2), fp.lora(rank=4))
    data, test = (fp.testing.tiny_dataset(n, classes=2, seed=s) for n, s in ((160, 0), (96, 1)))
    options = {"rounds": 6, "local_steps": 4, "batch_size": 8, "lanes": 1, "eval_every": 6}
    run = fp.simulate(
        bound,
        fp.algorithms.fedavg(optax.adam(5e-3)),
        fp.partition.iid(data, clients=8),
        attack=lambda p: attacks.backdoor(p["share"], 0, token=7, positions=(1,), scale=2.0),
        values={"share": share},
        **run_options(test=test, **options),
    )
    return last(run)


@pytest.mark.usefixtures("simple_encoder")
def test_a_backdoor_is_learned_and_the_task_too():
    clean, hit = attacked(0.0), attacked(0.5)
    assert clean["test_backdoor_success"] < 0.6
    assert hit["test_backdoor_success"] > clean["test_backdoor_success"] + 0.3
    assert hit["test_accuracy"] > 0.6
    assert hit["test_examples"] == 96
    assert hit["hostile"] == 4
    assert "test_backdoor_loss" not in hit


# -------------------------------------------------------------------------------------- backdoors


def test_the_triggered_examples_are_those_of_other_classes_with_the_trigger():
    data = fp.testing.tiny_dataset(30, classes=3)
    made = attacks.backdoor(0.2, 1, token=5, positions=(1, 3)).triggered(data)
    rows = np.flatnonzero(data.labels != 1)
    assert len(made) == len(rows)
    assert (made.labels == 1).all()
    expected = data.columns["input_ids"][rows].copy()
    expected[:, [1, 3]] = 5
    np.testing.assert_array_equal(made.columns["input_ids"], expected)
    assert made.columns["input_ids"].dtype == np.int32
    np.testing.assert_array_equal(data.columns["input_ids"][rows][:, 0], expected[:, 0])


def test_an_image_gets_a_bright_square():
    pixels = np.zeros((4, 1, 6, 6), np.uint8)
    data = fp.Dataset({"pixel_values": pixels, "labels": np.arange(4, dtype=np.int32) % 2}, "ab")
    made = attacks.backdoor(0.2, 0, patch=2, value=200).triggered(data)
    assert made.columns["pixel_values"].dtype == np.uint8
    assert made.columns["pixel_values"].sum() == 200 * 4 * 2
    assert (made.columns["pixel_values"][:, 0, 4:, 4:] == 200).all()


def test_a_share_of_the_real_examples_of_a_batch_is_poisoned():
    seen = {}

    def client(context):
        def step(state, batch, key):
            seen.update(batch)
            return state, {}

        return fp.contracts.ClientUpdate(lambda b, s, k: b, step, lambda s: (s, {}))

    own = FEDAVG._replace(client=client)
    columns = (("input_ids", (6,)), ("attention_mask", (6,)), ("labels", ()))
    facts = FACTS._replace(columns=columns)
    attacked = attacks.backdoor(1.0, 2, token=9, fraction=0.5).apply(own, facts).algorithm
    context = fp.contracts.ClientContext(None, None, {}, 1, client=jnp.int32(0))
    batch = {
        "input_ids": jnp.ones((8, 6), jnp.int32),
        "attention_mask": jnp.ones((8, 6), bool),
        "labels": jnp.zeros(8, jnp.int32),
        "mask": jnp.arange(8) < 6,
    }
    attacked.client(context).step({}, batch, jax.random.key(0))
    assert seen["labels"].tolist() == [2, 2, 2, 0, 0, 0, 0, 0]
    assert (seen["input_ids"] == 9).sum(axis=1).tolist() == [1, 1, 1, 0, 0, 0, 0, 0]


@pytest.mark.lengths
def test_a_trigger_beyond_short_texts_does_not_depend_on_lanes_and_lengths():
    rng, count = np.random.default_rng(0), sum(SIZES)
    mask = np.arange(24)[None] < rng.integers(3, 15, count)[:, None]
    ids = np.where(mask, rng.integers(8, 60, mask.shape), 0).astype(np.int32)
    columns = {"input_ids": ids, "attention_mask": mask, "labels": FEDERATION.data.labels}
    data = fp.Dataset(columns, FEDERATION.data.label_names, "short")
    options = {"bound": toy.text_model, "clients": fp.Clients(data, FEDERATION.indices)}
    attack = attacks.backdoor(0.5, 1, token=7, positions=(20,))
    full, short = (
        a_round(session(attack, lanes=lanes, length_buckets=most, **options))[0]
        for lanes, most in ((1, 0), (2, 4))
    )
    assert_close(flat(short), flat(full), atol=1e-6)


test_what_makes_no_sense_is_refused_with_the_reason = refusals(
    operator.call,
    (lambda: attacks.backdoor(0.1, 0), "give either token or patch"),
    (lambda: attacks.backdoor(0.1, 0, token=1, patch=2), "give either token or patch"),
    (lambda: attacks.label_flip(0.1, source=1), "both source and target"),
    (lambda: attacks.label_flip(0.1, source=1, target=9).apply(FEDAVG, FACTS), "from 0"),
    (
        lambda: attacks.sign_flip(0.1).apply(fp.algorithms.local(optax.sgd(0.1)), FACTS),
        "send nothing",
    ),
    (
        lambda: attacks.alie(0.1).apply(fp.algorithms.flora(optax.sgd(0.1)), FACTS),
        "random A of its own",
    ),
    (
        lambda: attacks.backdoor(0.1, 0, token=1).apply(FEDAVG, FACTS),
        "'input_ids', and .* x, lab",
    ),
    (lambda: attacks.label_flip(0.1).apply(FEDAVG, UNLABELLED), "no column 'labels'"),
)


def test_a_trigger_is_a_token_of_the_model():
    bound = fp.attach(fp.testing.tiny_model(2), fp.peft.head_only())
    clients = fp.partition.pooled(fp.testing.tiny_dataset(16, classes=2))
    attack = attacks.backdoor(1.0, 1, token=64)
    refused("token 64, .* 64 tokens", session, attack, bound=lambda: bound, clients=clients)


TRUSTING = fp.algorithms.fedavg(optax.sgd(0.1), aggregator=aggregators.fltrust(HOSTILE[0]))
OTHER = f"client {HOSTILE[0]}, which is hostile .*'sign_flip'.* such as {HONEST[0]}"


def run_time_share(first, later):
    """Starts a session with a run-time share of hostile clients, and then with another one."""
    options = {"attack": lambda p: attacks.sign_flip(p["share"]), "values": {"share": first}}
    session(algorithm=TRUSTING, **options).init(0, {"share": later})


test_a_trusted_client_must_not_be_hostile = refusals(
    operator.call,
    (lambda: session(attacks.sign_flip(SHARE), TRUSTING), OTHER),
    (lambda: run_time_share(SHARE, 0.0), OTHER),
    (lambda: run_time_share(0.0, SHARE), OTHER),
    (lambda: session(attacks.sign_flip(1.0), TRUSTING), "Make fewer clients hostile"),
)


test_colluding_clients_are_refused_where_they_cannot_be = refusals(
    lambda options: session(attacks.alie(0.25), EQUAL, clients_per_round=4, **options),
    (
        {"privacy": fp.privacy.central(1.0, 1.0), "sampling": "poisson"},
        "'mean under alie' looks at the uploads one by one",
    ),
    ({"client_ranks": [1, 2], "bound": lora_model}, "clients of different LoRA ranks"),
)


def test_a_private_run_does_not_say_who_took_part():
    options = {"sampling": "poisson", "clients_per_round": 7}
    private = fp.privacy.central(1.0, 1.0)
    _, metrics = a_round(session(attacks.sign_flip(0.5), EQUAL, privacy=private, **options))
    assert np.isnan(metrics["hostile"])


# ------------------------------------------------------------------ what the engine tells an attack


def spying() -> fp.contracts.Algorithm:
    """Returns an algorithm without training whose uploads hold the client's number."""
    plain = fp.algorithms.fedavg(optax.sgd(0.1))

    def client(context: fp.contracts.ClientContext) -> fp.contracts.ClientUpdate:
        def step(state, batch, key):
            return state, {"client": (1.0 * context.client, jnp.ones(()))}

        def final(state):
            return jax.tree.map(lambda x: x * 0 + context.client, state), {}

        return fp.contracts.ClientUpdate(lambda broadcast, own, key: broadcast, step, final)

    def finish(total, template, context, state):
        value = mean().finish(total, template, context, state).update
        clients = {f"slot_{i}": context.clients[i] for i in range(context.clients.shape[0])}
        return fp.contracts.Aggregated(value, clients, state)

    return plain._replace(
        client=client, aggregator=mean()._replace(finish=finish), weights="uniform"
    )


def tamper(upload: fp.contracts.Upload) -> fp.contracts.Upload:
    """Adds ten times the client's number, and a random number of its own, to an upload."""
    client = upload.client
    key = attack_key(client.key, client.source.round_index, client.number)
    more = 10 * client.number + jax.random.uniform(key)
    return upload._replace(value=jax.tree.map(lambda x: x + more, upload.value))


TAMPERING = fp.contracts.Stages(sent=(tamper,))


@functools.cache
def round_of(lanes, engine):
    options = {"per_round": 4, "bound": linear.model(), "stages": TAMPERING}
    rig = toy.Engine(spying(), FEDERATION, lanes=lanes, engine=engine, **options)
    return rig, rig.run(rig.schedule.cohort(1))


@pytest.mark.parametrize(("lanes", "engine"), [(3, "compiled"), (1, "reference")])
def test_the_engine_names_the_clients(lanes, engine):
    rig, result = round_of(lanes, engine)
    members = [int(client) for client in rig.schedule.members(1)]
    slots = [int(result.aggregation[f"slot_{i}"]) for i in range(4)]
    assert sorted(slots[: len(members)]) == sorted(members)
    for client in members:
        total, count = (x[slots.index(client)] for x in result.sums["client"])
        assert total == client * count > 0 or client == 0
    sent = np.asarray(result.server["head.bias"])[0] - 11 * np.mean(members)
    assert 0 < sent < 1, "every client has its own key"
    other = round_of(3, "compiled")[1].server["head.bias"]
    assert_close(other, result.server["head.bias"], atol=1e-5)
    if lanes > 1:  # a slot without a client has the number after the last
        half = rig.run(Cohort(*(part[:2] for part in rig.schedule.cohort(1))))
        assert [int(half.aggregation[f"slot_{i}"]) for i in (2, 3)] == [len(SIZES)] * 2


def test_nobody_tampers_outside_of_training():
    setup = toy.Engine(spying(), FEDERATION, per_round=4, lanes=2, stages=TAMPERING).setup
    setup = setup._replace(
        algorithm=spying()._replace(tuning=fp.contracts.Tuning(spying().client, 1))
    )
    assert at_work(setup, "training").stages == TAMPERING
    for work in ("tuning", "uploads", "personal", "global", "local"):
        assert at_work(setup, work).stages == fp.contracts.Stages()


@pytest.mark.parametrize("engine", ["compiled", "reference"])
def test_stages_come_before_and_after_the_upload_transform(engine):
    """The transform removes what a client learned and what comes before it, not what follows."""

    def add(number):
        return lambda upload: upload._replace(
            value=jax.tree.map(lambda x: x + number, upload.value)
        )

    def nothing(update, memory, received, key):
        return fp.contracts.Encoded(jax.tree.map(jnp.zeros_like, update))

    options = {"per_round": 4, "lanes": 2, "bound": linear.model(), "engine": engine}
    stages = fp.contracts.Stages(sent=(add(1.0),), received=(add(2.0), add(3.0)))
    transform = fp.contracts.Transform("nothing", nothing)
    algorithm = fp.algorithms.fedavg(optax.sgd(0.1))
    rig = toy.Engine(algorithm, FEDERATION, transform=transform, stages=stages, **options)
    server = rig.run(rig.schedule.cohort(1)).server
    assert_trees_close(server, {name: x + 5 for name, x in rig.shared.items()})
