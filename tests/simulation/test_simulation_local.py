"""Clients' models before the aggregation are those that the clients trained in this round."""

import numpy as np
import optax
import pytest
import running
import toy
from closeness import approx
from internals import seen_clients
from options import session_options
from refusals import refused
from running import rows

from fedjax_peft import TimeModel, aggregators, algorithms, privacy, session, transforms

pytestmark = pytest.mark.slow

CLIENTS = toy.clients([9, 4, 0, 13])
TEST = toy.dataset(21, seed=3)
SGD = optax.sgd(0.5)
FEDAVG = algorithms.fedavg(SGD)
MODEL = toy.model()


def run(algorithm=FEDAVG, **options):
    options = {"clients": CLIENTS, "model": MODEL, "diagnostics": ["local"], **options}
    return running.run(algorithm, test=TEST, test_clients=4, **options)


@pytest.fixture(scope="module")
def measured():
    return run(eval_every=2, rounds=3)


def test_measuring_changes_no_number(measured):
    plain = run(eval_every=2, rounds=3, diagnostics=[])
    added = {name for row in measured.metrics for name in row if name.startswith("local_")}
    assert rows(measured, *added) == rows(plain)
    running.assert_same_models(measured, plain, atol=0)


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


@pytest.mark.parametrize(
    ("algorithm", "options"),
    [
        (FEDAVG, {}),
        (algorithms.fednova(SGD), {}),
        (algorithms.fednova(SGD, head="private"), {}),
        (algorithms.fedper(SGD), {}),
        (algorithms.ditto(SGD), {}),
        (algorithms.apfl(SGD), {}),
        (
            algorithms.fedavg(SGD, aggregator=aggregators.flexlora()),
            {"client_ranks": [1, 2, 2, 1]},
        ),
    ],
    ids=["fedavg", "fednova", "fednova_private", "fedper", "ditto", "apfl", "ranks"],
)
@pytest.mark.sample("fedavg", "fednova_private")  # whose upload has another form
def test_a_local_model_is_that_of_a_round_with_this_client_alone(algorithm, options):
    """The aggregate of one upload is the upload, for these aggregators up to rounding."""
    options |= {"batch_size": 4, "clients_per_round": 4}
    row = run(algorithm, rounds=1, **options).metrics[1]
    made = session(MODEL, algorithm, CLIENTS, **session_options(**options))
    for client, expected in zip(row["clients"], row["local_loss"], strict=True):
        others = set(range(4)) - {client}
        state, _ = made.step(made.init(0), made.plan(1, 0, without=others))
        alone = made.evaluate(state, TEST, clients=[client])
        assert alone["loss"] == approx(expected, rel=1e-5)


def test_a_client_whose_upload_is_not_finite_has_no_value():
    row = run(clients=toy.poisoned(CLIENTS, 1), rounds=1).metrics[1]
    assert row["dropped"] == [1]
    assert row["local_loss"][1] is None
    assert row["local_loss_mean"] == approx(np.mean(np.delete(row["local_loss"], 1)))


def test_a_client_that_sends_its_noise_alone_has_not_trained():
    """Client 2 has no examples, and client 3 is late."""
    fast = TimeModel(1.0, 1e15, 1e15, 0.0)
    options = {"privacy": privacy.local(0.5, 1.0), "time_model": fast, "deadline": 3.5}
    personal, seen = algorithms.fedavg(SGD, head="private"), []
    with pytest.warns(UserWarning, match="measurements of single clients"):
        found = run(personal, rounds=1, on_phase=seen.append, **options).metrics
    row = found[1]
    assert (row["clients"], row["late"]) == ([0, 1, 2, 3], [3])
    assert row["client_steps"] == [3, 1, 0, 0]
    assert seen_clients(found) == {0, 1}
    assert (row["test_count_seen"], row["test_count_unseen"]) == (2, 2)
    assert row["local_loss"][2:] == [None, None]
    assert row["local_loss_mean"] == approx(np.mean(row["local_loss"][:2]))
    costs = seen[0].details["estimate"]
    assert (costs.clients, costs.steps, costs.bytes_up) == (4, 4, row["bytes_up"])
    assert costs.bytes_down == row["bytes_down"]


def test_uploads_of_another_form_need_a_local_model():
    """The upload of this algorithm is a change; without a word it would be taken for a model."""
    plain = algorithms.fednova(SGD)
    refused("local_model", run, plain._replace(local_model=None), rounds=1)


@pytest.mark.parametrize(
    "given", [transforms.flasc(1.0, 0.5), transforms.downlink(transforms.int8())]
)
def test_a_compressed_broadcast_is_refused(given):
    """Clients train from what they receive, and not from the server's own leaves."""
    refused(f"{given.name}.*diagnostics", run, transforms=given, rounds=1)
