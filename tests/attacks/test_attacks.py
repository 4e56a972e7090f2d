"""Attacks equal NumPy transcriptions of their papers, and change only what hostile clients send."""

import functools
import itertools

import jax
import jax.numpy as jnp
import linear
import numpy as np
import optax
import pytest
import toy
from closeness import approx, assert_close, assert_trees_close
from options import run_options, session_options
from scipy.stats import norm

import fedjax_peft as fp
from fedjax_peft import aggregators, attacks
from fedjax_peft.algorithms import fedavg, scaffold
from fedjax_peft.contracts import Federation, Wrapped
from fedjax_peft.engine.plan import Cohort
from fedjax_peft.support.errors import InputError

pytestmark = pytest.mark.slow

SIZES = (7, 4, 12, 1, 9, 5, 8)
FEDERATION = toy.clients(SIZES)
COLUMNS = tuple((name, x.shape[1:]) for name, x in FEDERATION.data.columns.items())
FACTS = Federation(
    *(len(SIZES), len(SIZES), "all", 4, "shuffled", 3, 1, 1), columns=COLUMNS, classes=toy.CLASSES
)
SHARE = 0.3
HOSTILE = attacks.sign_flip(SHARE).hostile(len(SIZES))
SGD = optax.sgd(0.1)


FEDAVG, model = fedavg(SGD), functools.cache(toy.model)


def engine(attack=None, *, lanes=3, algorithm=FEDAVG, kind="compiled", bound=None):
    attacked, stages = Wrapped(algorithm) if attack is None else attack.apply(algorithm, FACTS)
    options = {"per_round": len(SIZES), "lanes": lanes, "engine": kind, "bound": bound or model()}
    return toy.Engine(attacked, FEDERATION, stages=stages, **options)


def run(rig, cohort=None):
    return rig.run(cohort or rig.schedule.cohort(1), 1)


@functools.cache
def plain():
    """Returns rounds without an attack."""
    return engine()


@functools.cache
def changes():
    """Returns every client's honest change in round 1, from rounds in which it is alone."""
    rig = plain()
    cohort = rig.schedule.cohort(1)
    start = rig.model_at_start()
    found = []
    for place in range(len(SIZES)):
        sent = run(rig, Cohort(*([part[place]] for part in cohort))).server
        found.append(flat({n: np.asarray(sent[n]) - np.asarray(start[n]) for n in start}))
    return np.stack(found)


def flat(leaves):
    return np.concatenate([np.asarray(leaves[n], np.float64).ravel() for n in sorted(toy.SHARED)])


def update(attack, **options):
    """Returns the server's change in round 1 under an attack, and the metrics."""
    rig = engine(attack, **options)
    result = run(rig)
    return flat(result.server) - flat(rig.model_at_start()), result.aggregation


def mean_of(rows):
    return np.average(rows, axis=0, weights=SIZES)


def replaced(crafted):
    """Returns the honest changes with those of hostile clients replaced."""
    rows = changes().copy()
    rows[list(HOSTILE)] = crafted
    return rows


HONEST = [c for c in range(len(SIZES)) if c not in HOSTILE]


# ----------------------------------------------------------------------------------- who is hostile


def test_the_hostile_clients_are_a_share_chosen_by_seed():
    assert len(HOSTILE) == 2 == round(SHARE * len(SIZES))
    everyone = [set(attacks.ipm(share).hostile(20)) for share in (0, 0.1, 0.2, 0.4, 1.0)]
    assert [len(found) for found in everyone] == [0, 2, 4, 8, 20]
    assert all(a < b for a, b in itertools.pairwise(everyone)), "more are added"
    assert attacks.ipm(0.2).hostile(20) == attacks.alie(0.2).hostile(20)
    assert attacks.ipm(0.2, seed=1).hostile(20) != attacks.ipm(0.2).hostile(20)


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan"), "all", True])
def test_a_share_that_does_not_exist_is_refused(share):
    with pytest.raises(InputError, match=r"share = .* of sign_flip must be a number from 0 to 1"):
        attacks.sign_flip(share)


# -------------------------------------------------------------------------- each attack, by a loop


