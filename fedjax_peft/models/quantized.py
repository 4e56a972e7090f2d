"""Frozen linear layers whose kernels are stored in 8 or 4 bits.

``int8`` (absolute maximum of every output channel, as the weights of LLM.int8, Dettmers et al.
2022, section 2.1)::

    c = round(127 W / m),   m_j = max_i |W_ij|,        W ≈ c · m / 127

``nf4`` (QLoRA, Dettmers et al. 2023, section 3): 64 weights of one output channel share a scale,
every weight is the nearest of 16 quantiles q of a normal distribution, and the scales are quantised
again (double quantisation)::

    c = argmin_j |W / m - q_j|,   m = max |W| over 64 weights,        W ≈ m · q_c
    m is stored as a difference to the mean of all scales, in 8 bits with a float32 size for 256
    differences: 4 + 8/64 + 32/(64·256) = 4.127 bits a weight

Decisions:

* ``int8`` has no outlier features. LLM.int8 computes with 8-bit activations, and takes the features
  with large activations out of the product, whose number is known at run time only. Here only
  weights are stored in 8 bits, and products are computed in the compute dtype.
* A block of ``nf4`` never goes over two output channels. Where 64 divides the number of inputs, as
  in all common models, the blocks are those of bitsandbytes; otherwise the last block of every
  channel is shorter.
* A kernel is dequantised where it is used, once for the output and once more for the gradient, and
  dropped after it. The codes are made to depend on the layer's input, and for the gradient on that
  of its output. Otherwise the compiler dequantises all kernels before the loop over local steps and
  keeps them. An optimization barrier does not prevent this on a CPU.

The codes, scales and dequantised weights are checked against bitsandbytes.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import EllipsisType
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from fedjax_peft.models.layers import UNSEEDED, FusedLinear
from fedjax_peft.models.modules import is_inside, replace_module, submodules
from fedjax_peft.support.checks import check_choice
from fedjax_peft.support.errors import InputError
from fedjax_peft.transforms.nf4 import NF4

Quantization: TypeAlias = Literal["int8", "nf4"]
"""How the kernels of frozen linear layers are stored."""

BLOCK = 64
"""Weights that share a scale in ``nf4``."""
SCALES = 256
"""Scales that share a scale of their own."""


class FrozenCode(nnx.Variable):
    """A variable of a quantised kernel; it never changes."""


# ------------------------------------------------------------------------------------- arithmetic


def dynamic_map() -> np.ndarray:
    """Returns the 256 values of the 8-bit code of scales, ascending, float32 (Dettmers 2016).

    A sign, a decimal exponent from -6 to 0 whose length varies, and a linear fraction in the bits
    that are left; with 0 and 1 added. In bitsandbytes: ``create_dynamic_map``.
    """
    values = [0.0, 1.0]
    for i in range(7):
        edges = np.linspace(0.1, 1, 2**i + 1, dtype=np.float32)
        means = (edges[:-1] + edges[1:]) / 2
        values += [sign * 10.0 ** (i - 6) * float(mean) for sign in (1, -1) for mean in means]
    return np.sort(np.array(values, np.float32))


_VALUES = np.array(NF4, np.float32)
_SCALE_VALUES = dynamic_map()


def _middles(values: np.ndarray) -> np.ndarray:
    return (values[1:] + values[:-1]) / 2


@jax.jit
def _nf4_codes(kernel: Array) -> tuple[Array, ...]:
    """Returns codes, codes of the scales, their sizes and their mean; see :class:`NF4Kernel`."""
    n_in, n_out = kernel.shape
    blocks = jnp.pad(kernel.astype(jnp.float32), ((0, -n_in % BLOCK), (0, 0)))
    blocks = blocks.reshape(-1, BLOCK, n_out)
    largest = jnp.max(jnp.abs(blocks), axis=1)
    ratio = blocks / jnp.where(largest > 0, largest, 1.0)[:, None]
    code = jnp.zeros(ratio.shape, jnp.uint8)
    for middle in _middles(_VALUES):
        code += (ratio > middle).astype(jnp.uint8)
    code = code.reshape(-1, n_out)
    packed = ((code[0::2] << 4) | code[1::2])[: -(-n_in // 2)]
    # Blocks in the order of torch's [out, in].
    flat = largest.T.reshape(-1)
    mean = jnp.mean(flat)
    apart = jnp.pad(flat - mean, (0, -flat.size % SCALES)).reshape(-1, SCALES)
    sizes = jnp.max(jnp.abs(apart), axis=1)
    share = apart / jnp.where(sizes > 0, sizes, 1.0)[:, None]
    scale_code = jnp.searchsorted(_middles(_SCALE_VALUES), share).astype(jnp.uint8)
    scale_code = scale_code.reshape(-1)[: flat.size].reshape(n_out, -1).T
    return packed, scale_code, sizes, mean


_Dense: TypeAlias = Callable[[tuple[Array, ...], int, Any], tuple[Array, Array | None]]
"""(arrays of a kernel, inputs, dtype) -> a matrix of the dtype, and factors of its columns."""


@jax.jit
def _nf4_values(codes: Array) -> Array:
    """Returns the values of codes. A TPU gathers slowly, so that it chooses them instead."""
    return jax.lax.platform_dependent(
        codes, tpu=chosen_by_bits, default=lambda codes: jnp.asarray(_VALUES)[codes]
    )


def chosen_by_bits(codes: Array) -> Array:
    """Returns the values of codes by four choices, each between two halves of what is left."""
    values: list[Any] = list(_VALUES)
    for bit in range(4):
        upper = (codes >> bit) & 1 == 1
        values = [jnp.where(upper, b, a) for a, b in zip(values[::2], values[1::2], strict=True)]
    return values[0]


def _dense_nf4(arrays: tuple[Array, ...], n_in: int, dtype: Any) -> tuple[Array, None]:
    codes, scale_codes, sizes, mean = arrays
    n_out = codes.shape[1]
    flat = jnp.asarray(_SCALE_VALUES)[scale_codes.T.reshape(-1)]
    flat = jnp.pad(flat, (0, -flat.size % SCALES)).reshape(-1, SCALES) * sizes[:, None]
    scales = (flat.reshape(-1)[: scale_codes.size] + mean).reshape(n_out, -1).T
    pairs = jnp.stack([codes >> 4, codes & 15], axis=1).reshape(-1, n_out)
    values = _nf4_values(pairs)
    if n_in % BLOCK:
        values = values[:n_in] * jnp.repeat(scales, BLOCK, axis=0)[:n_in]
    else:
        values = (values.reshape(-1, BLOCK, n_out) * scales[:, None]).reshape(n_in, n_out)
    return values.astype(dtype), None


@jax.jit
def _int8_codes(kernel: Array) -> tuple[Array, Array]:
    """Returns codes int8 ``[in, out]`` and scales float32 ``[out]``."""
    kernel = kernel.astype(jnp.float32)
    largest = jnp.max(jnp.abs(kernel), axis=0)
    codes = jnp.round(kernel * (127 / jnp.where(largest > 0, largest, 1.0))[None])
    return codes.astype(jnp.int8), largest / 127


def _dense_int8(arrays: tuple[Array, ...], n_in: int, dtype: Any) -> tuple[Array, Array]:
    codes, scales = arrays
    return codes.astype(dtype), scales.astype(dtype)  # whole numbers up to 127 are exact


# ---------------------------------------------------------------------------------------- products


@jax.custom_batching.custom_vmap
def _codes_after(codes: Array, x: Array) -> Array:
    """Returns the codes, in a form that the compiler can only compute when it has ``x``.

    They are changed if the first number of ``x`` is NaN; results are NaN then anyway. On a GPU the
    kernels of products read int8 as it is, so nothing has to wait.
    """

    def wait(codes: Array, x: Array) -> Array:
        first = x.reshape(-1)[0]
        return codes ^ (first != first).astype(codes.dtype)

    if codes.dtype != jnp.int8:
        return wait(codes, x)
    return jax.lax.platform_dependent(codes, x, cuda=lambda codes, x: codes, default=wait)


@_codes_after.def_vmap
def _codes_after_lanes(
    size: int, batched: Sequence[bool], codes: Array, x: Array
) -> tuple[Array, bool]:
    """All lanes share the codes, so these wait for the first lane."""
    if batched[0]:
        return jax.vmap(_codes_after, (0, 0 if batched[1] else None))(codes, x), True
    return _codes_after(codes, x[0]), False


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(dense: _Dense, x: Array, arrays: tuple[Array, ...]) -> Array:
    """Returns ``x W`` for ``x`` ``[..., in]``; its gradient stores the codes alone."""
    codes, *others = arrays
    matrix, factors = dense((_codes_after(codes, x), *others), x.shape[-1], x.dtype)
    y = x @ matrix
    return y if factors is None else y * jnp.broadcast_to(factors, y.shape)


def _forward(dense: _Dense, x: Array, arrays: tuple[Array, ...]) -> tuple[Array, tuple[Array, ...]]:
    # The gradient needs only the number of inputs and the dtype: an empty array has both.
    return _product(dense, x, arrays), (jnp.zeros((0, x.shape[-1]), x.dtype), *arrays)


def _backward(
    dense: _Dense, stored: tuple[Array, ...], dy: Array
) -> tuple[Array, tuple[None, ...]]:
    empty, codes, *others = stored
    arrays = (_codes_after(codes, dy), *others)
    matrix, factors = dense(arrays, empty.shape[-1], empty.dtype)
    if factors is not None:
        dy = dy * jnp.broadcast_to(factors, dy.shape)
    return dy @ matrix.T, (None,) * len(arrays)


_product.defvjp(_forward, _backward)


# ----------------------------------------------------------------------------------------- modules


class QuantizedKernel(nnx.Module):
    """A quantised matrix ``[in, out]``; ``kernel[...]`` is the dequantised one, in float32."""

    kind: Quantization
    names: tuple[str, ...]
    """The variables that hold the codes and the scales."""
    encode: Callable[[Array], tuple[Array, ...]]
    """The matrix -> the values of these variables."""
    dense: _Dense
    shape: tuple[int, int]
    ndim = 2
    dtype = jnp.dtype(jnp.float32)
    """The dtype of the dequantised matrix."""

    def __init__(self, kernel: Any, arrays: tuple[Array, ...] | None = None):
        """``kernel`` is the matrix; with its codes and scales in ``arrays``, a shape is enough."""
        self.shape = (kernel.shape[0], kernel.shape[1])
        arrays = self.encode(kernel) if arrays is None else arrays
        for name, value in zip(self.names, arrays, strict=True):
            setattr(self, name, FrozenCode(value))

    @property
    def arrays(self) -> tuple[Array, ...]:
        """The codes and the scales."""
        return tuple(getattr(self, name)[...] for name in self.names)

    def product(self, x: Array) -> Array:
        """Returns ``x W`` ``[..., out]`` in the dtype of ``x`` ``[..., in]``."""
        return _product(self.dense, x, self.arrays)

    def __getitem__(self, index: EllipsisType) -> Array:
        """Returns the dequantised matrix."""
        matrix, factors = self.dense(self.arrays, self.shape[0], jnp.float32)
        return matrix if factors is None else matrix * factors[None]


class Int8Kernel(QuantizedKernel):
    """Codes int8 ``[in, out]`` and scales float32 ``[out]``."""

    kind = "int8"
    names = ("codes", "scales")
    encode = staticmethod(_int8_codes)
    dense = staticmethod(_dense_int8)


class NF4Kernel(QuantizedKernel):
    """Codes of 4 bits, and the scales of blocks of 64 inputs.

    ``codes`` (uint8 ``[in / 2, out]``) has two inputs in a byte, the first in the upper half.
    ``scale_codes`` (uint8 ``[in / 64, out]``) are the codes of the blocks' scales, less their
    ``scale_mean`` (float32 scalar); 256 of them, in the order of ``[out, in / 64]``, share one of
    the ``scale_sizes`` (float32).
    """

    kind = "nf4"
    names = ("codes", "scale_codes", "scale_sizes", "scale_mean")
    encode = staticmethod(_nf4_codes)
    dense = staticmethod(_dense_nf4)


_KERNELS: dict[str, type[QuantizedKernel]] = {"int8": Int8Kernel, "nf4": NF4Kernel}


class QuantizedLinear(nnx.Linear):
    """A linear layer whose kernel is quantised. PEFT methods attach to it as to ``nnx.Linear``.

    Reverse mode alone differentiates it.
    """

    kernel: Any
    original: Callable[[], Array] | None = None
    """Reads the kernel as it was before it was quantised; set only while a method is attached."""

    def __init__(self, layer: nnx.Linear, kernel: QuantizedKernel):
        _copy(layer, self)
        self.kernel = kernel

    def __call__(self, inputs: Array, out_sharding: Any = None) -> Array:
        """Returns the layer's output for ``inputs`` ``[..., in]``."""
        x = inputs if self.dtype is None else inputs.astype(self.dtype)
        y = self.kernel.product(x)
        if self.bias is None:
            return y
        return y + jnp.broadcast_to(self.bias[...].astype(y.dtype), y.shape)

    @property
    def kind(self) -> Quantization:
        """How the kernel is stored."""
        kind: Quantization = self.kernel.kind
        return kind

    def dequantized(self) -> nnx.Linear:
        """Returns the plain layer of the dequantised kernel."""
        layer = nnx.Linear(1, 1, rngs=UNSEEDED)
        _copy(self, layer)
        layer.kernel = nnx.Param(self.kernel[...])
        return layer


