"""Preferences to tokens: the two answers to a prompt side by side in one row, or labelled answers.

A row of tokens holds its texts one after the other, as packed rows do (``segment_ids``). So one
forward pass reads both answers, and neither sees the other.
"""

import functools
import re
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from fedjax_peft.data.conversations import Conversation, joined, messages_of, two_turns
from fedjax_peft.data.dataset import Dataset
from fedjax_peft.data.encoders.base import STAND_IN_WORDS, Encoder, StandIn, needing
from fedjax_peft.data.encoders.conversations import encode_conversations
from fedjax_peft.data.packing import side_by_side
from fedjax_peft.data.table import MissingColumn, Table, is_missing
from fedjax_peft.support.errors import InputError, users_level

_PAIR = ("chosen", "rejected")
_LABELLED = ("completion", "label")
_TURN = re.compile(r"(?:^|\n\n)(Human|Assistant):")
"""What comes before each turn in the texts of Anthropic's HH."""


def encode_preferences(
    table: Table,
    names: Sequence[str],
    tokenizer: Any,
    *,
    max_length: int,
    name: str,
    template: str | None = None,
    labelled: bool = False,
) -> Dataset:
    """Returns pairs of answers as tokens, one example each; or single answers with labels.

    Only the tokens of the last answer, with the token that ends it, are in ``loss_mask``. An answer
    loses the end that makes a text longer than ``max_length``. Of ``messages`` alone, which are
    prompts without answers, the result is that of :func:`encode_conversations`. Other arguments are
    those of it and of :class:`fedjax_peft.data.encoders.base.Encode`.

    Args:
      labelled: one example for each answer; those of a pair have the labels True and False, and
        stay together.

    Returns:
      ``input_ids``, ``segment_ids`` (1: the chosen text, 2: the rejected one; 0: padding) and
      ``position_ids`` int32, ``attention_mask`` and ``loss_mask`` bool, each ``[n, 2 max_length]``;
      ``preferred`` bool ``[n, 2]`` (True, False), or of labelled answers ``[n, 1]``; and
      ``prompt_ids``, ``prompt_mask`` and ``end_ids`` as :func:`encode_conversations` does. Meta:
      ``unit`` and ``cut_tokens``, each int32 ``[n]``. References: the preferred answers.

    Raises:
      InputError: a tokenizer, a template or a length that cannot be used, or a row (counted from 1)
        whose prompt leaves no room for an answer.
    """
    if {*table.columns} == {"messages"}:
        asked = {"messages": [_in_turns(row) for row in table.columns["messages"]]}
        table = replace(table, columns=asked)
        return encode_conversations(
            table, (), tokenizer, max_length=max_length, name=name, template=template
        )
    pairs = _PAIR[0] in table.columns
    sides = _PAIR if pairs else _LABELLED[:1]
    parts = [_answers(table, side, tokenizer, max_length, name, template) for side in sides]
    texts = {key: np.concatenate([x.columns[key] for x in parts]) for key in _TOKENS}
    n, unit = len(table), np.tile(np.arange(len(table), dtype=np.int32), len(sides))
    cut = np.concatenate([x.meta["cut_tokens"] for x in parts])
    if labelled:
        labels = np.arange(len(unit)) < n if pairs else np.array(table.columns["label"], np.bool_)
        rows, preferred = [[row] for row in range(len(unit))], labels[:, None]
        first = np.tile(np.arange(n), len(sides))
    else:
        rows, preferred = [[row, n + row] for row in range(n)], np.tile([True, False], (n, 1))
        first, unit, cut = np.arange(n), unit[:n], cut.reshape(2, n).sum(axis=0, dtype=np.int32)
    kept = {key: parts[0].columns[key][first] for key in ("prompt_ids", "prompt_mask", "end_ids")}
    columns = {**side_by_side(texts, rows, 2 * max_length), "preferred": preferred, **kept}
    notes = tuple(dict.fromkeys(note for part in parts for note in part.notes))
    meta = {"unit": unit, "cut_tokens": cut}
    return Dataset(columns, name=name, meta=meta, references=parts[0].references, notes=notes)


_TOKENS = ("input_ids", "attention_mask", "loss_mask")


