"""Compression of the broadcast: what clients receive, what the server adds, bytes, refusals."""

import functools
import math
import operator

import jax
import jax.numpy as jnp
import linear
import numpy as np
import optax
import pytest
from closeness import approx, assert_close, assert_small
from internals import Ledger, chain, scheduled
from refusals import refusals
from toy_transforms import ALGORITHM, FEDERATION, MODEL, feedback, run

import fedjax_peft as fp
from fedjax_peft import aggregators, algorithms
from fedjax_peft.transforms import downlink

BITS = {"head.bias": 3, "head.kernel": 18, "layer.lora_a": 10, "layer.lora_b": 12}


# ----------------------------------------------------------------------------------- one message


def test_clients_receive_the_start_plus_the_compressed_change():
    start = {"a": jnp.array([1.0, 2, 3, 4])}
    leaves = {"a": start["a"] + jnp.array([0.1, -0.4, 0.2, 0.0])}
    transform = chain(
        fp.transforms.clip_norm(1.0), downlink(fp.transforms.top_k(0.25, error_feedback=False))
    )
    state = transform.init(start)
    received, metrics = transform.receive(leaves, state, jax.random.key(0))
    assert_close(received["a"], [1, 1.6, 3, 4])
    expected = math.sqrt(0.01 + 0.04) / math.sqrt(0.01 + 0.16 + 0.04)
    assert_close(metrics["downlink_error"], expected, rtol=1e-6)
    assert jax.tree.leaves(transform.broadcast(state)) == [], "the start is not sent again"


def test_a_client_that_learns_nothing_leaves_the_server_as_it_is():
    """Its upload is the template bit for bit, although it received something else."""
    rates = optax.piecewise_constant_schedule(0.3, {1: 0.0})  # the second round has none
    given = {"algorithm": algorithms.fedavg(scheduled(optax.sgd(1.0), lambda t: rates(t - 1)))}
    one, two = (
        run([downlink(fp.transforms.sign(error_feedback=False))], n, **given) for n in (1, 2)
    )
    assert two.metrics[2]["downlink_error"] > 0.1
    for name, x in one.params.items():
        assert np.any(x != MODEL.trainable[name]) or name not in BITS
        np.testing.assert_array_equal(two.params[name], x)


# ------------------------------------------------------------------------------------- whole runs


@pytest.mark.slow
def test_a_downlink_that_loses_nothing_changes_nothing():
    plain, made = run(None), run(downlink(fp.transforms.top_k(1.0, error_feedback=False)))
    for name, x in plain.params.items():
        assert_close(made.params[name], x, atol=1e-6)
    assert_small(made.metrics[-1]["downlink_error"], 1e-6)


@pytest.mark.slow
def test_the_server_adds_what_was_learned_from_what_was_received():
    """Round 2 by hand: the clients' changes come from a run that starts from what they received."""
    given = downlink(fp.transforms.int8(8))
    first, both = run(given, 1), run(given)
    start = {n: MODEL.trainable[n] for n in BITS}
    theta = {n: jnp.asarray(first.params[n]) for n in BITS}
    received, _ = given.receive(theta, start, jax.random.key(0))
    copies = jax.device_get(received)  # a step consumes what it is given
    lanes = fp.Placement(lanes=3)
    session = fp.session(MODEL, ALGORITHM, FEDERATION, placement=lanes, batch_size=4)
    state = session.init(0)._replace(round_index=1, server=received)
    after = session.step(state)[0].server
    moved = 0.0
    for name in BITS:
        expected = theta[name] + (after[name] - copies[name])
        assert_close(both.params[name], expected, atol=1e-6)
        moved += float(jnp.abs(copies[name] - theta[name]).sum())
    assert moved > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("aggregator", ["mean", "fra"])