def _copy(layer: nnx.Linear, new: nnx.Linear) -> None:
    """Gives a new layer all that another one has except its kernel."""
    for name, value in vars(layer).items():
        if not name.startswith("_") and name not in ("kernel", "original"):
            setattr(new, name, value)


# ------------------------------------------------------------------------------- layers of a model


def layers_to_quantize(
    module: nnx.Module, how: Quantization | None, head: Sequence[str] = ()
) -> dict[str, nnx.Linear]:
    """Returns the linear layers that are quantised: path -> layer; none without ``how``.

    As in bitsandbytes, these are all dense layers except the head: those inside the ``head``'s
    module paths, and ``lm_head``. Layers of subclasses with a computation of their own stay, and so
    do kernels that a PEFT method trains.
    """
    if how is None:
        return {}
    check_choice("quantize", how, _KERNELS)
    layers = {
        path: layer
        for path, layer in submodules(module, nnx.Linear)
        if type(layer) in (nnx.Linear, FusedLinear)
        and not is_inside(path, head)
        and path.rpartition(".")[2] != "lm_head"
        and isinstance(layer.kernel, nnx.Param)
    }
    if not layers:
        raise InputError(
            f"quantize = {how!r}, but the model has no frozen linear layer outside its head."
        )
    return layers


def quantize_kernel(kernel: Array, how: Quantization) -> QuantizedKernel:
    """Returns a kernel ``[in, out]`` in 8 or 4 bits."""
    return _KERNELS[how](kernel)


