"""Questions on texts: SQuAD's JSON, MRQA's JSON lines, and tables with either structure."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from fedjax_peft.data.formats.files import read_json, read_splits
from fedjax_peft.data.formats.json_rows import json_lines
from fedjax_peft.data.table import Table
from fedjax_peft.support.errors import InputError

_FILES = {"train": ("train-v*.json",), "validation": ("dev-v*.json",)}
_COLUMNS = ("id", "question", "context", "answers")


def read_squad(folder: Path) -> dict[str, Table] | None:
    """Returns train and validation of SQuAD's own files, ``train-v1.1.json``, ``dev-v1.1.json``."""
    return read_splits(folder, _FILES, _squad_file)


def _squad_file(path: Path) -> Table:
    try:
        rows = [
            (qa["id"], qa["question"], paragraph["context"], qa["answers"])
            for article in read_json(path)["data"]
            for paragraph in article["paragraphs"]
            for qa in paragraph["qas"]
        ]
    except (KeyError, TypeError) as error:
        raise InputError(_misses(str(path), error)) from error
    return Table.of_rows(path, _COLUMNS, rows)


def read_mrqa(folder: Path) -> dict[str, Table] | None:
    """Returns the training questions of MRQA's files, one for each ``source``, as ``all``.

    The files are in the folder ``train``, if there is one: ``SQuAD.jsonl.gz`` and so on. The first
    line of each is a header.
    """
    folder = folder / "train" if (folder / "train").is_dir() else folder
    found: list[tuple[Any, ...]] = []
    for path in sorted([*folder.glob("*.jsonl"), *folder.glob("*.jsonl.gz")]):
        rows = json_lines(path)
        number, header = next(rows, (0, {}))
        if not isinstance(header, dict) or "header" not in header:
            return None
        try:
            source = header["header"]["dataset"]
            for number, text in rows:  # noqa: B007  used in the message
                for qa in text["qas"]:
                    answers = qa["detected_answers"]
                    found.append((qa["qid"], qa["question"], text["context"], answers, source))
        except (KeyError, TypeError) as error:
            raise InputError(_misses(f"Line {number} of {path}", error)) from error
    return {"all": Table.of_rows(folder, (*_COLUMNS, "source"), found)} if found else None


def _misses(place: str, error: Exception) -> str:
    what = f"has no field {error}" if isinstance(error, KeyError) else f"is malformed: {error}"
    return f"{place} {what}. It is not in the format of its name."


def canonical(table: Table) -> Table:
    """Returns the table with ``answers`` and ``answer_starts`` as lists.

    It reads the hub's form of SQuAD (``answers`` has ``text`` and ``answer_start``), MRQA's
    detected answers (``text`` and ``char_spans``), and one answer per row (``answer``,
    ``answer_start``). Rows without an ``id`` are numbered.

    Raises:
      InputError: there are no questions or no answers, or a row has a malformed answer, a malformed
        id, or the id of another row.
    """
    columns = dict(table.columns)
    name = next((name for name in ("answers", "answer") if name in columns), None)
    if name is None:
        raise InputError(table.lacks("answers"))
    starts = columns.pop("answer_start", columns.pop("answer_starts", [None] * len(table)))
    contexts = columns.get("context", [""] * len(table))
    found = []
    for row, *given in table.numbered(columns.pop(name), starts, contexts):
        try:
            found.append(_spans(*given))
        except (KeyError, TypeError, ValueError) as error:
            needs = f"not texts and the characters of the context at which they start ({error})"
            answers = f"{str(given[0])[:60]!r}"
            raise table.error(row, f"has {answers} for its answers: {needs}.") from error
    columns["answers"] = [[text for text, _ in spans] for spans in found]
    columns["answer_starts"] = [[start for _, start in spans] for spans in found]
    columns.setdefault("id", [str(row) for row in range(1, len(table) + 1)])
    seen: dict[str, int] = {}
    for row, key in table.numbered(columns["id"]):
        if not isinstance(key, (str, int)):
            what = "neither a text nor a whole number"
            raise table.error(row, f"has the id {str(key)[:60]!r}: {what}.")
        other = seen.setdefault(str(key), row)
        if other != row:
            twin = f"which row {other} has too: every question needs its own"
            raise table.error(row, f"has the id {key!r}, {twin}.")
    return replace(table, columns=columns)


def _spans(value: Any, start: Any, context: str) -> list[tuple[str, int]]:
    """Returns the text and the first character of every answer of one question."""
    if value is None or (isinstance(value, str) and not value.strip()):
        return []
    if isinstance(value, str):  # one answer
        return [_span(value, start)]
    if isinstance(value, dict):  # answers as columns
        value = [dict(zip(value, row, strict=True)) for row in zip(*value.values(), strict=True)]
    if not any(isinstance(answer, dict) for answer in value):
        return [_span(*pair) for pair in zip(value, start or (), strict=True)]
    found = []
    for answer in value:
        if "char_spans" in answer:  # MRQA: every occurrence, last character included
            places = answer["char_spans"]
            if isinstance(places, dict):
                places = zip(places["start"], places["end"], strict=True)
            for first, last in places:
                if first < 0 or not context[first : last + 1]:
                    raise ValueError(f"characters {first} to {last} are not in the context")
                found.append(_span(context[first : last + 1], first))
        else:
            found.append(_span(answer["text"], answer["answer_start"]))
    return found


def _span(text: Any, start: Any) -> tuple[str, int]:
    if not isinstance(text, str):
        raise TypeError("an answer that is no text")
    if isinstance(start, float) and not start.is_integer():
        raise ValueError(f"{start} is not a whole number")
    return text, int(start)
