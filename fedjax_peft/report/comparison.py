"""The comparison of runs or methods: what the terminal, the files of tables and the page show."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from fedjax_peft.report.columns import Column
from fedjax_peft.report.judgement import Judgement
from fedjax_peft.report.records import RunRecord
from fedjax_peft.report.table_files import Bold, TextTable
from fedjax_peft.report.wording import explained, plural

Rows: TypeAlias = Mapping[str, Mapping[Any, RunRecord]]
"""Name of a row -> seed -> run. A row of a single run has the seed None."""

NAME_WIDTH = 16
"""Characters for the name of a run in a terminal's table; a longer name is wrapped."""


class Comparison(NamedTuple):
    """The comparison of runs or of methods: one row each."""

    head: str
    """What a row is: ``Run`` or ``Method``."""
    title: str
    """The title of the page."""
    caption: str
    """The title of the table in files."""
    rows: Rows
    columns: list[Column]
    judged: Judgement | None
    lead: str
    """Sentences about the result."""
    finals: list[str]
    """The name and the final score of each row."""
    curve: str
    """The metric of the curves in words."""
    stem: str
    """The metric of the curves in names of files."""
    metric: str | None = None
    """The field of the curves; None: the headline metric of each run on the test set."""
    captions: Sequence[str] = ()
    """Sentences that explain the columns."""
    paired: str = ""
    """Sentences on the columns of the differences; empty without them."""
    power: str = ""
    """How many seeds the comparisons need; empty if it is not known."""
    warnings: Sequence[str] = ()
    """What a reader must know before comparing the numbers."""
    settings: tuple[list[str], list[Column]] | None = None
    """Names and columns of the table of all settings; None if no method has several."""

    @property
    def names(self) -> list[str]:
        """The names of the rows."""
        return list(self.rows)

    @property
    def over_seeds(self) -> bool:
        """Whether a row stands for several seeds."""
        return self.head == "Method"

    @property
    def runs(self) -> list[RunRecord]:
        """The runs of all rows, with names that tell their seeds."""
        return [
            run._replace(name=f"{name}, seed {seed}" if self.over_seeds else name)
            for name, by_seed in self.rows.items()
            for seed, run in by_seed.items()
        ]

    def terminal_tables(self, width: int) -> list[Table]:
        """Returns the results, the differences and all settings for a terminal."""
        head, shown = f"\n{self.head}", [column for column in self.columns if column.short]
        differences = [column for column in shown if column.part == "difference"]
        results = [column for column in shown if column.part != "difference"]
        tables = [(self.names, results)]
        tables += [(self.names, differences)] if differences else []
        tables += [self.settings] if self.settings else []
        return [terminal_table(head, *table, width) for table in tables]

    def files(self) -> dict[str, TextTable]:
        """Returns stem of the files -> table: ``table``, and ``settings`` if there are several."""
        shown = [column for column in self.columns if column.part != "costs"]
        notes = [
            self.lead,
            *self.captions,
            *filter(None, [self.paired, self.power]),
            *self.warnings,
        ]
        table = text_table(self.caption, self.head, self.names, shown)
        out = {"table": table._replace(notes=notes)}
        if self.settings is not None:
            out["settings"] = text_table("All settings", self.head, *self.settings)
        return out


def terminal_table(
    head: str, names: Sequence[str], columns: Sequence[Column], width: int, *, gap: int = 2
) -> Table:
    """Returns a table for a terminal of ``width`` characters, with ``names`` in the first column.

    If the terminal is too narrow for all columns, the last ones are omitted and the caption says
    so.
    """

    def text_width(texts: Iterable[str]) -> int:
        return max(cell_len(line) for text in texts for line in text.split("\n"))

    widths = [text_width([column.short, *column.cells]) + gap for column in columns]
    name = min(text_width([head, *names]), NAME_WIDTH) + gap
    shown = len(columns)
    while shown and name + sum(widths[:shown]) > width + gap:
        shown -= 1
    out = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0), header_style="bold")
    out.add_column(head, overflow="fold", min_width=name - gap)
    for column in columns[:shown]:
        out.add_column(column.short, justify="right", no_wrap=True)
    for i, row in enumerate(names):
        cells = (Text(c.cells[i], "bold green" if i in c.best else "") for c in columns[:shown])
        out.add_row(Text(row), *cells)
    if omitted := len(columns) - shown:
        out.caption = f"{omitted} more {plural('column', omitted)}: widen the terminal."
        out.caption_justify = "left"
    return out


def explanations(shown: Sequence[Table], columns: Iterable[Column]) -> list[str]:
    """Returns a sentence for each column of terminal tables whose heading does not explain it."""
    heads = {str(column.header) for table in shown for column in table.columns}
    found = {" ".join(c.short.split()): explained(c.title) for c in columns if c.short in heads}
    return [f"{head}: {text}." for head, text in found.items() if text]


def text_table(title: str, head: str, names: Sequence[str], columns: Sequence[Column]) -> TextTable:
    """Returns columns as a table for files; the best values are bold."""
    cells = [[Bold(x) if i in c.best else x for i, x in enumerate(c.cells)] for c in columns]
    data: dict[str, Sequence[object]] = {head: names}
    for column in columns:
        data |= column.data or {column.title: column.cells}
    heads = [head, *(column.title for column in columns)]
    return TextTable(title, heads, [*zip(names, *cells, strict=True)], data=data)
