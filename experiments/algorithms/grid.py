"""Compares every algorithm of 20news.toml on the same clients: runs, table and figure.

    cd experiments/algorithms && python grid.py --out RUNS --results results

Runs every method with seed 0 at its two learning rates, then seeds 1 and 2 at the rate that
validation chose; what is finished is not run again. Then writes ``algorithms`` (Markdown, CSV,
LaTeX), the figure ``differences`` and ``runs.csv`` with the numbers of every run. ``--only`` runs
some methods, ``--tables`` none; the files have all methods with finished runs. Words such as
``model.name=DIR`` replace keys of the config.
"""

import argparse
import statistics
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tomli_w

from fedjax_peft.cli import main as cli
from fedjax_peft.report.figure_files import save, style, subplots, table_csv
from fedjax_peft.report.study import Cell, Study, paired, read_study, summarise
from fedjax_peft.report.table_files import TextTable
from fedjax_peft.simulation.summaries import summary
from fedjax_peft.support.files import replace_file

sys.path.append(str(Path(__file__).parents[1]))
from significance import differences_in_words

CONFIG = Path(__file__).with_name("20news.toml")
RATE = "optimizer.learning_rate"
BASELINE = "fedavg"
RATES = 2
"""The learning rates of each method."""
SEEDS = (1, 2)
"""More seeds at the chosen rate."""
FAMILIES = {
    "one model": (
        *("fedavg", "centralised", "fedft", "fedprox", "moon", "fedavgm", "fedadam", "fedyogi"),
        *("fedadagrad", "fedsgd", "fednova", "feddyn", "scaffold", "q_fedavg"),
        *("afl", "hierfavg"),
    ),
    "one model, for LoRA": (
        *("fra", "ffa", "fra_ffa", "fedex", "flora", "fedmomentum", "fedrot", "fedsvd", "rolora"),
        *(
            "lora_a2",
            "hetlora",
            "flexlora",
            "raflora",
            "fslora",
            "fedplora",
            "fedask",
            "slora",
            "fedsb",
            "ravan",
        ),
    ),
    "one model, by forward passes": ("fedkseed", "fedmezo"),
    "personal": (
        *("local", "fedper", "fedrep", "fedbabu", "fedsa", "ditto", "apfl", "pfedme", "fedmcp"),
        *("fedmatch", "feddpa_t", "feddpa_f", "fedalt", "hilora", "ifca", "gossip", "pfedlora"),
        "fedlease",
    ),
}
"""Whose accuracy counts: on the global test set, or of each client's model on its own examples."""
PERSONAL = FAMILIES["personal"]


class Entry(NamedTuple):
    """A method at its chosen rate."""

    family: str
    cell: Cell
    """The runs of all its seeds."""

    def values(self, name: str) -> dict[Any, float]:
        """Returns seed -> a metric of the last round."""
        return values(self.cell, name)

    @property
    def outcome(self) -> str:
        """The metric that counts for the method's family."""
        return "client_accuracy_mean" if self.family == "personal" else "test_accuracy"


def values(cell: Cell, name: str) -> dict[Any, float]:
    """Returns seed -> a metric of the last round.

    It is that after the fine-tuning, if the method ends with one, and of the global model, if there
    is one beside personal models.
    """
    for full in (f"tuned_{name}", f"global_{name}", name):
        if found := cell.values(full):
            return found
    return {}


def criterion(name: str) -> str:
    """Returns the validation metric that chooses a method's rate."""
    return "client_validation_accuracy_mean" if name in PERSONAL else "validation_accuracy"


def chosen_rates(study: Study) -> dict[str, Cell]:
    """Returns method -> its cell with the best validation metric; of equal ones the first.

    Methods with a rate that is not finished are left out.
    """

    def score(cell: Cell) -> float:
        return statistics.fmean(values(cell, criterion(cell.name)).values())

    complete = {name: cells for name, cells in study.methods.items() if len(cells) == RATES}
    return {name: max(cells, key=score) for name, cells in complete.items()}


