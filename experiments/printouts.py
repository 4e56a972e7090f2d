"""The numbers that a paper prints, from a CSV file, so that they can stand beside one's own.

The columns of the file are ``table``, ``row``, ``column``, ``mean``, ``deviation`` and ``note``. A
mean is as printed, with its digits; ``-`` is a cell in which the paper prints a dash.
"""

import csv
import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from fedjax_peft.support.display import show
from fedjax_peft.support.errors import InputError, nearest

_COLUMNS = ["table", "row", "column", "mean", "deviation", "note"]


class Printed(NamedTuple):
    """A cell of a paper's table."""

    mean: str
    deviation: str = ""
    note: str = ""

    @property
    def value(self) -> float:
        """The number; NaN for a dash."""
        return float("nan") if self.mean == "-" else float(self.mean)

    @property
    def text(self) -> str:
        """The cell as it is shown, such as ``79.56 ± 0.6``."""
        return f"{self.mean} ± {self.deviation}" if self.deviation else self.mean


class Printout(NamedTuple):
    """The cells of a paper's tables."""

    cells: Mapping[tuple[str, str, str], Printed]
    """(table, row, column) -> cell."""

    def __call__(self, table: str, row: str, column: str) -> str:
        cell = self.cells.get((table, row, column))
        return "-" if cell is None else cell.text

    def value(self, table: str, row: str, column: str) -> float:
        """Returns the number of a cell.

        Raises:
          InputError: the paper has no such cell; the message names the nearest one.
        """
        key = (table, row, column)
        if key not in self.cells:
            advice = nearest(" / ".join(key), [" / ".join(one) for one in self.cells])
            raise InputError(f"The paper has no cell {show(' / '.join(key))}. {advice}")
        return self.cells[key].value

    def table(self, name: str) -> dict[tuple[str, str], Printed]:
        """Returns (row, column) -> cell of a table."""
        return {key[1:]: cell for key, cell in self.cells.items() if key[0] == name}


def read_printed(path: str | os.PathLike[str]) -> Printout:
    """Returns the cells of a file.

    Raises:
      InputError: the file lacks a column, a cell is there twice, or a number cannot be read.
    """
    cells: dict[tuple[str, str, str], Printed] = {}
    with Path(path).open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        if reader.fieldnames != _COLUMNS:
            raise InputError(f"{path} must have the columns {', '.join(_COLUMNS)}.")
        for line, row in enumerate(reader, start=2):
            key = (row["table"], row["row"], row["column"])
            cell = Printed(row["mean"], row["deviation"], row["note"])
            if key in cells:
                raise InputError(f"{path}, line {line}: {show(' / '.join(key))} is there twice.")
            try:
                _ = cell.value, float(cell.deviation or 0)
            except ValueError:
                raise InputError(f"{path}, line {line}: {show(cell.text)} is no number.") from None
            cells[key] = cell
    return Printout(cells)
