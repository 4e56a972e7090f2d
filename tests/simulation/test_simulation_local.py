"""Clients' models before the aggregation are those that the clients trained in this round."""

import jax
import numpy as np
import optax
import pytest
import reference
import toy
from closeness import approx
from options import run_options, session_options

from fedjax_peft import aggregators, algorithms
from fedjax_peft.simulation.records import Evaluation
from fedjax_peft.simulation.session import session
from fedjax_peft.simulation.simulate import simulate
from fedjax_peft.support.errors import InputError

pytestmark = pytest.mark.slow

SIZES = [9, 4, 0, 13]
TEST = toy.dataset(21, seed=3)
SGD = optax.sgd(0.5)
FEDAVG = algorithms.fedavg(SGD)
MODEL, WITHOUT_DROPOUT = toy.model(), toy.model(dropout=0)


def run(algorithm=FEDAVG, *, clients=None, model=MODEL, **options):
    options = {
        "rounds": 2,
        "clients_per_round": 4,
        "batch_size": 4,
        "diagnostics": ["local"],
        "test_clients": 4,
        **options,
    }
    clients = clients or toy.clients(SIZES)
    return simulate(model, algorithm, clients, test=TEST, **run_options(**options))


@pytest.fixture(scope="module")
def measured():
    return run(eval_every=2, rounds=3)


def without_times(rows):
    return [{k: v for k, v in row.items() if k != "time"} for row in rows]


def test_measuring_changes_no_number(measured):
    plain = run(eval_every=2, rounds=3, diagnostics=[])
    rows = [
        {k: v for k, v in row.items() if not k.startswith("local_")} for row in measured.metrics
    ]
    assert without_times(rows) == without_times(plain.metrics)
    for name, x in plain.params.items():
        np.testing.assert_array_equal(x, measured.params[name])


def test_evaluated_rounds_have_one_value_for_each_client(measured):
    assert [("local_loss" in row) for row in measured.metrics] == [False, False, True, True]
    row = measured.metrics[-1]
    assert row["clients"] == [0, 1, 3]
    for metric, pick in (("accuracy", min), ("loss", max)):
        each = row[f"local_{metric}"]
        assert len(each) == 3
        assert row[f"local_{metric}_mean"] == approx(np.mean(each))
        assert row[f"local_{metric}_std"] == approx(np.std(each))
        assert row[f"local_{metric}_worst"] == pick(each)
    assert len(set(row["local_loss"])) == 3
    assert row["time"]["local_s"] > 0