# -------------------------------------------------------------------------------------------- runs


def run(config: Path, out: Path, only: Sequence[str], words: Sequence[str]) -> None:
    """Runs a sweep, except for what is finished.

    Raises:
      SystemExit: a run failed.
    """
    named = [word for name in only for word in ("--only", name)]
    if code := cli.main(["sweep", str(config), "--out", str(out), "--resume", *named, *words]):
        sys.exit(code)


def write_config(chosen: Mapping[str, Cell], path: Path) -> None:
    """Writes the config with more seeds at the chosen rates."""
    config = tomllib.loads(CONFIG.read_text())
    for name, cell in chosen.items():
        config["methods"][name]["sweep"] = {
            "grid": {"seed": list(SEEDS), RATE: [cell.learning_rate]}
        }
    path.write_text(tomli_w.dumps(config))


# ------------------------------------------------------------------------------------------ tables


def read(
    out: Path, only: Sequence[str] = ()
) -> tuple[list[Entry], list[dict[str, Any]], list[str]]:
    """Returns the methods at their chosen rates, a row for every run, and notes on what is missing.

    Args:
      out: the folder with the sweeps ``choice`` (seed 0) and ``seeds``.
      only: the methods that should be there; none means all.
    """
    study = read_study(out / "choice")
    more = read_study(out / "seeds") if (out / "seeds").is_dir() else None
    chosen = chosen_rates(study)
    fresh = {name: cells[0] for name, cells in more.methods.items()} if more else {}
    entries, rows = [], []
    for family, names in FAMILIES.items():
        for name in [name for name in names if name in chosen]:
            cell, other = chosen[name], fresh.get(name)
            if other is not None and other.learning_rate == cell.learning_rate:
                cell = cell._replace(runs={**cell.runs, **other.runs})
            entries.append(Entry(family, cell))
            tried = [one for one in study.methods[name] if one.learning_rate != cell.learning_rate]
            rows += [row for one in (cell, *tried) for row in of_runs(family, one, one is cell)]
    wanted = only or [name for names in FAMILIES.values() for name in names]
    missing = [name for name in wanted if name not in chosen]
    notes = [f"Not run yet: {', '.join(missing)}."] if missing else []
    if few := [one.cell.name for one in entries if len(one.cell.runs) <= len(SEEDS)]:
        notes.append(f"Seeds are still missing, so that nothing is tested: {', '.join(few)}.")
    return entries, rows, notes


def of_runs(family: str, cell: Cell, chosen: bool) -> list[dict[str, Any]]:
    """Returns a row for every run of a cell."""
    names = ("test_accuracy", "client_accuracy_mean", "client_accuracy_worst")
    columns = {name: values(cell, name) for name in (criterion(cell.name), *names)}
    columns["validation"] = columns.pop(criterion(cell.name))
    key = {"method": cell.name, "family": family, "rate": cell.learning_rate, "chosen": chosen}
    return [
        {**key, "seed": seed, **{name: found.get(seed) for name, found in columns.items()}}
        | {f"bytes_{way}": summary(one.rows)[f"bytes_{way}"] for way in ("up", "down")}
        for seed, one in cell.runs.items()
    ]


def differences(entries: Sequence[Entry]) -> dict[str, tuple[dict, dict]]:
    """Returns method -> the outcome of its family by seed, and that of FedAvg."""
    base = next(one for one in entries if one.cell.name == BASELINE)
    others = [one for one in entries if one is not base]
    return {one.cell.name: (one.values(one.outcome), base.values(one.outcome)) for one in others}