def quantized(module: nnx.Module, how: Quantization | None, head: Sequence[str] = ()) -> nnx.Module:
    """Returns a module (changed) whose linear layers outside the head are quantised."""
    for path, layer in layers_to_quantize(module, how, head).items():
        assert how is not None
        kernel = quantize_kernel(layer.kernel[...], how)
        replace_module(module, path, QuantizedLinear(layer, kernel))
    return module


def dequantized(module: nnx.Module) -> nnx.Module:
    """Returns a module (changed) with plain layers in the place of its quantised ones."""
    for path, layer in list(submodules(module, QuantizedLinear)):
        replace_module(module, path, layer.dequantized())
    return module


_CODES = tuple(f".kernel.{name}" for kind in _KERNELS.values() for name in kind.names)


def is_code(leaf: str) -> bool:
    """Returns whether a leaf belongs to a quantised kernel, by its name."""
    return leaf.endswith(_CODES)


def parameters(leaves: Mapping[str, Any]) -> int:
    """Returns the number of parameters that frozen leaves hold; scales are not counted."""
    total = 0
    for name, x in leaves.items():
        if not is_code(name):
            total += math.prod(x.shape)
        elif name.endswith(".codes"):
            total += math.prod(x.shape) * (2 if x.dtype == jnp.uint8 else 1)
    return total


def check_stored(config: Mapping[str, Any]) -> None:
    """Raises InputError if the weights of a ``config.json`` are in a form that is not read."""
    how = config.get("quantization_config")
    if how is None:
        return
    table = how if isinstance(how, Mapping) else {}
    older = table.get("load_in_4bit") or table.get("load_in_8bit")
    method = table.get("quant_method") or ("bitsandbytes" if older else None)
    if method != "bitsandbytes":
        raise InputError(
            f"The model config has a quantization_config with quant_method = {method!r}, which is"
            " not read. Checkpoints of bitsandbytes are (nf4, fp4, int8). Choose the checkpoint"
            ' that this one was made from; quantize = "nf4" holds it in 4 bits.'
        )