def test_a_python_loop_over_local_steps_gives_the_same_loss():
    """The loop starts at the initial model and takes SGD steps on the batches of the plan."""
    model, clients = WITHOUT_DROPOUT, toy.clients(SIZES)
    row = run(model=model, rounds=1).metrics[1]
    plan = session(model, FEDAVG, clients, clients_per_round=4, batch_size=4).plan(1)
    frozen, start = (reference.leaves64(x) for x in (model.frozen, model.trainable))

    @jax.jit
    def loss(leaves):
        logits = model.apply(model.frozen, leaves, TEST.columns, None, False).logits
        chances = optax.softmax_cross_entropy_with_integer_labels
        return chances(logits, TEST.columns["labels"]).mean()

    for client, expected in zip(row["clients"], row["local_loss"], strict=True):
        leaves = start
        slot = plan.client.tolist().index(client)
        for batch in plan.examples[plan.slot == slot]:
            x, labels = (clients.data.columns[n][batch[batch >= 0]] for n in ("x", "labels"))
            gradient = reference.gradients(frozen, leaves, x, labels, 0.8)
            leaves = leaves | {n: leaves[n] - 0.5 * slope for n, slope in gradient.items()}
        assert loss({n: np.float32(x) for n, x in leaves.items()}) == approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("algorithm", "options"),
    [
        pytest.param(FEDAVG, {}, marks=pytest.mark.exhaustive),
        (algorithms.fednova(SGD), {}),
        (algorithms.fedper(SGD), {}),
        (algorithms.ditto(SGD), {}),
        pytest.param(algorithms.apfl(SGD), {}, marks=pytest.mark.exhaustive),
        (
            algorithms.fedavg(SGD, aggregator=aggregators.flexlora()),
            {"client_ranks": [1, 2, 2, 1]},
        ),
    ],
    ids=["fedavg", "fednova", "fedper", "ditto", "apfl", "ranks"],
)
@pytest.mark.sample("fednova", "ditto", "ranks")
def test_a_local_model_is_that_of_a_round_with_this_client_alone(algorithm, options):
    """The aggregate of one upload is the upload, for these aggregators up to rounding."""
    options |= {"batch_size": 4, "clients_per_round": 4}
    row = run(algorithm, rounds=1, **options).metrics[1]
    made = session(MODEL, algorithm, toy.clients(SIZES), **session_options(**options))
    for client, expected in zip(row["clients"], row["local_loss"], strict=True):
        others = set(range(4)) - {client}
        state, _ = made.step(made.init(0), made.plan(1, 0, without=others))
        alone = made.evaluate(state, TEST, clients=[client])
        assert alone["loss"] == approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("flora", {"head": "private"}),  # the sum on the frozen kernel, and leaves of the clients
        pytest.param("fedrep", {}, marks=pytest.mark.exhaustive),
        pytest.param("fra_ffa", {"at": 1}, marks=pytest.mark.exhaustive),
    ],
)
def test_the_reference_engine_measures_the_same(name, options):
    algorithm = getattr(algorithms, name)(SGD, **options)
    model = toy.lora_model()
    common = {"rounds": 2, "clients_per_round": 3, "batch_size": 4, "diagnostics": ["local"]}
    common |= {"test": TEST, "local_steps": 3}
    ours, oracle = (
        simulate(
            model, algorithm, toy.clients(SIZES), **run_options(engine=engine, **common)
        ).metrics
        for engine in ("compiled", "reference")
    )
    for row, other in zip(ours[1:], oracle[1:], strict=True):
        assert row["local_loss"] == approx(other["local_loss"], rel=1e-5)
        assert row["local_accuracy"] == other["local_accuracy"]
        assert len(row["local_loss"]) == len(row["clients"])


def test_a_client_whose_upload_is_not_finite_has_no_value():
    row = run(clients=toy.poisoned(toy.clients(SIZES), 1), rounds=1).metrics[1]
    assert row["dropped"] == [1]
    assert row["local_loss"][1] is None
    assert row["local_loss_mean"] == approx(np.mean(np.delete(row["local_loss"], 1)))


def test_a_test_set_is_needed():
    with pytest.raises(InputError, match="needs a test set"):
        simulate(
            MODEL,
            FEDAVG,
            toy.clients(SIZES),
            evaluation=Evaluation(diagnostics=["local"]),
            rounds=1,
        )


def test_uploads_of_another_form_need_a_local_model():
    """The upload of this algorithm is a change; without a word it would be taken for a model."""
    plain = algorithms.fednova(SGD)
    with pytest.raises(InputError, match="local_model"):
        run(plain._replace(local_model=None), rounds=1)


def test_all_algorithms_say_what_their_local_model_is():
    options = {
        "scaffold": {"learning_rate": 0.1},
        "fra_ffa": {"at": 1},
        "hilora": {"clients": 5, "root_rounds": 1, "cluster_rounds": 1},
        "slora": {"sparse_rounds": 1},
    }
    shared = {n: x for n, x in toy.lora_model().trainable.items() if n in toy.SHARED}
    for name in algorithms.__all__:
        algorithm = getattr(algorithms, name)(SGD, **options.get(name, {}))
        rules = algorithm.server
        server = jax.eval_shape(rules.init, shared)
        forms = [jax.eval_shape(f, server) for f in (rules.broadcast, rules.unchanged)]
        assert algorithm.local_model is not None or forms[0] == forms[1], name