def table(entries: Sequence[Entry], notes: Sequence[str]) -> TextTable:
    """Returns a row for each method, by family."""
    pairs = differences(entries)
    texts = dict(zip(pairs, differences_in_words(list(pairs.values()), 100), strict=True))
    rows = []
    for entry in entries:
        family, cell = entry
        facts = summary(cell.first.rows)
        names = ("test_accuracy", "client_accuracy_mean", "client_accuracy_worst")
        scores = [summarise(entry.values(name)).text(100) for name in names]
        if cell.name == "centralised":
            scores[1:] = "-", "-"
        row = [cell.name, family, f"{cell.learning_rate:g}", str(len(cell.runs)), *scores]
        row += [texts.get(cell.name, "-"), f"{facts['trained']:,}"]
        rows.append([*row, *(f"{facts[f'bytes_{way}'] / 1e6:.1f}" for way in ("up", "down"))])
    header = ["algorithm", "kind", "rate", "seeds", "test %", "clients' own %", "worst client %"]
    header += [f"outcome − {BASELINE}", "trained", "MB up", "MB down"]
    return TextTable(
        "Every algorithm on the same clients",
        header,
        rows,
        [
            "Accuracies in % after the last round, mean ± standard deviation over seeds. test: the"
            " global model on the global test set; where there are personal models only, the mean"
            " of three of these. clients' own: the mean over clients of each client's model on"
            " its own held-out documents; worst client: the lowest of these.",
            "Outcome: clients' own for the kind personal, test for the others. Its difference to"
            " FedAvg is in points, paired by seed, with the 95 % t interval; p by a paired t test,"
            " with Holm's correction over all differences of this table.",
            "Each method has two rates; seed 0 alone chose among them, by clients' own"
            " validation documents for the kind personal, by global ones for the others.",
            *notes,
        ],
    )


def figure(entries: Sequence[Entry], stem: Path) -> None:
    """Draws differences to FedAvg with their t intervals, a panel for each family.

    Methods without an interval are left out.
    """
    known = {name: paired(*pair) for name, pair in differences(entries).items()}
    found = {name: one for name, one in known.items() if one.high is not None}
    panels = {
        family: {name: found[name] for name in names if name in found}
        for family, names in FAMILIES.items()
    }
    panels = {family: shown for family, shown in panels.items() if shown}
    if not panels:
        return
    data: list[dict[str, Any]] = []
    with style():
        size = (4.2 * len(panels), 1.2 + 0.28 * max(map(len, panels.values())))
        fig, axes = subplots(1, len(panels), size=size, squeeze=False)
        for ax, (family, shown) in zip(axes[0], panels.items(), strict=True):
            means = [100 * (one.mean or 0.0) for one in shown.values()]
            ends = [100 * (one.high or 0.0) for one in shown.values()]
            margins = [end - mean for end, mean in zip(ends, means, strict=True)]
            rows = range(len(shown))
            ax.errorbar(means, rows, xerr=margins, fmt="o", capsize=3)
            ax.axvline(0, color="black", linewidth=0.8)
            ax.set_yticks(rows, list(shown))
            ax.set_ylim(len(shown) - 0.5, -0.5)
            on = "clients' own documents" if family == "personal" else "global test set"
            ax.set(title=family, xlabel=f"Points above FedAvg,\n{on}")
            data += [
                {"family": family, "method": name, "n": one.n, "points": mean, "margin": margin}
                for (name, one), mean, margin in zip(shown.items(), means, margins, strict=True)
            ]
    save(fig, stem, data)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs what is not finished, then writes the table, the figure and the numbers of every run."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("words", nargs="*", metavar="key=value")
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--results", type=Path, required=True, help="folder of the files")
    parser.add_argument("--only", action="append", default=[], metavar="METHOD")
    parser.add_argument("--tables", action="store_true", help="only write the files")
    a = parser.parse_args(arguments)
    if not a.tables:
        run(CONFIG, a.out / "choice", a.only, a.words)
        chosen = chosen_rates(read_study(a.out / "choice"))
        write_config(chosen, path := a.out / "seeds.toml")
        run(path, a.out / "seeds", a.only or list(chosen), a.words)
    entries, rows, notes = read(a.out, a.only)
    made = table(entries, notes)
    made.write(a.results / "algorithms")
    replace_file(a.results / "runs.csv", table_csv(rows).encode())
    figure(entries, a.results / "differences")
    print(made.markdown())


if __name__ == "__main__":
    main()
