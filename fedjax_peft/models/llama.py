"""Llama 2 and 3 (Touvron et al. 2023, Grattafiori et al. 2024).

TinyLlama and SmolLM have the same form and the same ``model_type``.
"""

import dataclasses

from fedjax_peft.models.decoder import FULL, DecoderConfig, Form, family_of


@dataclasses.dataclass(frozen=True)
class LlamaConfig(DecoderConfig):
    """The fields of ``config.json`` that shape the model, under their Hugging Face names."""

    hidden_act: str = "silu"
    attention_bias: bool = False
    mlp_bias: bool = False


def form(c: LlamaConfig) -> Form:
    """Returns the decoder's form."""
    return Form(
        activation=c.hidden_act,
        layers=(FULL,) * c.num_hidden_layers,
        ropes={FULL: c.rope()},
        query_bias=c.attention_bias,
        output_bias=c.attention_bias,
        feed_forward_bias=c.mlp_bias,
    )


FAMILY = family_of("Llama", LlamaConfig, form, ia3="k_proj", spans="transformer")
