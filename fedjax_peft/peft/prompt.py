"""Prompt tuning (Lester et al. 2021): learned tokens before the tokens of a text."""

from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from fedjax_peft.contracts import Key
from fedjax_peft.contracts.arguments import Count
from fedjax_peft.contracts.part import part
from fedjax_peft.models.base import AdapterParam
from fedjax_peft.models.layers import TokenEmbed
from fedjax_peft.models.modules import submodules
from fedjax_peft.peft.base import Adapted, Defaults, Method, replace_module
from fedjax_peft.support.errors import InputError


class PromptEmbed(Adapted):
    """A table of token embeddings that returns learned ones first. ``base`` is frozen.

    ``prompt`` is ``[tokens, width]``. The backbone extends mask, token types and positions for the
    prompt, and removes the prompt from the states that it returns.
    """

    def __init__(self, base: TokenEmbed, prompt: Array):
        self.base = base
        self.prompt = AdapterParam(prompt)

    def __call__(self, ids: Array) -> Array:
        """Returns embeddings ``[batch, tokens + length, width]`` of ids ``[batch, length]``."""
        x = self.base(ids)
        prompt = self.prompt[...].astype(x.dtype)
        rows = jnp.broadcast_to(prompt[None], (x.shape[0], *prompt.shape))
        return jnp.concatenate([rows, x], axis=1)

    def tokens(self, ids: Array) -> Array:
        """Returns the embeddings of ids alone, of tokens that follow in a cache."""
        return self.base(ids)

    def attend(self, query: Array) -> Array:
        """Returns the products with the frozen table, because a tied head predicts no prompt."""
        return self.base.attend(query)


@part
def prompt_tuning(tokens: Count = 8, *, init: Literal["random", "vocabulary"] = "random") -> Method:
    """Learned tokens before the text (prompt tuning, Lester et al. 2021), as in Hugging Face PEFT.

    The prompt takes the first positions, so the longest text is shorter by ``tokens``. A classifier
    that reads the first token reads the first token of the prompt.

    Args:
      tokens: the length of the prompt.
      init: ``random`` (N(0, 1), PEFT's default) or ``vocabulary`` (the embeddings of tokens drawn
        uniformly).

    Raises:
      InputError: an impossible option here; a model without a table of token embeddings, or one
        already adapted, when it is attached; no positions left, when the model is used.
    """

    def attach(module: nnx.Module, defaults: Defaults, key: Key, head: Sequence[str]) -> nnx.Module:
        path, table = _token_table(module)
        if init == "random":
            prompt = jax.random.normal(key, (tokens, table.features))
        else:
            ids = jax.random.randint(key, (tokens,), 0, table.num_embeddings)
            prompt = table.tokens(ids).astype(jnp.float32)
        replace_module(module, path, PromptEmbed(table, prompt))
        return module

    return Method("prompt_tuning", {"tokens": tokens, "init": init}, attach)


def _token_table(module: nnx.Module) -> tuple[str, TokenEmbed]:
    found = places(module, TokenEmbed, PromptEmbed)
    if len(found) != 1:
        what = f"has several ({', '.join(found)})" if found else "has none"
        raise InputError(
            "Prompt tuning needs a model with one table of token embeddings (layers.TokenEmbed),"
            f" and this one {what}."
        )
    return found.popitem()


def places(module: nnx.Module, kind: type, adapted: type) -> dict[str, Any]:
    """Returns the submodules of a type, path -> submodule."""
    for path, _ in submodules(module, adapted):
        raise InputError(f"The submodule {path!r} is already adapted.")
    return dict(submodules(module, kind))
