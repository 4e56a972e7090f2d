"""Runs every algorithm of 20news.toml and prints a table of their scores and costs.

    python experiments/algorithms/grid.py --out runs/algorithms > grid.md

Methods that are already finished in this folder are not run again. ``--only`` selects methods.
"""

import argparse
import contextlib
import sys
from pathlib import Path

from fedjax_peft.cli import main as cli
from fedjax_peft.config import config
from fedjax_peft.simulation import rows as history

CONFIG = Path(__file__).with_name("20news.toml")


def finished(directory: Path, rounds: int) -> bool:
    """Returns whether a run has finished all its rounds."""
    metrics = directory / "metrics.jsonl"
    return metrics.exists() and history.read_metrics(metrics)[-1]["round"] == rounds


def line(name: str, directory: Path) -> str:
    """Returns a row of the table; its scores are those after fine-tuning, if the method has one."""
    rows = history.read_metrics(directory / "metrics.jsonl")
    facts, last = history.summary(rows), rows[-1]
    tuned = "" if facts["tuned_score"] is None else "tuned_"
    compiled = sum(row["time"].get("compile_s", 0) for row in rows)
    trained = sum(row["time"].get("train_s", 0) for row in rows)
    cells = [
        name,
        f"{100 * last[tuned + 'test_accuracy']:.1f}",
        f"{100 * last[tuned + 'client_accuracy_mean']:.1f}",
        f"{100 * last[tuned + 'client_accuracy_worst']:.1f}",
        f"{facts['trained']:,}",
        f"{facts['bytes_up'] / 1e6:.2f}",
        f"{facts['bytes_down'] / 1e6:.2f}",
        f"{facts['simulated_seconds']:.1f}",
        f"{trained:.0f}",
        f"{compiled:.0f}",
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Runs the methods that are not finished, then prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("runs/algorithms"))
    parser.add_argument("--only", action="append", metavar="NAME")
    options = parser.parse_args()
    methods = {n: config.resolve(c) for n, c in config.methods(config.load(CONFIG)).items()}
    for name in options.only or methods:
        if not finished(options.out / name, methods[name]["rounds"]):
            words = ["run", str(CONFIG), "--only", name, "--out", str(options.out), "--overwrite"]
            with contextlib.redirect_stdout(sys.stderr):
                if code := cli.main(words):
                    sys.exit(code)
    print(
        "| algorithm | test acc. % | clients' own % | worst client % | trained | MB up | MB down"
        " | simulated s | train s | compile s |"
    )
    print("|---|" + "--:|" * 9)
    for name in options.only or methods:
        print(line(name, options.out / name))


if __name__ == "__main__":
    main()
