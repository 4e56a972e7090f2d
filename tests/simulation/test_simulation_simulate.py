"""``simulate``: reproducible numbers, and errors for wrong arguments."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import running
import toy
from closeness import approx
from compiled import compilations
from internals import TINY_BERT, Layout, Schedule, choose_lanes, host_rng
from options import run_options
from running import leaves, rows
from shallow import simplify

import fedjax_peft as fp

pytestmark = pytest.mark.slow

MODEL = toy.model()
SIZES = (7, 4, 12, 1, 9, 16, 3, 0, 5, 10, 2)
TRAIN, HELD_OUT = toy.clients(SIZES).holdout(0.4)
TEST = toy.dataset(30, seed=5)
ADAM = optax.adam(0.02)
ALGORITHMS = {
    "mean": fp.algorithms.fedavg(ADAM),
    "fra": fp.algorithms.fedavg(ADAM, aggregator=fp.aggregators.fra()),
    "private": fp.algorithms.fedavg(ADAM, head="private"),
    "frozen": fp.algorithms.fedavg(ADAM, head="frozen"),
    "local": fp.algorithms.local(ADAM),
}


def run(name, **changes):
    options = {"clients": TRAIN, "test": TEST, "client_test": HELD_OUT, "clients_per_round": 6}
    options |= {"model": MODEL, "rounds": 4, "lanes": 3, "test_clients": 3}
    return running.run(ALGORITHMS[name], **options | changes)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Returns a function that returns a run, and the number of compilations before each row."""

    @functools.cache
    def of(name):
        counts, out = [], tmp_path_factory.mktemp("runs") / name
        count = {"on_round": lambda row: counts.append(len(compilations))}
        return run(name, out=out, checkpoint_every=1, **count), counts

    return of


@jax.jit
def logits(params, x):
    return MODEL.apply(MODEL.frozen, params, {"x": x}, None, False).logits


def accuracy(params, data, rows=slice(None)):
    """Returns the accuracy of a model, with all examples in one batch."""
    found = np.asarray(logits(params, data.columns["x"]))
    return float(np.mean((found.argmax(axis=1) == data.labels)[rows]))


@pytest.mark.parametrize("name", ["mean", "fra", "private"])
@pytest.mark.sample("private")
def test_nothing_compiles_after_the_first_round(finished, name):
    """Checkpoints and evaluations included."""
    _, counts = finished(name)
    assert counts[1] > counts[0], "the listener hears the round program"
    assert counts[1:] == [counts[1]] * 4


def test_the_same_seed_gives_the_same_rows_to_the_bit(finished):
    one, again = finished("mean")[0], run("mean")
    assert rows(one) == rows(again)
    running.assert_same_models(one, again, atol=0)
    other = run("mean", seed=1)
    assert [r["clients"] for r in rows(one)[1:]] != [r["clients"] for r in rows(other)[1:]]
    losses = [[row["train_loss"] for row in rows(r)[1:]] for r in (one, other)]
    assert all(a != b for a, b in zip(*losses, strict=True))


def tiny_bert(dtype):
    shape = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16}
    model = fp.random_model({**TINY_BERT, **shape}, head=fp.heads.classification(4), dtype=dtype)
    return fp.attach(model, fp.lora(rank=2), seed=0)


def test_bfloat16_computes_and_float32_learns(monkeypatch):
    simplify(monkeypatch)
    model, data = tiny_bert("bfloat16"), fp.testing.tiny_dataset(12)
    frozen = model.compute_frozen()
    assert frozen["bert.encoder.layer.0.output.dense.kernel"].dtype == jnp.bfloat16
    clients = fp.partition.iid(data, 3)
    result = running.run(
        fp.algorithms.fedavg(optax.adamw(1e-2)), model=model, clients=clients, lanes=3
    )
    for name, value in result.params.items():
        assert value.dtype == jnp.float32, name
        assert np.isfinite(value).all(), name
        # The change is not one of bfloat16's 8 bits.
        if not name.endswith("scale"):
            assert np.any(value != value.astype(jnp.bfloat16).astype(jnp.float32)), name

    def logits(model):
        apply = jax.jit(model.apply, static_argnums=(3, 4))
        return np.asarray(apply(model.frozen, result.params, data.columns, None, False).logits)

    found, expected = logits(model.replace(frozen=frozen)), logits(tiny_bert("float32"))
    assert np.any(found != expected)
    assert np.abs(found - expected).max() < 0.05 * np.abs(expected).max()


