r"""Preferences: of two answers to a prompt, the model makes the chosen one more likely.

An answer :math:`y` to the prompt :math:`x` has :math:`|y|` tokens, the log-likelihood
:math:`\ell_y = \log\pi(y|x)`, a sum over them, and the ratio :math:`r_y = \ell_y -
\log\pi_{ref}(y|x)`. With the chosen answer :math:`w` and the rejected :math:`l`, the losses are

=========  ===========================================================================
``dpo``    :math:`-\log\sigma(\beta(r_w - r_l))` (Rafailov et al. 2023, Eq. 7)
``ipo``    :math:`(r_w/|w| - r_l/|l| - 1/(2\beta))^2` (Azar et al. 2024, Eq. 17)
``orpo``   :math:`-\tfrac1n\log\pi(x,w) - \beta\log\sigma(o_w - o_l)` with
           :math:`o_y = \log\tfrac{p_y}{1-p_y}, p_y = e^{\ell_y/|y|}` (Hong et al. 2024, Eq. 6)
``simpo``  :math:`-\log\sigma(\beta(\ell_w/|w| - \ell_l/|l|) - \gamma)` (Meng et al. 2024, Eq. 6)
``kto``    of one labelled answer: :math:`\lambda_D(1-\sigma(\beta(r_y - z)))` if it is desirable,
           else :math:`\lambda_U(1-\sigma(\beta(z - r_y)))` (Ethayarajh et al. 2024, Eq. 7)
=========  ===========================================================================

:math:`\pi_{ref}` is the model that the run starts from, which for adapters that start at zero is
the base. Its log-likelihoods are computed once, without dropout, and are a column of the data.

Where the papers are silent:

* IPO's paper writes sums; its authors confirmed the means over tokens to TRL, which are taken here.
* ORPO's first term counts the tokens of the prompt too, as the authors' code and TRL do. It is a
  mean over the :math:`n` tokens of each pair; in TRL a batch's tokens share one mean, so it equals
  TRL's with one pair in a batch.
* KTO's :math:`z = \max(0, \text{mean } r_{y'})` is a mean over the batch, without gradient, where
  :math:`y'` is the answer of the example before, of the same client: no answer leaves a client. A
  client with one example has its own answer there.

Checked against TRL 1.16 (``tests/golden/preferences_golden.py``), losses and gradients.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_peft.contracts import Batch, Metrics, Outputs, Sampling
from fedjax_peft.contracts.arguments import NotNegative, Positive
from fedjax_peft.contracts.part import part
from fedjax_peft.data.dataset import Dataset
from fedjax_peft.data.encoders.preferences import preferences_encoder
from fedjax_peft.data.packing import is_packed, side_by_side
from fedjax_peft.data.tokens import padded
from fedjax_peft.support.errors import InputError
from fedjax_peft.tasks.base import Task, prompted
from fedjax_peft.tasks.common import SumAndCount, total
from fedjax_peft.tasks.likelihood import Objective, next_tokens, token_scores

REFERENCE = "reference"
"""The column of the reference's log-likelihoods of the answers of a row, float32 ``[n, texts]``."""


@part
def preference(
    loss: Literal["dpo", "ipo", "orpo", "simpo", "kto"] = "dpo",
    beta: Positive | None = None,
    gamma: NotNegative = 1.0,
    desirable_weight: NotNegative = 1.0,
    undesirable_weight: NotNegative = 1.0,
) -> Task:
    """Preference: the model learns which of two answers to a prompt is better.

    Rows have ``prompt``, ``chosen`` and ``rejected``; see
    :func:`fedjax_peft.data.encoders.preferences.with_preferences`. An example is a pair. The loss
    is a mean over pairs, or with ``kto`` over answers, which may then also be single ones with a
    ``label``.

    The reward of an answer is ``beta`` times its log-likelihood minus the reference's; ``orpo`` and
    ``simpo`` have no reference and take the mean log-likelihood of its tokens. ``margin`` is the
    reward of the chosen answer minus that of the rejected one; of a single answer, its reward, with
    the other sign if it is undesirable. ``reward_accuracy`` is the share of positive margins.
    ``chosen_log_likelihood`` and ``rejected_log_likelihood`` are means of sums over tokens.

    Args:
      loss: one of the five losses.
      beta: how strongly a difference of the log-likelihoods counts (IPO's τ, ORPO's λ); None: 2
        with ``simpo``, else 0.1.
      gamma: the margin that ``simpo`` asks for.
      desirable_weight: KTO's λ of desirable answers.
      undesirable_weight: KTO's λ of undesirable answers.
    """
    beta = (2.0 if loss == "simpo" else 0.1) if beta is None else beta
    scored = _objective(loss, beta, gamma, (desirable_weight, undesirable_weight))
    return Task(
        scored.loss,
        scored.metrics,
        headline="reward_accuracy",
        name="preference",
        encoder=preferences_encoder(loss == "kto"),
        head="causal_lm",
        inputs=prompted(Sampling(), conversations=True),
        check=_checking(loss),
        loss_and_metrics=scored.loss_and_metrics,
        prepare=_prepared(loss),
    )