def alie_in_numpy(rows, z=None):
    n, m = len(SIZES), len(HOSTILE)
    s = np.floor(n / 2 + 1) - m
    z = norm.ppf((n - m - s) / (n - m)) if z is None else z
    return rows.mean(axis=0) - z * rows.std(axis=0)


def min_max_in_numpy(rows, direction):
    """The paper's search: the step is halved, the factor grows where the bound holds."""
    mean = rows.mean(axis=0)
    towards = {
        "unit": -mean / np.linalg.norm(mean),
        "std": -rows.std(axis=0),
        "sign": -np.sign(mean),
    }[direction]
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


CRAFTED = {
    "sign_flip": (attacks.sign_flip(SHARE, scale=2.0), lambda own, rows: -2 * own),
    "scaled": (attacks.scaled(SHARE, 5.0), lambda own, rows: 5 * own),
    "alie": (attacks.alie(SHARE), lambda own, rows: alie_in_numpy(rows)),
    "alie_z": (attacks.alie(SHARE, z=1.5), lambda own, rows: alie_in_numpy(rows, 1.5)),
    "ipm": (attacks.ipm(SHARE, epsilon=0.7), lambda own, rows: -0.7 * rows.mean(axis=0)),
} | {
    f"min_max_{way}": (
        attacks.min_max(SHARE, direction=way),
        lambda own, rows, way=way: min_max_in_numpy(rows, way),
    )
    for way in ("unit", "std", "sign")
}


@pytest.mark.parametrize("name", CRAFTED)
@pytest.mark.sample("sign_flip", "scaled", "alie", "ipm", "min_max_std", "min_max_sign")
def test_an_attack_equals_its_transcription(name):
    attack, craft = CRAFTED[name]
    expected = mean_of(replaced(craft(changes()[list(HOSTILE)], changes()[HONEST])))
    assert np.abs(expected - mean_of(changes())).max() > 1e-3, "the attack changes something"
    got, metrics = update(attack)
    assert_close(got, expected, rtol=1e-4, atol=2e-6)
    assert metrics["hostile"] == len(HOSTILE)


@pytest.mark.parametrize("way", ["unit", "std", "sign"])
def test_min_max_stays_within_the_largest_honest_distance(way):
    rows = changes()[HONEST]
    largest = max(np.linalg.norm(a - b) for a in rows for b in rows)
    crafted = min_max_in_numpy(rows, way)
    assert max(np.linalg.norm(crafted - r) for r in rows) == approx(largest, rel=1e-6)


def test_gaussian_noise_replaces_the_change_of_hostile_clients():
    std = 3.0
    got, _ = update(attacks.gaussian(SHARE, std))
    honest = changes().copy()
    honest[list(HOSTILE)] = 0
    noise = (got - mean_of(honest)) * sum(SIZES)
    expected = std * np.sqrt(sum(SIZES[c] ** 2 for c in HOSTILE))
    assert abs(noise.std() / expected - 1) < 0.25  # of 43 entries
    again, _ = update(attacks.gaussian(SHARE, std), lanes=1)
    assert_close(got, again, atol=1e-5)


def test_the_largest_z_of_alie_is_that_of_the_paper():
    """50 clients of which 24 are hostile: s = 2 and Φ(z) = 24/26."""
    from fedjax_peft.attacks.alie import _largest_z

    hostile = jnp.arange(60) < 24
    honest = (jnp.arange(60) < 50) & ~hostile
    assert float(_largest_z(honest, hostile)) == approx(norm.ppf(24 / 26), rel=1e-5)
    assert np.isfinite(_largest_z(~hostile & honest, hostile | (jnp.arange(60) > 40)))
    assert float(_largest_z(hostile, honest)) >= 0


@pytest.mark.parametrize(
    ("attack", "flipped"),
    [
        (attacks.label_flip(SHARE), lambda y: toy.CLASSES - 1 - y),
        (attacks.label_flip(SHARE, source=0, target=2), lambda y: np.where(y == 0, 2, y)),
    ],
)
def test_a_label_flip_is_training_on_flipped_labels(attack, flipped):
    columns = {name: x.copy() for name, x in FEDERATION.data.columns.items()}
    for client in HOSTILE:
        rows = FEDERATION.indices[client]
        columns["labels"][rows] = flipped(columns["labels"][rows])
    honest = plain()
    expected = honest.run(honest.schedule.cohort(1), 1, columns=columns)
    result = run(engine(attack))
    for name, x in result.server.items():
        assert_close(x, expected.server[name], atol=1e-6)
        assert np.abs(x - run(honest).server[name]).max() > 1e-4


