"""Texts to blocks of tokens, to predict each next token."""

import difflib
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from fedjax_peft.data.dataset import Dataset
from fedjax_peft.data.encoders.base import (
    STAND_IN_WORDS,
    Encoder,
    StandIn,
    needing,
    texts_in,
    texts_of,
)
from fedjax_peft.data.table import Table, require
from fedjax_peft.data.text import batches, cached, check_tokenizer, clean, fingerprint
from fedjax_peft.data.tokens import padded, padding_token, whole
from fedjax_peft.support.errors import InputError


def encode_language(
    table: Table, names: Sequence[str], tokenizer: Any, *, max_length: int, name: str
) -> Dataset:
    """Returns texts, each with the end-of-text token after it, in blocks of ``max_length`` tokens.

    A longer text is cut into consecutive blocks. No token is lost, but the first token of a block
    is not predicted. An empty text is one block without a token to predict.

    The table has a column ``text``, and the tokenizer an end-of-text token. Other arguments are
    those of :class:`Encode`.

    Returns:
      ``input_ids`` int32 and ``attention_mask`` bool, each ``[blocks, max_length]``; meta ``unit``
      int32 ``[blocks]``, the number of the text.

    Raises:
      InputError: the tokenizer or the length cannot be used, or a row (counted from 1) has no text.
    """
    check_tokenizer(tokenizer, max_length)
    if tokenizer.eos_token_id is None:
        raise InputError(
            f"{type(tokenizer).__name__} has no token for the end of a text (eos_token), which a"
            " model of the next token learns to predict. BERT's tokenizers have none; GPT-2's does."
        )
    if max_length < 2:
        raise InputError(f"max_length is {max_length}, but a block needs 2 tokens to predict one.")
    texts = [clean(text) for text in require(table, "text", str, "a text")]
    key = ["language", fingerprint(tokenizer), tokenizer.eos_token_id, max_length, *texts]
    columns = cached(key, lambda: _encode(tokenizer, texts, max_length))
    meta = {"unit": columns.pop("unit")}
    return Dataset(columns, name=name, meta=meta)


def _encode(tokenizer: Any, texts: list[str], max_length: int) -> dict[str, np.ndarray]:
    blocks: list[np.ndarray] = []
    unit: list[int] = []
    for rows in batches(texts):
        for number, encoding in enumerate(whole(tokenizer, texts[rows]), rows.start):
            tokens = np.array([*encoding.ids, tokenizer.eos_token_id], np.int32)
            some = np.split(tokens, range(max_length, len(tokens), max_length))
            blocks += some
            unit += [number] * len(some)
    ids, mask = padded(blocks, max_length, padding_token(tokenizer))
    return {"input_ids": ids, "attention_mask": mask, "unit": np.array(unit, np.int32)}


def _recognises(columns: Collection[str]) -> int:
    # A column with nearly the name "label" is a spelling mistake, which must not go unnoticed.
    labelled = difflib.get_close_matches("label", columns)
    return 1 if "text" in columns and not labelled else 0


def _check(table: Table, names: Sequence[str]) -> None:
    require(table, "text", str, "a text")


def _stand_in(rng: np.random.Generator, n: int, wanted: StandIn) -> dict[str, Any]:
    """Returns texts in which each word is followed by the same other word."""
    words = rng.integers(0, STAND_IN_WORDS, (n, 1)) + 7 * np.arange(12)
    return {"text": texts_of(rng, words % STAND_IN_WORDS)}


LANGUAGE = Encoder(
    columns=("text",),
    encode=encode_language,
    recognises=_recognises,
    needed=needing("text"),
    check=_check,
    texts=texts_in("text"),
    stand_in=_stand_in,
)
