"""A round as one program equals the slow reference; packing and padding have no effect."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
import toy
from closeness import assert_close, assert_small
from internals import Cohort, batches, client_key, stream

import fedjax_peft as fp

SIZES = (7, 4, 12, 1, 9, 16, 3, 0, 5, 10, 2)
FEDERATION = toy.clients(SIZES)
EPOCHS, BATCH, RATE, COHORT = 2, 4, 0.02, 8
ADAM = optax.adam(RATE)
POLICIES = {
    "shared": (fp.algorithms.fedavg(ADAM), toy.SHARED, ()),
    "private head": (fp.algorithms.fedavg(ADAM, head="private"), toy.ADAPTER, toy.HEAD),
    "local": (fp.algorithms.local(ADAM), (), toy.SHARED),
}


@functools.cache
def engine(policy, lanes):
    return toy.Engine(POLICIES[policy][0], FEDERATION, per_round=COHORT, lanes=lanes, epochs=EPOCHS)


@functools.cache
def expected(policy):
    """Returns the slow federation after two rounds."""
    _, shared, private = POLICIES[policy]
    slow = reference.Slow(
        **{"model": toy.model(), "federation": FEDERATION, "shared": shared, "private": private},
        optimizer=functools.partial(reference.Adam, RATE),
        local={"batch_size": BATCH, "epochs": EPOCHS},
    )
    return slow.run(reference.cohorts(FEDERATION, COHORT))


def differences(result, policy):
    """Returns the largest distance of any leaf from the reference's."""
    _, shared, private = POLICIES[policy]
    assert set(result.server) == set(shared)
    assert set(result.client_state) == set(private)
    slow, found = expected(policy), result.client_state
    far = [np.abs(result.server[n] - slow.leaves[n]).max() for n in shared]
    far += [np.abs(found[n] - [v[n] for v in slow.own]).max() for n in private]
    return max(far)


@pytest.mark.parametrize(
    ("policy", "lanes"),
    [
        ("private head", 1),
        ("private head", 3),
        ("shared", 3),
        pytest.param("local", 3, marks=pytest.mark.exhaustive),
    ],
)
def test_rounds_equal_the_slow_reference(policy, lanes):
    result, slow = engine(policy, lanes).rounds()[-1], expected(policy)
    assert len(set(slow.steps.values())) > 3, "unequal clients"
    assert_small(differences(result, policy), 1e-5)
    moved = [np.abs(slow.leaves[n] - toy.model().trainable[n]).max() for n in result.server]
    moved += [
        np.abs(x - toy.model().trainable[n][None]).max() for n, x in result.client_state.items()
    ]
    assert min(moved) > 1e-3, "every leaf has moved"