# --------------------------------------------------------------------------- what does not change


ALL = {
    "alie": attacks.alie,
    "gaussian": functools.partial(attacks.gaussian, std=1.0),
    "ipm": attacks.ipm,
    "label_flip": attacks.label_flip,
    "min_max": attacks.min_max,
    "scaled": functools.partial(attacks.scaled, factor=4.0),
    "sign_flip": attacks.sign_flip,
}


def test_every_attack_is_tested():
    assert {*ALL, "backdoor"} == set(attacks.__all__)


@pytest.mark.parametrize("name", ALL)
def test_without_hostile_clients_nothing_changes(name):
    got, expected = run(engine(ALL[name](0.0))), run(plain())
    assert got.aggregation.pop("hostile") == 0
    assert_trees_close(got, expected)


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("alie", {"lanes": 1}),
        ("sign_flip", {"lanes": 1}),
        ("alie", {"kind": "reference"}),
        pytest.param("sign_flip", {"kind": "reference"}, marks=pytest.mark.exhaustive),
    ],
)
@pytest.mark.sample("sign_flip*", "alie-other2")
def test_lanes_and_the_plain_loop_attack_the_same_clients(name, other):
    attack, small = ALL[name](SHARE), linear.model()
    one, another = run(engine(attack, bound=small)), run(engine(attack, bound=small, **other))
    assert_trees_close(one[:2], another[:2], atol=1e-5)
    assert another.aggregation["hostile"] == one.aggregation["hostile"] == len(HOSTILE)


@pytest.mark.parametrize("name", ["sign_flip", "ipm"])
def test_a_round_of_honest_clients_is_not_attacked(name):
    rig = engine(ALL[name](SHARE))
    cohort = rig.schedule.cohort(1)
    honest = Cohort(*([part[c] for c in HONEST] for part in cohort))
    got, expected = run(rig, honest), run(plain(), honest)
    assert got.aggregation["hostile"] == 0
    for leaf, x in got.server.items():
        assert_close(x, expected.server[leaf], atol=1e-6)


def test_hostile_clients_alone_send_what_they_learned_where_there_is_nobody_to_study():
    cohort = plain().schedule.cohort(1)
    alone = Cohort(*([part[c] for c in HOSTILE] for part in cohort))
    got, expected = run(engine(ALL["ipm"](SHARE)), alone), run(plain(), alone)
    for leaf, x in got.server.items():
        assert_close(x, expected.server[leaf], atol=1e-6)


def test_other_fields_of_an_upload_are_sent_as_they_are():
    """SCAFFOLD's control variates: their sum over clients is that of the plain run."""
    algorithm = scaffold(SGD, learning_rate=0.1)
    got, expected = (run(engine(a, algorithm=algorithm)) for a in (ALL["ipm"](SHARE), None))
    same, other = got.server, expected.server
    names = [n for n in same if n != "params"]
    assert any(
        np.allclose(x, y, atol=1e-6)
        for n in names
        for x, y in zip(*map(jax.tree.leaves, (same[n], other[n])), strict=True)
    )