def test_the_fields_of_rows(finished):
    result, _ = finished("mean")
    assert [row["round"] for row in result.metrics] == [0, 1, 2, 3, 4]
    for row in rows(result)[1:]:
        drawn = host_rng(0, "cohort", row["round"]).choice(len(SIZES), 6, replace=False)
        with_work = sorted(c for c in drawn.tolist() if TRAIN.sizes[c])
        assert row["clients"] == with_work
        assert row["dropped"] == []
        assert row["steps"] == sum(-(-int(TRAIN.sizes[c]) // 4) for c in with_work)
        assert 0 < row["padded_utilisation"] <= row["slot_utilisation"] <= 1
        assert row["aggregation_error"] > 0
        total = row["aggregation_error"]  # sqrt(x²) of the only matrix
        assert row["layers"] == {"aggregation_error": {"layer": approx(total, rel=1e-6)}}
    assert any(len(row["clients"]) < 6 for row in rows(result)[1:]), "an empty client was drawn"
    assert json.loads(json.dumps(result.metrics)) == result.metrics
    assert repr(result).startswith("Run(fedavg: 4 rounds, test accuracy 0.")
    lost = {**result.metrics[-1], "test_accuracy": None}  # a score that is not finite
    lost_run = dataclasses.replace(result, metrics=[*result.metrics[:-1], lost])
    assert repr(lost_run).endswith("test accuracy not finite)")


def test_test_metrics_are_those_of_the_global_model(finished):
    result, _ = finished("mean")
    assert result.metrics[0]["test_accuracy"] == approx(accuracy(MODEL.trainable, TEST), abs=1e-7)
    assert result.metrics[-1]["test_accuracy"] == approx(accuracy(result.params, TEST), abs=1e-7)
    values = [
        accuracy(result.params, HELD_OUT.data, rows) for rows in HELD_OUT.indices if len(rows)
    ]
    assert 1 < len(values) < len(SIZES)
    last = result.metrics[-1]
    assert last["client_accuracy_mean"] == approx(np.mean(values), abs=1e-6)
    assert last["client_accuracy_std"] == approx(np.std(values), abs=1e-6)
    assert last["client_accuracy_worst"] == approx(min(values), abs=1e-6)
    assert last["client_loss_worst"] >= last["client_loss_mean"] > 0
    sizes = HELD_OUT.sizes[HELD_OUT.sizes > 0]
    weighted = np.average(values, weights=sizes)
    assert last["client_accuracy_weighted"] == approx(weighted, abs=1e-6)
    assert (last["client_count"], last["client_examples"]) == (len(values), sizes.sum())
    assert last["test_examples"] == len(TEST)


@pytest.mark.parametrize("name", ["private", "local"])
@pytest.mark.sample("private")
def test_personal_models_are_tested_each_with_its_own_leaves(finished, name):
    result, _ = finished(name)
    chosen = host_rng(0, "test clients").permutation(len(SIZES))[:3].tolist()
    personal = [accuracy(result.client_params(c), TEST) for c in chosen]
    last = result.metrics[-1]
    assert last["test_accuracy"] == approx(np.mean(personal), abs=1e-6)
    values = [
        accuracy(result.client_params(c), HELD_OUT.data, rows)
        for c, rows in enumerate(HELD_OUT.indices)
        if len(rows)
    ]
    assert len(set(values)) > 1
    assert last["client_accuracy_mean"] == approx(np.mean(values), abs=1e-6)
    assert last["client_accuracy_worst"] == approx(min(values), abs=1e-6)


def test_evaluation_has_its_rounds_and_the_last_is_always_one():
    result = run("mean", rounds=5, eval_every=3)
    tested = [row["round"] for row in result.metrics if "test_accuracy" in row]
    assert tested == [0, 3, 5]
    untested = run("mean", rounds=1, test=None, client_test=None)
    assert not any(key.startswith(("test", "client_")) for row in untested.metrics for key in row)
    assert repr(untested) == "Run(fedavg: 1 round)"


def test_head_policies(finished):
    start, bare = MODEL.trainable, {"rounds": 2, "test": None, "client_test": None}
    shared, private = (finished(n)[0] for n in ("mean", "private"))
    frozen, alone = (run(n, **bare) for n in ("frozen", "local"))
    for name, result in {"mean": shared, "private": private, "local": alone}.items():
        fixed = result.params["layer.lora_scale"]
        np.testing.assert_array_equal(fixed, start["layer.lora_scale"], err_msg=name)

    assert (shared.client_state, frozen.client_state) == ({}, {})
    assert set(private.client_state) == set(toy.HEAD)
    assert set(alone.client_state) == set(toy.SHARED)
    for name in toy.HEAD:
        assert np.any(shared.params[name] != start[name])
        np.testing.assert_array_equal(frozen.params[name], start[name])
        # The global model keeps the initial values of what is private: nothing was averaged.
        np.testing.assert_array_equal(private.params[name], start[name])
        trained = {c for row in rows(private)[1:] for c in row["clients"]}
        for client, own in enumerate(private.client_state[name]):
            assert np.array_equal(own, start[name]) == (client not in trained)
    assert np.any(frozen.params["layer.lora_a"] != start["layer.lora_a"])
    distinct = {np.asarray(x).tobytes() for x in alone.client_state["layer.lora_a"]}
    assert len(distinct) == 1 + len({c for row in rows(alone)[1:] for c in row["clients"]})


def test_a_client_that_blows_up_is_dropped_and_named(finished):
    rounds = [row["clients"] for row in rows(finished("private")[0])[1:]]
    bad = next(c for c in rounds[1] if c in rounds[3] and c not in rounds[0])
    broken = toy.poisoned(TRAIN, bad)
    result = run("private", clients=broken, client_test=None)
    assert [row["dropped"] for row in rows(result)[1:]] == [
        [bad] if bad in members else [] for members in rounds
    ]
    for row in rows(result):
        assert all(v is None or np.isfinite(v) for v in row.values() if isinstance(v, float))
        assert row["test_loss"] is not None
    for name in toy.HEAD:
        np.testing.assert_array_equal(
            result.client_state[name][bad], MODEL.trainable[name], err_msg=name
        )
    for value in leaves(result).values():
        assert np.isfinite(value).all()
    with pytest.raises(
        fp.InputError, match=rf"In round 2 the uploads of the clients \[{bad}\] were"
    ):
        run("private", clients=broken, client_test=None, nonfinite="raise")


def test_a_run_without_finite_uploads_does_not_change_the_model():
    broken = toy.poisoned(TRAIN, *np.flatnonzero(TRAIN.sizes).tolist())
    result = run("mean", clients=broken, client_test=None)
    for name, value in result.params.items():
        np.testing.assert_array_equal(value, MODEL.trainable[name])
    for row in rows(result)[1:]:
        assert row["dropped"] == row["clients"]
        assert row["train_loss"] is row["train_accuracy"] is None
    assert len({row["test_loss"] for row in rows(result)}) == 1


def test_auto_lanes_on_a_cpu_and_no_more_lanes_than_clients():
    schedule = Schedule(TRAIN.indices, 6, 4, 1, None, 0)

    def choose(lanes):
        return choose_lanes(lanes, schedule, 4, None, None, Layout(), MODEL.frozen)

    assert (choose("auto"), choose(64), choose(5)) == (3, 6, 5)


def test_errors_of_the_algorithm_come_before_any_file_is_written(tmp_path):
    model = MODEL
    names = {"layer.lora_a": "layer.down", "layer.lora_b": "layer.up"}
    plain: fp.Model = model.replace(
        trainable={names.get(n, n): x for n, x in model.trainable.items()},
        kinds={names.get(n, n): kind for n, kind in model.kinds.items()},
    )
    options = {"rounds": 1, "clients_per_round": 3, "out": tmp_path / "run"}
    with pytest.raises(fp.InputError, match="'fra' needs LoRA factors A and B"):
        fp.simulate(plain, ALGORITHMS["fra"], TRAIN, **run_options(**options))
    no_head = model.replace(
        trainable={n: x for n, x in model.trainable.items() if n not in toy.HEAD},
        kinds={n: kind for n, kind in model.kinds.items() if n not in toy.HEAD},
    )
    with pytest.raises(fp.InputError, match=r"private rule '\^head:' matches no trainable leaf"):
        fp.simulate(
            no_head,
            fp.algorithms.fedavg(optax.sgd(0.1), head="private"),
            TRAIN,
            **run_options(**options),
        )
    assert not (tmp_path / "run").exists()


def test_fra_on_an_svd_start_warns():
    """FRA would remove the part outside the directions of the start; the run continues."""
    started = fp.attach(fp.testing.tiny_model(num_hidden_layers=1), fp.lora(2, init="svd"))
    algorithm = fp.algorithms.fedavg(optax.adam(1e-3), aggregator=fp.aggregators.fra())
    federation = fp.partition.iid(fp.testing.tiny_dataset(20), 4)
    rest = {"rounds": 1, "clients_per_round": 2, "devices": 99}
    with (
        pytest.warns(UserWarning, match="part of the pretrained weight"),
        pytest.raises(fp.InputError, match="99"),
    ):
        fp.simulate(started, algorithm, federation, **run_options(**rest))
