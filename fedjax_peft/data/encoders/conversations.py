"""Conversations to tokens, with a mask of those that a model learns to write: the answers."""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from fedjax_peft.data import templates
from fedjax_peft.data.conversations import (
    COLUMNS,
    Conversation,
    form_of,
    messages_of,
    two_turns,
    with_messages,
)
from fedjax_peft.data.dataset import Dataset
from fedjax_peft.data.encoders.base import STAND_IN_WORDS, Encoder, StandIn
from fedjax_peft.data.roles import fitted
from fedjax_peft.data.table import Table
from fedjax_peft.data.text import batches, cached, check_tokenizer, clean, fingerprint
from fedjax_peft.data.tokens import check_room, padded, padding_token, whole
from fedjax_peft.data.trees import is_tree


def encode_conversations(
    table: Table,
    names: Sequence[str],
    tokenizer: Any,
    *,
    max_length: int,
    name: str,
    template: str | None = None,
) -> Dataset:
    """Returns conversations as tokens, one example each.

    The loss counts the tokens of every answer and the token that ends it. A conversation of more
    than ``max_length`` tokens loses its end. An example without any answer token left stays in the
    data set, and nothing is learned from it: the number of examples, and so a partition, does not
    depend on the tokenizer. The key ``cut_tokens`` says how many tokens each example has lost.

    The table has a column ``messages`` (:mod:`fedjax_peft.data.conversations`). A conversation
    whose last message is not an answer has no target after it; its prompt is the whole
    conversation. The table may have ``references``, a list of gold answers for each row.
    ``template`` says how a conversation becomes text, see
    :func:`fedjax_peft.data.templates.template_of`. Other arguments are those of :class:`Encode`.

    Returns:
      ``input_ids`` int32, ``attention_mask`` bool and ``loss_mask`` bool (the tokens to learn),
      each ``[n, max_length]``; ``prompt_ids`` int32 and ``prompt_mask`` bool
      ``[n, longest prompt]``, the text before the last answer, padded on the left (a prompt of more
      than ``max_length`` tokens loses its beginning); and ``end_ids`` int32 ``[n, 1 or 2]``, the
      tokens after which an answer is complete. Meta: ``unit`` and ``cut_tokens``, each int32
      ``[n]``. References: the last answers, or those of the table.

    Raises:
      InputError: the tokenizer, the template or the length cannot be used, or a row (counted from
        1) does not fit the template.
    """
    check_tokenizer(tokenizer, max_length)
    template = templates.template_of(tokenizer, template)
    rows = [_cleaned(row) for row in table.columns["messages"]]
    rows, notes = fitted(tokenizer, template, rows)
    texts = [
        templates.render(tokenizer, template, row, where=table.place(number))
        for number, row in table.numbered(rows)
    ]
    marked = template == "chat" and templates.marks_answers(tokenizer)
    key = ["conversations", fingerprint(tokenizer), padding_token(tokenizer), max_length]
    key += [tokenizer.get_chat_template() if marked else "", *(json.dumps(x) for x in texts)]
    columns = cached(key, lambda: _encode(tokenizer, texts, rows if marked else None, max_length))
    ends = np.array(templates.end_tokens(tokenizer, template), np.int32)
    columns = {**columns, "end_ids": np.tile(ends, (len(rows), 1))}
    meta = {"unit": np.arange(len(rows), dtype=np.int32), "cut_tokens": columns.pop("cut_tokens")}
    answers: tuple[Any, ...]
    if "references" in table.columns:
        answers = tuple(map(tuple, table.columns["references"]))
    else:
        last = (row[-1] for row in rows)
        answers = tuple(x["content"] if x["role"] == "assistant" else "" for x in last)
    return Dataset(columns, name=name, meta=meta, references=answers, notes=notes)


