"""Bytes and simulated seconds, against figures worked out by hand."""

import jax
import jax.numpy as jnp
import optax
import pytest
import toy

from fedjax_peft import tree
from fedjax_peft.algorithms import fedavg, local
from fedjax_peft.peft.base import Method, attach
from fedjax_peft.peft.lora import lora
from fedjax_peft.run.cost import TimeModel, Traffic, traffic
from fedjax_peft.run.loop import simulate
from fedjax_peft.testing import tiny_model

SGD = optax.sgd(0.1)
# Two layers, query and value of 32 x 32, rank 2: A is 32 x 2 and B 2 x 32, 4 bytes a number.
ADAPTER = 2 * 2 * (32 * 2 + 2 * 32) * 4
# The pooler's 32 x 32 and the classifier's 32 x 4, with their biases.
HEAD = (32 * 32 + 32 + 32 * 4 + 4) * 4
# The toy's A is 5 x 2 and B 2 x 6; its head 6 x 3 with a bias.
TOY_ADAPTER, TOY_HEAD = (5 * 2 + 2 * 6) * 4, (6 * 3 + 3) * 4


@pytest.fixture(scope="module", autouse=True)
def compiled(tmp_path_factory):
    """Compiles every program once for all tests of this file."""
    with toy.compile_once(tmp_path_factory.mktemp("compiled")):
        yield


def moved(model, algorithm):
    return traffic(model, tree.assign_roles(model.kinds, algorithm.roles))


def test_traffic_follows_from_roles():
    model = attach(tiny_model(), lora(rank=2), seed=0)
    assert moved(model, fedavg(SGD)) == Traffic(ADAPTER + HEAD, ADAPTER + HEAD, 0)
    assert moved(model, fedavg(SGD, head="private")) == Traffic(ADAPTER, ADAPTER, 0)
    assert moved(model, fedavg(SGD, head="frozen")) == Traffic(ADAPTER, ADAPTER, 0)
    assert moved(model, local(SGD)) == Traffic(0, 0, 0)


def test_traffic_follows_from_dtypes():
    model = attach(tiny_model(), lora(rank=2), seed=0)
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), model.trainable)
    shared = (ADAPTER + HEAD) // 2
    assert moved(model.replace(trainable=half), fedavg(SGD)) == Traffic(shared, shared, 0)


def test_an_svd_start_costs_its_factors_once():
    model = attach(tiny_model(), lora(rank=2, init="svd"), seed=0)
    assert moved(model, fedavg(SGD)) == Traffic(ADAPTER + HEAD, ADAPTER + HEAD, ADAPTER)
    assert moved(model, fedavg(SGD, head="private")) == Traffic(ADAPTER, ADAPTER, ADAPTER)
    assert moved(model, local(SGD)) == Traffic(0, 0, 0), "nobody asks a server"


def run(algorithm, *, svd=False, rounds=6, **options):
    method = Method("lora", {}, lambda *_: None, start_shapes_frozen=svd)
    return simulate(
        toy.model(dropout=0, method=method),
        algorithm,
        toy.clients([9, 4, 0, 1, 13, 5, 6, 2]),
        rounds=rounds,
        clients_per_round=3,
        batch_size=4,
        time_model=TimeModel(2.0, bandwidth_up=8e3, bandwidth_down=16e3, latency=0.25),
        **options,
    )


def byte_rows(result):
    return [(row["bytes_up"], row["bytes_down"]) for row in result.metrics]


def test_a_round_moves_what_its_clients_move():
    result = run(fedavg(SGD))
    each = TOY_ADAPTER + TOY_HEAD
    counts = [0] + [len(row["clients"]) for row in result.metrics[1:]]
    assert set(counts[1:]) == {2, 3}, "the empty client moves nothing"
    assert byte_rows(result) == [(n * each, n * each) for n in counts]


def test_a_client_fetches_the_svd_start_at_its_first_round_but_the_runs_first(tmp_path):
    result = run(fedavg(SGD, head="private"), svd=True)
    seen, expected = set(result.metrics[1]["clients"]), [(0, 0)]
    for row in result.metrics[1:]:
        new = set(row["clients"]) - seen
        seen |= new
        up = TOY_ADAPTER * len(row["clients"])
        expected.append((up, up + TOY_ADAPTER * len(new)))
    assert byte_rows(result) == expected
    extra = [down > up for up, down in expected]
    assert extra[:2] == [False, False]
    assert {True, False} <= set(extra[2:]), "clients come for the first time, and come back"
    # A resumed run knows who has been there.
    out = tmp_path / "run"
    run(fedavg(SGD, head="private"), svd=True, rounds=3, out=out)
    resumed = run(fedavg(SGD, head="private"), svd=True, out=out, resume=True)
    assert byte_rows(resumed) == expected


def test_the_time_model_by_hand():
    model = TimeModel(2.0, bandwidth_up=8e3, bandwidth_down=16e3, latency=0.25)
    # 3 steps of 2 s; 1000 bytes at 1000 a second; 4000 bytes at 2000 a second; 0.25 s each way.
    assert model.round_seconds(3, 1000, 4000) == pytest.approx(6 + 1 + 2 + 0.5)
    assert model.round_seconds(3, 0, 0) == 6
    assert TimeModel().round_seconds(2, 3_125_000, 0) == pytest.approx(1 + 1 + 0.8)


def test_a_round_lasts_as_long_as_its_slowest_client():
    sizes = [9, 4, 0, 1, 13, 5, 6, 2]
    result = run(fedavg(SGD), rounds=3)
    transfer = (TOY_ADAPTER + TOY_HEAD) * (8 / 8e3 + 8 / 16e3) + 0.5
    for row in result.metrics[1:]:
        steps = max(-(-sizes[c] // 4) for c in row["clients"])
        assert row["simulated_seconds"] == pytest.approx(2 * steps + transfer)
    assert result.metrics[0]["simulated_seconds"] == 0


@pytest.mark.parametrize("svd", [False, True])
def test_alone_nothing_is_sent_and_only_computing_takes_time(svd):
    result = run(local(SGD), svd=svd, rounds=2)
    assert byte_rows(result) == [(0, 0)] * 3
    for row in result.metrics[1:]:
        assert row["simulated_seconds"] % 2 == 0
