"""Word vocabularies: the most frequent words of the training texts, and their tokenizer.

Models that are trained from scratch have no tokenizer of their own. The recurrent baselines of
federated learning predict whole words (McMahan et al. 2017).
"""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from fedjax_peft.data.formats.files import read_json
from fedjax_peft.data.text import clean
from fedjax_peft.support.errors import InputError
from fedjax_peft.support.files import replace_file
from fedjax_peft.support.libraries import without_advice

SPECIAL = ("<pad>", "<unk>", "<eos>")
"""The first tokens of every vocabulary: padding, every other word, and the end of a text."""
VOCABULARY = "vocabulary.json"
"""The file in a run directory."""


def count_words(texts: Iterable[str], size: int) -> tuple[str, ...]:
    """Returns the tokens of a vocabulary; the id of a token is its position.

    The first tokens are ``SPECIAL``. Then come the most frequent words, and words that are equally
    frequent in alphabetical order. A word is a run of letters, digits and underscores, or a run of
    other characters that are not spaces. Upper and lower case differ.

    Args:
      size: the largest number of tokens, with the three special ones. A smaller number of different
        words makes a smaller vocabulary.

    Raises:
      InputError: ``size`` leaves no place for a word, or the texts have no words.
    """
    if size <= len(SPECIAL):
        taken = ", ".join(SPECIAL)
        raise InputError(f"vocabulary = {size} leaves no place for a word beside {taken}.")
    split = _words().pre_tokenize_str
    counts = Counter(word for text in texts for word, _ in split(clean(text)))
    for token in SPECIAL:
        counts.pop(token, None)
    if not counts:
        raise InputError("The training texts have no words, so there is no vocabulary.")
    ranked = sorted(counts, key=lambda word: (-counts[word], word))
    return (*SPECIAL, *ranked[: size - len(SPECIAL)])


def word_tokenizer(tokens: Sequence[str]) -> Any:
    """Returns the fast tokenizer of a vocabulary from :func:`count_words`.

    It adds no special tokens. Words that are not in the vocabulary become ``<unk>``.
    """
    from tokenizers import Tokenizer, models

    with without_advice():
        from transformers import PreTrainedTokenizerFast

    ids = {token: i for i, token in enumerate(tokens)}
    backend = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    backend.pre_tokenizer = _words()
    pad, unknown, end = SPECIAL
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=pad,
        unk_token=unknown,
        eos_token=end,
        model_input_names=["input_ids", "attention_mask"],
    )


def write_vocabulary(directory: Path, tokens: Sequence[str]) -> None:
    """Writes a vocabulary into a run directory, for :func:`read_vocabulary`."""
    text = json.dumps(list(tokens), ensure_ascii=False, indent=0) + "\n"
    replace_file(directory / VOCABULARY, text.encode())


def read_vocabulary(directory: Path) -> tuple[str, ...]:
    """Returns the vocabulary of a run directory; empty if the run made none.

    Raises:
      InputError: the file is damaged.
    """
    path = directory / VOCABULARY
    if not path.exists():
        return ()
    tokens = read_json(path)
    valid = isinstance(tokens, list) and all(isinstance(token, str) for token in tokens)
    if not valid or tuple(tokens[: len(SPECIAL)]) != SPECIAL or len(set(tokens)) < len(tokens):
        needed = f"it must be a list of different texts that begins with {', '.join(SPECIAL)}"
        raise InputError(f"{path} is damaged: {needed}.")
    return tuple(tokens)


def _words() -> Any:
    """Returns the rule that cuts a text into words."""
    from tokenizers import pre_tokenizers

    return pre_tokenizers.Whitespace()
