"""Questions with several choices to tokens: one example for each choice, with a mask of it."""

import functools
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from fedjax_peft.data.dataset import Dataset
from fedjax_peft.data.encoders.base import (
    STAND_IN_WORDS,
    Encoder,
    StandIn,
    needing,
    recognising,
    texts_in,
)
from fedjax_peft.data.table import Table, require
from fedjax_peft.data.text import cached, check_tokenizer, clean, fingerprint
from fedjax_peft.data.tokens import beginning, padded, padding_token, whole
from fedjax_peft.support.errors import InputError

Style = Literal["text", "letters"]
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


class ChoiceQuestion(NamedTuple):
    """The reference of a question."""

    choices: tuple[str, ...]
    answer: int
    """The index of the right choice."""


def encode_choices(
    table: Table,
    names: Sequence[str],
    tokenizer: Any,
    *,
    max_length: int,
    name: str,
    style: Style = "text",
) -> Dataset:
    """Returns each choice of each question as an example.

    The tokens of a choice are those that the text of both has beyond the tokens of the question
    alone, as in EleutherAI's harness. Too long a text loses its beginning.

    The columns are ``question``, ``choices`` (a list of at least 2 texts) and ``answer``: the
    number of the right choice from 0 (as a number or as digits), its letter, or the choice. Other
    arguments are those of :class:`Encode`.

    With the style ``text`` an example is the question, a space and the choice (HellaSwag). With
    ``letters`` it is the question, the choices with their letters in lines of their own, and
    ``Answer:``; the example's choice is its letter (MMLU).

    Returns:
      ``input_ids`` int32, ``attention_mask`` bool and ``loss_mask`` bool (the choice), each ``[n,
      max_length]``; ``is_answer`` bool ``[n]``. Meta: ``unit``, ``choice`` and ``characters`` (of
      the choice), each int32 ``[n]``. References: a :class:`ChoiceQuestion` for each question.

    Raises:
      InputError: a tokenizer or a length that cannot be used, or a row (counted from 1).
    """
    check_tokenizer(tokenizer, max_length)
    if max_length < 2:
        raise InputError(f"max_length is {max_length}, but a question and a choice are 2 tokens.")
    questions, references = _questions(table)
    pairs = [
        (context, text, unit, i)
        for unit, (question, one) in enumerate(zip(questions, references, strict=True))
        for i, (context, text) in enumerate(_texts_of(question, one, style))
    ]
    key = ["choices", fingerprint(tokenizer), padding_token(tokenizer), max_length]
    texts = [part for context, text, *_ in pairs for part in (context, text)]
    columns = cached([*key, *texts], lambda: _encode(tokenizer, pairs, max_length))
    unit, choice = np.array([pair[2:] for pair in pairs], np.int32).reshape(-1, 2).T
    answers = np.array([one.answer for one in references], np.int32)
    columns = {**columns, "is_answer": choice == answers[unit]}
    characters = np.array([len(text) - 1 for _, text, *_ in pairs], np.int32)
    meta = {"unit": unit, "choice": choice, "characters": characters}
    return Dataset(columns, name=name, meta=meta, references=references)


def _questions(table: Table) -> tuple[list[str], tuple[ChoiceQuestion, ...]]:
    asked = [clean(text).rstrip() for text in require(table, "question", str, "a text")]
    lists = require(table, "choices", (list, tuple), "a list of choices")
    golds = require(table, "answer", (str, int), "an answer")
    references = []
    for row, choices, gold in table.numbered(lists, golds):
        where = table.place(row)
        if len(choices) < 2 or not all(isinstance(x, str) and x.strip() for x in choices):
            raise InputError(f"{where} needs at least 2 choices, each a text, not {choices!r:.80}.")
        texts = tuple(clean(x).strip() for x in choices)
        references.append(ChoiceQuestion(texts, _answer_of(where, choices, gold)))
    return asked, tuple(references)


