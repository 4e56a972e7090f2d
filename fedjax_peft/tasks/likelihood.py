"""Log-likelihoods of tokens under a language model, without an array of all logits.

The logits of a batch, ``[batch, length, vocabulary]``, are the largest array of a training step:
2.5 GB for 8 texts of 512 tokens and 151,936 words. Here they are never formed:

* Only the positions that count are read. They are gathered to the front, at a static capacity, and
  the loop over them stops after the last one. Under ``jax.vmap`` it stops after the longest lane.
* The loop takes :func:`chunk_size` positions at a time. Within one chunk the head makes the logits,
  and the log-likelihoods and the predictions are read from them.
* If a gradient is taken, the loop also forms the derivative of each log-likelihood with respect to
  its hidden state, ``[positions, width]``. The backward pass only multiplies it, and makes no
  logits (as Liger Kernel does, Hsu et al. 2024, arXiv:2410.10989). If the head itself is trained or
  adapted, the backward pass goes through the chunks a second time instead.

A loop with a run-time number of turns has no derivative in reverse mode. Where a derivative of a
derivative is taken (:mod:`fedjax_peft.engine.differentiable`), it is that of the same chunks in a
scan of static length with ``jax.checkpoint``. Forward mode (``jax.jvp``) is not available.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_peft.contracts import Batch, Metrics, Outputs, PyTree
from fedjax_peft.tasks.common import SumAndCount, real_rows, total

_LOGITS = 1 << 23
"""The largest number of logits in a chunk: 32 MiB in float32."""


class TokenScores(NamedTuple):
    """How a language model predicts the tokens of a batch."""

    log_likelihood: jax.Array
    """float32 ``[batch, length]``: the logarithm of the probability of each target; 0 where nothing
    counts."""
    correct: jax.Array
    """bool ``[batch, length]``: whether the target is the most likely token; False where nothing
    counts."""


class Objective(NamedTuple):
    """The functions of a task that predicts tokens; see :class:`fedjax_peft.tasks.Task`."""

    loss: Callable[[Outputs, Batch], SumAndCount]
    metrics: Callable[[Outputs, Batch], Metrics]
    loss_and_metrics: Callable[[Outputs, Batch], tuple[SumAndCount, Metrics]]


@cache  # the same functions for the same columns, so that their programs are found again
def objective(*columns: str, accuracy: bool = True) -> Objective:
    """Returns cross entropy and accuracy of the tokens that columns mark, as sums and counts.

    Args:
      *columns: names of columns, bool ``[batch, length]`` or ``[batch]``. The tokens that all of
        them mark are predicted.
      accuracy: whether the accuracy of these tokens is a metric.
    """

    def loss_and_metrics(outputs: Outputs, batch: Batch) -> tuple[SumAndCount, Metrics]:
        targets, counted = next_tokens(batch, _marked(batch, columns))
        scores = token_scores(outputs, targets, counted)
        loss = total(-scores.log_likelihood, counted)
        right = {"accuracy": total(scores.correct, counted)} if accuracy else {}
        return loss, {"loss": loss, **right}

    return Objective(
        lambda outputs, batch: loss_and_metrics(outputs, batch)[0],
        lambda outputs, batch: loss_and_metrics(outputs, batch)[1],
        loss_and_metrics,
    )


def _marked(batch: Batch, columns: Sequence[str]) -> jax.Array:
    """Returns which tokens all columns mark, bool ``[batch, length]``."""
    marks = [batch[column].astype(bool) for column in columns]
    return reduce(jnp.logical_and, [x if x.ndim == 2 else x[:, None] for x in marks])


def next_tokens(batch: Batch, is_target: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns (the next token of each position, whether it counts), both ``[batch, length]``.

    The first token of a row is no target, and neither is the first token of a segment of a packed
    row, because the token before it belongs to another text.

    Args:
      batch: has ``input_ids`` ``[batch, length]``, and ``segment_ids`` if rows are packed.
      is_target: bool ``[batch, length]``: the tokens that the model is to predict.
    """
    ids = batch["input_ids"]
    later = is_target[:, 1:].astype(bool) & real_rows(batch, ids)[:, 1:]
    if "segment_ids" in batch:
        later &= batch["segment_ids"][:, 1:] == batch["segment_ids"][:, :-1]
    shift = ((0, 0), (0, 1))
    return jnp.pad(ids[:, 1:], shift), jnp.pad(later, shift)


