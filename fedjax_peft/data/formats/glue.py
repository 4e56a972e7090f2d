"""GLUE's tab-separated files, and MRPC's own."""

from dataclasses import replace
from pathlib import Path

from fedjax_peft.data.formats.files import lines, read_splits, refuse_twins
from fedjax_peft.data.table import Table
from fedjax_peft.support.errors import InputError

_FILES = {
    "train": ("train.tsv", "msr_paraphrase_train.txt"),
    "validation": ("dev.tsv", "dev_matched.tsv", "msr_paraphrase_test.txt"),
}
"""Microsoft's MRPC has no validation split; its test split is used instead."""
_COLUMNS = {
    "#1 String": "sentence1",
    "#2 String": "sentence2",
    "Quality": "label",
    "is_duplicate": "label",
    "gold_label": "label",
    **{name: name for name in ("sentence", "sentence1", "sentence2", "label")},
    **{name: name for name in ("question", "question1", "question2")},
}
"""Name in the header -> name on the hub. Further columns are left out."""


def read_glue(folder: Path) -> dict[str, Table] | None:
    """Returns GLUE's train and validation split with the hub's column names, None if missing."""
    return read_splits(folder, _FILES, _read, deep=False)


def _read(path: Path) -> Table:
    """Returns the rows. Quotes have no special meaning in these files."""
    rows = ((number, line.split("\t")) for number, line in lines(path))
    _, header = next(rows, (0, []))
    refuse_twins(path, [_COLUMNS[name] for name in header if name in _COLUMNS])
    wanted = {_COLUMNS[name]: i for i, name in enumerate(header) if name in _COLUMNS}
    if "label" not in wanted or len(wanted) == 1:
        found = ", ".join(header)[:80]
        raise InputError(f"{path} does not start with the columns of a GLUE task, but {found!r}.")
    kept, numbers = [], []
    for number, fields in rows:
        if len(fields) < len(header) and "is_duplicate" in header:
            continue  # the distributed files of QQP have a few incomplete lines
        if len(fields) != len(header):
            raise InputError(
                f"Line {number} of {path} has {len(fields)} fields instead of {len(header)}."
            )
        if fields[wanted["label"]] == "-":  # MNLI: the annotators did not agree
            continue
        numbers.append(number)
        kept.append([fields[i] for i in wanted.values()])
    return replace(Table.of_rows(path, tuple(wanted), kept), numbers=numbers)
