"""The commands ``report`` and ``sync``: they read the rows of runs."""

import argparse
import contextlib
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.text import Text

from fedjax_peft.cli import watching
from fedjax_peft.config import config as configs
from fedjax_peft.report import live, page
from fedjax_peft.report.comparison import Options, compare
from fedjax_peft.report.records import find_runs
from fedjax_peft.report.study import Study, read_study
from fedjax_peft.report.tables import explanations
from fedjax_peft.report.targets import target_table
from fedjax_peft.simulation.storage import record, tracking
from fedjax_peft.simulation.summaries import privacy_in_words
from fedjax_peft.support import display
from fedjax_peft.support.errors import InputError


def report(options: argparse.Namespace) -> None:
    """Prints the comparison of runs and writes ``report.html`` with its figures and tables."""
    asked = Options(options.metric, options.at, options.choose_by, options.baseline, options.detect)
    shown = {"target": options.target, "options": asked, "smooth": options.smooth, "x": options.x}
    if options.watch:
        _check_watched(options)
        _watch(options, asked) if options.port is None else _serve(options, shown)
        return
    if options.port is not None:
        raise InputError("--port is for the page of runs that go on: add --watch.")
    study = read_study(*options.runs)
    print_study(study, asked)
    common = Path(os.path.commonpath([path.resolve() for path in options.runs]))
    written = page.write_report(study, options.out or common, **shown)
    if options.target is not None:
        console = _console()
        reached = target_table(compare(study, asked).rows, options.target, console.width)
        console.print("", reached, "", "Bytes are those of all clients, up and down.", sep="\n")
    print(written)


def _check_watched(options: argparse.Namespace) -> None:
    """Raises InputError for options that are not for ``--watch``."""
    if options.out is not None:
        raise InputError("--watch writes no report: leave --out out.")
    page = {"--target": options.target, "--smooth": options.smooth - 1, "--x": options.x}
    if options.port is None and (given := [name for name, value in page.items() if value]):
        raise InputError(
            f"{given[0]} is for the page, and --watch alone shows tables: add --port 0, which shows"
            " the page in a browser."
        )


def _watch(options: argparse.Namespace, asked: Options) -> None:
    """Shows the points and the tables of runs that go on, until all have ended, or Ctrl-C.

    Raises:
      InputError: a path does not exist, or is neither a study nor a run.
    """

    def tables(width: int) -> Sequence[RenderableType]:
        if not any(map(find_runs, options.runs)):
            return ()
        try:
            study = read_study(*options.runs, unfinished=True)
            return compare(study, asked).terminal_tables(width)
        except InputError as error:  # such as a metric that no run has recorded yet
            return [Text(display.one_line(str(error)))]

    watching.watch(options.runs, tables, _console())
    if any(map(find_runs, options.runs)):
        print_study(read_study(*options.runs, unfinished=True), asked)


def _serve(options: argparse.Namespace, shown: Mapping[str, Any]) -> None:
    """Serves the page of runs that go on, until Ctrl-C.

    Raises:
      InputError: a path does not exist, or the port is not free.
    """

    def render(version: str) -> str:
        study = read_study(*options.runs, unfinished=True)
        return page.render_report(study, version=version, **shown)

    with live.server(options.runs, render, port=options.port) as server:
        print(f"http://{live.HOST}:{server.server_port}/ (Ctrl-C ends it)", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()


def sync(options: argparse.Namespace) -> None:
    """Sends to the trackers of runs the rows that they have not taken, and prints how many."""
    runs = find_runs(options.run)
    if not runs:
        raise InputError(f"There is no run in {options.run}.")
    for path in runs:
        config = record.read_config(path)
        asked = {"trackers": config.get("trackers", {})}
        for text in options.overrides:
            asked = configs.override(asked, text)
        table = configs.resolve_table("trackers", configs.expanded(asked).get("trackers", {}))
        if not table:
            raise InputError(
                f"The config of {path} names no tracker: add one, such as trackers=mlflow."
            )
        for name, rows in tracking.sync(
            path, config, configs.build({"trackers": table}, "trackers")
        ).items():
            taken = f"has taken {display.counted(rows, 'row')}" if rows else "had all rows"
            print(f"{path}: {name} {taken}")


def _console() -> Console:
    """Returns the console; a file or a pipe has room for all columns, if COLUMNS does not say."""
    alone = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(width=None if alone else 10_000)


def print_study(study: Study, options: Options | None = None) -> None:
    """Prints runs with one seed each as rows; otherwise methods over their seeds."""
    console, shown = _console(), compare(study, options)
    tables = shown.terminal_tables(console.width)
    texts = [shown.lead] if shown.over_seeds or len(shown.names) > 1 else []
    texts += [shown.power] if shown.power else []
    texts += [f"Note: {warning}" for warning in shown.warnings]
    if not shown.over_seeds:
        words = {run.name: privacy_in_words(run.rows) for run in shown.runs}
        texts += [f"{name}: {text}" for name, text in words.items() if text]
    if console.is_terminal:  # other outputs are read by programs too
        texts += explanations(tables, shown.in_terminal)
    for i, table in enumerate(tables):
        console.print(*[""] * bool(i), table, sep="\n")
    if texts:
        console.print("", *texts, sep="\n", markup=False, highlight=False)
