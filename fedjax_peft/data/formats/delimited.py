"""Files of rows whose fields a character separates: csv and tsv, each field as text."""

import codecs
import csv
import itertools
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

from fedjax_peft.data.formats.files import opener, refuse_twins, unpacked
from fedjax_peft.support import toml
from fedjax_peft.support.display import show
from fedjax_peft.support.errors import InputError, nearest, users_level

_SPELLINGS = {"\\t": "\t", "tab": "\t", "none": ""}
"""What a shell or a person may write for a character."""


class Csv(NamedTuple):
    """How csv files are written."""

    sep: str | None = None
    """The character between two fields; None: a tab in ``.tsv``, and else a comma."""
    encoding: str = "utf-8"
    header: bool = True
    """Whether the first row has the names of the columns; otherwise they are ``column_1``, ..."""
    quote: str | None = None
    """The character around a field that holds separators or line ends, twice inside of one for
    itself; "": there is none. None: a quotation mark, and files that can be read with it and
    without it, with other rows, are refused."""
    escape: str = ""
    """The character before a quotation mark that belongs to a text, such as a backslash."""

    def between(self, path: Path) -> str:
        """Returns the separator of a file."""
        return self.sep or ("\t" if unpacked(path).suffix.lower() == ".tsv" else ",")

    @property
    def mark(self) -> str:
        """The character around fields, or ""."""
        return '"' if self.quote is None else self.quote


PLAIN = Csv()


def csv_form(given: Mapping[str, Any] | None) -> Csv:
    """Returns how csv files are written: the given fields of :class:`Csv`, and its defaults.

    Raises:
      InputError: an unknown field, a separator of several characters, or an unknown encoding.
    """
    given = given or {}
    for key in given:
        if key not in Csv._fields:
            raise InputError(f"csv has no key {key!r}. {nearest(key, Csv._fields)}")
    marks = {key: given[key] for key in ("sep", "quote", "escape") if key in given}
    marks = {key: _SPELLINGS.get(x, x) if isinstance(x, str) else x for key, x in marks.items()}
    for key, mark in marks.items():
        empty = mark == "" and key != "sep"
        if not empty and (not isinstance(mark, str) or len(mark) != 1 or mark in "\r\n"):
            example = {"sep": "';'", "quote": '\'"\', or "" for none', "escape": "'\\'"}[key]
            raise InputError(
                f"csv's {key} = {given[key]!r} must be one character, such as {example}."
            )
    form = Csv(**{**given, **marks})
    used = [
        mark for mark in (form.sep, '"' if form.quote is None else form.quote, form.escape) if mark
    ]
    if len({*used}) < len(used):
        raise InputError(
            f"csv's sep, quote and escape must be different characters, not {', '.join(used)}."
        )
    if not isinstance(form.header, bool):
        raise InputError(f"csv's header = {form.header!r} must be true or false.")
    try:
        "".encode(form.encoding)
        usual = codecs.lookup(form.encoding).name == PLAIN.encoding
    except (LookupError, TypeError):
        raise InputError(
            f"csv's encoding = {form.encoding!r} is unknown. Usual ones are utf-8, latin-1, cp1252"
            " (Windows) and gb18030."
        ) from None
    return form._replace(encoding=PLAIN.encoding) if usual else form  # UTF-8 has several names


def read_csv(path: Path, form: Csv) -> dict[str, list[str | None]]:
    """Returns the columns of a csv file; the fields that a short row lacks are None.

    Columns without a name are left out, with a warning.

    Raises:
      InputError: a file whose rows are in doubt, or do not fit its header.
      UnicodeError: another encoding.
    """
    records = _records(path, form)
    names, first = _header(path, form, records)
    rows = [_fitted(path, *record, len(names)) for record in itertools.chain(first, records)]
    nameless = [str(i) for i, name in enumerate(names, 1) if not name]
    if nameless:
        warnings.warn(
            f"{path}: column {' and '.join(nameless)} has no name and is left out. (pandas writes"
            " the index of a table as such a column.)",
            stacklevel=users_level(),
        )
    columns = zip(names, zip(*rows, strict=True) if rows else [()] * len(names), strict=True)
    return {name: list(column) for name, column in columns if name}


def csv_columns(path: Path, form: Csv) -> list[str]:
    """Returns the names of a csv file's columns; errors are those of :func:`read_csv`."""
    names, _ = _header(path, form, _records(path, form))
    return [name for name in names if name]