def test_an_attack_on_fra_replaces_rows_before_the_products_are_summed():
    """In the aggregator's own space: the truncated product of the replaced factors."""
    algorithm = fedavg(SGD, aggregator=aggregators.fra())
    got, _ = update(attacks.ipm(SHARE, epsilon=0.7), algorithm=algorithm)
    rig = engine(algorithm=algorithm)
    start = rig.model_at_start()
    rows = replaced(-0.7 * changes()[HONEST].mean(axis=0))
    sizes = [np.size(start[n]) for n in sorted(toy.SHARED)]
    splits = np.cumsum(sizes)[:-1]
    products = 0
    for row, weight in zip(rows, SIZES, strict=True):
        leaves = dict(zip(sorted(toy.SHARED), np.split(row, splits), strict=True))
        a, b = (
            np.asarray(start[f"layer.lora_{f}"])
            + leaves[f"layer.lora_{f}"].reshape(start[f"layer.lora_{f}"].shape)
            for f in "ab"
        )
        products = products + weight / sum(SIZES) * a @ b
    u, s, vt = np.linalg.svd(products)
    best = u[:, : toy.RANK] * s[: toy.RANK] @ vt[: toy.RANK]
    new = flat(start) + got
    leaves = dict(zip(sorted(toy.SHARED), np.split(new, splits), strict=True))
    a = leaves["layer.lora_a"].reshape(-1, toy.RANK)
    assert_close(a @ leaves["layer.lora_b"].reshape(toy.RANK, -1), best, atol=1e-5)


# --------------------------------------------------------------------------------- in simulate


def federation(examples=160, clients=8):
    data = fp.testing.tiny_dataset(examples, classes=2)
    return fp.partition.iid(data, clients=clients), fp.testing.tiny_dataset(96, classes=2, seed=1)


@functools.cache
def tiny():
    config = {**fp.testing.TINY_BERT, "num_hidden_layers": 1, "hidden_dropout_prob": 0.0}
    return fp.attach(fp.random_model(config, head=fp.heads.classification(2)), fp.lora(rank=4))


ADAM = fedavg(optax.adam(5e-3))
backdoor = functools.partial(attacks.backdoor, target=0, token=7, positions=(1,))


def last(run_):
    return run_.metrics[-1]


def simulated(attack):
    """Returns the last row of a run."""
    train, test = federation()
    options = {"rounds": 6, "local_steps": 4, "batch_size": 8, "lanes": 1, "eval_every": 6}
    return last(
        fp.simulate(tiny(), ADAM, train, test=test, attack=attack, **run_options(**options))
    )


@functools.cache
def without_hostile_clients():
    return simulated(backdoor(0.0))


def test_a_backdoor_is_learned_and_the_task_too():
    clean, hit = without_hostile_clients(), simulated(backdoor(0.5, scale=2.0))
    assert clean["test_backdoor_success"] < 0.6
    assert hit["test_backdoor_success"] > clean["test_backdoor_success"] + 0.3
    assert hit["test_accuracy"] > 0.6
    assert hit["test_examples"] == 96
    assert hit["hostile"] == 4


def test_flipped_labels_of_most_clients_ruin_the_mean():
    clean, flipped = without_hostile_clients(), simulated(attacks.label_flip(0.8))
    assert clean["test_accuracy"] > 0.7
    assert flipped["test_accuracy"] < 0.4


def test_the_share_is_a_run_time_value_and_compiles_once():
    options = {"local_steps": 1, "lanes": 1, "batch_size": 4}
    session = fp.session(
        *(model(), FEDAVG, FEDERATION),
        attack=lambda p: attacks.alie(p["share"]),
        values={"share": SHARE},
        **session_options(**options),
    )
    found = []
    for share in (SHARE, 0.5):
        state, info = session.step(session.init(0, {"share": share}))
        found.append(float(info.aggregation["hostile"]))
    assert found == [2, 4]
    assert len(session._programs) == 1
    program = next(iter(session._programs.values()))
    fixed = fp.session(
        model(), FEDAVG, FEDERATION, attack=attacks.alie(0.5), **session_options(**options)
    )
    expected, _ = fixed.step(fixed.init(0))
    for name, x in state.server.items():
        assert_close(x, expected.server[name], atol=1e-6)
    assert program._compiled is not None


def test_a_resumed_run_has_the_same_hostile_clients(tmp_path):
    attack = attacks.gaussian(SHARE, 0.01)
    options = {"test": toy.dataset(20, seed=5), "eval_every": 2, "local_steps": 1}
    simulate = functools.partial(
        fp.simulate, model(), FEDAVG, FEDERATION, attack=attack, **run_options(**options)
    )
    whole = simulate(rounds=2)
    simulate(rounds=1, out=tmp_path)
    resumed = simulate(rounds=2, out=tmp_path, resume=True)
    assert last(resumed)["test_loss"] == last(whole)["test_loss"]
    assert last(resumed)["hostile"] == last(whole)["hostile"] == 2


