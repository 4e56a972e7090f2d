"""What the tables and figures of all papers here share: a command line, columns, and panels.

A script of a paper has its tables and figures as data: the methods, for each column a heading and
where its cells come from, for each panel its curves. This module reads the sweeps, chooses the
settings, and writes Markdown, CSV, LaTeX, PNG, SVG and PDF.
"""

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from printouts import Printout, read_printed

from fedjax_peft.report.figure_files import bands, save, style, subplots
from fedjax_peft.report.study import At, Cell, Study, paired, read_study, summarise
from fedjax_peft.report.table_files import TextTable

Column = Callable[[str, Cell | None], str]
"""(method, its cell if there are runs) -> the text of a table's cell."""
Points = tuple[Sequence[float], Mapping[Any, Sequence[float | None]]]
"""The places of a curve on the x axis, and seed -> its values there."""
Row = dict[str, Any]
"""A row of the CSV of a figure."""


# ------------------------------------------------------------------------------------ command line


def arguments(doc: str, *paths: str, out: bool = True) -> argparse.ArgumentParser:
    """Returns a parser for folders of sweeps and the folder of the files.

    Args:
      doc: of the script.
      *paths: the arguments ``name`` (one folder) or ``name+`` and ``name*`` (several).
      out: whether ``--out`` is needed.
    """
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for path in paths:
        several = {"nargs": path[-1]} if path[-1] in "+*" else {}
        parser.add_argument(path.rstrip("+*"), type=Path, help="folder of a sweep", **several)
    parser.add_argument("--out", required=out, type=Path, help="the files: folder, or path")
    return parser


def write(made: TextTable | None, stem: Path | None) -> None:
    """Prints a table and writes it; None is a figure, whose files are named.

    Args:
      stem: path of the files without an ending; None writes nothing.
    """
    if made is None:
        print(f"{stem.name}: {stem}.png, .svg, .pdf and .csv\n")
        return
    if stem is not None:
        made.write(stem)
    print(made.markdown())


def report(words: Sequence[str] | None, doc: str, names: Sequence[str], parts: Callable) -> None:
    """Reads the command line of a script, and writes all that the given sweeps have runs for.

    Args:
      words: of the command line; None: those of the process.
      doc: of the script.
      names: of all tables and figures, in their order.
      parts: (sweeps, folder) -> name -> a function that returns the table or draws the figure, or
        why there is none.
    """
    parser = arguments(doc, "sweeps+")
    parser.add_argument("--only", metavar="NAME", help=f"of {', '.join(names)}")
    a = parser.parse_args(words)
    a.out.mkdir(parents=True, exist_ok=True)
    known = parts(read(a.sweeps), a.out)
    wanted = names if a.only is None else [a.only]
    for name in (name for name in wanted if name in known):
        if isinstance(known[name], str):
            print(f"{name}: left out, {known[name]}\n")
        else:
            write(known[name](), a.out / name)
    if absent := [name for name in wanted if name not in known]:
        print(f"left out, no runs: {', '.join(absent)}")


# ------------------------------------------------------------------------------------ reading runs


def printed(name: str) -> Printout:
    """Returns the numbers that a paper prints."""
    return read_printed(Path(__file__).parent / "papers" / f"{name}.csv")


def read(paths: Iterable[Path]) -> list[Study]:
    """Returns a study for each sweep at or below the paths, or for a path with runs alone."""
    found = []
    for path in paths:
        sweeps = sorted(file.parent for file in path.rglob("sweep.toml"))
        alone = [path] if any(path.rglob("metrics.jsonl")) else []
        found += [read_study(sweep) for sweep in sweeps or alone]
    return [study for study in found if study.cells]


def choose(studies: Iterable[Study]) -> tuple[dict[str, Cell], list[str]]:
    """Returns method -> its chosen setting, and sentences about the choice.

    If a method is in several sweeps, the sweep with the most settings counts.
    """
    cells: dict[str, Cell] = {}
    notes: dict[str, None] = {}
    for study in sorted(studies, key=lambda one: -len(one.cells)):
        choice = study.choice()
        new = {name: cell for name, cell in choice.cells.items() if name not in cells}
        cells |= new
        if new:
            notes |= dict.fromkeys([*study.notes, *choice.notes])
    return cells, list(notes)


def seeds(cells: Iterable[Cell]) -> str:
    """Returns the numbers of seeds, such as ``2 or 3``."""
    return " or ".join(map(str, sorted({len(cell.runs) for cell in cells})))


def models(cells: Iterable[Cell]) -> str:
    """Returns the names of the models, without their folders."""
    runs = [run for cell in cells for run in cell.runs.values()]
    return ", ".join(sorted({Path(run.config["model"]["name"]).name for run in runs}))


# ------------------------------------------------------------------------------------------ tables


def table(
    title: str,
    methods: Mapping[str, str],
    cells: Mapping[str, Cell],
    columns: Mapping[str, Column],
    notes: Sequence[str] = (),
    name: str = "method",
) -> TextTable:
    """Returns a row for each method, a cell for each column.

    Args:
      title: of the table.
      methods: method -> its name in the table.
      cells: method -> its chosen setting.
      columns: heading -> what is in it.
      notes: sentences below the table.
      name: the heading of the first column.
    """
    rows = [
        [label, *(column(method, cells.get(method)) for column in columns.values())]
        for method, label in methods.items()
    ]
    return TextTable(title, [name, *columns], rows, notes)


