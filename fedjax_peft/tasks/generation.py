"""Completions of prompts by a causal language model, and likelihoods of given continuations."""

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedjax_peft.contracts import Batch, Key, Params, Sampling
from fedjax_peft.data.encode import encode
from fedjax_peft.data.encoders.conversations import conversations_of, encode_prompts
from fedjax_peft.data.table import Table
from fedjax_peft.data.templates import end_tokens as template_ends
from fedjax_peft.data.templates import template_of
from fedjax_peft.data.text import clean
from fedjax_peft.data.tokens import beginning, whole
from fedjax_peft.engine.compilation import programs
from fedjax_peft.models.base import Model
from fedjax_peft.models.decoding import NO_TOKEN, NOT_CAUSAL, check_sampling, decode
from fedjax_peft.numerics.random import stream
from fedjax_peft.support.checks import check_count
from fedjax_peft.support.errors import InputError
from fedjax_peft.tasks.base import Task
from fedjax_peft.tasks.completions import decoded
from fedjax_peft.tasks.likelihood import token_scores

_SHORTEST = 16
"""The smallest padded length; further ones are its doubles, and each is compiled once."""


def generate(
    model: Model,
    params: Params,
    prompts: Sequence[Any],
    *,
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    seed: int = 0,
    template: str | None = None,
    task: Task | None = None,
    max_length: int | None = None,
    batch_size: int = 16,
) -> list[str]:
    """Returns the completion of each prompt, in order, without the prompt and special tokens.

    A completion ends with the tokenizer's end-of-text token or one that the model's configs name,
    or after ``max_new_tokens``. With a temperature, the tokens of a prompt depend on the seed and
    on the prompt's place in ``prompts``, not on the batches. The arguments that are not described
    here are those of :class:`fedjax_peft.contracts.Sampling`.

    Args:
      model: a model with a tokenizer and the head :func:`fedjax_peft.models.heads.causal_lm`.
      params: its trainable leaves.
      prompts: texts; with a ``template`` or a ``task`` also conversations (lists of messages).
      seed: the seed of the random numbers.
      template: how a prompt becomes text, see :func:`fedjax_peft.data.templates.template_of`; None:
        as ``task`` says.
      task: what the model was trained on; the prompts then have the form of its training examples.
        None: a prompt is the text that the model goes on with.
      max_length: tokens per prompt; a longer one loses its beginning. None: no limit.
      batch_size: prompts in a batch.

    Raises:
      InputError: no tokenizer, another head, an impossible setting, or too long a prompt.
    """
    tokenizer = model.require_tokenizer()
    how = check_sampling(Sampling(max_new_tokens, temperature, top_p, top_k))
    if isinstance(prompts, str):
        raise InputError("The prompts must be a list of texts, not one text: [prompt].")
    if not len(prompts):
        return []
    ends = None
    if template is not None:
        columns = encode_prompts(tokenizer, prompts, template=template, max_length=max_length)
        ends = [*template_ends(tokenizer, template_of(tokenizer, template))]
        tokens = _unpadded(columns)
    elif task is not None and _reads_conversations(task):
        columns = _task_prompts(model, task, conversations_of(prompts), max_length)
        tokens = _unpadded(columns)
        if "end_ids" in columns:
            ends = sorted({int(x) for x in columns["end_ids"].ravel() if x >= 0})
    else:
        tokens = _text_tokens(tokenizer, prompts, max_length)
    if ends is not None:
        ends = sorted({*ends, *end_tokens(model)})
    made = complete(model, params, tokens, how, seed, ends=ends, batch_size=batch_size)
    return decoded(tokenizer, made)


def _reads_conversations(task: Task) -> bool:
    """Returns whether a task's encoder makes prompts of conversations."""
    if task.encoder is None:
        return False
    fields = () if task.inputs is None else task.inputs.fields
    return "messages" in {*task.encoder.columns, *(field.name for field in fields)}


def _task_prompts(
    model: Model, task: Task, rows: Sequence[Any], max_length: int | None
) -> dict[str, np.ndarray]:
    """Returns the columns of conversations as the task's encoder makes them, whole by default.

    The encoder pads its columns to the length that it is given, and a model may read a million
    tokens. So the length doubles from a first guess until no prompt fills it.
    """
    table = Table("the prompts", {"messages": rows})
    limit = max_length or model.longest_text
    length = max_length or min(max(len(str(row)) for row in rows), limit)
    while True:
        data = encode(task, table, (), model.tokenizer, max_length=length, name="prompts")
        if length >= limit or data.columns["prompt_mask"].sum(axis=1).max() < length:
            return dict(data.columns)
        length = min(2 * length, limit)


