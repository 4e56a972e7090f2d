"""Gemma 3's text models (Gemma Team 2025): norms of queries and keys; five of six layers are local.

Local layers have a rotation of their own, with a smaller ``theta``. The checkpoints that also read
images (``model_type`` ``gemma3``) are not supported.
"""

import dataclasses

from fedjax_peft.models.decoder import FULL, SLIDING, Form, family_of
from fedjax_peft.models.gemma2 import GemmaConfig
from fedjax_peft.models.rotary import Rope, rope
from fedjax_peft.support.errors import InputError


@dataclasses.dataclass(frozen=True)
class Gemma3Config(GemmaConfig):
    """The fields of ``config.json`` that shape the model, under their Hugging Face names."""

    vocab_size: int = 262208
    max_position_embeddings: int = 131072
    sliding_window_pattern: int = 6
    """Every layer whose number is a multiple of this one sees all tokens, if ``layer_types`` is
    absent."""
    rope_local_base_freq: float | None = None
    """``theta`` of local layers in older configs."""

    @property
    def pattern(self) -> int:
        return self.sliding_window_pattern

    def rope(self, kind: str = FULL) -> Rope:
        """Returns the rotation of the layers of one kind."""
        own = (self.rope_parameters or {}).get(kind) or {}
        if not isinstance(own, dict):
            raise InputError(f"The model config has rope_parameters.{kind} = {own!r}: no table.")
        parameters = dict(own)
        is_global = kind == FULL
        if is_global:
            parameters |= self.rope_scaling or {}  # older configs scale global layers only
        return rope(
            parameters,
            theta=self.rope_theta if is_global else self.rope_local_base_freq,
            width=self.width,
            limit=self.max_position_embeddings,
            default_theta=1e6 if is_global else 1e4,
        )


def form(c: Gemma3Config) -> Form:
    """Returns the decoder's form."""
    ropes = {kind: c.rope(kind) for kind in (FULL, SLIDING)}
    return c.form()._replace(ropes=ropes, query_norm=True)


FAMILY = family_of(
    "Gemma3",
    Gemma3Config,
    form,
    heads=("causal_lm", "classification", "two_classifiers"),
    prefix="Text",
    centred=True,
    # transformers reads attn_logit_softcapping, but does not apply it.
    refused={"attn_logit_softcapping": None},
)
