"""The key schedule: keys are distinct, repeatable, and depend on their names only."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
from internals import client_key, host_rng, stream


def data(key):
    return jax.random.key_data(key).tolist()


def test_keys_are_distinct():
    streams = [stream(seed, name) for seed in (0, 1) for name in ("clients", "adapter", "init")]
    streams.append(stream(0, "init", "clients"))
    streams += [stream(seed, "init") for seed in (2**32, 2**32 + 1, 2**40, 2**63 - 1)]
    keys = [client_key(s, r, c) for s in streams for r in range(1, 6) for c in range(6)]
    steps = [jax.random.fold_in(k, i) for k in keys[:60] for i in range(5)]
    seen = [tuple(data(k)) for k in (*streams, *keys, *steps)]
    assert len(set(seen)) == len(seen)


def test_a_stream_descends_from_a_seed_or_a_key():
    assert data(stream(stream(5, "init"), "head")) == data(stream(5, "init", "head"))


def test_a_client_key_is_the_same_wherever_it_is_computed():
    root = stream(0, "clients")
    alone = [data(client_key(root, 3, c)) for c in (9, 4, 9, 0)]
    lanes = jax.jit(jax.vmap(lambda c: client_key(root, jnp.int32(3), c)))
    assert data(lanes(jnp.array([9, 4, 9, 0]))) == alone
    assert data(lanes(jnp.array([0, 9]))) == [alone[3], alone[0]]


def test_values_are_those_of_every_other_process():
    # Written down from another process: a run can be resumed, and a result repeated, anywhere.
    assert host_rng(0, "cohort", 1).integers(0, 1000, 4).tolist() == [813, 187, 702, 526]
    # A seed of more than 32 bits.
    assert host_rng(2**40 + 5, "order", 3).integers(0, 1000, 4).tolist() == [925, 971, 608, 711]
    assert data(stream(0, "clients")) == [3541564054, 3555481253]


def test_host_streams_differ_by_seed_name_and_index():
    calls = itertools.product((0, 1), ("cohort", "order"), (1, 2), (0, 7))
    drawn = [tuple(host_rng(*call).integers(0, 2**60, 2).tolist()) for call in calls]
    assert len(set(drawn)) == len(drawn)
    assert np.array_equal(host_rng(3, "a").random(4), host_rng(3, "a").random(4))
