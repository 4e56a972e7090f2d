"""The command ``demo``: it trains the runs of ``demo.toml``, and says what they show."""

import argparse
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

from fedjax_peft.cli import running
from fedjax_peft.report.comparison import compare
from fedjax_peft.report.page import write_report
from fedjax_peft.report.records import RunRecord
from fedjax_peft.report.study import make_study
from fedjax_peft.report.wording import listing
from fedjax_peft.simulation.storage.record import has_begun
from fedjax_peft.simulation.summaries import summary
from fedjax_peft.support import display

_TOGETHER = ("fedavg", "fra", "sign", "full")
"""The runs of honest clients that train together, in ``demo.toml``."""


def demo(options: argparse.Namespace) -> None:
    """Runs the demo's config, and prints what it shows and the next steps."""
    out = options.out or Path("runs/demo")
    if not options.overwrite and any(map(has_begun, out.glob("*"))):
        options.resume = True  # finished runs stay, and an interrupted one goes on
    config = Path(__file__).with_name("demo.toml")
    records = running.run_file(config, options, default_out=out)
    if options.dry_run:
        return
    page = write_report(records, out)
    print(f"\n{textwrap.fill(in_words(records), 88, break_on_hyphens=False)}")
    print(f"\nCurves and details: {page}\n")
    print(*next_steps(records[0].path, out), sep="\n")


def next_steps(run: Path, out: Path) -> list[str]:
    """Returns commands that work as they stand, each below a line that says what it does."""
    program, again = display.program(), display.argument(out.with_name(f"{out.name}-seed1"))
    both = f"{program} report {display.argument(out)} {again} --out runs"
    return [
        "Next, use the trained adapter:",
        f"  {program} export {display.argument(run)} --format peft --out adapter",
        "Or train on a table of texts; --data FILE names yours:",
        f"  {program} init mine && {program} run mine/config.toml --out runs/mine",
        "Or change a setting and compare:",
        f"  {program} demo seed=1 --out {again} && {both}",
    ]


def in_words(records: Sequence[RunRecord]) -> str:
    """Returns what the runs show, computed from their rows; runs that are missing are left out."""
    found = {run.path.name: run for run in records}
    facts = {name: summary(run.rows) for name, run in found.items()}
    score = {n: 100 * x for n, one in facts.items() if (x := one["final_score"]) is not None}
    sent = {name: one["bytes_up"] for name, one in facts.items() if one["bytes_up"]}
    said = []
    if {"local", "fedavg"} <= score.keys():
        said.append(
            f"Alone, a client reaches {score['local']:.0f} % on average; together they reach"
            f" {score['fedavg']:.0f} % ({found['fedavg'].name})."
        )
    if {"sign", "fedavg"} <= sent.keys():
        said.append(f"Sending only signs cuts the upload {sent['fedavg'] / sent['sign']:.0f}-fold.")
    if {"full", "fedavg"} <= sent.keys():
        said.append(f"Full fine-tuning sends {sent['full'] / sent['fedavg']:.0f} times as much.")
    said += _separation([found[name] for name in _TOGETHER if name in score], score)
    if {"attacked", "defended"} <= score.keys():
        said.append(
            f"With {100 * found['attacked'].config['attack']['share']:.0f} % hostile clients, the"
            f" mean ends at {score['attacked']:.0f} % and the geometric median at"
            f" {score['defended']:.0f} %."
        )
    return " ".join(said)


def _separation(runs: Sequence[RunRecord], score: Mapping[str, float]) -> list[str]:
    """Returns a sentence on which of the scores can be told apart, as the report judges it."""
    judged = compare(make_study(runs)).judged if len(runs) > 1 else None
    if judged is None:
        return []
    numbers = listing([f"{score[run.path.name]:.1f}" for run in runs])
    tested = summary(runs[0].rows)["test_examples"]
    on = "On this test set" if tested is None else f"On {tested:.0f} test texts"
    level, best = judged.ranking.level, judged.ranking.groups[0].name
    below = [one.name for one in judged.ranking.comparisons if one.separated]
    if not below:
        which = f"the accuracies of those that train together ({numbers} %)"
        return [f"{on}, {which} cannot be told apart."]
    others = listing([group.name for group in level[1:]])
    rest = f"; {others} cannot be told apart from it" if others else ""
    return [f"{on}, {best} is better than {listing(below)}{rest} ({numbers} %)."]
