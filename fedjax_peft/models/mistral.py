"""Mistral (Jiang et al. 2023): Llama's decoder whose layers all have a sliding window."""

import dataclasses

from fedjax_peft.models.decoder import FULL, SLIDING, DecoderConfig, Form, family_of


@dataclasses.dataclass(frozen=True)
class MistralConfig(DecoderConfig):
    """The fields of ``config.json`` that shape the model, under their Hugging Face names."""

    intermediate_size: int = 14336
    num_key_value_heads: int | None = 8
    max_position_embeddings: int = 4096 * 32
    hidden_act: str = "silu"
    sliding_window: int | None = 4096
    """None: every token sees all tokens before it."""


def form(c: MistralConfig) -> Form:
    """Returns the decoder's form."""
    kind = FULL if c.sliding_window is None else SLIDING
    return Form(
        activation=c.hidden_act,
        layers=(kind,) * c.num_hidden_layers,
        ropes={kind: c.rope()},
        window=c.sliding_window,
    )


FAMILY = family_of("Mistral", MistralConfig, form, ia3="k_proj")
