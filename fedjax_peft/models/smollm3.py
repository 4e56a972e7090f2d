"""SmolLM3 (Bakouch et al. 2025): Llama's decoder in which every fourth layer has no positions.

The queries and keys of these layers are not rotated (NoPE), so only the causal mask tells them the
order of tokens.
"""

import dataclasses

from fedjax_peft.models.decoder import (
    FULL,
    SLIDING,
    DecoderConfig,
    Form,
    family_of,
    layer_kinds,
    unrotated,
)
from fedjax_peft.support.errors import InputError


@dataclasses.dataclass(frozen=True)
class SmolLM3Config(DecoderConfig):
    """The fields of ``config.json`` that shape the model, under their Hugging Face names."""

    vocab_size: int = 128256
    hidden_size: int = 2048
    num_hidden_layers: int = 36
    num_attention_heads: int = 16
    num_key_value_heads: int | None = 4
    max_position_embeddings: int = 32768
    rope_theta: float | None = 2e6
    tie_word_embeddings: bool = True
    pad_token_id: int | None = dataclasses.field(default=128004, metadata={"least": -1})
    hidden_act: str = "silu"
    attention_bias: bool = False
    mlp_bias: bool = False
    use_sliding_window: bool = False
    sliding_window: int | None = None
    no_rope_layers: list | None = dataclasses.field(default=None, hash=False)
    """For every layer 1 if it rotates, 0 if it has no positions."""
    no_rope_layer_interval: int = 4
    """Every so many-th layer has no positions, without ``no_rope_layers``."""
    layer_types: list | None = dataclasses.field(default=None, hash=False)

    @property
    def layers(self) -> tuple[str, ...]:
        """The kind of every layer."""
        count, interval = self.num_hidden_layers, self.no_rope_layer_interval
        rotates = self.no_rope_layers
        if rotates is None:
            rotates = [(i + 1) % interval != 0 for i in range(count)]
        if len(rotates) != count:
            raise InputError(f"no_rope_layers has {len(rotates)} entries for {count} layers.")
        window = self.use_sliding_window and self.sliding_window is not None
        default = tuple(SLIDING if window and not turns else FULL for turns in rotates)
        kinds = layer_kinds(self.layer_types, default)
        if SLIDING in kinds and not window:
            raise InputError(
                f"layer_types has {SLIDING!r}, but the model config has no window: set"
                " use_sliding_window and sliding_window."
            )
        return tuple(k if turns else unrotated(k) for k, turns in zip(kinds, rotates, strict=True))


def form(c: SmolLM3Config) -> Form:
    """Returns the decoder's form."""
    return Form(
        activation=c.hidden_act,
        layers=c.layers,
        ropes={
            **dict.fromkeys((FULL, SLIDING), c.rope()),
            **dict.fromkeys((unrotated(FULL), unrotated(SLIDING))),
        },
        window=c.sliding_window,
        query_bias=c.attention_bias,
        output_bias=c.attention_bias,
        feed_forward_bias=c.mlp_bias,
    )


FAMILY = family_of("SmolLM3", SmolLM3Config, form, ia3="k_proj", spans="transformer")
