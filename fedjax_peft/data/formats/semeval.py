"""SemEval-2010 task 8 in the organisers' format: four lines for each sentence."""

import re
from pathlib import Path

from fedjax_peft.data.formats.files import lines, read_splits
from fedjax_peft.data.table import Table
from fedjax_peft.support.errors import InputError

_FILES = {"train": ("TRAIN_FILE.TXT",), "test": ("TEST_FILE_FULL.TXT",)}


def read_semeval(folder: Path) -> dict[str, Table] | None:
    """Returns train and test: ``TRAIN_FILE.TXT``, ``TEST_FILE_FULL.TXT``; None if missing."""
    return read_splits(folder, _FILES, _read)


def _read(path: Path) -> Table:
    """Returns the rows: ``8001<TAB>"sentence"``, the relation, a comment, a blank line."""
    sentences: list[str] = []
    relations: list[str] = []
    for number, line in lines(path):
        if not line.strip() or line.startswith("Comment:"):
            continue
        new = re.fullmatch(r'\d+\t"(.*)"\s*', line)
        if (new is None) == (len(sentences) == len(relations)):
            wanted = "a numbered sentence" if new is None else "the relation of the one before"
            raise InputError(f"Line {number} of {path} is {line[:60]!r} in place of {wanted}.")
        if new is None:
            relations.append(line.strip())
        else:
            sentences.append(new[1])
    if len(sentences) != len(relations):
        raise InputError(f"{path} ends before the relation of its last sentence.")
    return Table(str(path), {"text": sentences, "label": relations})