def _answer_of(where: str, choices: Sequence[str], gold: str | int) -> int:
    """Returns the index of the right choice."""
    found = None
    if gold in choices:
        found = list(choices).index(str(gold))
    elif isinstance(gold, int) or gold.strip().isdecimal():
        found = int(gold)
    elif len(gold.strip()) == 1:
        found = _LETTERS.find(gold.strip().upper())
    if found is None or not 0 <= found < len(choices):
        raise InputError(
            f"{where} has the answer {gold!r:.80}, which is neither a number from 0 to"
            f" {len(choices) - 1}, nor a letter, nor one of the choices."
        )
    return found


def _texts_of(question: str, one: ChoiceQuestion, style: Style) -> list[tuple[str, str]]:
    """Returns (question, choice with a space before it) for each choice."""
    if style == "text":
        return [(question, f" {text}") for text in one.choices]
    letters = _LETTERS[: len(one.choices)]
    lines = [f"{letter}. {text}" for letter, text in zip(letters, one.choices, strict=False)]
    context = "\n".join([question, *lines, "Answer:"])
    return [(context, f" {letter}") for letter in letters]


def _encode(
    tokenizer: Any, pairs: Sequence[tuple[str, str, int, int]], max_length: int
) -> dict[str, np.ndarray]:
    first = beginning(tokenizer)
    contexts = whole(tokenizer, [pair[0] for pair in pairs])
    both = whole(tokenizer, [pair[0] + pair[1] for pair in pairs])
    rows = [[*first, *text.ids][-max_length:] for text in both]
    ids, mask = padded(rows, max_length, padding_token(tokenizer))
    # The tokens of the choice, at least one.
    sizes = [max(len(y) - len(x), 1) for x, y in zip(contexts, both, strict=True)]
    starts = mask.sum(axis=1) - np.array(sizes, np.int64)
    loss_mask = mask & (np.arange(max_length) >= starts[:, None])
    return {"input_ids": ids, "attention_mask": mask, "loss_mask": loss_mask}


def _check(table: Table, names: Sequence[str]) -> None:
    _questions(table)


def _words(table: Table, style: Style) -> list[str]:
    """Returns the text before the choices of each question, once, and its choices."""
    found = []
    for question, one in zip(*_questions(table), strict=True):
        pairs = _texts_of(question, one, style)
        found += [pairs[0][0], *(text for _, text in pairs)]
    return found


def _stand_in(rng: np.random.Generator, n: int, wanted: StandIn) -> dict[str, Any]:
    """Returns questions of three words; the right choice is the first of them."""
    rows = [rng.choice(STAND_IN_WORDS, 5, replace=False) for _ in range(n)]
    places = rng.integers(0, 3, n)
    choices = [np.insert(row[3:], place, row[0]) for row, place in zip(rows, places, strict=True)]
    return {
        "question": [" ".join(f"w{i}" for i in row[:3]) for row in rows],
        "choices": [[f"w{i}" for i in row] for row in choices],
        "answer": [int(place) for place in places],
    }


@functools.cache
def choices_encoder(style: Style) -> Encoder:
    """Returns the encoder of a style; see :func:`encode_choices`."""
    return Encoder(
        columns=("question", "choices", "answer"),
        encode=functools.partial(encode_choices, style=style),
        recognises=recognising("question", "choices", "answer"),
        needed=needing("question", "choices", "answer"),
        check=_check,
        texts=texts_in("question"),
        words=functools.partial(_words, style=style),
        stand_in=_stand_in,
    )


def scores_by_unit(scores: np.ndarray, data: Any) -> dict[int, np.ndarray]:
    """Returns the number of each question -> the scores of its choices, in their order.

    Args:
      scores: of each example, ``[n]``.
    """
    unit, choice = data.meta["unit"], data.meta["choice"]
    order = np.lexsort((choice, unit))
    units, starts = np.unique(unit[order], return_index=True)
    parts = np.split(scores[order], starts[1:])
    return {int(one): part for one, part in zip(units, parts, strict=True)}
