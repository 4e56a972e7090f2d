"""Quantised kernels: the arithmetic of bitsandbytes, gradients, memory, and what refuses them."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny
import torch
from closeness import ROUNDOFF, approx, assert_close, roughly
from flax import nnx
from internals import NF4, TINY_BERT
from refusals import refused
from safetensors.numpy import load_file
from scipy.stats import norm

import fedjax_peft as fp
from fedjax_peft.models import quantized
from fedjax_peft.models.quantized import Int8Kernel, NF4Kernel, QuantizedLinear

pytestmark = pytest.mark.slow

GOLDEN = Path(__file__).parents[1] / "golden" / "bitsandbytes" / "matrices.safetensors"
HOW = ("int8", "nf4")
NARROW = {**TINY_BERT, "num_hidden_layers": 1, "vocab_size": 16}


def model_of(how=None, **options):
    return fp.random_model(TINY_BERT, head=fp.heads.classification(4), quantize=how, **options)


# ------------------------------------------------------------------------------------- arithmetic


def test_nf4_values_are_quantiles_of_the_normal_distribution():
    """QLoRA, Section 3: quantiles of N(0, 1) over two halves that both contain 0, divided by the
    largest. The offset is the mean of 1 - 1/32 and 1 - 1/30, as in bitsandbytes.
    """
    offset = 1 - (1 / 32 + 1 / 30) / 2
    upper = norm.ppf(np.linspace(offset, 0.5, 9)[:-1])
    lower = -norm.ppf(np.linspace(offset, 0.5, 8)[:-1])
    values = np.sort([*upper, 0.0, *lower]) / upper.max()
    assert values == roughly(np.array(NF4), abs=3e-7)  # printed float32 numbers


def test_a_tpu_chooses_the_values_that_others_look_up():
    codes = jnp.arange(16, dtype=jnp.uint8).reshape(2, 8)
    np.testing.assert_array_equal(quantized.chosen_by_bits(codes), np.float32(NF4).reshape(2, 8))


def nf4_loop(matrix):
    """NF4 of a torch matrix [out, in] with blocks in one row, one weight after the other."""
    values, rows, codes = np.array(NF4, np.float32), [], []
    scales = [
        max(abs(x) for x in row[i : i + 64]) for row in matrix for i in range(0, len(row), 64)
    ]
    mean = np.float32(np.mean(scales, dtype=np.float64))
    table, stored = quantized.dynamic_map(), []
    for i in range(0, len(scales), 256):
        apart = np.array(scales[i : i + 256], np.float32) - mean
        size = max(abs(apart)) or np.float32(1)
        stored += [size * table[np.argmin(abs(table - x / size))] + mean for x in apart]
    blocks = -(-matrix.shape[1] // 64)
    for r, row in enumerate(matrix):
        code = []
        for i, x in enumerate(row):
            scale = scales[r * blocks + i // 64] or np.float32(1)
            code.append(int(np.argmin(abs(values - x / scale))))
        codes.append(code)
        rows.append([values[c] * stored[r * blocks + i // 64] for i, c in enumerate(code)])
    return np.array(codes), np.array(rows, np.float32)


def unpacked(kernel):
    codes = np.asarray(kernel.codes[...])
    return np.stack([codes >> 4, codes & 15], axis=1).reshape(-1, codes.shape[1])


@pytest.mark.parametrize("shape", [(6, 128), (5, 70)])
def test_nf4_follows_the_formulas_one_weight_after_the_other(shape):
    matrix = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    matrix[1] = 0
    kernel = NF4Kernel(jnp.asarray(matrix.T))
    codes, values = nf4_loop(matrix)
    np.testing.assert_array_equal(unpacked(kernel)[: shape[1]].T, codes)
    # Scales reach 3; the code of a scale is read, multiplied and added to the mean.
    assert_close(np.asarray(kernel[...]).T, values, atol=4e-6)


@pytest.mark.parametrize("name", ["normal", "tails"])
def test_kernels_are_those_of_bitsandbytes(name):
    golden = load_file(GOLDEN)
    matrix = golden[f"{name}.matrix"]
    kernel = jnp.asarray(matrix.T)
    assert_close(quantized.dynamic_map(), golden["dynamic_map"], atol=4 * ROUNDOFF)
    theirs = {n.removeprefix(f"{name}.nf4."): x for n, x in golden.items() if ".nf4." in n}
    mine = NF4Kernel(kernel)
    np.testing.assert_array_equal(np.asarray(mine.codes[...]).T.reshape(-1), theirs["codes"])
    assert_close(mine.scale_mean[...], theirs["scale_mean"][0], rtol=1e-6)
    assert_close(mine.scale_sizes[...], theirs["scale_sizes"], rtol=1e-6)
    # Theirs searches a table of the scales' code in steps, which sometimes misses the nearest one.
    scales = np.asarray(mine.scale_codes[...]).T.reshape(-1)
    same = scales == theirs["scale_codes"]
    assert same.mean() > 0.97
    ours, values = np.asarray(mine[...]).T, theirs["values"]
    blocks = np.repeat(same, 64).reshape(ours.shape)
    # A scale is a mean plus a product, so the rounding of the largest scale is in all values.
    rounding = 16 * ROUNDOFF * np.abs(values).max()
    assert_close(ours[blocks], values[blocks], rtol=1e-6, atol=rounding)

    mine = Int8Kernel(kernel)
    np.testing.assert_array_equal(np.asarray(mine.codes[...]).T, golden[f"{name}.int8.codes"])
    assert_close(np.asarray(mine[...]).T, golden[f"{name}.int8.values"], rtol=1e-6, atol=1e-6)


# -------------------------------------------------------------------------------------- the layers


@pytest.mark.parametrize("how", HOW)
def test_a_product_and_its_gradients_are_those_of_the_dequantised_kernel_in_torch(how):
    """LoRA over a quantised layer: output, and gradients to A, B and the input."""
    rng = np.random.default_rng(1)
    x, w, a, b = (
        rng.standard_normal(s).astype(np.float32) for s in ((3, 5, 128), (128, 6), (128, 2), (2, 6))
    )
    layer = nnx.Linear(128, 6, rngs=nnx.Rngs(0))
    layer.kernel.set_value(jnp.asarray(w))
    layer = QuantizedLinear(layer, quantized.quantize_kernel(layer.kernel[...], how))
    dense = np.asarray(layer.kernel[...])

    def loss(x, a, b):
        return jnp.mean(jnp.sin(layer(x) + (x @ a) @ b))

    value, gradients = jax.value_and_grad(loss, (0, 1, 2))(x, a, b)
    leaves = [torch.tensor(v, requires_grad=True) for v in (x, a, b)]
    total = torch.sin(leaves[0] @ torch.tensor(dense) + leaves[0] @ leaves[1] @ leaves[2]).mean()
    total.backward()
    assert value == approx(total.item(), abs=2e-6)
    for mine, leaf in zip(gradients, leaves, strict=True):
        # Phases reach 40, and each sums 128 terms; their rounding goes into the cosine.
        assert_close(mine, leaf.grad.numpy(), atol=2e-5)

    # The same over lanes: the codes are shared.
    lanes = jax.vmap(jax.grad(loss, (0, 1, 2)))(*(jnp.stack([v, 2 * v]) for v in (x, a, b)))
    for mine, one in zip(lanes, gradients, strict=True):
        assert_close(mine[0], one, atol=1e-5)


@pytest.mark.parametrize("how", HOW)
def test_loading_quantises_all_but_embeddings_norms_and_head(tmp_path, how):
    fp.testing.write_tiny_checkpoint(tmp_path)
    plain = fp.load_model(tmp_path, head=fp.heads.classification(4))
    model = fp.load_model(tmp_path, head=fp.heads.classification(4), quantize=how)
    assert model.counts() == plain.counts()
    assert model.trainable.keys() == plain.trainable.keys()
    kernels = {n.partition(".kernel.")[0] for n in model.frozen if ".kernel." in n}
    assert kernels == {n.removesuffix(".kernel") for n in plain.frozen if n.endswith(".kernel")}
    others = {n: x for n, x in model.frozen.items() if ".kernel" not in n}
    assert all(x.dtype == jnp.float32 for x in others.values())
    # The function on a model gives the same codes, and the original kernels can be read again.
    for name, x in fp.quantize(plain, how).frozen.items():
        np.testing.assert_array_equal(x, model.frozen[name], name)
    for name in (f"{k}.kernel" for k in kernels):
        np.testing.assert_array_equal(model.original(name), plain.frozen[name], name)


METHODS = {
    "lora": fp.lora(4),
    "dora": fp.peft.dora(4),
    "ia3": fp.peft.ia3(),
    "pfeiffer": fp.peft.pfeiffer(4),
    "prefix": fp.peft.prefix_tuning(4),
    "bitfit": fp.peft.bitfit(),
}


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.sample("lora", "dora", "bitfit")
def test_every_method_computes_with_the_dequantised_weights(name):
    """Logits equal those of a plain model that holds the dequantised weights, and merged ones."""
    model = fp.random_model(NARROW, head=fp.heads.classification(4), quantize="nf4")
    plain = fp.merge(model)  # dequantised
    assert all(x.dtype == jnp.float32 for x in plain.frozen.values())
    batch = {k: jnp.asarray(v) % 16 for k, v in tiny.BATCH.items()}
    models = [fp.attach(base, METHODS[name], seed=2) for base in (model, plain)]
    params = tiny.trained(models[0])
    if name in ("lora", "dora"):
        merged = fp.merge(models[0], params)
        assert merged.frozen.keys() == plain.frozen.keys()
        models.append(merged)
    expected, *others = [
        one.apply(one.frozen, one.trainable if one.method is None else params, batch, None, False)
        for one in models
    ]
    for outputs in others:
        assert_close(outputs.logits, expected.logits, atol=2e-5)


# ------------------------------------------------------------------------------------------ starts


def truncated(matrix, rank):
    u, s, vt = np.linalg.svd(matrix.astype(np.float64), full_matrices=False)
    return (u[:, :rank] * s[:rank]) @ vt[:rank]


def first_features(matrix, rank):
    """The projection of all rows on the first ones, which a QR decomposition begins with."""
    q, _ = np.linalg.qr(matrix[:rank].T.astype(np.float64))
    return matrix @ q @ q.T


def coded(matrix):
    """NF4 of a flax kernel [in, out], by the slow loop."""
    return nf4_loop(np.asarray(matrix, np.float32).T)[1].T.astype(np.float64)


def loftq_loop(weights, rank, iterations):
    """LoftQ, Algorithm 1: the frozen matrix and the product of the factors."""
    product = np.zeros_like(weights)
    for _ in range(iterations):
        frozen = coded(weights - product)
        product = truncated(weights - frozen, rank)
    return frozen, product


@pytest.mark.parametrize(("init", "iterations"), [("loftq", 3), ("svd", 1), ("qr", 1)])
def test_starts_follow_their_algorithms_and_are_nearer_to_the_weights(init, iterations):
    rank, path = 4, "bert.encoder.layer.0.attention.self.query"
    head = fp.heads.classification(4)
    plain = fp.random_model(NARROW, head=head)
    model = fp.random_model(NARROW, head=head, quantize="nf4")
    method = fp.lora(rank, alpha=2 * rank, init=init, loftq_iterations=iterations)
    model = fp.attach(model, method)
    weights = np.asarray(plain.frozen[f"{path}.kernel"], np.float64)
    if init == "loftq":
        frozen, product = loftq_loop(weights, rank, iterations)
    else:
        product = {"svd": truncated, "qr": first_features}[init](weights, rank)
        frozen = coded(weights - product)
    layer = fp.models.modules.submodule(model.module(), path)
    assert_close(layer.product(), product, atol=1e-5)
    assert_close(layer.base.kernel[...], frozen, atol=1e-5)
    error = np.linalg.norm(weights - frozen - product)
    assert error < 0.9 * np.linalg.norm(weights - coded(weights))
    # Attaching leaves no trace of the reader in the model.
    assert layer.base.original is None
    if init != "loftq":  # the order of the two steps does not matter
        other = fp.quantize(fp.attach(plain, method), "nf4")
        np.testing.assert_array_equal(
            other.frozen[f"{path}.base.kernel.codes"], model.frozen[f"{path}.base.kernel.codes"]
        )


def test_starts_need_the_weights_before_quantisation():
    refused("load the model with quantize='nf4'", fp.attach, model_of(), fp.lora(2, init="loftq"))
    model = model_of("nf4")
    with pytest.raises(fp.InputError, match="does not know where to read them"):
        fp.attach(model.replace(original=None), fp.lora(2, init="loftq"))
    changed = model.replace(original=lambda name: 1.1 * model.original(name))
    refused("they are not those that were quantised", fp.attach, changed, fp.lora(2, init="loftq"))


# ---------------------------------------------------------------------------------------- refusals


def test_what_changes_frozen_weights_is_refused():
    refused(r"quantize = 'nf3'.*'nf4'", model_of, "nf3")
    refused("quantised already", fp.quantize, model_of("nf4"), "int8")
    refused("Full fine-tuning trains all weights", fp.attach, model_of("nf4"), fp.peft.full())
    clients = fp.partition.iid(fp.testing.tiny_dataset(32), clients=2, seed=0)
    model = fp.attach(model_of("int8"), fp.lora(2))
    for algorithm in (fp.algorithms.flora, fp.algorithms.fedex):
        with pytest.raises(
            fp.InputError, match="are quantised: a sum would need them all in float32"
        ):
            fp.session(model, algorithm(optax.sgd(0.1)), clients)
    with pytest.raises(fp.InputError, match="no frozen linear layer"):
        fp.random_model(
            {"model_type": "rnn", "vocab_size": 9}, head=fp.heads.causal_lm(), quantize="int8"
        )


# ------------------------------------------------------------------------------------------ memory


WIDE = {**TINY_BERT, "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 1}


def test_four_bits_stay_four_bits_in_the_compiled_round():
    """The kernels are 3.1 MB in float32. The compiled round has room for one dequantised kernel
    (1 MB) and as much for the activations, not for all of them.
    """
    head, weights = fp.heads.classification(4), 4 * 256 * 256 + 2 * 256 * 1024
    plain, model = (
        fp.attach(fp.random_model(WIDE, head=head, dropout=0.0, quantize=how), fp.lora(2))
        for how in (None, "nf4")
    )
    clients = fp.partition.iid(fp.testing.tiny_dataset(4, length=4), clients=2, seed=0)
    algorithm = fp.algorithms.fedavg(optax.sgd(0.1), head="frozen")
    placement = fp.Placement(lanes=2)
    session = fp.session(model, algorithm, clients, placement=placement, batch_size=1)
    held, whole = (sum(x.nbytes for x in made.frozen.values()) for made in (model, plain))
    assert sum(x.nbytes for x in session.setup.frozen.values()) == held
    codes = weights * (4 + 8 / 64 + 32 / (64 * 256)) / 8
    rest = whole - 4 * weights  # embeddings, norms and biases
    assert held == approx(codes + rest, abs=6 * 2 * 32)
    state, plan = session.init(0), session.plan(1)
    program = session.program(plan)
    program.compile(state, plan)
    assert program._compiled.memory_analysis().temp_size_in_bytes < 2 * 4 * 256 * 1024