def of_runs(text: Callable[[Cell], str]) -> Column:
    """Returns a column with a text of the cell; ``-`` without runs."""
    return lambda method, cell: "-" if cell is None else text(cell)


def among(cells: Mapping[str, Cell], column: Column) -> Column:
    """Returns the column of other runs than those of the table."""
    return lambda method, _: column(method, cells.get(method))


def of_paper(numbers: Printout, table: str, rows: Mapping[str, str], column: str) -> Column:
    """Returns a column of numbers that the paper prints.

    Args:
      numbers: of the paper.
      table: its table.
      rows: method -> its row there.
      column: there.
    """
    return lambda method, cell: numbers(table, rows[method], column)


def score(metric: str, at: At = "final") -> Column:
    """Returns the column of a metric in %, mean ± deviation over seeds."""
    return of_runs(lambda cell: summarise(cell.values(metric, at)).text(100))


def minus(base: str, cells: Mapping[str, Cell], values: Callable[[Cell], Mapping]) -> Column:
    """Returns the column of the differences to a method in points, paired by seed."""

    def text(method: str, cell: Cell | None) -> str:
        if cell is None or method == base or base not in cells:
            return "-"
        return paired(values(cell), values(cells[base])).text(100)

    return text


RATE = of_runs(lambda cell: f"{cell.learning_rate:g}")
"""The column of the learning rates."""


# ----------------------------------------------------------------------------------------- figures


class Panel(NamedTuple):
    """A panel of a figure."""

    curves: Mapping[str, Points]
    """Label -> what is drawn: the mean over seeds and its deviation."""
    look: Mapping[str, Any]
    """For ``Axes.set``, such as ``title``."""
    key: Mapping[str, Any] = {}
    """The first columns of the CSV; then come ``name``, ``seed``, ``x`` and ``value``."""
    x: str | None = None
    """Another name of the column ``x``, which then comes after the first ones."""
    ticks: str | Mapping[float, str] | None = "integer"
    """Where the x axis has ticks: ``integer``, ``log`` (at the places), or place -> label."""


def draw(
    stem: Path | None,
    panels: Sequence[Panel],
    shape: tuple[int, int] = (1, 1),
    *,
    legend: str = "outside lower center",
    numbers: Mapping[str, int] | None = None,
    **options: Any,
) -> tuple[Any, list[Row]]:
    """Draws panels and writes their figure; returns it, and the rows of its CSV.

    Args:
      stem: path of the files without an ending; None writes nothing.
      panels: row by row.
      shape: rows and columns of panels.
      legend: its place; ``inside`` of the only panel.
      numbers: label -> the number of its style; by default in the order of the figure.
      **options: for :func:`fedjax_peft.report.figure_files.subplots`, such as ``size``.
    """
    data: list[Row] = []
    with style():
        figure, axes = subplots(*shape, squeeze=False, **options)
        for ax, panel in zip(axes.flat, panels, strict=True):
            for name, (xs, by_seed) in panel.curves.items():
                number = None if numbers is None else numbers[name]
                drawn = bands(ax, name, xs, by_seed, number=number)
                data += [{**panel.key, **_renamed(row, panel.x)} for row in drawn]
            ax.set(**panel.look)
            _ticks(ax, panel)
        if legend == "inside":
            axes[0, 0].legend()
        else:
            below(figure, axes[0, 0], legend)
    if stem is not None:
        save(figure, stem, data)
    return figure, data


def _renamed(row: Row, x: str | None) -> Row:
    return row if x is None else {x: row.pop("x"), **row}


def _ticks(ax: Any, panel: Panel) -> None:
    """Sets the ticks of the x axis."""
    if panel.ticks == "integer":
        ax.xaxis.get_major_locator().set_params(integer=True)
    elif panel.ticks == "log":
        log_ticks(ax, sorted({x for xs, _ in panel.curves.values() for x in xs}))
    elif panel.ticks is not None:
        ax.set_xticks(list(panel.ticks), list(panel.ticks.values()))


def log_ticks(ax: Any, places: Sequence[float]) -> None:
    """Gives the x axis a logarithmic scale with ticks at these places."""
    ax.set_xscale("log")
    ax.set_xticks(places, [f"{x:g}" for x in places])
    ax.set_xticks([], minor=True)


def below(figure: Any, axes: Any, place: str = "outside lower center") -> None:
    """Draws one legend for all panels outside of them."""
    handles, labels = axes.get_legend_handles_labels()
    columns = {"ncols": len(labels)} if "lower" in place else {}
    figure.legend(handles, labels, loc=place, **columns)


def by_seed(
    cells: Iterable[Mapping[Any, float]], scale: float = 100
) -> dict[Any, list[float | None]]:
    """Returns seed -> its value at each place; None where a place lacks the seed.

    Args:
      cells: for each place, seed -> value.
      scale: of the values.
    """
    cells = list(cells)
    found = sorted({seed for one in cells for seed in one}, key=str)
    return {s: [scale * one[s] if s in one else None for one in cells] for s in found}
