"""A table of a run's numbers, for spreadsheets and data frames."""

import csv as tables
import io
from pathlib import Path

from fedjax_peft.contracts.part import part
from fedjax_peft.simulation.rows import Row, fields, number
from fedjax_peft.simulation.trackers.base import TrackedRun, Tracker, taken_back
from fedjax_peft.support.files import naming, replace_file


@part
def csv(*, path: str = "metrics.csv") -> Tracker:
    """A CSV file with a line for each round and a column for each number.

    Columns have the names of the fields in ``metrics.jsonl``; ``time.train_s`` is the field
    ``train_s`` of the table ``time``. A number that a round lacks is an empty cell. A run that
    begins replaces the file, and a resumed one replaces the lines from its first round on.

    Args:
      path: the path of the file; a relative path is in the run directory, or without one in the
        working directory.
    """

    def take(row: Row, run: TrackedRun, /) -> None:
        table = run.opened(lambda: _Table(run.path(path), row["round"]), lambda table: None)
        numbers = {name: number(row, name) for name in fields(row)}
        table.add(numbers | dict.fromkeys(table.columns.intersection(taken_back(row))))

    return take


class _Table:
    """A CSV file of rows, which starts with those that the file has before a round."""

    def __init__(self, path: Path, first: int):
        self._path = path
        self._begun = False
        self._rows: dict[int, dict[str, object]] = {}
        self._columns: list[str] = []
        if first and path.is_file():
            with naming(path), path.open(newline="", encoding="utf-8") as file:
                for row in tables.DictReader(file):
                    if (index := int(row["round"])) < first:
                        self._rows[index] = dict(row)
                        self._columns = list(row)

    @property
    def columns(self) -> set[str]:
        """The names of the columns."""
        return {*self._columns}

    def add(self, numbers: dict[str, float | None]) -> None:
        """Adds a row; the first one, a new column and a row that is there write the file anew."""
        cells = {n: int(x) if x is not None and x.is_integer() else x for n, x in numbers.items()}
        index = int(numbers["round"] or 0)
        new = [name for name in cells if name not in self._columns]
        later = index > max(self._rows, default=-1)
        self._rows[index] = self._rows.get(index, {}) | cells
        if later and not new and self._begun and self._path.is_file():
            with naming(self._path), self._path.open("a", newline="", encoding="utf-8") as file:
                tables.DictWriter(file, self._columns).writerow(cells)
            return
        self._columns += new
        self._begun = True
        text = io.StringIO(newline="")
        writer = tables.DictWriter(text, self._columns)
        writer.writeheader()
        writer.writerows(self._rows[i] for i in sorted(self._rows))
        replace_file(self._path, text.getvalue().encode())
