"""Upload transforms: ``clip_norm`` equals a loop; chains, memory, state, masks, bad uploads."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toy
from closeness import assert_close
from internals import Cohort, chain, client_key, encoder, server_key, stream
from toy_transforms import ALGORITHM, FEDERATION, MODEL, feedback, ones, record, upload

import fedjax_peft as fp
from fedjax_peft.transforms.clip import share_and_median

pytestmark = pytest.mark.slow

SIZES = tuple(FEDERATION.sizes.tolist())
KEY = stream(0, "clients")
FEEDBACK, ONES = feedback(), ones()


def engine(transform=None, *, lanes=3, algorithm=ALGORITHM, bound=MODEL, **options):
    options |= {"lanes": lanes, "bound": bound, "transform": transform}
    return toy.Engine(algorithm, FEDERATION, per_round=5, **options)


@functools.cache
def plain():
    return engine()


def one_by_one(server, round_index):
    """Returns every client's change in a round, from rounds in which it is alone."""
    rig = plain()
    cohort = rig.schedule.cohort(round_index)
    assert list(cohort[0]) == [0, 1, 2, 3, 4]
    changes = []
    for place in range(len(SIZES)):
        alone = Cohort(*([part[place]] for part in cohort))
        state = (jax.tree.map(jnp.asarray, server), rig.start()[1])
        sent = rig.run(alone, round_index, state).server
        changes.append({n: sent[n] - np.asarray(x) for n, x in server.items()})
    return changes


def joint_norm(change):
    return np.sqrt(sum((np.asarray(x, np.float64) ** 2).sum() for x in change.values()))


def weighted(changes):
    weights = np.array(SIZES) / sum(SIZES)
    return {n: sum(w * c[n] for w, c in zip(weights, changes, strict=True)) for n in changes[0]}


# --------------------------------------------------------------------------------------- clip_norm


def clipped(change, max_norm):
    encoded = fp.transforms.clip_norm(max_norm).client(change, (), (), KEY)
    return encoded.update


def test_a_change_is_scaled_to_the_largest_norm_over_all_leaves():
    change = {"a": jnp.array([3.0, 0.0]), "b": jnp.array([[0.0, 4.0]])}
    for max_norm, expected in ((2.5, 0.5), (5.0, 1.0), (7.0, 1.0), (float("inf"), 1.0)):
        for name, x in clipped(change, max_norm).items():
            assert_close(x, expected * change[name], rtol=1e-6)


@pytest.mark.parametrize("size", [0.0, 1e-30, 1e30])
def test_changes_of_any_size_are_clipped_without_overflow(size):
    result = clipped({"a": jnp.full(4, size)}, 1.0)["a"]
    assert_close(result, np.full(4, min(size, 0.5)), rtol=1e-6)


def test_a_round_with_clipping_equals_a_loop_over_clients():
    start = {n: np.asarray(x) for n, x in plain().start()[0].items()}
    changes = one_by_one(start, 1)
    norms = np.array([joint_norm(change) for change in changes])
    max_norm = float(np.median(norms)) * 0.9
    scales = np.minimum(1, max_norm / norms)
    expected = weighted(
        [{n: s * x for n, x in c.items()} for s, c in zip(scales, changes, strict=True)]
    )
    rig = engine(chain(fp.transforms.clip_norm(max_norm), record()))
    result = rig.run(rig.schedule.cohort(1), 1)
    for name, x in result.server.items():
        assert_close(x, start[name] + expected[name], atol=1e-6)
    share, median = (result.aggregation[f"clip_{n}"] for n in ("share", "median_norm"))
    assert share == np.float32((norms > max_norm).mean())
    assert 0 < share < 1
    assert_close(median, np.median(norms), rtol=1e-5)
    assert_close(result.aggregation["largest_norm"], max_norm, rtol=1e-6)
    assert_close(result.norms, norms, rtol=1e-5)  # of what was learned
    # Two clients: the median lies between them.
    two = rig.run(Cohort(*(part[:2] for part in rig.schedule.cohort(1))), 1)
    assert_close(two.aggregation["clip_median_norm"], norms[:2].mean(), rtol=1e-5)
    nobody = rig.run(Cohort([], [], []), 1)
    assert np.isnan(nobody.aggregation["clip_share"])


