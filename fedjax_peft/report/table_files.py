"""Tables for papers: Markdown, CSV and LaTeX."""

import csv
import io
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple
from unicodedata import name

from fedjax_peft.support.display import markdown, one_line
from fedjax_peft.support.files import replace_file


class Bold(str):
    """A cell in bold; CSV has the text alone."""

    __slots__ = ()


class TextTable(NamedTuple):
    """A table of texts, which is written as Markdown, CSV and LaTeX."""

    title: str
    header: Sequence[str]
    """The headings of the columns; the first column has the names of the rows."""
    rows: Sequence[Sequence[str]]
    """Cells; a cell may be :class:`Bold`. Every row has as many cells as the header."""
    notes: Sequence[str] = ()
    """Sentences below the table. CSV omits title and notes."""
    data: Mapping[str, Sequence[object]] | None = None
    """Heading -> values of a column of the CSV, if it has numbers instead of the texts."""

    def __str__(self) -> str:
        """Returns the table in aligned columns, as a terminal shows it."""
        every = [self.header, *self.rows]
        widths = [max(map(len, column)) for column in zip(*every, strict=True)]
        lines = []
        for first, *others in every:
            right = (cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))
            lines.append("  ".join([first.ljust(widths[0]), *right]).rstrip())
        title = [self.title] if self.title else []
        return "\n".join([*title, *lines, *self.notes])

    def _repr_markdown_(self) -> str:
        """Returns what a notebook shows."""
        return self.markdown()

    def markdown(self) -> str:
        """Returns the table in GitHub's Markdown, with the title above and the notes below."""
        lines = [_markdown_row(self.header)]
        lines.append("| " + " | ".join(["---", *["---:"] * (len(self.header) - 1)]) + " |")
        lines += map(_markdown_row, self.rows)
        title = [f"**{markdown(self.title)}**", ""] if self.title else []
        notes = [line for note in self.notes for line in ("", markdown(note))]
        return "\n".join([*title, *lines, *notes, ""])

    def csv(self) -> str:
        """Returns header and rows as CSV (RFC 4180)."""
        header, rows = [*self.header], [*map(tuple, self.rows)]
        if self.data is not None:
            header, rows = [*self.data], [*zip(*self.data.values(), strict=True)]
        return csv_text([header, *rows])

    def latex(self) -> str:
        r"""Returns a ``table`` environment with the rules of booktabs (``\usepackage{booktabs}``).

        Special characters are escaped. The characters ``±``, ``−``, ``×``, Greek letters and a few
        others become commands; the rest needs UTF-8, which is LaTeX's default.
        """
        body = [*map(_latex_row, self.rows)]
        notes = [f"  \\par\\smallskip\\footnotesize {_latex(note)}" for note in self.notes]
        caption = [f"  \\caption{{{_latex(self.title)}}}"] if self.title else []
        return "\n".join(
            [
                "\\begin{table}",
                "  \\centering",
                *caption,
                f"  \\begin{{tabular}}{{l{'r' * (len(self.header) - 1)}}}",
                "    \\toprule",
                _latex_row(self.header),
                "    \\midrule",
                *body,
                "    \\bottomrule",
                "  \\end{tabular}",
                *notes,
                "\\end{table}",
                "",
            ]
        )

    def write(self, stem: str | os.PathLike[str]) -> list[Path]:
        """Writes ``stem.md``, ``stem.csv`` and ``stem.tex``; returns their paths.

        Raises:
          OSError: a file cannot be written.
        """
        texts = {"md": self.markdown(), "csv": self.csv(), "tex": self.latex()}
        paths = [Path(f"{os.fspath(stem)}.{ending}") for ending in texts]
        for path, text in zip(paths, texts.values(), strict=True):
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, text.encode(errors="replace"))
        return paths


def csv_text(rows: Iterable[Iterable[object]]) -> str:
    """Returns rows as CSV (RFC 4180).

    A text that a spreadsheet would run as a formula, such as a class ``=1+2``, gets an apostrophe
    before it. Numbers and scores with a sign stay as they are.
    """
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(map(_inert, row) for row in rows)
    return out.getvalue()


_FORMULA = re.compile(r"[=@\t\r＝＠]|[-+－＋](?!(?:[\d\s.,;%±()\[\]–−eE+-]|to )*$|[\d\s.][^|!(]*$)")
"""The start of what spreadsheets take for a formula."""


def _inert(cell: object) -> object:
    return f"'{cell}" if isinstance(cell, str) and _FORMULA.match(cell) else cell


def _markdown_row(cells: Sequence[str]) -> str:
    return (
        "| "
        + " | ".join(f"**{markdown(x)}**" if isinstance(x, Bold) else markdown(x) for x in cells)
        + " |"
    )


_LATEX = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': "''",
    "±": r"$\pm$",
    "×": r"$\times$",
    "−": "$-$",
    "–": "--",
    "≤": r"$\leq$",
    "≥": r"$\geq$",
    "→": r"$\rightarrow$",
    "…": r"\ldots{}",
    **{c: f"\\{c}" for c in "&%$#_"},
    **{
        letter: f"$\\{name(letter).split()[-1].lower().replace('lamda', 'lambda')}$"
        for letter in "αβγδεζηθικλμνξπρστυφχψω"
    },
    **{letter: f"$\\{name(letter).split()[-1].capitalize()}$" for letter in "ΓΔΘΞΠΣΦΨΩ"},
    "µ": r"$\mu$",  # the micro sign
}


def _latex_row(cells: Sequence[str]) -> str:
    return f"    {' & '.join(map(_latex_cell, cells))} \\\\"


def _latex_cell(cell: str) -> str:
    r"""Returns a cell; a bracket at the start of a row would be an argument of ``\\``."""
    text = _latex(cell)
    if isinstance(cell, Bold):
        # \boldmath, because \textbf does not change what is between dollar signs.
        return f"\\textbf{{\\boldmath {text}}}" if "$" in text else f"\\textbf{{{text}}}"
    return f"{{}}{text}" if text.startswith("[") else text


def _latex(text: str) -> str:
    return "".join(_LATEX.get(c, c) for c in one_line(text))
