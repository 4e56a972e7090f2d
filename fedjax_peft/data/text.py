"""Texts to token columns, with a cache on disk."""

import contextlib
import hashlib
import io
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_peft.data.tokens import check_room, joined, model_columns
from fedjax_peft.support.assets import cache_dir
from fedjax_peft.support.display import redraws
from fedjax_peft.support.errors import InputError
from fedjax_peft.support.files import replace_file

_FORMAT = 3
"""Part of every cache key. Increase it when the columns or their computation change."""
_BATCH = 1024
"""Texts per call of the tokenizer, enough to use all cores."""
_CHARACTERS = 1 << 21
"""Characters per call, roughly. It bounds the memory: a token takes about 100 times its text."""
_SURROGATE = re.compile("[\ud800-\udfff]")


def tokenize(
    tokenizer: Any, texts: Sequence[str], pairs: Sequence[str] | None = None, *, max_length: int
) -> dict[str, np.ndarray]:
    """Returns the token columns of texts, truncated and right-padded to ``max_length``.

    The columns are cached on disk. The key is a hash of the texts and of the tokenizer's state.

    Args:
      tokenizer: a fast tokenizer of ``transformers`` with a padding token.
      pairs: n second texts (such as the hypothesis of an entailment pair), or None.
      max_length: tokens per example, special tokens included.

    Returns:
      ``input_ids`` int32 ``[n, max_length]``; ``attention_mask`` bool ``[n, max_length]``; and
      ``token_type_ids`` int32 ``[n, max_length]`` if any of them is not 0.

    Raises:
      InputError: one text instead of a list, or a tokenizer or a length that cannot be used.
    """
    _check(tokenizer, texts, pairs, max_length)
    texts = [clean(text) for text in texts]
    pairs = None if pairs is None else [clean(text) for text in pairs]
    key = ["tokens", fingerprint(tokenizer), max_length, len(texts), *texts, *(pairs or ())]
    return cached(key, lambda: _encode(tokenizer, texts, pairs, max_length))


def cached(key: Iterable[Any], make: Callable[[], dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Returns the columns of ``make()``, from the cache if the key is known.

    Args:
      key: everything that the columns depend on: texts (hashed one by one) and JSON values. Its
        first entry names the kind of columns, so that keys of two kinds differ.
      make: called without arguments; returns name -> array.
    """
    path = cache_dir() / "tokens" / f"{_digest(key)}.npz"
    columns = _read(path)
    if columns is None:
        columns = make()
        with contextlib.suppress(OSError):  # a full or read-only disk costs time, not the run
            _write(path, columns)
    return columns


def fingerprint(tokenizer: Any) -> str:
    """Returns everything that a fast tokenizer's output depends on, as text for a cache key."""
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    # State of the last call; our calls always set both.
    for state in ("padding", "truncation"):
        backend.pop(state, None)
    settings = [
        tokenizer.pad_token_id,
        tokenizer.truncation_side,
        list(tokenizer.model_input_names),
    ]
    return json.dumps([settings, backend], sort_keys=True)


def clean(text: str) -> str:
    """Returns a text that UTF-8 can encode: each lone surrogate becomes one U+FFFD.

    Lone surrogates come from texts that were cut between UTF-16 units; JSON can hold them.
    """
    return text if text.isascii() else _SURROGATE.sub("\ufffd", text)


def batches(texts: Sequence[Any], *more: Sequence[Any] | None) -> Iterator[slice]:
    """Yields slices of the rows that fit into memory, with a progress bar if it takes long.

    Args:
      texts: n texts, or lists of words.
      *more: further columns of n texts, such as second texts, or None.
    """
    from tqdm import tqdm

    columns = [column for column in (texts, *more) if column is not None]
    shown = {"desc": "tokenizing", "unit": " texts", "delay": 2, "leave": False}
    with tqdm(total=len(texts), disable=not redraws(), **shown) as progress:
        start = 0
        while start < len(texts):
            stop, size = start, 0
            while stop < min(start + _BATCH, len(texts)) and size < _CHARACTERS:
                size += sum(_size(column[stop]) for column in columns)
                stop += 1
            yield slice(start, stop)
            progress.update(stop - start)
            start = stop


def _size(text: str | Sequence[str]) -> int:
    return len(text) if isinstance(text, str) else sum(map(len, text))


def check_tokenizer(tokenizer: Any, max_length: int, *, pair: bool = False) -> None:
    """Raises InputError for a tokenizer that is not fast, or a length that it does not support."""
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        kind = type(tokenizer).__name__
        raise InputError(f"{kind} is not a fast tokenizer of transformers (backend_tokenizer).")
    special = tokenizer.num_special_tokens_to_add(pair)
    if not special < max_length <= tokenizer.model_max_length:
        raise InputError(
            f"max_length is {max_length}, but this tokenizer adds {special} special tokens and its"
            f" model takes at most {tokenizer.model_max_length}."
        )


def _check(
    tokenizer: Any, texts: Sequence[str], pairs: Sequence[str] | None, max_length: int
) -> None:
    for given in (texts, pairs):
        if isinstance(given, str):
            raise InputError("The texts must be a list of texts, not one text: [text].")
    check_tokenizer(tokenizer, max_length, pair=pairs is not None)
    if tokenizer.pad_token_id is None:
        raise InputError(
            "The tokenizer has no padding token. Choose one first, for GPT-2 for example with"
            " tokenizer.pad_token = tokenizer.eos_token."
        )
    if pairs is not None and len(pairs) != len(texts):
        raise InputError(f"There are {len(texts)} texts but {len(pairs)} second texts.")


def _encode(
    tokenizer: Any, texts: Sequence[str], pairs: Sequence[str] | None, max_length: int
) -> dict[str, np.ndarray]:
    check_room(len(texts), max_length, "texts")
    backend = tokenizer.backend_tokenizer
    parts = [model_columns(tokenizer, [], max_length)]
    for rows in batches(texts, pairs):
        backend.no_padding()
        backend.enable_truncation(max_length, direction=tokenizer.truncation_side)
        inputs: Sequence[Any] = texts[rows]
        if pairs is not None:
            inputs = list(zip(inputs, pairs[rows], strict=True))
        parts.append(model_columns(tokenizer, backend.encode_batch(inputs), max_length))
    return joined(parts)


def _digest(key: Iterable[Any]) -> str:
    digest = hashlib.sha256(str(_FORMAT).encode())
    for part in key:
        text = part if isinstance(part, str) else json.dumps(part, sort_keys=True)
        data = text.encode()
        # The type and the length in front: ("ab", "c") and ("a", "bc") are different, 1 and "1".
        digest.update(isinstance(part, str).to_bytes() + len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def _read(path: Path) -> dict[str, np.ndarray] | None:
    """Returns the cached columns, or None if the file is missing or damaged."""
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as columns:
            return dict(columns.items())
    except Exception:  # numpy and zipfile raise many kinds
        return None


def _write(path: Path, columns: dict[str, np.ndarray]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    content = io.BytesIO()
    np.savez(content, **columns)  # type: ignore[arg-type]
    replace_file(path, content.getvalue())