def test_the_only_accepted_client_is_the_whole_share():
    share, median = share_and_median(jnp.array([3.0, 9.0]), jnp.array([True, False]), 1.0)
    assert (share, median) == (1, 3)


# ---------------------------------------------------------------- a transform with memory and state


def test_memory_state_and_noise_equal_a_loop_over_clients():
    clip, codec = fp.transforms.clip_norm(0.2), FEEDBACK
    server = {n: np.asarray(x) for n, x in plain().start()[0].items()}
    memory = [codec.memory(server)] * len(SIZES)
    state, shorten, encode = codec.init(server), jax.jit(clip.client), jax.jit(codec.client)
    for number, result in enumerate(engine(chain(clip, codec)).rounds(), 1):
        sent, lengths = [], []
        for client, change in enumerate(one_by_one(server, number)):
            key = client_key(stream(KEY, "transform"), number, client)
            change = shorten(change, (), (), jax.random.fold_in(key, 0)).update
            key = jax.random.fold_in(key, 1)
            encoded = encode(change, memory[client], codec.broadcast(state), key)
            memory[client] = encoded.memory
            sent.append(encoded.update)
            lengths.append(encoded.measured["length"])
        key = jax.random.fold_in(stream(server_key(KEY, number), "transform"), 1)
        context = toy.context(number)._replace(key=key)
        measured = fp.contracts.Measurements({"length": jnp.stack(lengths)}, jnp.ones(5, bool))
        decoded = codec.server(weighted(sent), state, measured, context)
        server = {n: server[n] + np.asarray(x) for n, x in decoded.aggregate.items()}
        state = decoded.state
        for name, x in result.server.items():
            assert_close(x, server[name], atol=1e-5)
        own = result.transform_state.memory[1]
        for client in range(len(SIZES)):
            for name, x in memory[client].items():
                assert_close(own[name][client], x, atol=1e-5)
        assert result.transform_state.server[1]["rounds"] == number
        assert_close(
            result.aggregation["feedback_length"], decoded.metrics["feedback_length"], rtol=1e-5
        )


def test_another_order_of_slots_gives_the_same_noise():
    rig = engine(FEEDBACK)
    cohort = rig.schedule.cohort(1)
    one = rig.run(cohort, 1)
    other = rig.run(Cohort(*(part[::-1] for part in cohort)), 1)
    for a, b in zip(jax.tree.leaves(one.server), jax.tree.leaves(other.server), strict=True):
        assert_close(a, b, atol=1e-5)


def test_only_those_whose_uploads_are_accepted_change_their_memory():
    rig = engine(FEEDBACK)
    cohort = Cohort(*(part[:3] for part in rig.schedule.cohort(1)))
    poisoned = toy.poisoned(FEDERATION, 1).data.columns
    result = rig.run(cohort, 1, columns=poisoned)
    assert result.finite.tolist()[:3] == [True, False, True]
    moved = [bool(np.any(x)) for x in result.transform_state.memory["layer.lora_a"]]
    assert moved == [True, False, True, False, False]
    assert result.transform_state.server["rounds"] == 1


def test_a_round_without_an_upload_leaves_everything_as_it_is():
    rig = engine(FEEDBACK)
    before = rig.start()
    result = rig.run(Cohort([], [], []), 1)
    after = (result.server, result.client_state, result.transform_state)
    for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        np.testing.assert_array_equal(a, b)


def test_an_upload_that_is_not_finite_is_dropped_before_it_is_transformed():
    rig = engine(ONES)
    poisoned = toy.poisoned(FEDERATION, 1).data.columns
    result = rig.run(rig.schedule.cohort(1), 1, columns=poisoned)
    assert result.finite.tolist() == [True, False, True, True, True]
    start = rig.model_at_start()
    for name, x in result.server.items():
        assert_close(x, np.asarray(start[name]) + 1, rtol=1e-6)


def test_a_transform_that_gives_numbers_that_are_not_finite_drops_its_client():
    def client(update, memory, received, key):
        return fp.contracts.Encoded(jax.tree.map(lambda x: x / 0, update))

    rig = engine(fp.contracts.Transform("divide", client))
    result = rig.run(rig.schedule.cohort(1), 1)
    assert not result.finite.any()
    for name, x in result.server.items():
        np.testing.assert_array_equal(x, rig.model_at_start()[name])


