"""Qwen3 (Yang et al. 2025), its dense models: norms of queries and keys, biases only on request."""

import dataclasses

from fedjax_peft.models import qwen2
from fedjax_peft.models.decoder import Form, family_of
from fedjax_peft.models.qwen2 import Qwen2Config


@dataclasses.dataclass(frozen=True)
class Qwen3Config(Qwen2Config):
    """The fields of ``config.json`` that shape the model, under their Hugging Face names."""

    head_dim: int | None = 128
    attention_bias: bool = False


def form(c: Qwen3Config) -> Form:
    """Returns the decoder's form."""
    plain = qwen2.form(c)._replace(query_norm=True)
    return plain._replace(query_bias=c.attention_bias, output_bias=c.attention_bias)


FAMILY = family_of("Qwen3", Qwen3Config, form, spans="transformer")
