"""Labelled data sets as instructions: a request in words, and the label as the answer.

Each data set has several templates, as in FLAN (Wei et al. 2022, arXiv:2109.01652). The words are
ours. Which template a row has is drawn from the seed, the split and the number of the row.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from fedjax_peft.data.conversations import two_turns
from fedjax_peft.data.dataset import Dataset
from fedjax_peft.data.encode import encode
from fedjax_peft.data.encoders.base import Encoded
from fedjax_peft.data.encoders.conversations import with_rows
from fedjax_peft.data.table import Table
from fedjax_peft.data.text import clean
from fedjax_peft.data.tokens import padding_token, whole
from fedjax_peft.numerics.random import host_rng
from fedjax_peft.support.errors import InputError


class Form(NamedTuple):
    """How the rows of a data set become instructions."""

    templates: tuple[str, ...]
    """Requests. ``{text}``, ``{text_pair}``, ``{context}`` and ``{question}`` stand for the column
    of this name, ``{options}`` for the possible answers."""
    answers: Mapping[str, str] | None = None
    """Label -> the answer in words; None: the label itself."""


_YES_NO_ENTAILMENT = {"entailment": "yes", "not_entailment": "no"}
FORMS: dict[str, Form] = {
    "sst2": Form(
        (
            "Is the mood of this sentence about a film positive or negative?\n\n{text}",
            "{text}\n\nDid the reviewer like the film? Answer positive or negative.",
            "Someone wrote about a film: {text}\nThe opinion is positive or negative. Which?",
        )
    ),
    "rte": Form(
        (
            "Text: {text}\nClaim: {text_pair}\n\nDoes the claim follow from the text? yes or no",
            "{text}\n\nCan one conclude from this that the following is true? {text_pair}\n"
            "Answer yes or no.",
            "Suppose this is true: {text}\nIs it then certain that {text_pair} Say yes or no.",
        ),
        _YES_NO_ENTAILMENT,
    ),
    "qnli": Form(
        (
            "Question: {text}\nSentence: {text_pair}\n\nDoes the sentence contain the answer?"
            " yes or no",
            "{text_pair}\n\nIs the question '{text}' answered here? Answer yes or no.",
            "Someone asks: {text}\nSomeone replies: {text_pair}\nIs it an answer? Say yes or no.",
        ),
        _YES_NO_ENTAILMENT,
    ),
    "mrpc": Form(
        (
            "A: {text}\nB: {text_pair}\n\nDo A and B mean the same? yes or no",
            "{text}\n{text_pair}\n\nIs the second sentence a paraphrase of the first? Answer yes"
            " or no.",
            "Compare two sentences from the news. First: {text} Second: {text_pair}\nIs their"
            " meaning equal? Say yes or no.",
        ),
        {"equivalent": "yes", "not_equivalent": "no"},
    ),
    "qqp": Form(
        (
            "A: {text}\nB: {text_pair}\n\nAre these the same question? yes or no",
            "{text}\n{text_pair}\n\nWould one answer serve both questions? Answer yes or no.",
            "A user asks: {text}\nAnother one asks: {text_pair}\nIs it a duplicate? Say yes or no.",
        ),
        {"duplicate": "yes", "not_duplicate": "no"},
    ),
    "mnli": Form(
        (
            "Premise: {text}\nHypothesis: {text_pair}\n\nIs the hypothesis true? yes, maybe or no",
            "{text}\n\nGiven this, is it right that: {text_pair}\nAnswer yes, maybe or no.",
            "We know: {text}\nSomebody says: {text_pair}\nIs that so? Say yes, maybe or no.",
        ),
        {"entailment": "yes", "neutral": "maybe", "contradiction": "no"},
    ),
    "20newsgroups": Form(
        (
            "To which newsgroup was this post sent?\n\n{text}",
            "{text}\n\nName the newsgroup of this post. It is one of: {options}.",
            "Read a post and choose its newsgroup out of {options}.\n\nPost: {text}",
        )
    ),
    "semeval2010_task8": Form(
        (
            "How are the two marked nouns related?\n\n{text}",
            "{text}\n\nWhich relation holds between e1 and e2? Choose one of: {options}.",
            "Find the relation of e1 to e2 in this sentence: {text}",
        )
    ),
    "squad": Form(
        (
            "{context}\n\nAnswer with words from the text: {question}",
            "Question: {question}\nFind the answer in this paragraph and copy it.\n\n{context}",
            "Read:\n{context}\n\nNow tell me briefly: {question}",
        )
    ),
}
"""Data set -> its form."""
_CLASSES = Form(
    (
        "{text}\n\nWhich of these fits best: {options}?",
        "Choose one of {options} for this text:\n\n{text}",
    )
)
"""The form of other classified texts."""
_PAIRS = Form(
    (
        "A: {text}\nB: {text_pair}\n\nWhich of these fits A and B best: {options}?",
        "{text}\n{text_pair}\n\nChoose one of {options} for these two texts.",
    )
)
"""The form of other classified pairs of texts."""
_SPANS = FORMS["squad"]
_GOLDS = {"answers", "answer_starts"}
_PASSES = 3
_OPTIONS = "options"
_FIELD = re.compile(r"\{(text|text_pair|context|question|options)\}")


def as_instructions(
    name: str,
    table: Table,
    names: Sequence[str],
    *,
    part: str,
    seed: int,
    rows: Sequence[int] | None = None,
) -> Table:
    """Returns rows of a table as requests and answers.

    The answer to a question on a context is its first gold answer; all of them are references. The
    columns ``label`` (of classified texts) and ``task`` (the name of the data set) are keys to
    partition by; further keys stay. ``request`` has the template of each row, and field of the
    template -> text.

    Args:
      name: of the data set; one without an entry in :data:`FORMS` has general templates.
      table: one split, prepared for its own task: classified texts, or questions on contexts.
      seed: the seed of the choice of templates. A row's template does not depend on ``rows``.
      rows: the rows to use; None: all.

    Raises:
      InputError: rows of another kind.
    """
    numbers = range(len(table)) if rows is None else rows
    given, table = len(table), table.take(numbers)
    columns = dict(table.columns)
    if "answers" in columns and "question" in columns:
        form, golds = FORMS.get(name, _SPANS), [list(map(str, x)) for x in columns["answers"]]
        used = {"context", "question", "answers", "answer_starts"}
        answers = [gold[0] if gold else "" for gold in golds]
    elif "text" in columns and "label" in columns:
        form = FORMS.get(name, _PAIRS if "text_pair" in columns else _CLASSES)
        used = {"text", "text_pair"}
        answers = [(form.answers or {}).get(str(x), str(x)) for x in columns["label"]]
        golds = [[answer] for answer in answers]
    else:
        raise InputError(
            f"instructions = true is for classified texts and for questions on a context, and"
            f" {name!r} has the columns {', '.join(columns)}."
        )
    drawn = host_rng(seed, f"instructions:{part}").integers(0, len(form.templates), given)
    options = ", ".join((form.answers or {}).get(x, x) for x in names)
    fields = sorted(used & columns.keys() - _GOLDS)
    kept: dict[str, Any] = {key: x for key, x in columns.items() if key not in used}
    kept["request"] = [
        (form.templates[i], {_OPTIONS: options} | {x: str(columns[x][row]) for x in fields})
        for row, i in enumerate(drawn[list(numbers)])
    ]
    if "label" in kept:
        kept["label"] = [str(label) for label in kept["label"]]
    kept.setdefault("task", [name] * len(table))
    pairs = zip(kept["request"], answers, strict=True)
    kept["messages"] = [two_turns(_filled(*request), answer) for request, answer in pairs]
    kept["references"] = golds
    return replace(table, columns=kept, label_names=None)


def encode_instructions(
    task: Encoded, table: Table, tokenizer: Any, *, max_length: int, name: str
) -> tuple[Table, Dataset]:
    """Returns rows as conversations and as tokens, each with its whole answer if there is room.

    In a row of more than ``max_length`` tokens, the longest text loses its end until the request
    and the answer fit. Rows that fit are rendered and tokenized once.

    Args:
      table: of :func:`as_instructions`.
      max_length: tokens of a request with its answer.

    Raises:
      InputError: a tokenizer, template or length that cannot be used.
    """
    data = encode(task, table, (), tokenizer, max_length=max_length, name=name)
    for _ in range(_PASSES):  # tokens may join differently around a cut
        lost = data.meta["cut_tokens"]
        rows = map(int, np.flatnonzero(lost))
        long = [row for row in rows if any(_texts(table.columns["request"][row][1]).values())]
        if not long:
            break
        table = _shortened(table, {row: int(lost[row]) for row in long}, tokenizer)
        some = table.take(long)
        again = encode(task, some, (), tokenizer, max_length=max_length, name=name)
        data = with_rows(data, np.array(long), again, padding_token(tokenizer))
    return table, data


def _shortened(table: Table, excess: Mapping[int, int], tokenizer: Any) -> Table:
    """Returns the rows with less text in some of them.

    Args:
      excess: row -> the number of tokens that its longest text loses at its end.
    """
    requests, messages = list(table.columns["request"]), list(table.columns["messages"])
    for row, tokens in excess.items():
        template, fields = requests[row]
        texts = _texts(fields)
        longest = max(texts, key=lambda field: len(texts[field]))
        fields = fields | {longest: _cut(tokenizer, texts[longest], tokens)}
        requests[row] = (template, fields)
        messages[row] = two_turns(_filled(template, fields), messages[row][1]["content"])
    return replace(table, columns={**table.columns, "request": requests, "messages": messages})


def _texts(fields: Mapping[str, str]) -> dict[str, str]:
    """Returns the fields of a request that a row has of its own."""
    return {field: text for field, text in fields.items() if field != _OPTIONS}


def _cut(tokenizer: Any, text: str, tokens: int) -> str:
    """Returns a text without its last tokens; empty if there are no more than these."""
    text = clean(text)
    [encoding] = whole(tokenizer, [text])
    kept = len(encoding.ids) - tokens
    return text[: encoding.offsets[kept][0]].rstrip() if kept > 0 else ""


def _filled(template: str, fields: Mapping[str, str]) -> str:
    """Returns the template with its fields. Braces in a text have no meaning."""
    return _FIELD.sub(lambda found: fields[found[1]], template)