def _answers(
    table: Table, side: str, tokenizer: Any, max_length: int, name: str, template: str | None
) -> Dataset:
    """Returns the conversations of a column as tokens, of which the last answer counts alone."""
    conversations = replace(table, columns={"messages": table.columns[side]})
    data = encode_conversations(
        conversations, (), tokenizer, max_length=max_length, name=name, template=template
    )
    mask, prompts = data.columns["loss_mask"], data.columns["prompt_mask"].sum(axis=1)
    starts = mask & ~np.pad(mask[:, :-1], ((0, 0), (1, 0)))
    last = mask.shape[1] - 1 - np.argmax(starts[:, ::-1], axis=1)
    for number, tokens, learned in table.numbered(prompts, mask.sum(axis=1)):
        if tokens >= max_length or not learned:
            raise table.error(
                number,
                f"has a prompt of {'at least ' * int(tokens >= max_length)}{tokens:,} tokens, which"
                f" leaves no room for an answer: max_length is {max_length}. Raise max_length, or"
                " leave the row out.",
            )
    answer = mask & (np.arange(mask.shape[1]) >= last[:, None])
    return replace(data, columns={**data.columns, "loss_mask": answer})


# ------------------------------------------------------------------------------- forms of rows


def with_preferences(table: Table, *, labelled: bool = False) -> Table:
    """Returns the table with whole conversations in ``chosen`` and ``rejected``.

    The forms of a pair: a ``prompt`` (a text, or messages) and the two answers (texts, or
    messages), as in TRL; two lists of messages with the prompt in both, as in UltraFeedback, whose
    ``prompt`` is then not read; two texts with ``Human:`` and ``Assistant:`` before each turn, as
    Anthropic's HH. Labelled answers have ``prompt``, ``completion`` and ``label`` (true or false),
    as in TRL; the conversation is then in ``completion``.

    Pairs that answer different prompts are left out; a warning, and a note of the table, count
    them.

    Args:
      labelled: whether labelled answers are read, beside pairs.

    Raises:
      InputError: other columns, or a row (counted from 1) that is no preference.
    """
    sides = _sides(table, labelled)
    columns: dict[str, Any] = {side: [] for side in sides}
    given = table.columns.get("prompt", [None] * len(table))
    apart, kept = [], []
    for index, (row, prompt, *answers) in enumerate(
        table.numbered(given, *(table.columns[side] for side in sides))
    ):
        where = table.place(row)
        found = [_conversation(where, *x, prompt) for x in zip(sides, answers, strict=True)]
        if len(found) == 2 and found[0][:-1] != found[1][:-1]:
            apart.append(row)
            continue
        if len(found) == 2 and _said(found[0]) == _said(found[1]):
            raise InputError(f"{where} has equal answers in 'chosen' and 'rejected'. Leave it out.")
        kept.append(index)
        for side, conversation in zip(sides, found, strict=True):
            columns[side].append(conversation)
    others = table.take(kept)
    if sides != _PAIR:
        labels = others.numbered(others.columns["label"])
        columns["label"] = [_label(others, row, x) for row, x in labels]
    keys = {key: x for key, x in others.columns.items() if key not in (*columns, "prompt")}
    return replace(others, columns={**columns, **keys}, notes=(*table.notes, *_noted(table, apart)))


def _sides(table: Table, labelled: bool) -> tuple[str, ...]:
    """Returns the columns of answers."""
    if {*_PAIR} <= {*table.columns}:
        return _PAIR
    if {*_LABELLED} <= {*table.columns} and labelled:
        return _LABELLED[:1]
    advice = "It needs prompt, chosen and rejected; or chosen and rejected with the prompt in both."
    if {*_LABELLED} <= {*table.columns}:
        advice = 'Answers with a label are for [task] loss = "kto"; other losses need pairs.'
    raise MissingColumn(
        f"{table.origin} has no pairs of answers, only the columns {', '.join(table.columns)}."
        f' {advice} To use other columns, name them: columns = {{chosen = "...", rejected ='
        ' "..."}.'
    )


def _conversation(where: str, side: str, answer: Any, prompt: Any) -> Conversation:
    """Returns a prompt with one of its answers, which is the last message."""
    if is_missing(answer):
        raise InputError(
            f"{where} has no {side!r} answer. To leave out rows without an answer, set drop_missing"
            " = true."
        )
    if isinstance(answer, str):
        found = _turns(answer) if prompt is None else two_turns("", answer)[1:]
    else:
        found = messages_of(where, answer)
    if found and found[0]["role"] == "assistant" and prompt is not None:
        found = [*_prompt(where, prompt), *found]
    roles = [message["role"] for message in found]
    if len(roles) < 2 or roles[-1] != "assistant" or "user" not in roles:
        raise InputError(
            f"{where} needs in {side!r} an answer to its 'prompt', or a conversation that ends with"
            " an answer: messages, or a text with 'Human:' and 'Assistant:' before its turns."
        )
    if is_missing(found[-1]["content"]) and not found[-1].get("tool_calls"):
        raise InputError(f"{where} has an empty answer in {side!r}.")
    return found


