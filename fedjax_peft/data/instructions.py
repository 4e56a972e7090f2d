"""Labelled data sets as instructions: a request in words, and the label as the answer.

Each data set has several templates, as in FLAN (Wei et al. 2022, arXiv:2109.01652). The words are
ours. Which template a row has is drawn from the seed, the split and the number of the row.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from fedjax_peft.data.conversations import Conversation
from fedjax_peft.data.room import Room
from fedjax_peft.data.table import Table
from fedjax_peft.errors import InputError
from fedjax_peft.random import host_rng

__all__ = ["FORMS", "Form", "as_instructions"]


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
        ),
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
        ),
    ),
    "semeval2010_task8": Form(
        (
            "How are the two marked nouns related?\n\n{text}",
            "{text}\n\nWhich relation holds between e1 and e2? Choose one of: {options}.",
            "Find the relation of e1 to e2 in this sentence: {text}",
        ),
    ),
    "squad": Form(
        (
            "{context}\n\nAnswer with words from the text: {question}",
            "Question: {question}\nFind the answer in this paragraph and copy it.\n\n{context}",
            "Read:\n{context}\n\nNow tell me briefly: {question}",
        ),
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
_FIELD = re.compile(r"\{(text|text_pair|context|question|options)\}")


def as_instructions(
    name: str,
    table: Table,
    names: Sequence[str],
    *,
    part: str,
    seed: int,
    room: Room | None = None,
) -> Table:
    """Returns a table of conversations: a request made of a row, and its answer.

    The answer to a question on a context is its first gold answer; all of them are references. The
    columns ``label`` (of classified texts) and ``task`` (the name of the data set) are keys to
    partition by; further keys stay.

    Args:
      name: of the data set; one without an entry in :data:`FORMS` has general templates.
      table: one split, prepared for its own task: classified texts, or questions on contexts.
      names: of all classes, in order.
      part: the name of the split.
      seed: of the choice of templates.
      room: in a conversation that is too long, the longest text of the row loses its end until the
        request and the answer fit; None: texts stay whole.

    Raises:
      InputError: rows of another kind, or a template that the tokenizer does not have.
    """
    columns = dict(table.columns)
    if "answers" in columns and "question" in columns:
        form, golds = FORMS.get(name, _SPANS), [list(map(str, x)) for x in columns["answers"]]
        answers = [gold[0] if gold else "" for gold in golds]
        used = {"context", "question", "answers", "answer_starts"}
    elif "text" in columns and "label" in columns:
        form = FORMS.get(name, _PAIRS if "text_pair" in columns else _CLASSES)
        words = form.answers or {}
        answers = [words.get(str(x), str(x)) for x in columns["label"]]
        golds = [[answer] for answer in answers]
        used = {"text", "text_pair"}
    else:
        raise InputError(
            f"instructions = true is for classified texts and for questions on a context, and"
            f" {name!r} has the columns {', '.join(columns)}."
        )
    words = form.answers or {}
    options = ", ".join(words.get(x, x) for x in names)
    drawn = host_rng(seed, f"instructions:{part}").integers(0, len(form.templates), len(table))
    texts = [
        {field: str(columns[field][row]) for field in sorted(used & columns.keys() - _GOLDS)}
        for row in range(len(table))
    ]

    def conversation(row: int) -> Conversation:
        request = _filled(form.templates[drawn[row]], {**texts[row], "options": options})
        return [
            {"role": "user", "content": request},
            {"role": "assistant", "content": answers[row]},
        ]

    conversations = [conversation(row) for row in range(len(table))]
    if room is not None:
        _shorten(texts, conversations, conversation, room)
    kept: dict[str, Any] = {key: x for key, x in columns.items() if key not in used}
    if "label" in kept:
        kept["label"] = [str(label) for label in kept["label"]]
    kept |= {"task": [name] * len(table)} if "task" not in kept else {}
    return replace(
        table, columns={"messages": conversations, "references": golds, **kept}, label_names=None
    )


def _shorten(
    texts: Sequence[dict[str, str]],
    conversations: list[Conversation],
    conversation: Callable[[int], Conversation],
    room: Room,
) -> None:
    """Cuts the longest text of each row whose conversation is too long, and makes it anew."""
    rows = list(range(len(texts)))
    for _ in range(_PASSES):  # tokens may join differently around a cut
        excess = room.excess([conversations[row] for row in rows])
        rows = [row for row, tokens in zip(rows, excess, strict=True) if tokens]
        for row, tokens in zip(rows, filter(None, excess), strict=True):
            longest = max(texts[row], key=lambda field: len(texts[row][field]))
            texts[row][longest] = room.cut(texts[row][longest], tokens)
            conversations[row] = conversation(row)


def _filled(template: str, fields: Mapping[str, Any]) -> str:
    """Returns the template with its fields. Braces in a text have no meaning."""
    return _FIELD.sub(lambda found: str(fields[found[1]]), template)
