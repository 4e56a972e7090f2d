"""Qwen2 and Qwen2.5 (Yang et al. 2024): biases of queries, keys, values; windows in late layers."""

import dataclasses

from fedjax_peft.models.decoder import FULL, SLIDING, DecoderConfig, Form, family_of, layer_kinds
from fedjax_peft.support.errors import InputError


@dataclasses.dataclass(frozen=True)
class Qwen2Config(DecoderConfig):
    """The fields of ``config.json`` that shape the model, under their Hugging Face names."""

    vocab_size: int = 151936
    intermediate_size: int = 22016
    num_key_value_heads: int | None = 32
    max_position_embeddings: int = 32768
    hidden_act: str = "silu"
    use_sliding_window: bool = False
    sliding_window: int | None = 4096
    max_window_layers: int = dataclasses.field(default=28, metadata={"least": 0})
    """With ``use_sliding_window``, the layers from this one on have a window."""
    layer_types: list | None = dataclasses.field(default=None, hash=False)
    """The kind of every layer, in the place of ``max_window_layers``."""

    @property
    def window(self) -> int | None:
        """The window of sliding layers."""
        return self.sliding_window if self.use_sliding_window else None

    @property
    def layers(self) -> tuple[str, ...]:
        """The kind of every layer."""
        first = self.max_window_layers if self.window else self.num_hidden_layers
        default = (SLIDING if i >= first else FULL for i in range(self.num_hidden_layers))
        kinds = layer_kinds(self.layer_types, tuple(default))
        if SLIDING in kinds and self.window is None:
            raise InputError(
                f"layer_types has {SLIDING!r}, but the model config has no window: set"
                " use_sliding_window and sliding_window."
            )
        return kinds


def form(c: Qwen2Config) -> Form:
    """Returns the decoder's form."""
    return Form(
        activation=c.hidden_act,
        layers=c.layers,
        ropes=dict.fromkeys((FULL, SLIDING), c.rope()),
        window=c.window,
        query_bias=True,
    )


FAMILY = family_of("Qwen2", Qwen2Config, form, spans="transformer")