def token_scores(
    outputs: Outputs, targets: jax.Array, counted: jax.Array, *, chunk: int | None = None
) -> TokenScores:
    """Returns the log-likelihoods of tokens, and whether they are predicted.

    Args:
      outputs: of a language model. Without a ``readout`` its ``logits`` are used.
      targets: int ``[batch, length]``: the token that each position is to predict. Ignored where
        ``counted`` is False.
      counted: bool ``[batch, length]``.
      chunk: positions whose logits exist at once; None: :func:`chunk_size`.
    """
    if outputs.readout is None or outputs.hidden is None:
        scores, correct = _score(outputs.logits, targets)
        return TokenScores(jnp.where(counted, scores, 0.0), correct & counted)
    hidden = outputs.hidden.reshape(-1, outputs.hidden.shape[-1])
    count = counted.reshape(-1)
    n = len(count)
    size = min(chunk or chunk_size(_vocabulary(outputs.readout, hidden)), n)
    rows = -(-n // size) * size
    # Counted positions first; the rest of the capacity holds zeros, never a padded row's NaN.
    place = jnp.nonzero(count, size=rows, fill_value=n)[0]
    gathered = jnp.take(hidden, place, axis=0, mode="fill", fill_value=0)
    labels = jnp.take(targets.reshape(-1), place, mode="fill", fill_value=0)
    chunks = -(-jnp.sum(count) // size)
    scores, correct = _scores(
        outputs.readout,
        gathered.reshape(-1, size, hidden.shape[-1]),
        labels.reshape(-1, size),
        chunks,
    )
    rank = jnp.maximum(jnp.cumsum(count) - 1, 0)
    scores = jnp.where(count, scores.reshape(-1)[rank], 0.0).reshape(counted.shape)
    correct = (count & correct.reshape(-1)[rank]).reshape(counted.shape)
    return TokenScores(scores, correct)


def chunk_size(vocabulary: int) -> int:
    """Returns the number of positions in a chunk: a power of two, at least 16.

    The logits of a chunk are at most 2^23 numbers, if 16 positions have no more.
    """
    return max(16, 1 << ((_LOGITS // vocabulary).bit_length() - 1)) if vocabulary < _LOGITS else 16


def _vocabulary(readout: Callable[[jax.Array], jax.Array], hidden: jax.Array) -> int:
    return jax.eval_shape(readout, hidden[:1]).shape[-1]


def _score(logits: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns (log-likelihoods, whether the prediction is right) of logits ``[..., vocabulary]``.

    Sums over a comparison with the word's number fuse into one pass over the logits, and so do
    their derivatives; a gather and an argmax do not (on the CPU). A prediction is right if no other
    word has a larger logit, and no earlier one an equal logit, as with an argmax. This needs one
    byte for each logit, where the number of the most likely word needs four.
    """
    logits = logits.astype(jnp.float32)
    word = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    label = targets[..., None]
    chosen = jnp.sum(jnp.where(word == label, logits, 0.0), axis=-1)
    own = jax.lax.stop_gradient(chosen)[..., None]
    less = (logits < own) | ((logits == own) & (word > label))  # False for NaN
    less |= (word == label) & (own == own)
    return chosen - jax.nn.logsumexp(logits, axis=-1), jnp.all(less, axis=-1)


# ------------------------------------------------------------------- loops over chunks of positions


def _chunk(readout: PyTree, hidden: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
    return _score(readout(hidden), targets)


def _chunk_and_slope(
    readout: PyTree, hidden: jax.Array, targets: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the results of a chunk, and each log-likelihood's derivative by its hidden state."""
    scores, back, correct = jax.vjp(lambda h: _chunk(readout, h, targets), hidden, has_aux=True)
    return scores, correct, back(jnp.ones_like(scores))[0]


def _each(
    f: Callable[..., PyTree], readout: PyTree, hidden: jax.Array, targets: jax.Array, chunks: Any
) -> PyTree:
    """Returns ``f`` of the first ``chunks`` chunks, stacked; zeros for the others.

    Args:
      f: (readout, hidden states ``[size, width]``, targets ``[size]``) -> arrays.
      hidden: ``[capacity, size, width]``.
      targets: ``[capacity, size]``.
      chunks: int32 scalar.
    """

    def turn(i: Any, done: PyTree) -> PyTree:
        new = f(readout, hidden[i], targets[i])
        return jax.tree.map(lambda all_, x: all_.at[i].set(x), done, new)

    shapes = jax.eval_shape(f, readout, hidden[0], targets[0])
    empty = jax.tree.map(lambda x: jnp.zeros((len(hidden), *x.shape), x.dtype), shapes)
    if len(hidden) == 1:
        return turn(0, empty)
    return jax.lax.fori_loop(0, chunks, turn, empty)


def _each_in_scan(
    f: Callable[..., PyTree], readout: PyTree, hidden: jax.Array, targets: jax.Array, chunks: Any
) -> PyTree:
    """Returns what :func:`_each` returns, differentiably."""

    def turn(given: tuple[jax.Array, ...]) -> PyTree:
        i, h, t = given
        return jax.tree.map(lambda x: jnp.where(i < chunks, x, jnp.zeros_like(x)), f(readout, h, t))

    return jax.lax.map(jax.checkpoint(turn), (jnp.arange(len(hidden)), hidden, targets))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _chunks(
    f: Callable[..., PyTree], readout: PyTree, hidden: jax.Array, targets: jax.Array, number: Any
) -> PyTree:
    """Returns :func:`_each`; its derivative is that of :func:`_each_in_scan`."""
    return _each(f, readout, hidden, targets, number)


def _chunks_forward(f: Callable[..., PyTree], *given: Any) -> tuple[PyTree, tuple]:
    return _each(f, *given), given


def _chunks_backward(f: Callable[..., PyTree], given: tuple, cotangent: PyTree) -> tuple:
    return jax.vjp(partial(_each_in_scan, f), *given)[1](cotangent)


_chunks.defvjp(_chunks_forward, _chunks_backward)


# ----------------------------------------------------------------------- the gradient of the scores


@jax.custom_vjp
def _scores(
    readout: PyTree, hidden: jax.Array, targets: jax.Array, number: jax.Array
) -> tuple[jax.Array, jax.Array]:
    return _chunks(_chunk, readout, hidden, targets, number)


def _scores_forward(readout: PyTree, hidden: Any, targets: Any, number: Any) -> tuple:
    """Returns the scores, and what the backward pass needs.

    Every argument tells whether a derivative by it is wanted (``perturbed``).
    """
    moved, held = _partition((readout, hidden))
    readout, states = _combine(moved, held)
    targets, number = targets.value, number.value
    if jax.tree.leaves(moved[0]):  # the head is trained
        done = _chunks(_chunk, readout, states, targets, number)
        return done, (moved, held, targets, number)
    scores, correct, slopes = _chunks(_chunk_and_slope, readout, states, targets, number)
    return (scores, correct), slopes


def _scores_backward(residuals: Any, cotangents: tuple) -> tuple:
    cotangent = cotangents[0]
    if isinstance(residuals, tuple):
        shape = residuals[2].shape
        if isinstance(cotangent, jax.custom_derivatives.SymbolicZero):
            cotangent = jnp.zeros(shape, jnp.float32)
        return (*_head_gradient(*residuals, cotangent), None, None)
    if isinstance(cotangent, jax.custom_derivatives.SymbolicZero):
        return None, None, None, None
    slopes = residuals.astype(jnp.float32) * cotangent[..., None]
    return None, slopes.astype(residuals.dtype), None, None


_scores.defvjp(_scores_forward, _scores_backward, symbolic_zeros=True)


@jax.custom_vjp
def _head_gradient(
    moved: PyTree, held: PyTree, targets: jax.Array, number: jax.Array, cotangent: jax.Array
) -> PyTree:
    """Returns the gradient of the weighted sum of the log-likelihoods, in the form of ``moved``.

    Args:
      moved: (head, hidden states), with None for the arrays that have no gradient.
      held: the other arrays.
      targets: int32 ``[capacity, size]``.
      number: of chunks with anything that counts.
      cotangent: the weights, ``[capacity, size]``.
    """
    heads, states = moved

    def turn(i: jax.Array, done: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
        total, slopes = done
        chosen = jax.tree.map(lambda x: x[i], (states, held[1]))

        def score(head: PyTree, state: PyTree) -> jax.Array:
            readout, hidden = _combine((head, state), (held[0], chosen[1]))
            return _chunk(readout, hidden, targets[i])[0]

        head, state = jax.vjp(score, heads, chosen[0])[1](cotangent[i])
        total = jax.tree.map(lambda x, y: x + y.astype(x.dtype), total, head)
        return total, jax.tree.map(lambda all_, x: all_.at[i].set(x), slopes, state)

    start = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), heads)
    total, slopes = jax.lax.fori_loop(
        0, number, turn, (start, jax.tree.map(jnp.zeros_like, states))
    )
    return jax.tree.map(lambda x, y: y.astype(x.dtype), heads, total), slopes


def _head_gradient_in_scan(
    moved: PyTree, held: PyTree, targets: jax.Array, number: jax.Array, cotangent: jax.Array
) -> PyTree:
    """Returns what :func:`_head_gradient` returns, differentiably."""

    def scores(moved: PyTree) -> jax.Array:
        readout, hidden = _combine(moved, held)
        found: jax.Array = _each_in_scan(_chunk, readout, hidden, targets, number)[0]
        return found

    return jax.vjp(scores, moved)[1](cotangent)[0]


_head_gradient.defvjp(
    lambda *given: (_head_gradient(*given), given),
    lambda given, cotangent: jax.vjp(_head_gradient_in_scan, *given)[1](cotangent),
)


def _partition(primals: PyTree) -> tuple[PyTree, PyTree]:
    """Returns the arrays with a wanted derivative, and the others; None in each other's places."""

    def is_primal(x: Any) -> bool:
        return isinstance(x, jax.custom_derivatives.CustomVJPPrimal)

    moved = jax.tree.map(lambda x: x.value if x.perturbed else None, primals, is_leaf=is_primal)
    held = jax.tree.map(lambda x: None if x.perturbed else x.value, primals, is_leaf=is_primal)
    return moved, held


def _combine(moved: PyTree, held: PyTree) -> PyTree:
    return jax.tree.map(
        lambda x, y: y if x is None else x, moved, held, is_leaf=lambda x: x is None
    )