def encode_prompts(
    tokenizer: Any,
    prompts: Sequence[str | Conversation],
    *,
    template: str | None = None,
    max_length: int | None = None,
) -> dict[str, np.ndarray]:
    """Returns prompts as tokens, padded on the left, for generation.

    Args:
      prompts: n texts of a user, or conversations that end with a user's message.
      template: as for :func:`encode_conversations`.
      max_length: the most tokens of a prompt, which loses its beginning; None: no limit.

    Returns:
      ``prompt_ids`` int32 and ``prompt_mask`` bool, each ``[n, longest prompt]``; ``end_ids`` int32
      ``[n, 1 or 2]``, the tokens after which a completion is complete.

    Raises:
      InputError: the template cannot be used, or a prompt does not fit it.
    """
    template = templates.template_of(tokenizer, template)
    rows = [_cleaned(row) for row in conversations_of(prompts)]
    rows, _ = fitted(tokenizer, template, rows)
    texts = [
        templates.prompt_text(tokenizer, template, row, f"Prompt {number}")
        for number, row in enumerate(rows, 1)
    ]
    ids = [encoding.ids for encoding in whole(tokenizer, texts)]
    ends = np.array(templates.end_tokens(tokenizer, template), np.int32)
    columns = left_padded(ids, padding_token(tokenizer), max_length)
    return {**columns, "end_ids": np.tile(ends, (len(ids), 1))}


def conversations_of(prompts: Sequence[str | Conversation]) -> list[Conversation]:
    """Returns prompts as conversations; a text is a message of the user."""
    return [
        [{"role": "user", "content": x}] if isinstance(x, str) else messages_of(f"Prompt {n}", x)
        for n, x in enumerate(prompts, 1)
    ]


def left_padded(
    prompts: Sequence[Sequence[int] | np.ndarray], padding: int, max_length: int | None = None
) -> dict[str, np.ndarray]:
    """Returns ``prompt_ids`` int32 and ``prompt_mask`` bool ``[n, longest]``, padded on the left.

    Args:
      max_length: the most tokens of a prompt, which loses its beginning; None: no limit.
    """
    prompts = [ids if max_length is None else ids[-max_length:] for ids in prompts]
    longest = max([1, *map(len, prompts)])
    ids, mask = padded(prompts, longest, padding, left=True)
    return {"prompt_ids": ids, "prompt_mask": mask}


def with_rows(data: Dataset, rows: np.ndarray, new: Dataset, padding: int) -> Dataset:
    """Returns encoded conversations with other tokens in some rows. Keys and references stay.

    Args:
      new: m encoded conversations of the same length.
    """
    columns = {key: x.copy() for key, x in data.columns.items()}
    prompts = _prompts(columns)
    for row, prompt in zip(rows, _prompts(new.columns), strict=True):
        prompts[row] = prompt
    columns |= left_padded(prompts, padding)
    for key in ("input_ids", "attention_mask", "loss_mask"):
        columns[key][rows] = new.columns[key]
    cut = np.copy(data.meta["cut_tokens"])
    cut[rows] = new.meta["cut_tokens"]
    return replace(data, columns=columns, meta={**data.meta, "cut_tokens": cut})


