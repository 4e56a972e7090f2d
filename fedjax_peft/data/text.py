"""Texts to token columns, with a cache on disk."""

import contextlib
import hashlib
import io
import json
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_peft.assets import cache_dir
from fedjax_peft.errors import InputError
from fedjax_peft.files import replace_file

__all__ = ["tokenize"]

_FORMAT = 1
"""Part of every cache key; changes when the columns or how they are made change."""
_BATCH = 1024
"""Texts per call of the tokenizer: bounds the Python objects alive, and fills all cores."""


def tokenize(
    tokenizer: Any, texts: Sequence[str], pairs: Sequence[str] | None = None, *, max_length: int
) -> dict[str, np.ndarray]:
    """Returns the token columns of texts, truncated and right-padded to ``max_length``.

    The columns are cached on disk under a hash of the texts and of everything of the tokenizer
    that matters, so a second call reads a file.

    Args:
      tokenizer: a fast tokenizer of ``transformers`` with a padding token.
      texts: n texts.
      pairs: n second texts (such as the hypothesis of an entailment pair), or None.
      max_length: tokens per example, special tokens included.

    Returns:
      ``input_ids`` int32 ``[n, max_length]``; ``attention_mask`` bool ``[n, max_length]``; and
      ``token_type_ids`` int32 ``[n, max_length]`` if any of them is not 0.

    Raises:
      InputError: a tokenizer or a length that cannot be used.
    """
    _check(tokenizer, texts, pairs, max_length)
    path = cache_dir() / "tokens" / f"{_key(tokenizer, texts, pairs, max_length)}.npz"
    columns = _read(path)
    if columns is None:
        columns = _encode(tokenizer, texts, pairs, max_length)
        with contextlib.suppress(OSError):  # a full or read-only disk costs time, not the run
            _write(path, columns)
    return columns


def _check(
    tokenizer: Any, texts: Sequence[str], pairs: Sequence[str] | None, max_length: int
) -> None:
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise InputError(
            f"{type(tokenizer).__name__} is not a fast tokenizer of transformers, which is needed"
            " here (one with a backend_tokenizer)."
        )
    if tokenizer.pad_token_id is None:
        raise InputError(
            "The tokenizer has no padding token. Choose one first, for GPT-2 for example with"
            " tokenizer.pad_token = tokenizer.eos_token."
        )
    special = tokenizer.num_special_tokens_to_add(pairs is not None)
    if not special < max_length <= tokenizer.model_max_length:
        raise InputError(
            f"max_length is {max_length}, but this tokenizer adds {special} special tokens and its"
            f" model takes at most {tokenizer.model_max_length}."
        )
    if pairs is not None and len(pairs) != len(texts):
        raise InputError(f"There are {len(texts)} texts but {len(pairs)} second texts.")


def _encode(
    tokenizer: Any, texts: Sequence[str], pairs: Sequence[str] | None, max_length: int
) -> dict[str, np.ndarray]:
    shape = (len(texts), max_length)
    columns = {
        "input_ids": np.empty(shape, np.int32),
        "attention_mask": np.empty(shape, np.bool_),
        "token_type_ids": np.zeros(shape, np.int32),
    }
    for start in range(0, len(texts), _BATCH):
        rows = slice(start, start + _BATCH)
        tokens = tokenizer(
            list(texts[rows]),
            None if pairs is None else list(pairs[rows]),
            padding="max_length",
            padding_side="right",
            truncation=True,
            max_length=max_length,
            return_attention_mask=True,
            return_tensors="np",
        )
        for name, column in columns.items():
            if name in tokens:
                column[rows] = tokens[name]
    if not columns["token_type_ids"].any():
        del columns["token_type_ids"]
    return columns


def _key(tokenizer: Any, texts: Sequence[str], pairs: Sequence[str] | None, max_length: int) -> str:
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    # What the last call left behind; ours always sets both.
    for state in ("padding", "truncation"):
        backend.pop(state, None)
    settings = [
        _FORMAT,
        max_length,
        tokenizer.pad_token_id,
        tokenizer.truncation_side,
        list(tokenizer.model_input_names),
        len(texts),
    ]
    digest = hashlib.sha256(json.dumps([settings, backend], sort_keys=True).encode())
    for part in (texts, pairs or ()):
        for text in part:
            data = text.encode()
            # The length in front: ("ab", "c") and ("a", "bc") are different texts.
            digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def _read(path: Path) -> dict[str, np.ndarray] | None:
    """Returns the cached columns, or None for a file that is missing, cut short or damaged."""
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as columns:
            return dict(columns)
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile):
        return None


def _write(path: Path, columns: dict[str, np.ndarray]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    content = io.BytesIO()
    np.savez(content, **columns)  # type: ignore[arg-type]
    replace_file(path, content.getvalue())
