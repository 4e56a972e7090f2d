"""Live progress of a run: a bar in a terminal, plain lines elsewhere."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from fedjax_peft.run.history import Row, read_metrics

__all__ = ["progress"]


@contextmanager
def progress(title: str, rounds: int, metrics: Path) -> Iterator[Callable[[Row], None]]:
    """Yields the function to call with every row; ``metrics`` has those before a resume."""
    console = Console()
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
        name = row.get("headline")
        for metric, whose in ((f"test_{name}", name), (f"client_{name}_mean", f"clients' {name}")):
            if row.get(metric) is not None:
                parts.append(f"{whose} {row[metric]:.3f}")
                break
        parts.append(f"{total(row) / 1e6:.1f} MB")
        if row.get("dropped"):
            parts.append(f"dropped {row['dropped']}")
        return "  ".join(parts)

    if not console.is_terminal:

        def line(row: Row) -> None:
            print(f"{title}  round {row['round']}/{rounds}  {text(row)}", flush=True)

        yield line
        return

    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("ETA"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[state]}"),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(title, total=rounds, state="compiling")

        def update(row: Row) -> None:
            bar.update(task, completed=row["round"], state=text(row))

        yield update


def _bytes(row: Row) -> int:
    return row.get("bytes_up", 0) + row.get("bytes_down", 0)
