"""Writes one CSV row for each finished run, or for each round of it: the numbers of every seed.

    python experiments/runs_csv.py runs/peft/minilm_l3 minilm_l6=runs/peft/l6 --out runs.csv

``METRIC_mean`` is the mean over the evaluations after the start, ``error`` the relative aggregation
error, ``bytes_up`` a sum over rounds. With ``--target METRIC=VALUE``, ``rounds_to`` is the first
evaluated round that has the value; a run without one gets the round of its next evaluation.
"""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fedjax_peft.report.cells import Cell
from fedjax_peft.report.figure_files import table_csv
from fedjax_peft.report.records import RunRecord, find_runs, load_run
from fedjax_peft.simulation.rows import number
from fedjax_peft.simulation.summaries import series


def totals(run: RunRecord, metrics: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yields the row of a run."""
    cell = Cell(run.name, {}, {0: run})
    row: dict[str, Any] = {"rounds": run.rows[-1]["round"]}
    for metric in metrics:
        row[metric] = cell.values(metric, "final").get(0)
        row[f"{metric}_mean"] = cell.values(metric, "mean").get(0)
    _, errors = series(run.rows, "round", "aggregation_error_relative")
    row |= {"error_first": errors[0], "error_last": errors[-1]} if errors else {}
    yield row | {"bytes_up": sum(one.get("bytes_up", 0) for one in run.rows)}


def by_round(run: RunRecord, metrics: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yields a row for each round, round 0 included."""
    sent = 0
    for one in run.rows:
        sent += one.get("bytes_up", 0)
        values = {name: number(one, name) for name in (*metrics, "aggregation_error_relative")}
        yield {"round": one["round"], **values, "bytes_up": sent}


def rounds_to(run: RunRecord, target: str) -> int:
    """Returns the first evaluated round with ``METRIC=VALUE``, or the one after the run's end."""
    metric, _, value = target.partition("=")
    rounds, values = series(run.rows, "round", metric)
    reached = [n for n, x in zip(rounds, values, strict=True) if x >= float(value)]
    return int(min(reached, default=2 * rounds[-1] - rounds[-2]))


def main(words: Sequence[str] | None = None) -> None:
    """Writes the file; unfinished runs are left out."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("runs", nargs="+", help="FOLDER or STUDY=FOLDER")
    parser.add_argument("--metrics", nargs="+", default=["validation_accuracy", "test_accuracy"])
    parser.add_argument("--by-round", action="store_true", help="a row for each round")
    parser.add_argument("--target", help="METRIC=VALUE")
    parser.add_argument("--out", required=True, type=Path)
    a = parser.parse_args(words)
    rows, kind = [], by_round if a.by_round else totals
    for study, _, folder in (text.rpartition("=") for text in a.runs):
        for run in filter(lambda one: one.finished, map(load_run, find_runs(folder))):
            key = {"study": study or Path(folder).name, "method": run.name}
            key |= {"rate": run.config["optimizer"]["learning_rate"], "seed": run.config["seed"]}
            key |= {"rounds_to": rounds_to(run, a.target)} if a.target else {}
            rows += [key | one for one in kind(run, a.metrics)]
    a.out.write_text(table_csv(rows))


if __name__ == "__main__":
    main()