def test_personal_models_have_a_backdoor_of_their_own():
    train, test = federation()
    result = fp.simulate(
        *(tiny(), fedavg(optax.adam(5e-3), head="private"), train),
        attack=attacks.backdoor(0.25, 1, token=7),
        **run_options(
            **{"test": test, "rounds": 1, "local_steps": 1, "lanes": 1, "test_clients": 2},
            progress=False,
        ),
    )
    row = last(result)
    assert {"test_backdoor_success", "test_backdoor_success_std"} <= set(row)
    assert "test_backdoor_loss" not in row
    assert row["test_examples"] == 96


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

    plain = fedavg(SGD)._replace(client=client)
    columns = (("input_ids", (6,)), ("attention_mask", (6,)), ("labels", ()))
    facts = FACTS._replace(columns=columns)
    attacked = attacks.backdoor(1.0, 2, token=9, fraction=0.5).apply(plain, facts).algorithm
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


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: attacks.backdoor(0.1, 0), "give either token or patch"),
        (lambda: attacks.backdoor(0.1, 0, token=1, patch=2), "give either token or patch"),
        (lambda: attacks.backdoor(0.1, 0, token=-1), "token = -1 of backdoor"),
        (lambda: attacks.backdoor(0.1, 0, token=1, positions=()), "must list numbers"),
        (lambda: attacks.backdoor(0.1, 0, patch=2, value=300), "value = 300"),
        (lambda: attacks.backdoor(0.1, 0, token=1, fraction=2), "fraction = 2 of backdoor"),
        (lambda: attacks.label_flip(0.1, source=1), "both source and target"),
        (lambda: attacks.label_flip(0.1, source=1, target=9).apply(fedavg(SGD), FACTS), "from 0"),
        (lambda: attacks.min_max(0.1, direction="up"), "There is no direction 'up'"),
        (lambda: attacks.gaussian(0.1, -1), "std = -1 of gaussian"),
        (lambda: attacks.sign_flip(0.1).apply(fp.algorithms.local(SGD), FACTS), "send nothing"),
        (lambda: attacks.alie(0.1).apply(fp.algorithms.flora(SGD), FACTS), "random A of its own"),
        (
            lambda: attacks.backdoor(0.1, 0, token=1).apply(fedavg(SGD), FACTS),
            "the column 'input_ids', and these have x, labels",
        ),
        (
            lambda: attacks.label_flip(0.1).apply(
                fedavg(SGD), FACTS._replace(columns=(("x", (5,)),), classes=0)
            ),
            "no column 'labels'",
        ),
    ],
)
def test_what_makes_no_sense_is_refused_with_the_reason(make, match):
    with pytest.raises(InputError, match=match):
        make()


def test_colluding_clients_are_refused_where_noise_is_added_to_a_sum():
    with pytest.raises(InputError, match="'mean under alie' looks at the uploads one by one"):
        fp.session(
            *(model(), fedavg(SGD, weights="uniform"), FEDERATION),
            attack=attacks.alie(0.25),
            privacy=fp.privacy.central(1.0, 1.0),
            **session_options(**{"sampling": "poisson", "clients_per_round": 4}),
        )


def test_a_private_run_does_not_say_who_took_part():
    session = fp.session(
        *(model(), fedavg(SGD, weights="uniform"), FEDERATION),
        attack=attacks.sign_flip(0.5),
        privacy=fp.privacy.central(1.0, 1.0),
        **session_options(
            **{"sampling": "poisson", "clients_per_round": 7, "local_steps": 1, "lanes": 1}
        ),
    )
    _, info = session.step(session.init(0))
    assert np.isnan(info.aggregation["hostile"])


def test_colluding_clients_have_all_directions():
    with pytest.raises(InputError, match="clients of different LoRA ranks"):
        fp.session(
            model(),
            FEDAVG,
            FEDERATION,
            attack=attacks.alie(0.25),
            system=fp.System(client_ranks=[1, 2]),
        )