def _prompts(columns: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    both = zip(columns["prompt_ids"], columns["prompt_mask"], strict=True)
    return [ids[mask] for ids, mask in both]


def _cleaned(conversation: Conversation) -> Conversation:
    return [{**message, "content": clean(message["content"])} for message in conversation]


def _encode(
    tokenizer: Any,
    texts: Sequence[templates.Rendered],
    conversations: Sequence[Conversation] | None,
    max_length: int,
) -> dict[str, np.ndarray]:
    """Returns the columns, and ``cut_tokens``.

    Args:
      texts: n conversations as text.
      conversations: the same as messages, if the tokenizer marks their answers; else None.
    """
    check_room(len(texts), max_length, "conversations", each=6)
    tokens, targets, prompts, cut = [], [], [], []
    for rows in batches([one.text for one in texts]):
        some = texts[rows]
        if conversations is None:
            encodings = whole(tokenizer, [one.text for one in some])
            pairs = zip(encodings, some, strict=True)
            found = [(encoding.ids, _targets(encoding, one.spans)) for encoding, one in pairs]
        else:
            found = _marked(tokenizer, conversations[rows])
        for text, target in found:
            tokens.append(np.array(text[:max_length], np.int32))
            targets.append(target[:max_length])
            cut.append(max(len(text) - max_length, 0))
        prompts += [x.ids[-max_length:] for x in whole(tokenizer, [one.prompt for one in some])]
    padding = padding_token(tokenizer)
    ids, mask = padded(tokens, max_length, padding)
    loss = padded(targets, max_length, 0)[0].astype(np.bool_)
    loss[:, :1] = False  # nothing comes before the first token
    columns = {"input_ids": ids, "attention_mask": mask, "loss_mask": loss}
    columns["cut_tokens"] = np.array(cut, np.int32)
    return columns | left_padded(prompts, padding, max_length)


def _targets(encoding: Any, spans: Sequence[tuple[int, int]]) -> np.ndarray:
    """Returns which tokens have a character in one of the spans, bool ``[tokens]``.

    Some tokenizers leave spaces out of the characters of their tokens. Therefore all tokens between
    the first and the last one of a span belong to it.
    """
    starts, ends = np.array(encoding.offsets, np.int64).reshape(-1, 2).T
    inside = np.zeros(len(starts), np.bool_)
    for start, end in spans:
        inside[np.searchsorted(ends, start, "right") : np.searchsorted(starts, end)] = True
    return inside


def _marked(tokenizer: Any, conversations: Sequence[Conversation]) -> list[tuple[Any, Any]]:
    """Returns tokens and targets of conversations, by the marks of the chat template.

    If transformers finds fewer answers than there are, prefixes find them. Its mask ends before an
    answer that begins with a space, if the tokenizer leaves spaces out of the characters of tokens.
    """
    result = []
    for conversation in conversations:
        answered = conversation[-1]["role"] == "assistant"
        tokens = templates.apply_chat(
            tokenizer,
            conversation,
            add_generation_prompt=not answered,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        targets = np.array(tokens["assistant_masks"], np.bool_) & answered
        found = np.count_nonzero(np.diff(targets.astype(np.int8), prepend=0) == 1)
        answers = [m["content"] for m in conversation if m["role"] == "assistant"]
        if answered and found < np.count_nonzero([bool(text.strip()) for text in answers]):
            text = templates.apply_chat(tokenizer, conversation, tokenize=False)
            spans = templates.answer_spans(tokenizer, conversation, "A conversation")
            targets = _targets(whole(tokenizer, [text])[0], spans)
        result.append((tokens["input_ids"], targets))
    return result


def _recognises(columns: Collection[str]) -> int:
    return 0 if form_of(columns) is None else 2


def _check_splits(tables: Mapping[str, Table], renamed: Mapping[str, str]) -> None:
    for table in tables.values():
        if form_of(table.columns) is None:
            with_messages(table)  # raises


def _texts(table: Table) -> list[str]:
    return ["\n".join(message["content"] for message in row) for row in table.columns["messages"]]


def _stand_in(rng: np.random.Generator, n: int, wanted: StandIn) -> dict[str, Any]:
    """Returns requests of three words; the answer is the first and the last of them."""
    words = rng.integers(0, STAND_IN_WORDS, (n, 3))
    texts = [[f"w{i}" for i in row] for row in words]
    return {"messages": [two_turns(" ".join(row), f"{row[0]} {row[2]}") for row in texts]}


def _needed(columns: Collection[str]) -> Collection[str]:
    """Returns the columns of a conversation; none of trees, whose rows need each other."""
    return () if is_tree(columns) else form_of(columns) or ()


CONVERSATIONS = Encoder(
    columns=(*COLUMNS, "references"),
    encode=encode_conversations,
    recognises=_recognises,
    needed=_needed,
    check_splits=_check_splits,
    prepare=with_messages,
    texts=_texts,
    stand_in=_stand_in,
    stand_in_length=96,
)