@pytest.mark.sample("mean")
def test_both_engines_lanes_and_resume_agree(tmp_path, aggregator):
    """With all features: broadcasts, memory and state of the server, noise, and bytes."""
    plain = aggregator == "mean"  # feedback's noise is on the sum, which FRA truncates
    given = [
        downlink(fp.transforms.quantize(4)),
        feedback() if plain else fp.transforms.clip_norm(0.2),
    ]
    given.append(fp.transforms.top_k(0.5, error_feedback=plain))
    bound = linear.model() if plain else MODEL
    algorithm = algorithms.fedavg(optax.sgd(0.1), aggregator=getattr(aggregators, aggregator)())
    simulated = functools.partial(run, given, model=bound, algorithm=algorithm)
    made = simulated(3)
    other = simulated(3, lanes=1, engine="reference")
    for name, x in made.params.items():
        assert_close(other.params[name], x, atol=1e-5)
    for name in ("downlink_error", "compression_error", "bytes_up"):
        assert other.metrics[-1][name] == approx(made.metrics[-1][name], rel=1e-3)
    on_disk = {"out": tmp_path / "run", "checkpoint_every": 1}
    simulated(2, **on_disk)
    resumed = simulated(3, resume=True, **on_disk)
    for name, x in made.params.items():
        np.testing.assert_array_equal(resumed.params[name], x)
    assert resumed.metrics[-1]["compression_error"] == made.metrics[-1]["compression_error"]
    assert 0 < made.metrics[-1]["downlink_error"] < 0.5
    assert made.metrics[1]["downlink_error"] == 0, "in round 1 nothing has changed"


# ----------------------------------------------------------------------------------------- bytes


def ledger(transform):
    server = ALGORITHM.server.init(fp.tree.select(MODEL.trainable, tuple(BITS)))
    return Ledger(MODEL, ALGORITHM, server, 4, transform=transform)


def test_compressed_broadcasts_are_counted_down_and_uploads_are_not_changed():
    whole = 4 * sum(BITS.values())
    small = sum(math.ceil((4 * n + 32) / 8) for n in BITS.values())
    counted = ledger(downlink(fp.transforms.quantize(4)))
    assert (counted.up(0), counted.down(0)) == (whole, small)
    both = ledger(chain(downlink(fp.transforms.quantize(4)), fp.transforms.sign()))
    assert both.up(0) == sum(math.ceil((n + 32) / 8) for n in BITS.values())
    assert both.down(0) == small
    both.record({"round": 1, "clients": [0], "dropped": []})
    assert both.down(0) == small, "any message can be read without the ones before it"


def test_a_resting_leaf_is_sent_again_if_its_message_is_drawn_anew():
    rounded = {
        name: fp.transforms.quantize(4, stochastic=name == "drawn") for name in ("drawn", "nearest")
    }
    for name, compressor in rounded.items():
        counted = ledger(chain(downlink(compressor), fp.transforms.sign()))
        whole = counted.down(0)
        counted.record({"round": 1, "clients": [0], "dropped": []})
        counted.record({"round": 2, "clients": [0], "dropped": [], "skipped_leaves": ["head.bias"]})
        assert counted.down(0) == whole - (0 if name == "drawn" else math.ceil((4 * 3 + 32) / 8))
        counted.record({"round": 3, "clients": [0], "dropped": [0]})  # the server stays as it is
        assert counted.down(0) == (whole if name == "drawn" else 0)


@pytest.mark.slow
def test_a_run_with_flasc_is_sparse_in_its_rows():
    row = run(fp.transforms.flasc(0.25, 0.5), 3).metrics[-1]
    assert row["bytes_up"] == 5 * math.ceil((11 * 32 + 43) / 8)
    assert row["bytes_down"] == 5 * math.ceil((22 * 32 + 43) / 8)
    assert 0 < row["compression_error"] < 1
    assert 0 < row["downlink_error"] < 1


# -------------------------------------------------------------------------------------- refusals


test_what_cannot_compress_a_broadcast_is_refused = refusals(
    operator.call,
    (
        lambda: downlink(fp.transforms.clip_norm(1.0)),
        "downlink takes a compressor such as .*'clip_norm' is",
    ),
    (lambda: downlink(fp.transforms.sign()), "compressor without memory, and 'sign' has one"),
    (lambda: downlink(fp.transforms.power_sgd(error_feedback=False)), "'power_sgd' has one"),
    (
        lambda: chain(downlink(fp.transforms.int8()), fp.transforms.flasc()),
        "Only one transform can change what clients",
    ),
    (
        lambda: run([fp.transforms.top_k(0.5), fp.transforms.flasc()]),
        "'flasc' must be the first transform of a chain",
    ),
)


def test_a_transform_without_downlink_receives_the_leaves_themselves():
    plain = fp.contracts.Transform("plain", lambda update, *_: fp.contracts.Encoded(update))
    assert chain(plain).receive is None
    assert chain(plain).down_wire is None