def test_entries_that_a_transform_leaves_alone_keep_every_bit():
    """1 + (1e-9 - 1) is 0 in float32, and not 1e-9."""
    start = {"a": jnp.array([1.0, 1.0])}
    half = fp.contracts.Transform(
        "first", lambda update, *_: fp.contracts.Encoded({"a": update["a"] * jnp.array([0.5, 1])})
    )
    encode = encoder(half, ALGORITHM, (), {})
    sent = encode(upload({"a": jnp.array([3.0, 1e-9])}, start)).value
    np.testing.assert_array_equal(sent["a"], np.array([2.0, 1e-9], np.float32))


# ------------------------------------------------------------------------------- what is not sent


def test_directions_that_a_client_does_not_own_stay_as_they_came():
    """All clients have rank 1 of 2: nobody can move the second direction."""
    rig = engine(ones(), ranks=[1])
    start, new = rig.model_at_start(), rig.run(rig.schedule.cohort(1), 1).server
    np.testing.assert_array_equal(new["layer.lora_a"][:, 1], start["layer.lora_a"][:, 1])
    np.testing.assert_array_equal(new["layer.lora_b"][1], start["layer.lora_b"][1])
    assert_close(new["layer.lora_a"][:, 0], start["layer.lora_a"][:, 0] + 1, rtol=1e-6)


def test_the_norm_counts_the_unmasked_rows_of_a_client_only():
    rig = engine(chain(fp.transforms.clip_norm(0.05), record()), ranks=[1, 2])
    result = rig.run(rig.schedule.cohort(1), 1)
    assert_close(result.aggregation["largest_norm"], 0.05, rtol=1e-6)
    assert_close(result.aggregation["clip_median_norm"], np.median(result.norms), rtol=1e-6)


def test_leaves_that_rest_in_a_round_stay_as_they_are():
    rig = engine(FEEDBACK, algorithm=fp.algorithms.rolora(optax.sgd(0.1)), bound=toy.lora_model())
    start = {n: np.asarray(x) for n, x in rig.model_at_start().items()}
    odd, even = rig.rounds()
    np.testing.assert_array_equal(odd.server["layer.lora_a"], start["layer.lora_a"])
    assert np.any(odd.server["layer.lora_b"] != start["layer.lora_b"])
    np.testing.assert_array_equal(odd.server["layer.lora_b"], even.server["layer.lora_b"])
    assert np.any(odd.server["layer.lora_a"] != even.server["layer.lora_a"])


# ------------------------------------------------------------------------------------------ chains


def test_a_chain_runs_clients_parts_forwards_and_servers_parts_backwards():
    def times(factor, plus):
        return fp.contracts.Transform(
            f"times {factor}",
            lambda update, memory, received, key: fp.contracts.Encoded(factor * update + plus),
            server=lambda aggregate, state, measured, context: fp.contracts.Decoded(
                (aggregate - plus) / factor, state, {"seen": aggregate}
            ),
            changes_aggregate=True,
            wire=lambda template, wire: wire._replace(bits=factor * wire.bits),
        )

    both = chain(times(2, 1), times(3, 0))
    x = jnp.array(5.0)
    encoded = both.client(x, both.memory(x), both.init(x), KEY)
    assert encoded.update == 33
    measured = fp.contracts.Measurements(encoded.measured, jnp.ones(1, bool))
    decoded = both.server(encoded.update, both.init(x), measured, toy.context())
    assert decoded.aggregate == 5
    assert decoded.metrics == {"seen": 11, "seen_2": 33}
    assert both.wire(jnp.zeros(7), fp.contracts.Wire(7, 32)) == fp.contracts.Wire(7, 192)
    assert both.changes_aggregate
    assert not chain(fp.transforms.clip_norm(1.0)).changes_aggregate


def test_norm_is_the_length_over_all_leaves():
    leaves = {"a": jnp.array([3.0]), "b": jnp.zeros((0, 2)), "c": jnp.array([[4.0]])}
    assert fp.tree.norm(leaves) == 5
    assert fp.tree.norm({}) == 0
    assert_close(fp.tree.norm({"a": jnp.full(4, 2e38)}), np.inf)
    assert_close(fp.tree.norm({"a": jnp.full(4, 1e38)}), 2e38, rtol=1e-6)
