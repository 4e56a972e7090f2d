"""Compares the methods of a sweep at their chosen settings, by two outcomes: a table.

    python experiments/chosen.py runs/federa/small/long --out experiments/federa/results/long

The outcomes are the test metric of the last round, and its mean over the evaluations after the
start. Each method has the setting with the best validation metric, unless it has only one. Seeds
that chose nothing can be added with ``--fresh FOLDER``, a sweep over the chosen settings.
"""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import paper
from significance import differences_in_words

from fedjax_peft.report.separation import binomial
from fedjax_peft.report.study import At, Cell, Study, read_study, summarise
from fedjax_peft.report.table_files import TextTable

OUTCOMES: dict[At, str] = {"final": "last round", "mean": "mean of evaluations"}
FEW_SEEDS = (
    "An interval of three seeds or fewer is wide: half of it is 4.3 standard errors with three"
    " seeds (t with 2 degrees of freedom), 12.7 with two."
)
"""The note of a table with such an interval."""


def cells(study: Study, fresh: Study | None) -> dict[str, Cell]:
    """Returns method -> its chosen cell, with the runs of the same setting in ``fresh``."""
    chosen = study.chosen(study.choose_by)
    for name, cell in chosen.items():
        for other in [] if fresh is None else fresh.methods.get(name, []):
            if other.learning_rate == cell.learning_rate:
                chosen[name] = cell._replace(runs={**cell.runs, **other.runs})
    return chosen


def test_errors(found: Sequence[Cell], metric: str) -> Iterator[str]:
    """Yields the note on the chance of the test examples, if the runs record their number."""
    counts = {row.get("test_examples") for cell in found for row in cell.first.rows[-1:]}
    if metric.startswith("test_") and len(counts) == 1 and (n := counts.pop()):
        means = [summarise(cell.values(metric)).mean for cell in found]
        worst = max(math.sqrt(binomial(mean, n)) for mean in means if mean is not None)
        yield test_error(n, worst)


def test_error(examples: int, error: float) -> str:
    """Returns the note on the standard error of a share of test examples."""
    return (
        f"A value of the last round on {examples:,} test examples has a standard error of at most"
        f" {100 * error:.1f} points over samples of these examples; ± and the intervals do not"
        " contain it. All methods and seeds share the examples, so it cancels in part in a"
        " difference."
    )


def table(title: str, study: Study, fresh: Study | None, metric: str, baseline: str) -> TextTable:
    """Returns a row for each method: both outcomes, and their differences to a known baseline."""
    found = cells(study, fresh)
    values = {(name, at): found[name].values(metric, at) for name in found for at in OUTCOMES}
    compared = [name for name in found if baseline in found and name != baseline]
    keys = [(name, at) for name in compared for at in OUTCOMES]
    pairs = [(values[name, at], values[baseline, at]) for name, at in keys]
    texts = dict(zip(keys, differences_in_words(pairs, 100), strict=True))
    rows = []
    for name, cell in found.items():
        row = [name, f"{cell.learning_rate:g}", str(len(cell.runs))]
        row += [summarise(values[name, at]).text(100) for at in OUTCOMES]
        row += [texts.get((name, at), "-") for at in OUTCOMES] if compared else []
        rows.append(row)
    header = ["method", "learning rate", "seeds", *OUTCOMES.values()]
    header += [f"{words} − {baseline}" for words in OUTCOMES.values()] if compared else []
    notes = [f"{metric} in %, mean ± standard deviation over seeds."]
    if compared:
        notes[0] += (
            " Differences are in points, paired by seed, with the 95 % t interval; p by a paired t"
            " test, with Holm's correction over all differences of this table."
        )
    if any(len(several) > 1 for several in study.methods.values()):
        notes.append(f"The setting was chosen by {study.choose_by}, its mean over seeds.")
    notes += test_errors([*found.values()], metric)
    if any(2 <= len(a.keys() & b.keys()) <= 3 for a, b in pairs):
        notes.append(FEW_SEEDS)
    return TextTable(title, header, rows, [*notes, *study.notes])


def main(words: Sequence[str] | None = None) -> None:
    """Writes the table as Markdown, CSV and LaTeX."""
    parser = paper.arguments(__doc__, "runs")
    parser.add_argument("--fresh", type=Path, help="folder of a sweep with other seeds")
    parser.add_argument("--metric", default="test_accuracy", help="a field of the rows")
    parser.add_argument("--baseline", help="the sweep's own if it is left out")
    parser.add_argument("--title", default="Methods at their chosen settings")
    a = parser.parse_args(words)
    study = read_study(a.runs)
    fresh = None if a.fresh is None else read_study(a.fresh)
    baseline = a.baseline or study.baseline or ""
    paper.write(table(a.title, study, fresh, a.metric, baseline), a.out)


if __name__ == "__main__":
    main()
