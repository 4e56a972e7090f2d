"""Checkpoints in GGUF, llama.cpp's format: one file with a config, a tokenizer and weights.

Decoders of Llama (SmolLM, TinyLlama and Mistral are stored as Llama), Qwen2 and Qwen3 are read,
with weights in ``F32``, ``F16``, ``BF16``, ``Q8_0``, ``Q4_0`` or ``Q4_1``. The package ``gguf`` of
llama.cpp reads the file and dequantises; ``transformers`` translates its config and its tokenizer.
Tensors are read one by one, when a model asks for them. Checked against ``transformers``, which
reads the same files.

llama.cpp rotates neighbouring pairs of a head, Hugging Face's Llama its two halves. A GGUF file of
Llama therefore has the rows of queries and keys in another order; they are put back.
"""

import functools
import re
from pathlib import Path
from typing import Any

import numpy as np
from jax import Array

from fedjax_peft.models.checkpoint import broken, leaf_value
from fedjax_peft.support.errors import InputError, first_line
from fedjax_peft.support.libraries import install, without_advice

_FAMILIES = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}
_TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1")
_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    **{f"attn_{short}": f"self_attn.{short}_proj" for short in "qkv"},
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    **{f"ffn_{short}": f"mlp.{short}_proj" for short in ("gate", "up", "down")},
}
_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
"""Names of modules in GGUF -> those of Hugging Face."""


_HEADS = {"q": "num_attention_heads", "k": "num_key_value_heads"}


class Gguf:
    """A GGUF file as a checkpoint: its config, its tokenizer and its tensors."""

    def __init__(self, path: Path) -> None:
        try:
            from gguf import GGUFReader
        except ImportError:
            raise InputError(
                f"{path} is a GGUF file, which the package gguf reads: {install('gguf')}."
            ) from None
        self.path = path
        try:
            reader = GGUFReader(str(path))
            fields = {name: field.contents() for name, field in reader.fields.items()}
        except Exception as error:  # a damaged header raises all kinds
            raise broken(self.path, first_line(error), "GGUF file") from error
        self._family = str(fields.get("general.architecture"))
        if self._family not in _FAMILIES:
            raise InputError(
                f"{path} holds a model of the architecture {self._family!r}. GGUF files of"
                f" {', '.join(_FAMILIES)} are read; other models load from safetensors."
            )
        scaling = fields.get(f"{self._family}.rope.scaling.type", "none")
        names = [tensor.name for tensor in reader.tensors]
        if scaling != "none" or "rope_freqs.weight" in names:
            raise InputError(
                f"{path} scales its rotary positions, as Llama 3.1 does. A GGUF file does not"
                " describe how. Load the model's safetensors checkpoint."
            )
        self._head_width = fields.get(f"{self._family}.attention.key_length")
        self._tensors = {_hugging_face(tensor.name): tensor for tensor in reader.tensors}
        if foreign := {t.tensor_type.name for t in reader.tensors}.difference(_TYPES):
            raise InputError(
                f"{path} holds weights of the type {min(foreign)}. These are read:"
                f" {', '.join(_TYPES)}."
            )

    @functools.cached_property
    def config(self) -> dict[str, Any]:
        """The fields of the ``config.json`` of the same model."""
        try:
            with without_advice():
                from transformers import AutoConfig

                config = AutoConfig.from_pretrained(**self._place).to_dict()
        except Exception as error:
            raise broken(self.path, first_line(error), "GGUF file") from error
        # The file stores the number in float32: 1e-5 is 9.99999975e-6 in it.
        config["rms_norm_eps"] = float(str(np.float32(config["rms_norm_eps"])))
        config["head_dim"] = self._head_width or config.get("head_dim")
        config["architectures"] = [f"{_FAMILIES[self._family]}ForCausalLM"]
        config["tie_word_embeddings"] = "lm_head.weight" not in self._tensors
        return config

    def tokenizer(self) -> Any:
        """Returns the tokenizer, unchecked; a damaged one raises all kinds of errors."""
        with without_advice():
            from transformers import AutoTokenizer

            return AutoTokenizer.from_pretrained(**self._place)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes by Hugging Face's names of tensors."""
        return {name: tuple(map(int, t.shape[::-1])) for name, t in self._tensors.items()}

    def read(self, name: str, transposed: bool) -> Array:
        """Returns a tensor in float32, with flax's order of axes if ``transposed``."""
        from gguf import dequantize

        tensor = self._tensors[name]
        array = np.asarray(dequantize(tensor.data, tensor.tensor_type), np.float32)
        array = array.reshape(self.shapes[name])
        if self._family == "llama" and (rotated := re.search(r"\.([qk])_proj\.", name)):
            array = _halves(array, self.config[_HEADS[rotated[1]]])
        return leaf_value(self.path, name, array, transposed)

    @property
    def _place(self) -> dict[str, str]:
        """The arguments with which ``transformers`` finds the file."""
        folder, name = str(self.path.parent), self.path.name
        return {"pretrained_model_name_or_path": folder, "gguf_file": name}


def _hugging_face(name: str) -> str:
    """Returns Hugging Face's name of a tensor of a GGUF file; unknown names stay."""
    stem, _, kind = name.rpartition(".")
    if layer := re.fullmatch(r"blk\.(\d+)\.(\w+)", stem):
        module = _LAYER.get(layer[2], layer[2])
        return f"model.layers.{layer[1]}.{module}.{kind}"
    return f"{_NAMES.get(stem, stem)}.{kind}"


def _halves(array: np.ndarray, heads: int) -> np.ndarray:
    """Returns rows ordered by the halves of each head, given neighbouring pairs."""
    pairs = array.reshape(heads, -1, 2, *array.shape[1:])
    return pairs.swapaxes(1, 2).reshape(array.shape)
