"""Operations on stacked pytrees."""

import jax
import jax.numpy as jnp
import numpy as np

import fedjax_peft as fp

STACKED = {
    "a": jnp.arange(6, dtype=jnp.float32).reshape(3, 2),
    "b": {"c": jnp.array([1, 2, 3], jnp.int32)},
}


def lists(x):
    return jax.tree.map(lambda leaf: np.asarray(leaf).tolist(), x)


def test_broadcast_stacks_copies():
    result = fp.tree.broadcast({"a": jnp.ones((2, 3)), "b": 5}, 4)
    assert jax.tree.map(jnp.shape, result) == {"a": (4, 2, 3), "b": (4,)}


def test_take_gathers_rows_and_clips():
    got = fp.tree.take(STACKED, np.array([2, 0, 9, -1]))
    assert lists(got) == {"a": [[4, 5], [0, 1], [4, 5], [0, 1]], "b": {"c": [3, 1, 3, 1]}}
    assert lists(fp.tree.take(STACKED, jnp.array(1))) == {"a": [2, 3], "b": {"c": 2}}


def test_put_replaces_rows_and_drops_those_out_of_range():
    rows = {"a": jnp.full((2, 2), 7.0), "b": {"c": jnp.array([8, 9])}}
    got = fp.tree.put(STACKED, jnp.array([1, 3]), rows)
    assert lists(got) == {"a": [[0, 1], [7, 7], [4, 5]], "b": {"c": [1, 8, 3]}}


def test_where_picks_rows_whole():
    zeros = jax.tree.map(jnp.zeros_like, STACKED)
    got = fp.tree.where(jnp.array([True, False, True]), STACKED, zeros)
    assert lists(got) == {"a": [[0, 1], [0, 0], [4, 5]], "b": {"c": [1, 0, 3]}}


def test_weighted_sum_is_float32_for_all_dtypes():
    got = fp.tree.weighted_sum(
        {"a": STACKED["a"].astype(jnp.bfloat16)}, jnp.array([1.0, 0.5, 2.0], jnp.float32)
    )
    assert lists(got) == {"a": [0 + 1 + 8, 1 + 1.5 + 10]}
    assert got["a"].dtype == jnp.float32


def test_distance_is_joint_and_float32():
    x = {"a": jnp.array([3.0, 1.0], jnp.bfloat16), "b": {"c": jnp.array([[1.0]])}}
    y = {"a": jnp.array([0.0, 1.0], jnp.bfloat16), "b": {"c": jnp.array([[5.0]])}}
    assert fp.tree.distance(x, y) == 5
    assert fp.tree.distance(x, y).dtype == jnp.float32
    assert fp.tree.distance({}, {}) == 0


def test_all_finite_as_a_whole_and_by_row():
    bad = {"a": STACKED["a"].at[1, 0].set(jnp.inf), "n": jnp.array([jnp.nan, 0, 0])}
    assert bool(fp.tree.all_finite(STACKED))
    assert not bool(fp.tree.all_finite(bad))
    assert fp.tree.all_finite(bad, axis=0).tolist() == [False, False, True]
    # Whole numbers are always finite, and so is nothing.
    assert bool(fp.tree.all_finite(STACKED["b"], axis=0))
    assert bool(fp.tree.all_finite({}, axis=0))


def test_size_and_bytes_of_arrays_and_of_shapes():
    assert (fp.tree.size(STACKED), fp.tree.nbytes(STACKED)) == (9, 36)
    halves = {"a": jax.ShapeDtypeStruct((3, 5), jnp.bfloat16)}
    assert (fp.tree.size(halves), fp.tree.nbytes(halves)) == (15, 30)


def test_select_sorts_names():
    assert list(fp.tree.select({"b": 1, "c": 2, "a": 3}, {"c", "a"})) == ["a", "c"]


def test_the_check_of_many_leaves_is_compiled_once():
    """Not once for each of the operations that use it."""

    def accepted(leaves):
        good = fp.tree.all_finite(leaves, axis=0)
        return fp.tree.where(good, leaves, jax.tree.map(jnp.zeros_like, leaves))

    leaves = {str(i): jnp.ones((2, 3)) for i in range(40)}
    text = jax.jit(accepted).lower(leaves).compile().as_text()
    assert text.count(" and(") < 3 * len(leaves)
