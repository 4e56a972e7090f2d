"""Gemma 2 (Gemma Team 2024): soft caps, norms around both sublayers, every other layer local."""

import dataclasses
import math

from fedjax_peft.models.decoder import FULL, SLIDING, DecoderConfig, Form, family_of, layer_kinds
from fedjax_peft.support.errors import InputError

_CAPS = ("attn_logit_softcapping", "final_logit_softcapping")


@dataclasses.dataclass(frozen=True)
class GemmaConfig(DecoderConfig):
    """What the configs of Gemma 2 and 3 share."""

    vocab_size: int = 256000
    hidden_size: int = 2304
    intermediate_size: int = 9216
    num_hidden_layers: int = 26
    num_attention_heads: int = 8
    num_key_value_heads: int | None = 4
    head_dim: int | None = 256
    hidden_activation: str = "gelu_pytorch_tanh"
    max_position_embeddings: int = 8192
    pad_token_id: int | None = dataclasses.field(default=0, metadata={"least": -1})
    tie_word_embeddings: bool = True
    attention_bias: bool = False
    query_pre_attn_scalar: float = 256
    """Scores are divided by its square root."""
    sliding_window: int | None = 4096
    layer_types: list | None = dataclasses.field(default=None, hash=False)
    final_logit_softcapping: float | None = None
    use_bidirectional_attention: bool | None = None
    """True (embedding models) is not implemented."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.use_bidirectional_attention:
            raise InputError("use_bidirectional_attention = true is not implemented for Gemma.")
        if SLIDING in self.layers and self.sliding_window is None:
            raise InputError("The model config has sliding layers, but no sliding_window.")
        for name in ("query_pre_attn_scalar", *_CAPS):
            value = getattr(self, name, None)
            if value is not None and not value > 0:
                raise InputError(f"The model config has {name} = {value}; it must be positive.")

    @property
    def pattern(self) -> int:
        """Every layer whose number is a multiple of this one sees all tokens."""
        return 2

    @property
    def layers(self) -> tuple[str, ...]:
        """The kind of every layer."""
        numbers = range(1, self.num_hidden_layers + 1)
        default = (SLIDING if number % self.pattern else FULL for number in numbers)
        return layer_kinds(self.layer_types, tuple(default))

    def form(self) -> Form:
        """Returns the decoder's form, but for what Gemma 2 and 3 have differently."""
        return Form(
            activation=self.hidden_activation,
            layers=self.layers,
            ropes={},
            window=self.sliding_window,
            query_bias=self.attention_bias,
            output_bias=self.attention_bias,
            centred=True,
            post_norms=True,
            embedding_scale=math.sqrt(self.hidden_size),
            score_scale=1 / math.sqrt(self.query_pre_attn_scalar),
            logit_cap=self.final_logit_softcapping,
        )


@dataclasses.dataclass(frozen=True)
class Gemma2Config(GemmaConfig):
    """The fields of ``config.json`` that shape the model, under their Hugging Face names."""

    final_logit_softcapping: float | None = 30.0
    attn_logit_softcapping: float | None = 50.0


def form(c: Gemma2Config) -> Form:
    """Returns the decoder's form."""
    ropes = dict.fromkeys((FULL, SLIDING), c.rope())
    return c.form()._replace(ropes=ropes, score_cap=c.attn_logit_softcapping)


FAMILY = family_of(
    "Gemma2",
    Gemma2Config,
    form,
    heads=("causal_lm", "classification", "two_classifiers", "token_classification"),
    centred=True,
)
