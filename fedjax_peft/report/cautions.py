"""What a reader must know before comparing runs."""

import math
import re
from collections.abc import Iterator, Sequence

from fedjax_peft.report.records import SEED, RunRecord
from fedjax_peft.report.settings import compare_settings, printed
from fedjax_peft.report.wording import is_share, numbered, word
from fedjax_peft.simulation.summaries import summary
from fedjax_peft.support.display import counted

_TEST_SET = re.compile(r"(^|\.|_)(test|dataset)($|\.|_)|^data(\.(name|path|source|split|subset))?$")
_UPLOADS = {
    "dropped": "not finite and excluded",
    "failed": "missing because clients dropped out",
    "late": "too late and excluded",
    "partial": "of partial work, because of the deadline",
}
"""Field of a row -> why the uploads of the clients in it were not aggregated, or incomplete."""
_ROUNDS = re.compile(r"(^|\.)rounds$")
_SMALL = 1000
"""A test set of fewer examples is called coarse: its accuracy has an error above 1.5 points."""


def cautions(runs: Sequence[RunRecord], *, over_seeds: bool = False) -> list[str]:
    """Returns facts about single runs, and differences of their lengths, seeds and test sets.

    Args:
      over_seeds: whether the runs differ in seeds on purpose.
    """
    out = [f"{run.name}: {fact}" for run in runs for fact in _of_run(run)]
    lengths = sorted({run.rows[-1]["round"] for run in runs if run.rows})
    if len(lengths) > 1:
        out.append(f"The runs have different lengths: {lengths[0]} to {lengths[-1]} rounds.")
    for key, values in compare_settings([run.config for run in runs]).differing:
        difference = f"{key} is {', '.join(dict.fromkeys(values))}"
        if SEED.search(key):
            if not over_seeds:
                out.append(
                    f"The runs have different seeds, so differences are partly chance:"
                    f" {difference}."
                )
        elif _TEST_SET.search(key):
            out.append(f"The runs may have different test sets: {difference}.")
    return out


def coarse(runs: Sequence[RunRecord]) -> str:
    """Returns how coarse a fraction of the smallest test set is; empty if that is not small."""
    facts = [summary(run.rows) for run in runs if run.rows]
    sizes = [fact["test_examples"] for fact in facts if is_share(fact["headline"])]
    n = min((int(size) for size in sizes if size), default=_SMALL)
    if n >= _SMALL:
        return ""
    return (
        f"The test set has {counted(n, 'example')}: one of them is {100 / n:.2g} points of"
        f" {word(facts[0]['headline'])}, whose standard error is up to"
        f" {50 / math.sqrt(n):.1f} points."
    )


def _of_run(run: RunRecord) -> Iterator[str]:
    for field, reason in _UPLOADS.items():
        found = [
            (row["round"], client)
            for row in run.rows
            if isinstance(row.get(field), list)
            for client in row[field]
        ]
        if found:
            rounds, clients = (set(column) for column in zip(*found, strict=True))
            yield (
                f"{counted(len(found), 'upload')} {reason}:"
                f" {numbered('client', clients)} in {numbered('round', rounds)}."
            )
    if empty := [row["round"] for row in run.rows if row.get("clients") == []]:
        yield f"no client took part in {numbered('round', empty)}."
    for key in dict.fromkeys(key for row in run.rows for key in row):
        if nulls := [row["round"] for row in run.rows if key in row and row[key] is None]:
            yield f"{key} was not finite in {numbered('round', nulls)}."
    planned = {value for key, value in printed(run.config).items() if _ROUNDS.search(key)}
    done = str(run.rows[-1]["round"] if run.rows else 0)
    if len(planned) == 1 and done not in planned:
        yield f"unfinished or stopped early, after {done} of {planned.pop()} rounds."
