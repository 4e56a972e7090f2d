"""Compressors: NumPy references, unbiasedness, error feedback, bytes on the wire, whole rounds."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from closeness import assert_close
from internals import NF4, chain, constants_of, encoder, plan
from small_config import small
from toy_transforms import ALGORITHM, FEDERATION, compressors, example, run, upload

import fedjax_peft as fp
from fedjax_peft import transforms
from fedjax_peft.transforms import error_feedback
from fedjax_peft.transforms.compressing import count, index_bits
from fedjax_peft.transforms.packing import pack, wires_of

pytestmark = pytest.mark.slow

KEY = jax.random.key(3)
SHAPES = {"head.bias": (3,), "head.kernel": (6, 3), "layer.lora_a": (5, 2), "layer.lora_b": (2, 6)}


def change(seed=0):
    rng = np.random.default_rng(seed)
    return {n: jnp.asarray(rng.normal(0, 0.1, s), jnp.float32) for n, s in SHAPES.items()}


def encoded(transform, update, key=KEY, memory=None):
    memory = transform.memory(update) if memory is None else memory
    return transform.client(update, memory, transform.broadcast(transform.init(update)), key)


encode = jax.jit(encoded, static_argnums=0)


def read(transform, update, key=KEY):
    """Returns what the server reads, as float64 arrays."""
    made = encode(transform, update, key).update
    return {n: np.asarray(x, np.float64) for n, x in made.items()}


# ------------------------------------------------------------------------------- NumPy references


def in_blocks(x, block, code):
    flat = np.asarray(x, np.float64).ravel()
    return np.concatenate([code(flat[i : i + block]) for i in range(0, x.size, block)]).reshape(
        x.shape
    )


def nearest_int8(x):
    return np.round(127 * x / np.abs(x).max()) / 127 * np.abs(x).max()


def nearest_nf4(x):
    scaled = x / np.abs(x).max()
    return np.array(NF4)[np.abs(scaled[:, None] - NF4).argmin(1)] * np.abs(x).max()


def nearest_uniform(x, levels):
    largest = np.abs(x).max()
    return np.sign(x) * np.floor(np.abs(x) / largest * levels + 0.5) / levels * largest


def largest(x, k):
    flat = np.asarray(x, np.float64).ravel()
    kept = np.argsort(-np.abs(flat), kind="stable")[:k]
    return np.where(np.isin(np.arange(flat.size), kept), flat, 0).reshape(x.shape)


REFERENCES = {
    "int8": (fp.transforms.int8(4), lambda x: in_blocks(x, 4, nearest_int8)),
    "nf4": (fp.transforms.nf4(4), lambda x: in_blocks(x, 4, nearest_nf4)),
    "quantize": (
        fp.transforms.quantize(3, stochastic=False),
        lambda x: nearest_uniform(np.asarray(x), 3),
    ),
    "blocks": (
        fp.transforms.quantize(5, stochastic=False, block=7),
        lambda x: in_blocks(x, 7, lambda b: nearest_uniform(b, 15)),
    ),
    "sign": (
        fp.transforms.sign(),
        lambda x: np.where(np.asarray(x) >= 0, 1, -1) * np.abs(x).mean(),
    ),
    "top_k": (fp.transforms.top_k(0.3), lambda x: largest(x, math.ceil(0.3 * x.size))),
}


@pytest.mark.parametrize("name", REFERENCES)
def test_a_compressor_equals_its_numpy_reference(name):
    transform, reference = REFERENCES[name]
    update, lost, size = change(), 0.0, 0.0
    for leaf, x in read(transform, update).items():
        wanted, original = reference(update[leaf]), np.asarray(update[leaf], np.float64)
        assert_close(x, wanted, rtol=2e-6, atol=1e-8)
        lost, size = lost + ((wanted - original) ** 2).sum(), size + (original**2).sum()
    measured = encode(transform, update).measured
    assert_close(measured, math.sqrt(lost / size), rtol=1e-5)


def test_top_k_across_leaves_takes_the_largest_of_all():
    update = change()
    flat = np.concatenate([np.asarray(update[n]).ravel() for n in sorted(update)])
    made = read(fp.transforms.top_k(0.1, across_leaves=True), update)
    sent = np.concatenate([made[n].ravel() for n in sorted(made)])
    assert_close(sent, largest(flat, 5))
    assert np.count_nonzero(sent) == 5


def test_random_k_sends_the_drawn_entries_times_n_over_k():
    update = change()
    for feedback, factor in ((False, 18 / 6), (True, 1.0)):
        x = read(fp.transforms.random_k(1 / 3, error_feedback=feedback), update)["head.kernel"]
        assert np.count_nonzero(x) == 6
        assert_close(x[x != 0], factor * np.asarray(update["head.kernel"])[x != 0])


@pytest.mark.parametrize("by", ["norm", "product", "random"])
def test_top_directions_sends_columns_of_a_with_the_same_rows_of_b(by):
    update = {"m.lora_a": jnp.array([[1.0, 4, 2], [1, 0, 3]]), "head.bias": jnp.ones(2)}
    update["m.lora_b"] = jnp.array([[5.0, 5], [0.1, 0], [1, 2]])
    made = read(fp.transforms.top_directions(1, by=by), update)
    norms = np.array([(2, 50), (16, 0.01), (13, 5)])
    best = {"norm": norms.sum(1).argmax(), "product": norms.prod(1).argmax()}.get(by)
    (sent,) = np.flatnonzero(made["m.lora_a"].any(0))
    assert best in (None, sent)
    for name, x in (("m.lora_a", made["m.lora_a"]), ("m.lora_b", made["m.lora_b"].T)):
        full = np.asarray(update[name] if name == "m.lora_a" else update[name].T)
        np.testing.assert_array_equal(x, np.where(np.arange(3) == sent, full, 0))
    np.testing.assert_array_equal(made["head.bias"], 1)


def test_directions_are_ranked_by_the_factor_that_has_changed():
    """In FFA-LoRA only B is shared; in RoLoRA, the factor that rests looks like zeros."""
    b = jnp.array([[1.0, 0], [3, 0], [2, 0]])
    alone = read(fp.transforms.top_directions(1, by="product"), {"m.lora_b": b})["m.lora_b"]
    resting = {"m.lora_a": jnp.zeros((2, 3)), "m.lora_b": b}
    other = read(fp.transforms.top_directions(1, by="product"), resting)["m.lora_b"]
    for x in (alone, other):
        np.testing.assert_array_equal(x, [[0, 0], [3, 0], [0, 0]])


def test_power_sgd_equals_its_numpy_reference_and_finds_the_best_factors():
    rng = np.random.default_rng(0)
    matrix = rng.normal(size=(12, 9)) * 0.5 ** np.arange(9)[None]
    update = {"w": jnp.asarray(matrix, jnp.float32), "v": jnp.ones(3)}
    transform = fp.transforms.power_sgd(2, error_feedback=False)
    memory, errors = transform.memory(update), []
    (q,) = (np.asarray(x, np.float64) for x in memory.values())  # a vector is sent whole
    for _ in range(12):
        encoded = encode(transform, update, memory=memory)
        p = np.linalg.qr(matrix @ q)[0]
        q = matrix.T @ p
        assert_close(encoded.update["w"], p @ q.T, atol=2e-5)
        memory = encoded.memory
        errors.append(np.linalg.norm(encoded.update["w"] - matrix))
    best = np.sqrt((np.linalg.svd(matrix, compute_uv=False)[2:] ** 2).sum())
    assert_close(errors[-1], best, rtol=1e-3)
    assert errors[0] > 1.05 * best, "the warm start improves Q"


# ------------------------------------------------------------------------------------ unbiasedness

UNBIASED = {
    "quantize": fp.transforms.quantize(3),
    "quantize l2": fp.transforms.quantize(3, norm="l2"),
    "quantize blocks": fp.transforms.quantize(2, block=5),
    "ternary": fp.transforms.ternary(),
    "random_k": fp.transforms.random_k(0.3),
    "random_k and quantize": chain(fp.transforms.random_k(0.3), fp.transforms.quantize(4)),
}


@pytest.mark.parametrize("name", UNBIASED)
def test_the_mean_over_many_keys_is_the_change(name):
    update, draws = change(), 4000
    run = jax.jit(jax.vmap(lambda key: encode(UNBIASED[name], update, key).update))
    for leaf, x in run(jax.random.split(KEY, draws)).items():
        x = np.asarray(x, np.float64)
        error = np.abs(x.mean(0) - np.asarray(update[leaf]))
        # 5 standard errors, and float32 rounding of entries that are always the same.
        assert (error <= 5 * x.std(0) / np.sqrt(draws) + 1e-7).all()
        assert x.std(0).max() > 1e-3


def test_two_leaves_of_the_same_shape_have_different_random_numbers():
    x = jnp.full(64, 0.3).at[0].set(1.0)
    made = read(fp.transforms.ternary(), {"a": x, "b": x})
    assert (made["a"] != made["b"]).any()


# ---------------------------------------------------------------------------------- error feedback


@pytest.mark.parametrize("name", compressors(with_option="error_feedback"))
def test_what_is_sent_adds_up_to_the_changes_minus_the_memory(name):
    transform = example(name, error_feedback=True)
    memory = transform.memory(change())
    sent = changes = jax.tree.map(jnp.zeros_like, change())
    for i in range(6):
        encoded = encode(transform, change(i), jax.random.fold_in(KEY, i), memory)
        memory = encoded.memory
        sent = jax.tree.map(jnp.add, sent, encoded.update)
        changes = jax.tree.map(jnp.add, changes, change(i))
    lost = memory["lost"]
    for leaf, x in sent.items():
        assert_close(x, changes[leaf] - lost[leaf], atol=1e-6)
    assert max(np.abs(x).max() for x in lost.values()) > 1e-4


def test_error_feedback_wraps_a_chain_of_compressors():
    inner = chain(fp.transforms.top_k(0.3, error_feedback=False), fp.transforms.quantize(3))
    transform = error_feedback(inner)
    first = encode(transform, change())
    expected = read(inner, change())
    for leaf, x in first.update.items():
        assert_close(x, expected[leaf], rtol=1e-6)
        assert_close(first.memory["lost"][leaf], change()[leaf] - x, atol=1e-7)
    size = sum(w.nbytes for w in wires(transform).values())
    assert size == sum(w.nbytes for w in wires(inner).values())


def test_what_was_lost_of_a_leaf_waits_while_the_leaf_rests():
    """In RoLoRA, A and B are sent in turns; a client of a lower rank never sends the rest."""
    start, transform = change(1), fp.transforms.top_k(0.3)
    rests = {"layer.lora_a": jnp.array(False), "layer.lora_b": jnp.array(True)}
    owned = {"layer.lora_b": jnp.array([[True] * 6, [False] * 6])}
    memory = {"lost": change(2), "own": ()}
    memory["lost"]["layer.lora_b"] = memory["lost"]["layer.lora_b"].at[1].set(0)
    encode_ = jax.jit(encoder(transform, ALGORITHM, (), rests))
    learned = jax.tree.map(jnp.add, start, change(3))
    learned["layer.lora_b"] = learned["layer.lora_b"].at[1].set(start["layer.lora_b"][1])
    encoded = encode_(upload(learned, start, memory, owned))
    sent, lost = encoded.value, encoded.memory["lost"]
    np.testing.assert_array_equal(lost["layer.lora_a"], memory["lost"]["layer.lora_a"])
    np.testing.assert_array_equal(sent["layer.lora_a"], learned["layer.lora_a"])
    np.testing.assert_array_equal(lost["layer.lora_b"][1], 0)
    for name in ("head.bias", "layer.lora_b"):
        total = sent[name] - start[name] + lost[name]
        wanted = learned[name] - start[name] + memory["lost"][name]
        assert_close(total, wanted, atol=1e-6)


def test_noise_at_the_server_takes_no_error_feedback():
    with pytest.raises(fp.InputError, match="cannot be added to 'noise'"):
        error_feedback(fp.contracts.Transform("noise", lambda *_: None, changes_aggregate=True))


# -------------------------------------------------------------------------------------- edge cases


@pytest.mark.parametrize("name", compressors())
def test_zeros_single_entries_and_extreme_sizes_stay_finite(name):
    update = {"none": jnp.zeros((0, 2))}
    for kind, size in (("zeros", 0.0), ("tiny", 1e-37), ("huge", 1e37)):
        leaves = change() | {"one": jnp.ones(1), "scalar": jnp.float32(1)}
        update |= {f"{kind}.{n}": size * x for n, x in leaves.items()}
    made = encoded(example(name), update)  # in one program it would take longer
    for leaf, x in made.update.items():
        assert x.shape == update[leaf].shape
        assert np.isfinite(x).all()
        assert not leaf.startswith("zeros") or not np.any(x)
    assert np.isfinite(jax.tree.leaves(made.measured)).all()


# -------------------------------------------------------------------------------- bytes on the wire


def wires(transform, template=None):
    template = change() if template is None else template
    return transform.wire(template, wires_of(template))


BITS = [  # of a leaf [6, 3] of 18 float32 entries
    (fp.transforms.quantize(4), 18 * 4 + 32),
    (fp.transforms.quantize(4, block=5), 18 * 4 + 4 * 32),
    (fp.transforms.int8(8), 18 * 8 + 3 * 32),
    (fp.transforms.nf4(8), 18 * 4 + 3 * 32),
    (fp.transforms.sign(), 18 + 32),
    (fp.transforms.ternary(), 8 * 4 + 32 - 0),  # 18 entries in 4 bytes: five in a byte
    (fp.transforms.top_k(0.1), 2 * 32 + 2 * 5),  # 2 indices of 5 bits
    (fp.transforms.top_k(0.5), 9 * 32 + 18),  # a bitmap is smaller than 9 indices
    (fp.transforms.top_k(1.0), 18 * 32),
    (fp.transforms.random_k(0.1), 2 * 32),
    (fp.transforms.power_sgd(1), (6 + 3) * 32),
    (fp.transforms.power_sgd(2), 18 * 32),  # factors would not be smaller
    (fp.transforms.clip_norm(1.0), None),
    (chain(fp.transforms.top_k(0.1), fp.transforms.quantize(4)), 2 * 5 + 2 * 4 + 32),
    (chain(fp.transforms.quantize(4), fp.transforms.top_k(0.1)), 32 + 2 * 4 + 2 * 5),
    (chain(fp.transforms.top_k(0.5), fp.transforms.int8(4)), 18 + 9 * 8 + 3 * 32),
    (
        chain(fp.transforms.top_k(0.5), fp.transforms.clip_norm(1.0), fp.transforms.random_k(0.5)),
        18 + 5 * 32,
    ),
    (
        chain(chain(fp.transforms.top_k(0.5), fp.transforms.sign()), fp.transforms.random_k(0.5)),
        18 + 32 + 5 * 1,
    ),
]


@pytest.mark.parametrize(("transform", "bits"), BITS, ids=lambda x: getattr(x, "name", ""))
def test_the_wire_is_counted_to_the_bit(transform, bits):
    if bits is None:
        assert transform.wire is None
    else:
        assert wires(transform)["head.kernel"].nbytes == math.ceil(bits / 8)


def test_top_k_across_leaves_is_one_message():
    wire = wires(fp.transforms.top_k(0.1, across_leaves=True))
    assert wire == fp.contracts.Wire(5, 32, 5 * 6)  # 43 entries: indices of 6 bits
    both = wires(chain(fp.transforms.top_k(0.1, across_leaves=True), fp.transforms.int8(4)))
    assert both == fp.contracts.Wire(5, 8, 5 * 6 + 2 * 32)


def test_directions_take_their_entries_and_one_index_a_pair():
    wire = wires(fp.transforms.top_directions(1))
    assert wire["layer.lora_a"] == fp.contracts.Wire(5, 32, 1)
    assert wire["layer.lora_b"] == fp.contracts.Wire(6, 32, 0)
    assert wire["head.kernel"] == fp.contracts.Wire(18, 32, 0)
    assert wires(fp.transforms.top_directions(1, by="random"))["layer.lora_a"] == fp.contracts.Wire(
        5, 32, 0
    )
    assert wires(fp.transforms.top_directions(9))["layer.lora_b"] == fp.contracts.Wire(12, 32, 0)


def test_shares_are_rounded_up_and_a_bitmap_replaces_long_indices():
    assert [count(share, 10) for share in (0.001, 0.1, 0.11, 0.3, 1.0)] == [1, 1, 2, 3, 10]
    assert [index_bits(k, 1000) for k in (1, 100, 101, 1000)] == [10, 1000, 1000, 0]
    assert index_bits(1, 1) == 0


# ------------------------------------------------------------------------------------------ chains


@pytest.mark.parametrize("across", [False, True])
def test_a_compressor_after_a_sparsifier_sees_the_chosen_entries_only(across):
    update = change()
    sparse = read(fp.transforms.top_k(0.3, across_leaves=across), update)
    made = read(chain(fp.transforms.top_k(0.3, across_leaves=across), fp.transforms.sign()), update)
    if across:
        together = np.concatenate([x[x != 0] for x in sparse.values()])
        scales = [np.abs(together).mean()] * 4
    else:
        scales = [np.abs(x[x != 0]).mean() for x in sparse.values()]
    for (leaf, x), scale in zip(sparse.items(), scales, strict=True):
        assert_close(made[leaf], np.sign(x) * scale, rtol=1e-6)


def test_entries_are_packed_in_order_and_go_back_to_their_places():
    update = {"a": jnp.array([[0.0, -3], [1, 0]]), "b": jnp.ones(2)}
    values, back = pack(update, {"a": fp.contracts.Wire(2, 32), "b": fp.contracts.Wire(2, 32)})
    np.testing.assert_array_equal(values["a"], [-3, 1])
    new = back({"a": jnp.array([5.0, 6]), "b": jnp.zeros(2)})
    np.testing.assert_array_equal(new["a"], [[0, 5], [6, 0]])
    np.testing.assert_array_equal(new["b"], 0)


def test_no_compressor_follows_power_sgd():
    with pytest.raises(fp.InputError, match="'quantize' cannot follow 'power_sgd'"):
        chain(fp.transforms.power_sgd(), fp.transforms.quantize())
    assert chain(
        fp.transforms.quantize(), fp.transforms.power_sgd(), fp.transforms.clip_norm(1.0)
    ).final


# ------------------------------------------------------------------------------------- whole rounds


def test_the_errors_of_all_compressors_are_in_the_rows_and_nan_is_dropped():
    together = (fp.transforms.top_k(0.6), fp.transforms.quantize(4))
    poisoned = run(together, federation=toy.poisoned(FEDERATION, 1)).metrics[-1]
    assert poisoned["dropped"] == [1]
    assert all(0 < poisoned[name] < 1 for name in ("compression_error", "compression_error_2"))
    nobody = run(together, 1, federation=toy.poisoned(FEDERATION, *range(5)))
    assert nobody.metrics[-1]["compression_error"] is None


def test_compressed_bytes_are_in_the_rows_and_in_the_simulated_seconds():
    plain, small = (run(given, 1).metrics[-1] for given in (None, fp.transforms.sign()))
    bits = [18 + 32, 3 + 32, 10 + 32, 12 + 32]
    assert small["bytes_up"] == 5 * sum(math.ceil(n / 8) for n in bits)
    assert small["bytes_down"] == plain["bytes_down"]
    assert small["simulated_seconds"] < plain["simulated_seconds"]


# ------------------------------------------------------------------------------------- bad options


def test_a_share_is_a_constant_of_the_program():
    assert constants_of(fp.transforms.top_k) == ("share",)
    with pytest.raises(fp.InputError, match=r"share = .* of top_k .* cannot be a run-time value"):
        jax.eval_shape(
            lambda share: encoded(fp.transforms.top_k(share), change()).update, jnp.float32(0.5)
        )


def test_a_sweep_over_shares_compiles_each_of_them_and_one_over_norms_does_not():
    raw = small(transforms={"top_k": {"share": 0.1}, "clip_norm": {"max_norm": 1.0}})
    points = plan(raw, ["transforms.top_k.share=0.1,0.2"]).points
    assert [point.config["runtime"] for point in points] == [None, None]
    points = plan(raw, ["transforms.clip_norm.max_norm=1.0,2.0"]).points
    assert points[0].config["runtime"] == ["transforms.clip_norm.max_norm"]


def test_every_transform_of_a_config_is_in_the_list_of_this_file():
    assert set(compressors()) <= set(transforms.__all__)
    assert len(compressors()) >= 9
