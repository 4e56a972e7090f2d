"""What the command line shows of a run: a banner, and a line for each round."""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

from rich.filesize import decimal

from fedjax_peft.simulation.estimate import Estimate
from fedjax_peft.simulation.progress import Phase, RunDisplay
from fedjax_peft.simulation.rows import Row, headline, is_personal, read_metrics
from fedjax_peft.simulation.score_names import usual_scores
from fedjax_peft.support.display import counted, one_line


@contextmanager
def screen(
    title: str, description: str, rounds: int, metrics: Path, *, verbosity: int = 0
) -> Iterator[RunDisplay | None]:
    """Yields the display of a run, which is closed at the end of the block; None for none.

    Args:
      description: the algorithm, model and data in a few words, for the banner.
      metrics: the run's ``metrics.jsonl``, which has the rows before a resume.
      verbosity: -1 shows nothing, 0 is the default, 1 shows every phase and its duration.
    """
    if verbosity < 0:
        yield None
        return
    verbose = verbosity > 0
    with closing(
        RunDisplay(
            title,
            rounds,
            sys.stdout,
            banner=partial(banner, title, description),
            text=_row_text(metrics, timed=verbose),
            verbose=verbose,
        )
    ) as display:
        yield display


class DryRun(Exception):
    """Raised to end a run before its first program is compiled."""


def dry_run(title: str, description: str, show: Callable[[str], None]) -> Callable[[Phase], None]:
    """Returns an ``on_phase`` that shows the banner and then raises :class:`DryRun`."""

    def on_phase(phase: Phase) -> None:
        if phase.name == "starting":
            show(banner(title, description, phase))
            raise DryRun

    return on_phase


def banner(title: str, description: str, phase: Phase) -> str:
    """Returns a few lines on a run and the cost of its first round.

    Args:
      phase: the phase ``starting`` of the run.
    """
    details = phase.details
    costs: Estimate = details["estimate"]
    fresh = details.get("fresh")
    trained = {k: n for k, n in details["parameters"].items() if k != "frozen" and n}
    full = not details["parameters"].get("frozen")  # then what adapters would be is all weights
    words = {kind: "backbone" if full and kind == "adapter" else kind for kind in trained}
    several = f" ({' + '.join(f'{n:,} {words[kind]}' for kind, n in trained.items())})"
    evaluated = [f"{counted(n, 'example')} ({name})" for name, n in details["evaluations"].items()]
    every, most = details["eval_every"], details["most_examples"]
    large = details["batch_size"] > most
    memory = {k: n for k, n in costs.memory.items() if n}
    stored = [
        f"on the {place}, {decimal(n)} when all have trained" for place, n in costs.stored.items()
    ]
    lines = {
        "clients": f"{details['clients']:,}, of which {details['clients_per_round']:,} per round;"
        f" {counted(details['train_examples'], 'training example')}",
        "parameters": f"{sum(trained.values()):,} trained{several if len(trained) > 1 else ''},"
        f" {details['parameters'].get('frozen', 0):,} frozen",
        **({"new values": f"{', '.join(fresh)}: drawn at random, not loaded"} if fresh else {}),
        "first round": f"{counted(costs.steps, 'local step')} of"
        f" {counted(costs.clients, 'client')}, {decimal(costs.bytes_up)} up,"
        f" {decimal(costs.bytes_down)} down",
        **({"batch": f"{counted(most, 'example')} at most: no client has more"} if large else {}),
        "evaluation": f"{', '.join(evaluated)} before round 1 and after"
        f" {'every round' if every == 1 else f'every {every} rounds'}"
        if evaluated
        else "none",
        "memory": f"{', '.join(f'{decimal(n)} {k}' for k, n in memory.items())};"
        " a training step needs more, which `fedjax-peft plan` counts",
        **({"client state": stored[0]} if stored else {}),
        **({"privacy": details["privacy"]} if details.get("privacy") else {}),
        "device": f"{details['device']}, computing in {details['dtype']}",
        "out": str(details["out"]) if details["out"] is not None else "(nothing is written)",
    }
    if details["resumed_from"] is not None:
        lines["resumed"] = f"after round {details['resumed_from']} of {phase.rounds}"
    width = max(map(len, lines))
    body = (f"  {name:{width}}  {one_line(text)}" for name, text in lines.items())
    return "\n".join(
        [f"{one_line(title)}: {one_line(description)}, {counted(phase.rounds, 'round')}", *body]
    )


def _row_text(metrics: Path, *, timed: bool) -> Callable[[Row], str]:
    """Returns a function from a row to its line, with the bytes sent since the start of the run."""
    sent: int | None = None

    def total(row: Row) -> int:
        nonlocal sent
        if sent is None:
            earlier = read_metrics(metrics) if metrics.exists() else []
            sent = sum(_bytes(other) for other in earlier if other["round"] < row["round"])
        sent += _bytes(row)
        return sent

    def text(row: Row) -> str:
        parts = []
        if row.get("train_loss") is not None:
            parts.append(f"loss {row['train_loss']:.3f}")
        test, own = usual_scores(name := headline([row]))
        of_test = f"personal {name}" if is_personal(row, test) else name
        chosen = dict.fromkeys(usual_scores(name, "validation"), "validation")
        for labels in ({test: of_test, own: f"clients' {name}"}, chosen):
            known = [key for key in labels if row.get(key) is not None]
            parts += [f"{labels[key]} {row[key]:.3f}" for key in known[:1]]
        parts.append(f"{total(row) / 1e6:.1f} MB sent")
        if row.get("dropped"):
            parts.append(f"dropped {row['dropped']}")
        if timed:
            names = {"compile_s": "compiling", "train_s": "training", "eval_s": "evaluating"}
            spent: Mapping[str, float] = row.get("time", {})
            parts += [f"{what} {spent[key]:.1f} s" for key, what in names.items() if key in spent]
        return "  ".join(parts)

    return text


def _bytes(row: Row) -> int:
    return row.get("bytes_up", 0) + row.get("bytes_down", 0)
