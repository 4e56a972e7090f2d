"""Questions about a context to windows of the context, labelled with the answer's position."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from fedjax_peft.data.dataset import Dataset
from fedjax_peft.data.encoders.base import STAND_IN_WORDS, Encoder, StandIn, needing, recognising
from fedjax_peft.data.formats.squad import canonical
from fedjax_peft.data.table import Table, require
from fedjax_peft.data.text import batches, cached, check_tokenizer, clean, fingerprint
from fedjax_peft.data.tokens import joined, model_columns, offsets, padding_token, whole
from fedjax_peft.support.errors import InputError

_QUESTION = 64
"""The largest number of tokens of a question, as in BERT's SQuAD code."""
_STRIDE = 128
"""Tokens that neighbouring windows share, as in BERT's SQuAD code."""


class Question(NamedTuple):
    """A question with its context and its gold answers."""

    id: str
    context: str
    answers: tuple[str, ...]
    """The gold answers, () if unknown; ("",): the context has no answer. The label is the first."""


def encode_spans(
    table: Table,
    names: Sequence[str],
    tokenizer: Any,
    *,
    max_length: int,
    name: str,
    doc_stride: int | None = None,
    unanswerable: bool = False,
) -> Dataset:
    """Returns one example for each window of a context, with the question before the context.

    Positions are those of the first answer's tokens. In a window that does not contain all of them,
    both are 0, the [CLS] token, as in Hugging Face's ``run_qa``. A question is cut to 64 tokens, or
    to half of the room if that is less.

    The columns are ``id``, ``question``, ``context``, ``answers`` and ``answer_starts``. Without
    the last two, for questions to be answered, all positions are 0. ``doc_stride`` is how many
    tokens of the context neighbouring windows share; by default 128, or half of what a window
    always holds, if that is less. With ``unanswerable``, questions may have no answer, or blank
    ones, as in SQuAD 2; their positions are 0. Other arguments are those of :class:`Encode`.

    Returns:
      ``input_ids`` int32, ``attention_mask`` bool, perhaps ``token_type_ids`` int32, and
      ``context_mask`` bool (the tokens that an answer may use), each ``[windows, max_length]``;
      ``start_positions`` and ``end_positions`` (inclusive) int32 ``[windows]``; meta ``unit`` int32
      ``[windows]``, the number of the question, and ``offsets`` ``[windows, max_length, 2]``, where
      in its context each token of it is, in characters; references: :class:`Question`.

    Raises:
      InputError: the tokenizer or the length cannot be used; or a row (counted from 1) has no
        answer, or the answer is not in its context at the given position.
    """
    check_tokenizer(tokenizer, max_length, pair=True)
    room = max_length - tokenizer.num_special_tokens_to_add(True)
    if room < 2:
        raise InputError(f"max_length is {max_length}: no room for both a question and a context.")
    limit = min(_QUESTION, room // 2)
    stride = min(_STRIDE, (room - limit) // 2) if doc_stride is None else doc_stride
    if not 0 <= stride < room - limit:
        raise InputError(
            f"doc_stride is {stride}, but with max_length = {max_length} a window may hold only"
            f" {room - limit} tokens of a context: choose a smaller stride or a larger max_length."
        )
    questions, spans = _questions(table, unanswerable)
    asked = [clean(text) for text in require(table, "question", str, "a question")]
    contexts = [clean(question.context) for question in questions]
    settings = [padding_token(tokenizer), max_length, limit, stride, len(asked)]
    key = ["spans", fingerprint(tokenizer), *settings, *asked, *contexts]
    columns = cached(key, lambda: _encode(tokenizer, asked, contexts, max_length, limit, stride))
    meta = {name: columns.pop(name) for name in ("unit", "offsets")}
    return Dataset(
        columns | _positions(columns["context_mask"], meta["unit"], meta["offsets"], spans),
        name=name,
        meta=meta,
        references=questions,
    )


def span_text(data: Dataset, row: int, start: int, end: int) -> str:
    """Returns the text of the tokens ``start`` to ``end`` (inclusive) of a window's context."""
    offsets = data.meta["offsets"][row]
    context = data.references[data.meta["unit"][row]].context
    return context[offsets[start, 0] : offsets[end, 1]].strip()


def _questions(table: Table, unanswerable: bool) -> tuple[tuple[Question, ...], np.ndarray]:
    """Returns the checked questions, and the characters of the first answers, int32 ``[n, 2]``."""
    if "answers" in table.columns:
        table = canonical(table)
    ids = require(table, "id", (str, int), "an id")
    contexts = require(table, "context", str, "a context")
    if "answers" not in table.columns:
        asked = tuple(Question(str(i), text, ()) for i, text in zip(ids, contexts, strict=True))
        return asked, np.zeros((len(asked), 2), np.int32)
    golds = table.columns["answers"], table.columns["answer_starts"]
    questions, spans = [], []
    for row, id_, context, answers, starts in table.numbered(ids, contexts, *golds):
        given = [pair for pair in zip(answers, starts, strict=True) if pair[0].strip()]
        if not given and not unanswerable:
            raise table.error(
                row,
                "has no answer. If some contexts have none, as in SQuAD 2, the task is"
                " question_answering(unanswerable=True): task = { name = 'question_answering',"
                " unanswerable = true }.",
            )
        if not given:
            questions.append(Question(str(id_), context, ("",)))
            spans.append((0, 0))
            continue
        answers, starts = zip(*given, strict=True)
        for answer, start in zip(answers, starts, strict=True):
            there = context[start : start + len(answer)] if start >= 0 else ""
            if there != answer:
                place = f"{answer[:60]!r} at character {start} of the context, counted from 0"
                raise table.error(row, f"has the answer {place}, but there stands {there[:60]!r}.")
        questions.append(Question(str(id_), context, tuple(answers)))
        # Without trailing spaces: in byte-level tokenizers a space belongs to the next token.
        spans.append((starts[0], starts[0] + len(answers[0].rstrip())))
    return tuple(questions), np.array(spans, np.int32).reshape(-1, 2)


def _encode(
    tokenizer: Any,
    questions: list[str],
    contexts: list[str],
    max_length: int,
    limit: int,
    stride: int,
) -> dict[str, np.ndarray]:
    """Returns token columns of all windows, and ``context_mask``, ``offsets`` and ``unit``."""
    longest = max(map(len, contexts), default=0)
    small = np.min_scalar_type(longest)  # offsets are as large as all other columns together
    room = max_length - tokenizer.num_special_tokens_to_add(True)
    together = tokenizer.backend_tokenizer.post_process
    batched = [_columns(tokenizer, [], max_length, small)]
    for rows in batches(questions, contexts):
        windows: list[tuple[int, Any, Any]] = []
        asked, about = whole(tokenizer, questions[rows]), whole(tokenizer, contexts[rows])
        for unit, (question, context) in enumerate(zip(asked, about, strict=True), rows.start):
            question = _shortened(tokenizer, questions[unit], question, limit)
            context.truncate(room - len(question), stride=stride)
            parts = (context, *context.overflowing)
            windows += [(unit, part, together(question, part)) for part in parts]
        batched.append(_columns(tokenizer, windows, max_length, small))
    return joined(batched)


def _shortened(tokenizer: Any, text: str, encoding: Any, limit: int) -> Any:
    """Returns the encoding of a text, cut to at most ``limit`` tokens."""
    # Not Encoding.truncate: the encoding keeps the rest, which is then paired with every window.
    while len(encoding) > limit:
        text = text[: min(encoding.offsets[limit][0], len(text) - 1)]
        (encoding,) = whole(tokenizer, [text])
    return encoding


def _columns(
    tokenizer: Any, windows: list[tuple[int, Any, Any]], max_length: int, small: np.dtype
) -> dict[str, np.ndarray]:
    """Returns the columns of windows, each a question's number, a part of its context, and both."""
    columns = model_columns(tokenizer, [pair for _, _, pair in windows], max_length)
    columns["context_mask"] = np.zeros((len(windows), max_length), np.bool_)
    columns["offsets"] = np.zeros((len(windows), max_length, 2), small)
    for row, (_, part, pair) in enumerate(windows):
        (at,) = np.nonzero(np.array(pair.sequence_ids) == 1)
        # Offsets of the part: in the pair, a byte-level tokenizer has removed the space again.
        columns["offsets"][row, at] = offsets(part)
        columns["context_mask"][row, at] = True
    columns["unit"] = np.array([unit for unit, _, _ in windows], np.int32)
    return columns


def _positions(
    context_mask: np.ndarray, unit: np.ndarray, offsets: np.ndarray, spans: np.ndarray
) -> dict[str, np.ndarray]:
    """Returns ``start_positions`` and ``end_positions`` (inclusive) int32 ``[windows]``."""
    begin, end = np.split(spans[unit], 2, axis=1)
    # Two tokens can share one character; no token has no character.
    inside = context_mask & (offsets[..., 1] > begin) & (offsets[..., 0] < end)
    first = np.argmax(inside, axis=1)
    last = inside.shape[1] - 1 - np.argmax(inside[:, ::-1], axis=1)
    rows = np.arange(len(unit))
    begin, end = offsets[rows, first, 0].astype(np.int64), offsets[rows, last, 1].astype(np.int64)
    # The answer is complete if no other window of the question contains more of it.
    some = inside.any(axis=1)
    least, most = np.full(len(spans), np.iinfo(np.int64).max), np.full(len(spans), -1)
    np.minimum.at(least, unit[some], begin[some])
    np.maximum.at(most, unit[some], end[some])
    hold = some & (begin == least[unit]) & (end == most[unit])
    positions = {"start_positions": first, "end_positions": last}
    return {key: np.where(hold, x, 0).astype(np.int32) for key, x in positions.items()}


def _texts(table: Table) -> list[str]:
    first = [answers[0] if answers else "" for answers in table.columns["answers"]]
    return [f"{q} {a}" for q, a in zip(table.columns["question"], first, strict=True)]


def _words(table: Table) -> list[str]:
    parts = (("question", "a question"), ("context", "a context"))
    return [text for name, what in parts for text in require(table, name, str, what)]


def _stand_in(rng: np.random.Generator, n: int, wanted: StandIn) -> dict[str, Any]:
    """Returns questions that are a word of the context; the answer is the word after it."""
    columns: dict[str, Any] = {"id": [f"question {i}" for i in range(n)]}
    contexts = [[f"w{i}" for i in rng.permutation(STAND_IN_WORDS)[:12]] for _ in range(n)]
    places = rng.integers(0, 11, n)
    columns["question"] = [words[i] for words, i in zip(contexts, places, strict=True)]
    columns["context"] = [" ".join(words) for words in contexts]
    columns["answers"] = [[words[i + 1]] for words, i in zip(contexts, places, strict=True)]
    columns["answer_starts"] = [
        [len(" ".join(words[: i + 1])) + 1] for words, i in zip(contexts, places, strict=True)
    ]
    return columns


SPANS = Encoder(
    columns=("id", "question", "context", "answers", "answer_starts"),
    encode=encode_spans,
    recognises=recognising("context", "question"),
    needed=needing("question", "context"),
    group_column="context",
    prepare=canonical,
    texts=_texts,
    words=_words,
    stand_in=_stand_in,
)
SPANS_OR_NONE = SPANS._replace(encode=functools.partial(encode_spans, unanswerable=True))
"""The same for questions of which some have no answer."""