def _header(
    path: Path, form: Csv, records: Iterator[tuple[int, list[str]]]
) -> tuple[list[str], list[tuple[int, list[str]]]]:
    """Returns the names of all columns, "" for those without one, and the first row of data."""
    top = next(records, (0, []))[1] if form.header else []
    first = list(itertools.islice(records, 1))
    row = first[0][1] if first else []
    numbered = [f"column_{i + 1}" for i in range(len(row))]
    names = [name.removeprefix("\ufeff").strip() for name in top] if form.header else numbered
    shown = top if form.header else row
    other = next((c for c in ";\t|," if c in "".join(shown) and c in "".join(row)), None)
    if len(names) == 1 and other is not None:
        raise InputError(
            f"{path} has one column, which begins with {show(shown[0], 40)}. Its fields seem to be"
            f" separated by {other!r}: csv = {{ sep = {toml.literal(other)} }} in [data], in Python"
            f" csv={{'sep': {other!r}}}, or --sep of `fedjax-peft init`."
        )
    refuse_twins(path, [name for name in names if name])
    return names, first


def _fitted(path: Path, line: int, row: list[str], count: int) -> list[str | None]:
    """Returns a row with as many fields as the header."""
    if any(row[count:]):
        raise InputError(
            f"Line {line} of {path} has {len(row)} fields, but the header has {count}. A field that"
            " holds the separator needs quotation marks around it, and each column a name."
        )
    return [*row[:count], *[None] * (count - len(row))]


def _records(path: Path, form: Csv) -> Iterator[tuple[int, list[str]]]:
    """Yields (number of its first line, fields) for the header and each row; not for blank lines.

    Raises:
      InputError: a quotation mark inside a quoted field, or one that nothing closes. Or, unless
        ``form`` says how fields are quoted, a row of several lines that could be several rows.
    """
    sep, mark = form.between(path), form.mark
    how: dict[str, Any] = {"delimiter": sep, "escapechar": form.escape or None, "strict": True}
    how |= {"quotechar": mark} if mark else {"quotechar": None, "quoting": csv.QUOTE_NONE}
    quoted, doubt = form.quote is not None or bool(form.escape), (0, 0)
    count, feeds, lines = 0, False, list[str]()  # fields of the header; lines of the present row
    with _opened(path, form) as file, _long_fields():
        read = csv.reader(_noted(file, lines), **how)
        while True:
            start = read.line_num + 1
            lines.clear()
            try:
                row = next(read, None)
            except csv.Error as error:
                raise _misquoted(path, start, lines, "end of data" in str(error)) from None
            if row is None:
                break
            if not row or (len(row) == 1 and row[0].isspace()):
                continue
            if not quoted and any(mark in line for line in lines):
                # As many fields as the header has, if quotation marks are a part of the texts?
                plain = lines[0].count(sep) == lines[-1].count(sep) == count - 1
                quoted = not plain and (len(row) == count or (count == 0 and form.header))
                if plain and len(lines) > 1 and doubt == (0, 0):
                    doubt = start, read.line_num
            count, feeds = count or len(row), feeds or lines[-1].endswith("\n")
            if feeds and lines[-1].endswith("\r"):
                raise InputError(
                    f"Line {read.line_num} of {path} ends with a carriage return alone, and other"
                    " lines with a line feed. A text with a line end needs quotation marks around"
                    " it."
                )
            yield start, row
    if doubt != (0, 0) and not quoted:
        raise InputError(
            f"Lines {doubt[0]} to {doubt[1]} of {path} are one row if quotation marks enclose"
            f" fields, and {doubt[1] - doubt[0] + 1} rows if they are a part of the texts. Say"
            """ which: csv = { quote = '"' } or csv = { quote = "" } in [data], or --quote of"""
            " `fedjax-peft init`."
        )


def _noted(file: Iterable[str], lines: list[str]) -> Iterator[str]:
    """Yields the lines of a file, and appends each to ``lines``."""
    for line in file:
        lines.append(line)
        yield line


def _misquoted(path: Path, start: int, lines: Sequence[str], is_open: bool) -> InputError:
    """Returns the error of a row whose quotation marks do not enclose fields."""
    fault = (
        f"The row that begins in line {start} of {path} has a quotation mark that nothing closes"
        if is_open
        else f"Line {start + len(lines) - 1} of {path} goes on behind a closing quotation mark"
    )
    return InputError(
        f"{fault}: {show(lines[0 if is_open else -1].strip(), 60)}. If quotation marks are a part"
        """ of the texts, say so: csv = { quote = "" } in [data], or --quote none of"""
        " `fedjax-peft init`. If a backslash stands before those of the texts:"
        r" csv = { escape = '\' }, or --escape '\'."
    )


@contextmanager
def _opened(path: Path, form: Csv) -> Iterator[IO[str]]:
    encoding = "utf-8-sig" if form.encoding == PLAIN.encoding else form.encoding
    with opener(path)(path, "rt", encoding=encoding, newline="") as file:
        yield file


@contextmanager
def _long_fields() -> Iterator[None]:
    """Lets a text be longer than the 128 KiB that ``csv`` allows."""
    limit = csv.field_size_limit(2**31 - 1)
    try:
        yield
    finally:
        csv.field_size_limit(limit)