def test_the_order_of_the_cohort_does_not_matter():
    rig = engine("private head", 3)
    clients, weights, work = rig.schedule.cohort(1)
    order = np.random.default_rng(0).permutation(COHORT)
    shuffled = Cohort(*([part[i] for i in order] for part in (clients, weights, work)))
    one, other = rig.run(Cohort(clients, weights, work)), rig.run(shuffled)
    for a, b in zip(jax.tree.leaves(one[:2]), jax.tree.leaves(other[:2]), strict=True):
        assert_close(a, b, rtol=0, atol=1e-6)
    for name, (total, count) in one.sums.items():
        assert_close(total[order], other.sums[name][0], rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(count[order], other.sums[name][1])


def test_a_round_again_is_the_same_to_the_bit():
    rig = engine("private head", 3)
    one, again = (rig.run(rig.schedule.cohort(3), 3) for _ in range(2))
    assert jax.tree.all(jax.tree.map(np.array_equal, one, again))
    other = rig.run(rig.schedule.cohort(3), 4)  # same examples, other dropout
    assert not np.array_equal(one.server["layer.lora_a"], other.server["layer.lora_a"])


def test_only_the_cohort_changes_its_private_leaves():
    rig = engine("private head", 3)
    result = rig.run(rig.schedule.cohort(1))
    start = rig.start()[1]
    for client in range(len(SIZES)):
        took_part = client in rig.schedule.members(1) and SIZES[client] > 0
        same = np.array_equal(result.client_state["head.bias"][client], start["head.bias"][client])
        assert same != took_part


def test_metrics_are_sums_over_the_real_examples_of_every_slot():
    rig = engine("private head", 3)
    members = rig.schedule.members(1)
    result = rig.run(rig.schedule.cohort(1))
    for name in ("loss", "accuracy"):
        assert result.sums[name][1].tolist() == [EPOCHS * SIZES[c] for c in members]
    assert result.finite.all()


def count_steps(optimizer):
    """Returns FedAvg with an additional private leaf: the step counter of Adam."""

    def client(context):
        inner = fp.algorithms.fedavg(optimizer).client(context)
        return inner._replace(
            init=lambda broadcast, private, key: inner.init(broadcast, {}, key),
            final=lambda state: (state.shared, {"count": state.optimizer[0].count}),
        )

    roles = fp.contracts.Roles(shared=("^head:", "^adapter:"))
    return fp.algorithms.fedavg(optimizer)._replace(
        client=client, roles=roles, aggregator=fp.aggregators.mean(error=False)
    )


def test_idle_lanes_change_no_state_and_no_counter_and_empty_batches_are_steps():
    rig = toy.Engine(count_steps(ADAM), FEDERATION, per_round=4, lanes=3, epochs=EPOCHS)
    rows = FEDERATION.indices
    nothing = np.full((1, BATCH), -1, np.int32)

    def batch(client, *positions):
        return np.array([[rows[client][i] for i in positions] + [-1] * (BATCH - len(positions))])

    work = {
        2: np.concatenate([batch(2, 0, 1, 2, 3), batch(2, 4), batch(2, 5, 6)]),
        5: np.concatenate([batch(5, 3, 2), nothing]),
    }

    def run(clients, batches):
        cohort = Cohort(clients, [float(SIZES[c]) for c in clients], batches)
        counters = {"count": jnp.zeros(len(SIZES), jnp.int32)}
        return rig.run(cohort, 1, (rig.start()[0], counters))

    both = run([2, 5], [work[2], work[5]])
    assert {c: int(both.client_state["count"][c]) for c in (2, 5, 0)} == {2: 3, 5: 2, 0: 0}
    alone = run([2], [work[2]])  # two lanes are never used
    assert alone.client_state["count"].tolist() == [0, 0, 3] + [0] * 8
    trimmed = run([2, 5], [work[2], work[5][:1]])
    assert int(trimmed.client_state["count"][5]) == 1
    # Metrics count examples, of which an empty batch has none.
    assert_close(trimmed.sums["loss"], both.sums["loss"], rtol=1e-6)


# One program with plain SGD, private heads and infinite examples of the clients 0 and 5.
BAD = (0, 5)


@functools.cache
def poisoned():
    federation = toy.poisoned(FEDERATION, *BAD)
    algorithm = fp.algorithms.fedavg(optax.sgd(0.5), head="private")
    return toy.Engine(algorithm, federation, per_round=COHORT, lanes=3, epochs=EPOCHS)


def cohort_of(rig, *clients):
    rows = [rig.schedule.indices[c] for c in clients]
    return Cohort(clients, [float(len(r)) for r in rows], [batches(r, BATCH) for r in rows])


def test_a_half_padded_batch_gives_the_gradient_of_its_real_examples():
    rig = poisoned()
    # What padding must not touch: row 0 of the data is infinite.
    x = np.array(toy.poisoned(FEDERATION, *BAD).data.columns["x"])
    assert not np.isfinite(x[FEDERATION.indices[0][0]]).any()
    model, rows = toy.model(), FEDERATION.indices[6]
    assert len(rows) == 3
    result = rig.run(cohort_of(rig, 6), round_index=4)
    key = jax.random.fold_in(client_key(stream(0, "clients"), 4, 6), 1)
    kept = np.asarray(jax.random.bernoulli(key, 0.8, (BATCH, toy.WIDTH)))[:3]
    leaves = {n: np.asarray(v, np.float64) for n, v in model.trainable.items()}
    frozen = {n: np.asarray(v, np.float64) for n, v in model.frozen.items()}
    by = reference.gradients(frozen, leaves, x[rows], FEDERATION.data.labels[rows], kept)
    for name in toy.ADAPTER:
        assert_close(result.server[name], leaves[name] - 0.5 * by[name], atol=1e-6)
    for name in toy.HEAD:
        expected = leaves[name] - 0.5 * by[name]
        assert_close(result.client_state[name][6], expected, atol=1e-6)


def test_an_upload_that_is_not_finite_is_left_out():
    rig = poisoned()
    result = rig.run(cohort_of(rig, 0, 1, 2, 5, 8))
    without = rig.run(cohort_of(rig, 1, 2, 8))
    assert result.finite.tolist() == [False, True, True, False, True, True, True, True]
    for name in toy.ADAPTER:
        assert np.isfinite(result.server[name]).all()
        assert_close(result.server[name], without.server[name], rtol=0, atol=1e-6)
        assert np.abs(result.server[name] - np.asarray(rig.shared[name])).max() > 1e-3
    for name in toy.HEAD:
        for client in BAD:
            np.testing.assert_array_equal(result.client_state[name][client], rig.client_state[name])
        assert_close(
            result.client_state[name][[1, 2, 8]],
            without.client_state[name][[1, 2, 8]],
            rtol=0,
            atol=1e-6,
        )
    assert all(np.isfinite(x) for x in result.aggregation.values())


def test_a_round_without_a_finite_upload_changes_no_state():
    rig = poisoned()
    for cohort in (cohort_of(rig, *BAD), cohort_of(rig)):
        result = rig.run(cohort)
        for name in toy.ADAPTER:
            np.testing.assert_array_equal(result.server[name], rig.shared[name])
        for name in toy.HEAD:
            start = np.broadcast_to(rig.client_state[name], result.client_state[name].shape)
            np.testing.assert_array_equal(result.client_state[name], start)
        assert result.aggregation["aggregation_error"] == 0