def _prompt(where: str, prompt: Any) -> Conversation:
    if not isinstance(prompt, str):
        return messages_of(where, prompt)
    return _turns(prompt) or two_turns(prompt, "")[:1]


def _in_turns(prompt: Conversation) -> Conversation:
    """Returns a prompt; of a single message that is a text in the form of HH, its turns."""
    alone = [message["role"] for message in prompt] == ["user"]
    return (_turns(prompt[0]["content"]) if alone else []) or prompt


def _turns(text: str) -> Conversation:
    """Returns the turns of a text in the form of HH, without an empty last one; none in others."""
    before, *rest = _TURN.split(text)
    if before.strip() or not rest:
        return []
    roles = {"Human": "user", "Assistant": "assistant"}
    pairs = zip(rest[::2], rest[1::2], strict=True)
    turns = [{"role": roles[who], "content": said.strip()} for who, said in pairs]
    return joined(turns[:-1] if not turns[-1]["content"] else turns, ("user", "assistant"))


def _said(conversation: Conversation) -> Any:
    last = conversation[-1]
    return last["content"].strip(), last.get("tool_calls")


def _label(table: Table, row: int, value: Any) -> bool:
    known = {"true": True, "1": True, "false": False, "0": False}
    text = str(value).strip().lower()
    if text not in known:
        raise table.error(row, f"has the label {value!r:.60}, which is neither true nor false.")
    return known[text]


def _noted(table: Table, rows: Sequence[int]) -> list[str]:
    """Returns the note on pairs that are left out, after a warning."""
    if not rows:
        return []
    if len(rows) == len(table):
        raise InputError(f"No row of {table.origin} has two answers to one prompt.")
    note = (
        f"{len(rows):,} of {len(table):,} pairs of {table.origin} are left out: their answers are"
        f" to different prompts. The first is row {rows[0]}."
    )
    warnings.warn(note, stacklevel=users_level())
    return [note]


def _check_splits(
    tables: Mapping[str, Table], renamed: Mapping[str, str], labelled: bool = False
) -> None:
    for table in tables.values():
        _sides(table, labelled)


def _recognises(columns: Collection[str]) -> int:
    """Returns the columns of a pair; answers with a label may be instructions too."""
    return len({*_PAIR, "prompt"} & {*columns}) if {*_PAIR} <= {*columns} else 0


def _texts(table: Table) -> list[str]:
    side = _PAIR[0] if _PAIR[0] in table.columns else _LABELLED[0]
    return ["\n".join(x["content"] for x in row[:-1]) for row in table.columns[side]]


def _words(table: Table) -> list[str]:
    """Returns the prompts, and all answers to them."""
    sides = _PAIR if _PAIR[0] in table.columns else _LABELLED[:1]
    answers = [row[-1]["content"] for side in sides for row in table.columns[side]]
    return _texts(table) + answers


def _stand_in(rng: np.random.Generator, n: int, wanted: StandIn) -> dict[str, Any]:
    """Returns requests of three words; the better answer is the first of them, not the last."""
    words = [rng.choice(STAND_IN_WORDS, 3, replace=False) for _ in range(n)]
    return {
        "prompt": [" ".join(f"w{i}" for i in row) for row in words],
        "chosen": [f"w{row[0]}" for row in words],
        "rejected": [f"w{row[2]}" for row in words],
    }


@functools.cache
def preferences_encoder(labelled: bool) -> Encoder:
    """Returns the encoder of pairs, or of answers with labels; see :func:`encode_preferences`."""
    return Encoder(
        columns=("prompt", *_PAIR, *(_LABELLED if labelled else ())),
        encode=functools.partial(encode_preferences, labelled=labelled),
        recognises=_recognises,
        needed=needing(*_PAIR, *(_LABELLED if labelled else ())),
        check_splits=functools.partial(_check_splits, labelled=labelled),
        prepare=functools.partial(with_preferences, labelled=labelled),
        texts=_texts,
        words=_words,
        stand_in=_stand_in,
        stand_in_length=96,
    )
