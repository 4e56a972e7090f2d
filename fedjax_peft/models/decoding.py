"""Token by token: greedy and sampled completions of a batch of prompts, as one compiled loop.

The prompts are one call of the model, which fills a key-value cache; every further token is one
call with a single token, in a ``while_loop`` that ends when all rows have ended. Nothing depends on
other rows: the random numbers of a row come from the row's own key and the index of the token, so
the same seed gives the same tokens however rows are put into batches.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from fedjax_peft.contracts import Batch, Key, Outputs, Sampling
from fedjax_peft.contracts.arguments import strict
from fedjax_peft.models.cache import empty
from fedjax_peft.support.errors import InputError

NO_TOKEN = -1
"""What follows the end of a completion."""

NOT_CAUSAL = (
    "Only a decoder with the head fp.heads.causal_lm() generates text and has likelihoods of texts."
    " This model has another head, or it is no transformer (rnn, lstm) and keeps no cache."
)


def check_sampling(how: Sampling) -> Sampling:
    """Returns the settings, which must be in their ranges."""
    return strict(Sampling)(*how)


def decode(
    forward: Callable[[Batch], Outputs],
    ids: Array,
    mask: Array,
    how: Sampling,
    keys: Key | None = None,
    *,
    ends: Array | None = None,
    real: Array | None = None,
) -> Array:
    """Returns completions, int32 ``[batch, max_new_tokens]``: :data:`NO_TOKEN` after an end token.

    Args:
      forward: a causal language model: batch with a ``cache`` -> outputs.
      ids: prompts, int ``[batch, length]``, padded on the left.
      mask: bool ``[batch, length]``: the tokens of the prompts.
      keys: one random key for each row, ``[batch]``; None: only for greedy choice.
      ends: int32 ``[batch, n]``: the tokens that end a row's completion; negative: none.
      real: bool ``[batch]``: the rows that count; None: all. Others do not keep the loop running.
    """
    rows, length = ids.shape
    ends = jnp.full((rows, 1), NO_TOKEN, jnp.int32) if ends is None else ends

    def choose(outputs: Outputs, index: Array | int) -> Array:
        hidden = outputs.hidden
        if outputs.readout is None or hidden is None:
            logits = outputs.logits[:, -1]
        else:
            logits = outputs.readout(hidden[:, -1:])[:, 0]
        own = None if keys is None else jax.vmap(jax.random.fold_in, (0, None))(keys, index)
        return next_tokens(logits, how, own)

    def is_end(token: Array) -> Array:
        return jnp.any(token[:, None] == ends, axis=1) & (token >= 0)

    slots = length + how.max_new_tokens - 1
    batch: dict[str, Any] = {"input_ids": ids, "attention_mask": mask, "cache": empty(rows, slots)}
    outputs = forward(batch)
    if outputs.cache is None:
        raise InputError(NOT_CAUSAL)
    token = choose(outputs, 0)
    if real is not None:
        token = jnp.where(real, token, NO_TOKEN)
    done = is_end(token) | (token == NO_TOKEN)
    written = jnp.full((rows, how.max_new_tokens), NO_TOKEN, jnp.int32).at[:, 0].set(token)

    def going(carry: Any) -> Array:
        index, _, done, _, _ = carry
        return (index < how.max_new_tokens) & _any(~done)

    def step(carry: Any) -> Any:
        index, token, done, written, cache = carry
        one: dict[str, Any] = {
            "input_ids": jnp.maximum(token, 0)[:, None],
            "attention_mask": jnp.ones((rows, 1), bool),
            "cache": cache,
        }
        outputs = forward(one)
        token = jnp.where(done, NO_TOKEN, choose(outputs, index))
        written = jax.lax.dynamic_update_slice_in_dim(written, token[:, None], index, axis=1)
        return index + 1, token, done | is_end(token), written, outputs.cache

    start = (jnp.int32(1), token, done, written, outputs.cache)
    return jax.lax.while_loop(going, step, start)[3]


@jax.custom_batching.custom_vmap
def _any(flags: Array) -> Array:
    """Returns whether any flag is set, of all clients: the condition of a loop that ``vmap`` maps.

    A condition with a client axis would make ``vmap`` copy the whole cache in every step.
    """
    return jnp.any(flags)


@_any.def_vmap
def _any_of_all(axis_size: int, in_batched: Any, flags: Array) -> tuple[Array, bool]:
    return _any(flags), False


def next_tokens(logits: Array, how: Sampling, keys: Key | None = None) -> Array:
    """Returns one token for each row, int32 ``[batch]``.

    The order of temperature, ``top_k`` and ``top_p`` is that of Hugging Face.

    Args:
      logits: float32 ``[batch, vocabulary]``.
      keys: ``[batch]``; None: only for greedy choice.
    """
    if how.temperature == 0 or keys is None:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    logits = logits.astype(jnp.float32) / how.temperature
    if 0 < how.top_k < logits.shape[-1]:
        smallest = jax.lax.top_k(logits, how.top_k)[0][:, -1:]
        logits = jnp.where(logits < smallest, -jnp.inf, logits)
    if how.top_p < 1:
        logits = jnp.where(_nucleus(logits, how.top_p), logits, -jnp.inf)
    return jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32)


def _nucleus(logits: Array, top_p: float) -> Array:
    """Returns which tokens are in the nucleus: more likely ones have less than ``top_p`` in all."""
    order = jnp.argsort(-logits, axis=-1)
    likely = jnp.take_along_axis(jax.nn.softmax(logits, axis=-1), order, axis=-1)
    before = jnp.cumsum(likely, axis=-1) - likely
    kept = (before < top_p).at[:, 0].set(True)
    return jnp.take_along_axis(kept, jnp.argsort(order, axis=-1), axis=-1)