class _Texts(NamedTuple):
    """The texts of a batch's rows, each ``[batch, texts]``; zeros where a row has fewer."""

    log_likelihood: jax.Array
    """The sum over the tokens of the answer."""
    tokens: jax.Array
    """Their number, in float32."""
    whole: tuple[jax.Array, jax.Array]
    """The same two of the answer and its prompt, if asked for."""


def _texts(outputs: Outputs, batch: Batch, *, prompts: bool = False) -> _Texts:
    """Returns the log-likelihoods of a batch's texts; those of prompts only if asked for."""
    targets, answers = next_tokens(batch, batch["loss_mask"])
    counted = next_tokens(batch, batch["attention_mask"])[1] if prompts else answers
    scores = token_scores(outputs, targets, counted).log_likelihood
    numbers = jnp.arange(1, batch["preferred"].shape[1] + 1)
    of_text = batch["segment_ids"][..., None] == numbers[None, None]

    def sums(counted: jax.Array) -> tuple[jax.Array, jax.Array]:
        chosen = of_text & counted[..., None]
        found = jnp.sum(jnp.where(chosen, scores[..., None], 0.0), axis=1)
        return found, jnp.sum(chosen, axis=1, dtype=jnp.float32)

    return _Texts(*sums(answers), sums(counted))


@functools.cache  # the same functions for the same settings, so that their programs are found again
def _objective(loss: str, beta: float, gamma: float, weights: tuple[float, float]) -> Objective:
    def both(outputs: Outputs, batch: Batch) -> tuple[SumAndCount, Metrics]:
        texts = _texts(outputs, batch, prompts=loss == "orpo")
        ratios = texts.log_likelihood
        ratios = ratios if loss in _WITHOUT_REFERENCE else ratios - batch[REFERENCE]
        real = texts.tokens > 0
        if loss == "kto":
            liked, real = batch["preferred"][:, 0].astype(bool), real[:, 0]
            losses = _kto(ratios, texts.tokens, liked, beta, weights)
            margins = jnp.where(liked, 1.0, -1.0) * beta * ratios[:, 0]
            chosen, rejected = real & liked, real & ~liked
            sums = (texts.log_likelihood[:, 0],) * 2
        else:
            losses = _PAIRS[loss](ratios, texts, beta, gamma)
            of_tokens = loss in _WITHOUT_REFERENCE
            margins = beta * _difference(_per_token(ratios, texts) if of_tokens else ratios)
            chosen = rejected = real = real[:, ::2]
            sums = texts.log_likelihood[:, ::2], texts.log_likelihood[:, 1::2]
        summed = total(losses, real)
        metrics = {
            "loss": summed,
            "reward_accuracy": total(margins > 0, real),
            "margin": total(margins, real),
            "chosen_log_likelihood": total(sums[0], chosen),
            "rejected_log_likelihood": total(sums[1], rejected),
        }
        return summed, metrics

    return Objective(lambda *given: both(*given)[0], lambda *given: both(*given)[1], both)


def _difference(values: jax.Array) -> jax.Array:
    """Returns values of chosen texts minus those of rejected ones, ``[batch, pairs]``."""
    return values[:, ::2] - values[:, 1::2]


def _per_token(sums: jax.Array, texts: _Texts) -> jax.Array:
    return sums / jnp.maximum(texts.tokens, 1.0)


def _dpo(ratios: jax.Array, texts: _Texts, beta: float, gamma: float) -> jax.Array:
    return -jax.nn.log_sigmoid(beta * _difference(ratios))


def _ipo(ratios: jax.Array, texts: _Texts, beta: float, gamma: float) -> jax.Array:
    return (_difference(_per_token(ratios, texts)) - 1 / (2 * beta)) ** 2


def _simpo(ratios: jax.Array, texts: _Texts, beta: float, gamma: float) -> jax.Array:
    return -jax.nn.log_sigmoid(beta * _difference(_per_token(ratios, texts)) - gamma)


def _orpo(ratios: jax.Array, texts: _Texts, beta: float, gamma: float) -> jax.Array:
    means = jnp.where(texts.tokens > 0, _per_token(ratios, texts), -1.0)
    log_odds = _difference(means - _log_of_rest(means))
    sums, tokens = texts.whole
    likely = sums[:, ::2] / jnp.maximum(tokens[:, ::2], 1.0)
    return -likely - beta * jax.nn.log_sigmoid(log_odds)


def _log_of_rest(x: jax.Array) -> jax.Array:
    """Returns ``log(1 - exp(x))`` of ``x < 0`` (Mächler 2012)."""
    near = x > -np.log(2)
    # Each branch gets arguments that it has a derivative at.
    close, far = jnp.where(near, x, -0.5), jnp.where(near, -1.0, x)
    return jnp.where(near, jnp.log(-jnp.expm1(close)), jnp.log1p(-jnp.exp(far)))


