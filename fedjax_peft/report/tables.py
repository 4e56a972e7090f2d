"""Columns as tables: for a terminal, and for files."""

from collections.abc import Iterable, Sequence

from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from fedjax_peft.report.columns import Frame
from fedjax_peft.report.table_files import Bold, TextTable
from fedjax_peft.report.wording import explained
from fedjax_peft.support.display import plural

NAME_WIDTH = 16
"""Characters for the name of a run in a terminal's table; a longer name is wrapped."""


def terminal_table(frame: Frame, width: int, *, gap: int = 2) -> Table:
    """Returns a table for a terminal of ``width`` characters, with the names in the first column.

    If the terminal is too narrow for all columns, the last ones are omitted and the caption says
    so.
    """
    head, names, columns = frame

    def text_width(texts: Iterable[str]) -> int:
        return max(cell_len(line) for text in texts for line in text.split("\n"))

    widths = [text_width([column.short, *column.cells]) + gap for column in columns]
    name = min(text_width([head, *names]), NAME_WIDTH) + gap
    shown = len(columns)
    while shown and name + sum(widths[:shown]) > width + gap:
        shown -= 1
    out = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0), header_style="bold")
    first = Text(head if "\n" in head else f"\n{head}")
    out.add_column(first, overflow="fold", min_width=name - gap)
    for column in columns[:shown]:
        out.add_column(Text(column.short), justify="right", no_wrap=True)
    for i, row in enumerate(names):
        cells = (Text(c.cells[i], "bold green" if i in c.best else "") for c in columns[:shown])
        out.add_row(Text(row), *cells)
    if omitted := len(columns) - shown:
        out.caption = f"{omitted} more {plural('column', omitted)}: widen the terminal."
        out.caption_justify = "left"
    return out


def explanations(shown: Sequence[Table], frames: Sequence[Frame]) -> list[str]:
    """Returns a sentence for each column of terminal tables whose heading does not explain it."""
    heads = {str(column.header) for table in shown for column in table.columns}
    columns = [c for frame in frames for c in frame.columns if c.short in heads]
    found = {" ".join(c.short.split()): explained(c.title) for c in columns}
    return [f"{head}: {text}." for head, text in found.items() if text]


def text_table(title: str, frame: Frame) -> TextTable:
    """Returns a table for files; the best values are bold."""
    head, names, columns = frame
    cells = [[Bold(x) if i in c.best else x for i, x in enumerate(c.cells)] for c in columns]
    data: dict[str, Sequence[object]] = {head: names}
    for column in columns:
        data |= column.data or {column.title: column.cells}
    heads = [head, *(column.title for column in columns)]
    return TextTable(title, heads, [*zip(names, *cells, strict=True)], data=data)