def _unpadded(columns: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    """Returns the tokens of each row of ``prompt_ids``."""
    pairs = zip(columns["prompt_ids"], columns["prompt_mask"], strict=True)
    return [ids[mask] for ids, mask in pairs]


def _text_tokens(
    tokenizer: Any, prompts: Sequence[Any], max_length: int | None
) -> list[np.ndarray]:
    """Returns the tokens of texts, which begin as the tokenizer lets texts begin."""
    wrong = next((x for x in prompts if not isinstance(x, str)), None)
    if wrong is not None:
        raise InputError(
            f"A prompt is a text, not a {type(wrong).__name__}. Conversations need a template, such"
            ' as template="chat".'
        )
    begin = beginning(tokenizer)
    keep = None if max_length is None else max(max_length - len(begin), 0)
    found = [encoding.ids for encoding in whole(tokenizer, [clean(x) for x in prompts])]
    cut = [ids if keep is None else ids[len(ids) - min(keep, len(ids)) :] for ids in found]
    return [np.array([*begin, *ids], np.int32) for ids in cut]


def complete(
    model: Model,
    params: Params,
    prompts: Sequence[Sequence[int] | np.ndarray],
    how: Sampling,
    seed: int = 0,
    *,
    ends: Sequence[int] | None = None,
    batch_size: int = 16,
) -> np.ndarray:
    """Returns the tokens of completions, int32 ``[prompts, max_new_tokens]``.

    After an end token comes :data:`fedjax_peft.models.decoding.NO_TOKEN`.

    Args:
      prompts: the tokens of each prompt; an empty one becomes the token that begins a text.
      ends: the tokens that end a completion; None: those of :func:`end_tokens`.

    Raises:
      InputError: another head, an empty prompt without a token to begin with, or too long a prompt.
    """
    if not len(prompts):
        return np.zeros((0, how.max_new_tokens), np.int32)
    ends = end_tokens(model) if ends is None else [*ends]
    rows = [np.asarray(x if len(x) else [text_start(model)], np.int32) for x in prompts]
    _check_room(model, "prompt", [len(row) for row in rows], how.max_new_tokens - 1)
    result = np.full((len(rows), how.max_new_tokens), NO_TOKEN, np.int32)
    size = min(batch_size, 1 << max(len(rows) - 1, 0).bit_length())
    width = functools.partial(_width, limit=model.longest_text - how.max_new_tokens + 1)
    last = jnp.asarray(ends or [NO_TOKEN], jnp.int32)
    run, key = _completing(model.apply, how), stream(seed, "generate")
    frozen = model.compute_frozen()
    for length, members in _batches(rows, width, size):
        batch = _padded([rows[i] for i in members], length, size, left=True)
        numbers = jnp.asarray(np.resize(members, size), jnp.int32)
        made = run(frozen, params, batch, numbers, len(members), last, key)
        result[members] = jax.device_get(made)[: len(members)]
    return result


def _check_room(model: Model, what: str, lengths: Sequence[int], new: int = 0) -> None:
    """Raises InputError if the model has too few positions for tokens and ``new`` ones that follow.

    Without this check a model with rotary positions would go on, where it was never trained.
    """
    number = int(np.argmax(lengths))
    if lengths[number] + new > model.longest_text:
        more = f", and its completion needs {new} more" if new else ""
        raise InputError(
            f"The {what} {number + 1} has {lengths[number]} tokens{more}, and the model reads at"
            f" most {model.longest_text}. Cut it to {max(model.longest_text - new, 0)} tokens"
            + (" (max_length), or lower max_new_tokens." if new else ".")
        )


class Likelihood(NamedTuple):
    """How likely a model finds given tokens after others."""

    total: float
    """The sum of the log-probabilities of the tokens."""
    greedy: bool
    """Whether each of them is the most likely one."""
    tokens: int
    """Their number."""


def likelihoods(
    model: Model,
    params: Params,
    rows: Sequence[tuple[Sequence[int], Sequence[int]]],
    *,
    batch_size: int = 16,
) -> list[Likelihood]:
    """Returns the likelihood of each continuation after its context.

    Args:
      rows: (tokens of the context, tokens of the continuation). An empty context becomes the token
        that begins a text.

    Raises:
      InputError: another head, or too long a row.
    """
    both = [((*c,) if len(c) else (text_start(model),), (*t,)) for c, t in rows]
    texts = [np.array([*c, *t], np.int32) for c, t in both]
    result: list[Likelihood] = [Likelihood(0.0, True, 0)] * len(rows)
    if not rows:
        return result
    _check_room(model, "row", [len(text) - 1 for text in texts])  # its last token is not read
    size = min(batch_size, 1 << max(len(rows) - 1, 0).bit_length())
    run, frozen = _scoring(model.apply), model.compute_frozen()
    width = functools.partial(_width, limit=model.longest_text)
    for length, members in _batches([text[:-1] for text in texts], width, size):
        batch = _padded([texts[i][:-1] for i in members], length, size, left=False)
        targets = _padded([texts[i][1:] for i in members], length, size, left=False)
        starts = np.zeros(size, np.int32)
        starts[: len(members)] = [len(both[i][0]) - 1 for i in members]
        sums, right = jax.device_get(run(frozen, params, batch, targets["input_ids"], starts))
        for i, total, greedy in zip(members, sums, right, strict=False):
            result[i] = Likelihood(float(total), bool(greedy), len(both[i][1]))
    return result


def _completing(apply: Any, how: Sampling) -> Callable[..., Array]:
    """Returns the compiled loop; it compiles once for each padded length."""
    forward: Any = weakref.ref(apply)  # the program is dropped with the model

    def run(
        frozen: Params, params: Params, batch: Batch, rows: Any, count: Any, ends: Any, key: Key
    ) -> Array:
        ids, mask = batch["input_ids"], batch["attention_mask"]
        keys = jax.vmap(jax.random.fold_in, (None, 0))(key, rows)
        return decode(
            lambda columns: forward()(frozen, params, columns, None, False),
            ids,
            mask,
            how,
            keys,
            ends=jnp.broadcast_to(ends, (len(ids), len(ends))),
            real=jnp.arange(len(ids)) < count,
        )

    return programs.get(apply, ("complete", how), lambda: jax.jit(run))


def _scoring(apply: Any) -> Callable[..., tuple[Array, Array]]:
    forward: Any = weakref.ref(apply)  # as above

    def run(frozen: Params, params: Params, batch: Batch, targets: Any, starts: Any) -> Any:
        outputs = forward()(frozen, params, batch, None, False)
        if outputs.readout is None:
            raise InputError(NOT_CAUSAL)
        places = jnp.arange(targets.shape[1])[None]
        counted = batch["attention_mask"] & (places >= starts[:, None])
        scores = token_scores(outputs, targets, counted)
        right = jnp.all(scores.correct | ~counted, axis=1)
        return jnp.sum(scores.log_likelihood, axis=1), right

    return programs.get(apply, "score", lambda: jax.jit(run))


def _batches(
    rows: Sequence[np.ndarray], width: Callable[[int], int], size: int
) -> list[tuple[int, list[int]]]:
    """Returns (padded length, row numbers) of batches of at most ``size`` rows of like length."""
    check_count("the generation", "batch_size", size)
    order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
    found: list[tuple[int, list[int]]] = []
    for i in order:
        length = width(len(rows[i]))
        if not found or found[-1][0] != length or len(found[-1][1]) == size:
            found.append((length, []))
        found[-1][1].append(i)
    return found


def _padded(
    rows: Sequence[np.ndarray], length: int, size: int, *, left: bool
) -> dict[str, np.ndarray]:
    """Returns ``input_ids`` and ``attention_mask`` ``[size, length]``; missing rows are zeros."""
    ids, mask = np.zeros((size, length), np.int32), np.zeros((size, length), bool)
    for i, row in enumerate(rows):
        where = slice(length - len(row), None) if left else slice(len(row))
        ids[i, where], mask[i, where] = row, True
    return {"input_ids": ids, "attention_mask": mask}


def _width(longest: int, *, limit: int) -> int:
    """Returns a padded length: a power of two, but not beyond the positions of the model."""
    return max(longest, min(max(_SHORTEST, 1 << max(longest - 1, 0).bit_length()), limit))


def end_tokens(model: Model) -> list[int]:
    """Returns the tokens that end a text: the tokenizer's, and those that the config names."""
    named = model.config.get("eos_token_id")
    found = [named] if isinstance(named, int) else [*(named or ())]
    own = None if model.tokenizer is None else model.tokenizer.eos_token_id
    return sorted({*found, *([] if own is None else [own])})


def text_start(model: Model) -> int:
    """Returns the token before a text: the tokenizer's first, or (GPT-2) the end-of-text token."""
    tokenizer = model.tokenizer
    given = () if tokenizer is None else (tokenizer.bos_token_id, tokenizer.eos_token_id)
    named: Mapping[str, Any] = model.config
    for token in (*given, named.get("bos_token_id"), *end_tokens(model)):
        if token is not None:
            return int(token)
    raise InputError("A prompt has no tokens, and the model has no token to begin a text with.")
