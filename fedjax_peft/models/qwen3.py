"""Qwen3 (Yang et al. 2025), its dense models: norms of queries and keys, biases only on request."""

import dataclasses

from fedjax_peft.models.decoder import FULL, SLIDING, Form, family_of
from fedjax_peft.models.qwen2 import Qwen2Config

__all__ = ["FAMILY", "Qwen3Config"]


@dataclasses.dataclass(frozen=True)
class Qwen3Config(Qwen2Config):
    """The fields of ``config.json`` that shape the model, under their Hugging Face names."""

    head_dim: int | None = 128
    attention_bias: bool = False


def form(c: Qwen3Config) -> Form:
    """Returns the decoder's form."""
    return Form(
        activation=c.hidden_act,
        layers=c.layers,
        ropes=dict.fromkeys((FULL, SLIDING), c.rope()),
        window=c.window,
        query_bias=c.attention_bias,
        output_bias=c.attention_bias,
        query_norm=True,
    )


FAMILY = family_of(
    "Qwen3",
    Qwen3Config,
    form,
    spans="transformer",
)