_PAIRS = {"dpo": _dpo, "ipo": _ipo, "orpo": _orpo, "simpo": _simpo}
_WITHOUT_REFERENCE = ("orpo", "simpo")


def _kto(
    ratios: jax.Array,
    tokens: jax.Array,
    liked: jax.Array,
    beta: float,
    weights: tuple[float, float],
) -> jax.Array:
    """Returns the loss of each answer, ``[batch]``; the second text is with an unrelated answer."""
    unrelated = total(ratios[:, 1:], tokens[:, 1:] > 0)
    mean = unrelated[0] / jnp.maximum(unrelated[1], 1.0)
    reference = jax.lax.stop_gradient(jnp.maximum(mean, 0.0))
    distance = jnp.where(liked, 1.0, -1.0) * (ratios[:, 0] - reference)
    return jnp.where(liked, *weights) * (1 - jax.nn.sigmoid(beta * distance))


# ------------------------------------------------------- what is computed before the first round


@functools.cache
def _prepared(loss: str) -> Callable[[Any, Dataset, Sequence[np.ndarray]], Dataset] | None:
    """Returns ``Task.prepare``: it adds what the reference says of the answers."""

    def prepare(model: Any, data: Dataset, owned: Sequence[np.ndarray]) -> Dataset:
        if REFERENCE in data.columns:
            return data
        _checking(loss)(data, "given")
        from fedjax_peft.models.passes import over_batches  # models load slowly

        data = _with_unrelated(data, owned) if loss == "kto" else data
        columns = {name: x for name, x in data.columns.items() if not name.startswith("prompt_")}
        longest = int(np.flatnonzero(columns["attention_mask"].any(axis=0)).max(initial=0)) + 1
        columns = {n: x[:, :longest] if n in _OF_TOKENS else x for n, x in columns.items()}
        found = over_batches(model, model.trainable, columns, _sums_of_answers, _ROWS)
        return replace(data, columns={**data.columns, **found})

    return None if loss in _WITHOUT_REFERENCE else prepare


_ROWS = 16
"""Rows whose log-likelihoods are computed together."""
_OF_TOKENS = ("input_ids", "attention_mask", "loss_mask", "segment_ids", "position_ids")


def _sums_of_answers(outputs: Outputs, batch: Batch) -> dict[str, jax.Array]:
    return {REFERENCE: _texts(outputs, batch).log_likelihood}


def _with_unrelated(data: Dataset, owned: Sequence[np.ndarray]) -> Dataset:
    """Returns answers with a second text: the prompt, with the answer to a client's prompt before.

    Args:
      owned: the rows of each client. They lose the columns of prompts, because a row is then no
        example of its own; empty: one owner has all rows.
    """
    ids, mask, answers = (data.columns[name] for name in _OF_TOKENS[:3])
    other = np.arange(len(data))
    for rows in owned or [other.copy()]:
        other[rows] = np.roll(rows, 1)
    prompts, most = mask & (np.cumsum(answers, axis=1) == 0), ids.shape[1] // 2
    texts, learned = [], []
    for row, before in enumerate(other):
        prompt, answer = ids[row, prompts[row]], ids[before, answers[before]]
        texts.append(np.concatenate([prompt, answer])[:most])
        learned.append(np.repeat([False, True], [len(prompt), len(answer)])[:most])
    padding = int(ids[~mask][0])
    more, real = padded(texts, ids.shape[1], padding)
    both = {
        "input_ids": np.concatenate([ids, more]),
        "attention_mask": np.concatenate([mask, real]),
        "loss_mask": np.concatenate([answers, padded(learned, ids.shape[1], 0)[0] > 0]),
    }
    pairs = [[row, len(data) + row] for row in range(len(data))]
    preferred = np.pad(data.columns["preferred"], ((0, 0), (0, 1)))
    columns = {**data.columns, **side_by_side(both, pairs, ids.shape[1]), "preferred": preferred}
    return replace(data, columns={n: x for n, x in columns.items() if not (owned and n in _PROMPT)})


_PROMPT = ("prompt_ids", "prompt_mask", "end_ids")


@functools.cache
def _checking(loss: str) -> Callable[[Dataset, str], None]:
    """Returns ``Task.check``."""

    def check(data: Dataset, which: str) -> None:
        missing = {"preferred", "segment_ids"} - data.columns.keys()
        if missing:
            raise InputError(
                f"The {which} data are for preferences, but have no column {min(missing)!r}."
                " load_dataset makes it, from prompt, chosen and rejected."
            )
        if REFERENCE in data.columns:  # prepared, and so checked
            return
        if loss == "kto" and is_packed(data.columns):
            raise InputError(
                "loss = 'kto' puts a second answer into each row, for which packed rows have no"
                " room. Leave packing out."
            )
        pairs = data.columns["preferred"].shape[1] > 1
        if pairs == (loss == "kto"):
            rows = "pairs, and 'kto' reads single" if pairs else "single answers, not pairs of"
            raise InputError(
                f"The {which} data hold {rows} answers: load them with the task of the run, task ="
                f" fp.tasks.preference({loss!r})."
            )

    return check
