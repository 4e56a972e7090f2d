"""Columns of words and tags, a blank line after each sentence; and PLONER, made of such files."""

import re
from dataclasses import replace
from pathlib import Path

from fedjax_peft.data.formats import tabular
from fedjax_peft.data.formats.files import lines, read_splits, unpacked
from fedjax_peft.data.iob import TAG, iob2, sentences
from fedjax_peft.data.table import Table
from fedjax_peft.support.errors import InputError

_FILES = {
    "train": ("eng.train", "*train*.conll", "train", "train.txt"),
    "validation": ("eng.testa", "*dev*.conll", "dev", "dev.txt", "valid.txt"),
    # WNUT17's test split also exists without tags.
    "test": ("eng.testb", "*.test.annotated", "*test*.conll", "test", "test.txt"),
}

PLONER_SOURCES = ("CoNLL", "WNUT", "OnBC", "OnBN", "OnMZ", "OnNW", "OnTC", "OnWB")
"""CoNLL-2003, WNUT16 and the genres of OntoNotes 5: broadcast conversation, broadcast news,
magazine, newswire, telephone conversation, web."""
_PLONER_TYPES = {
    **dict.fromkeys(("per", "person"), "PER"),
    **dict.fromkeys(("loc", "location", "geo-loc", "gpe"), "LOC"),
    **dict.fromkeys(("org", "organization", "company", "corporation"), "ORG"),
}
"""Entity types of the sources, in lower case; all others are left out. OntoNotes' GPE (countries,
cities) is what CoNLL calls a location; its facilities, and WNUT's, are not."""


def read_conll(folder: Path) -> dict[str, Table] | None:
    """Returns the splits of a folder of such files (WNUT's and CoNLL-2003's names), or None."""
    return read_splits(folder, _FILES, read_conll_file)


def read_conll_file(path: Path) -> Table:
    """Returns ``tokens`` and ``tags`` of each sentence, in IOB2.

    The word is the first column and the tag the last; tabs or spaces between them.

    Raises:
      InputError: a line without a tag, or one that is not in IOB form.
    """
    rows: list[tuple[list[str], list[str]]] = [([], [])]
    for number, line in lines(path):
        if not line.strip() or line.startswith("-DOCSTART-"):
            if rows[-1][0]:
                rows.append(([], []))
            continue
        # Not str.split(): words of tweets can contain other kinds of spaces.
        fields = line.split("\t") if "\t" in line else line.strip(" ").split(" ")
        if len(fields) < 2 or not fields[0] or not TAG.fullmatch(fields[-1]):
            raise InputError(
                f"Line {number} of {path}, {line[:60]!r}, is not a word and its tag: O, or B- or I-"
                " and the type of an entity."
            )
        tokens, tags = rows[-1]
        tokens.append(fields[0])
        tags.append(fields[-1])
    full = [(tokens, iob2(tags)) for tokens, tags in rows if tokens]
    return Table.of_rows(path, ("tokens", "tags"), full)


def read_ploner(folder: Path) -> dict[str, Table] | None:
    """Returns all sentences with a person, location or organisation, and the ``source`` of each.

    Files may lie in any folders, of words and tags in columns, or tables with ``tokens`` and
    ``tags``. Their source is told by a word of their path: a genre (``bc``, ``bn``, ``mz``, ``nw``,
    ``tc``, ``wb``), or one that starts with ``conll`` or ``eng`` (CoNLL-2003), ``wnut`` (WNUT16).

    Returns:
      One table named ``all``, or None where the splits are ready: ``all`` or ``train``.

    Raises:
      InputError: a file whose source the path does not tell.
    """
    rows = []
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        name = path.name.lower()
        if name.startswith((".", "readme", "licen")):
            continue
        if path.parent == folder and _is_table(path):
            return None
        table = _sentences(path)
        source = _source(path.relative_to(folder))
        for words, tags in zip(table.columns["tokens"], table.columns["tags"], strict=True):
            kinds = [_PLONER_TYPES.get(tag[2:].lower()) for tag in tags]
            pairs = zip(tags, kinds, strict=True)
            kept = [f"{tag[:2]}{kind}" if kind else "O" for tag, kind in pairs]
            if any(tag != "O" for tag in kept):
                rows.append((words, kept, source))
    return {"all": Table.of_rows(folder, ("tokens", "tags", "source"), rows)} if rows else None


def _is_table(path: Path) -> bool:
    """Returns whether a file has a row for each sentence; ``.tsv`` has one for each word."""
    return tabular.kind(path) is not None and unpacked(path).suffix != ".tsv"


def _sentences(path: Path) -> Table:
    if not _is_table(path):
        return read_conll_file(path)
    table = tabular.read_file(path, alone=True)
    words, tags = sentences(table)
    return replace(table, columns={**table.columns, "tokens": words, "tags": tags})


def _source(path: Path) -> str:
    words = re.split(r"[^a-z0-9]+", str(path).lower())
    for genre in PLONER_SOURCES[2:]:
        if genre[2:].lower() in words:
            return genre
    for source, start in (("WNUT", "wnut"), ("CoNLL", "conll"), ("CoNLL", "eng")):
        if any(word.startswith(start) for word in words):
            return source
    raise InputError(
        f"Which source of PLONER is {path}? Its path needs a word that tells it: conll, wnut, or a"
        " genre of OntoNotes: bc, bn, mz, nw, tc, wb."
    )
