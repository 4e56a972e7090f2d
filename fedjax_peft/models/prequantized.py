"""Checkpoints whose linear layers ``bitsandbytes`` has quantised; they are read as they are.

A layer ``X`` of ``[out, in]`` weights is stored as, in 8 bits (LLM.int8, Dettmers et al. 2022)::

    X.weight  int8 [out, in]       X.SCB  float32 [out]        W = weight · SCB / 127

and in 4 bits (QLoRA, Dettmers et al. 2023), in the order of the flat ``[out, in]`` matrix::

    X.weight             uint8 [n / 2, 1]: two codes in a byte, the first in the upper half
    X.weight.quant_map   float32 [16]: the value of every code
    X.weight.absmax      the scale of every block of weights: float32, or uint8 codes
    X.weight.nested_quant_map, nested_absmax
                         the values of these codes, and their scale for every block of codes
    X.weight.quant_state.bitsandbytes__nf4 (or __fp4)
                         JSON: blocksize, nested_blocksize, nested_offset, shape

    W = quant_map[code] · scale,    scale = nested_quant_map[absmax] · nested_absmax + nested_offset

Layers in ``int8``, and in ``nf4`` with double quantisation, are held in these bits, without being
quantised a second time (:mod:`fedjax_peft.models.quantized`), unless ``quantize`` names the other
form. Others are dequantised: ``fp4``, plain scales, and blocks that go over two outputs.
bitsandbytes rounds weights to the dtype of the checkpoint before a product, and here they are
rounded to the compute dtype.

Other methods, such as GPTQ and AWQ, are refused by name.
"""

import json
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedjax_peft.models.checkpoint import Safetensors, broken, leaf_value
from fedjax_peft.models.quantized import (
    BLOCK,
    SCALES,
    Int8Kernel,
    NF4Kernel,
    Quantization,
    QuantizedKernel,
    dynamic_map,
)
from fedjax_peft.models.registry import Hold
from fedjax_peft.transforms.nf4 import NF4

_METHOD = "bitsandbytes"
_SIDE = (".SCB", ".weight_format", ".absmax", "quant_map", ".nested_absmax")
"""Ends of the names of tensors that belong to another one."""
_STATE = ".quant_state.bitsandbytes__"
_ROWS = 0
"""The ``weight_format`` of a matrix in the order of its rows."""


class Prequantized(Safetensors):
    """The tensors of such a checkpoint: a quantised layer has one, its weights."""

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes by tensor name, without those of codes and scales."""
        found = {
            n: s for n, s in super().shapes.items() if not n.endswith(_SIDE) and _STATE not in n
        }
        return found | {n: self._state(n)["shape"] for n in found if self._state_name(n)}

    def read(self, name: str, transposed: bool) -> Array:
        """Returns a tensor in float32, dequantised if it is stored in few bits."""
        layer = name.removesuffix(".weight")
        if self._state_name(name):
            return leaf_value(self.file(name), name, self._four_bits(name), transposed)
        if f"{layer}.SCB" in self._stored:
            codes, scales = self._eight_bits(layer)
            values = codes.astype(np.float32) * scales[:, None]
            return leaf_value(self.file(name), name, values, transposed)
        return super().read(name, transposed)

    def kernel(self, name: str) -> QuantizedKernel | None:
        """Returns a layer's kernel ``[in, out]`` in the bits that it is stored in.

        None: it is stored in another form than kernels are held in, or not quantised.
        """
        layer = name.removesuffix(".weight")
        if f"{layer}.SCB" in self._stored:
            codes, scales = self._eight_bits(layer)
            return Int8Kernel(_abstract(codes.T), (jnp.asarray(codes.T), jnp.asarray(scales)))
        if not self._state_name(name):
            return None
        state = self._state(name)
        (n_out, n_in), codes = state["shape"], self.raw(name)
        if not (state.get("nested_blocksize") == SCALES and state["blocksize"] == BLOCK):
            return None
        maps = (self.raw(f"{name}.quant_map"), self.raw(f"{name}.nested_quant_map"))
        ours = np.array(NF4, np.float32), dynamic_map()
        if n_in % BLOCK or not all(
            np.allclose(a, b, atol=1e-6) for a, b in zip(maps, ours, strict=True)
        ):
            return None
        arrays = (
            codes.reshape(n_out, n_in // 2).T,
            self.raw(f"{name}.absmax").reshape(n_out, n_in // BLOCK).T,
            self.raw(f"{name}.nested_absmax"),
            np.float32(state["nested_offset"]),
        )
        shape = jax.ShapeDtypeStruct((n_in, n_out), jnp.float32)
        return NF4Kernel(shape, tuple(map(jnp.asarray, arrays)))

    def _state_name(self, name: str) -> str | None:
        names = (f"{name}{_STATE}{kind}" for kind in ("nf4", "fp4"))
        return next((one for one in names if one in self._stored), None)

    def _state(self, name: str) -> dict[str, Any]:
        """Returns the JSON that describes the weights of a layer in 4 bits."""
        key = self._state_name(name)
        assert key is not None
        try:
            state = json.loads(self.raw(key).tobytes())
            state["shape"] = tuple(map(int, state["shape"]))
        except (ValueError, KeyError, TypeError) as error:
            raise broken(self.file(key), f"{key} is not the JSON of a quantised layer") from error
        return state

    def _four_bits(self, name: str) -> np.ndarray:
        """Returns the weights of a layer in 4 bits, float32 ``[out, in]``."""
        state, scales = self._state(name), self.raw(f"{name}.absmax")
        if "nested_blocksize" in state:
            sizes = np.repeat(self.raw(f"{name}.nested_absmax"), state["nested_blocksize"])
            values = self.raw(f"{name}.nested_quant_map")[scales]
            scales = values * sizes[: scales.size] + np.float32(state["nested_offset"])
        bytes_ = self.raw(name).reshape(-1)
        codes = np.stack([bytes_ >> 4, bytes_ & 15], axis=1).reshape(-1)
        values = self.raw(f"{name}.quant_map")[codes]
        size = int(np.prod(state["shape"]))
        dense = values[:size] * np.repeat(scales, state["blocksize"])[:size]
        return dense.reshape(state["shape"])

    def _eight_bits(self, layer: str) -> tuple[np.ndarray, np.ndarray]:
        """Returns the codes int8 ``[out, in]`` of a layer and their scales ``[out]``."""
        name = f"{layer}.weight_format"
        if name in super().shapes and int(self.raw(name)) != _ROWS:
            raise broken(self.file(name), f"{layer} is stored in tiles (weight_format)")
        return self.raw(f"{layer}.weight"), self.raw(f"{layer}.SCB") / np.float32(127)


def _abstract(matrix: np.ndarray) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(matrix.shape, jnp.float32)


def reader(config: Mapping[str, Any]) -> type[Safetensors]:
    """Returns how the tensors of a checkpoint with this ``config.json`` are read."""
    return Prequantized if config.get("quantization_config") else Safetensors


def held(
    tensors: Any, hold: Hold, quantize: Quantization | None, leaf: str, name: str, transposed: bool
) -> Any:
    """Returns a leaf as the model holds it: in the bits of the checkpoint, if these are few.

    Args:
      tensors: of the checkpoint.
      hold: what makes a leaf from float32 values.
      quantize: as for :func:`fedjax_peft.load_model`.
      name: of the tensor.
    """
    stored = isinstance(tensors, Prequantized) and transposed and leaf.endswith(".kernel")
    kernel = tensors.kernel(name) if stored else None
    if kernel is not None and quantize in (None, kernel.kind):
        return kernel
    return hold(leaf, tensors.read(name, transposed))
