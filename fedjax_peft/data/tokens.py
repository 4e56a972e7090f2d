"""Encodings of a fast tokenizer as arrays, with the positions of words and characters."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from fedjax_peft.support.errors import InputError
from fedjax_peft.support.memory import require


def whole(tokenizer: Any, texts: Sequence[str]) -> list[Any]:
    """Returns the encoding of every text, without truncation and special tokens."""
    return _backend(tokenizer).encode_batch(list(texts), add_special_tokens=False)


def beginning(tokenizer: Any) -> list[int]:
    """Returns the token that the tokenizer puts before every text (Llama's), or nothing (GPT-2)."""
    first = _backend(tokenizer).encode("").ids[:1]
    return first if first == [tokenizer.bos_token_id] else []


def _backend(tokenizer: Any) -> Any:
    """Returns the ``backend_tokenizer``, without the truncation and padding of its last call."""
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    return backend


def check_room(n: int, max_length: int, what: str, each: int = 9) -> None:
    """Raises InputError if the columns of n texts do not fit into memory, ``each`` byte a token."""
    require(
        each * n * max_length,
        f"Tokenizing {n:,} {what} with max_length = {max_length}",
        "Choose a smaller max_length.",
    )


def model_columns(
    tokenizer: Any, encodings: Sequence[Any], max_length: int
) -> dict[str, np.ndarray]:
    """Returns the columns that a model reads, padded on the right.

    Args:
      tokenizer: gives the padding token, and whether its models have token types.
      encodings: n encodings with special tokens, each of at most ``max_length`` tokens.

    Returns:
      ``input_ids`` int32, ``attention_mask`` bool and, if the tokenizer's models have them,
      ``token_type_ids`` int32, each ``[n, max_length]``.
    """
    check_room(len(encodings), max_length, "examples")
    padding = padding_token(tokenizer)
    ids, mask = padded([encoding.ids for encoding in encodings], max_length, padding)
    columns = {"input_ids": ids, "attention_mask": mask}
    if "token_type_ids" in tokenizer.model_input_names:
        types = [encoding.type_ids for encoding in encodings]
        columns["token_type_ids"], _ = padded(types, max_length, 0)
    return columns


def padded(
    rows: Sequence[Sequence[int] | np.ndarray], length: int, padding: int, *, left: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Returns tokens int32 and whether they are real, bool, both ``[rows, length]``.

    Args:
      rows: the tokens of each row, at most ``length``.
      left: whether rows are padded on the left; by default on the right.
    """
    sizes = np.array([len(row) for row in rows], np.int32)[:, None]
    places = np.arange(length)
    real = places >= length - sizes if left else places < sizes
    ids = np.full(real.shape, padding, np.int32)
    ids[real] = np.concatenate([np.empty(0, np.int32), *rows])
    return ids, real


def joined(parts: Sequence[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Returns the columns of several batches as one, without token types that are all 0."""
    columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    if not columns.get("token_type_ids", np.ones(1)).any():
        del columns["token_type_ids"]
    return columns


def offsets(encoding: Any) -> np.ndarray:
    """Returns where each token starts and ends in its text: characters, int32 ``[tokens, 2]``."""
    return np.array(encoding.offsets, np.int32).reshape(-1, 2)


def padding_token(tokenizer: Any) -> int:
    """Returns the padding token, or the end-of-text token if there is none (GPT-2).

    Raises:
      InputError: the tokenizer has neither.
    """
    for token in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if token is not None:
            return token
    raise InputError(
        "The tokenizer has neither a padding token nor one for the end of a text. Choose one first,"
        " such as tokenizer.pad_token = tokenizer.unk_token."
    )
