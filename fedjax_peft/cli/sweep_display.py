"""The display of a sweep on the command line."""

from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from fedjax_peft.simulation.points import Job, PointDone
from fedjax_peft.simulation.progress import duration
from fedjax_peft.support import display


class SweepDisplay:
    """A line for every point that has ended; in a terminal also a bar with the time left."""

    def __init__(self, points: int, metric: str | None, *, quiet: bool):
        self._metric, self._quiet = metric, quiet
        self._console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
        columns = (BarColumn(bar_width=16), MofNCompleteColumn(), TimeElapsedColumn())
        text = TextColumn("{task.description}", markup=False)
        self._bar = Progress(*columns, text, console=self._console, transient=True)
        self._task = self._bar.add_task("", total=points)
        self._left = ""

    def __enter__(self) -> Self:
        if self._console.is_terminal and not self._quiet:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def start(self, index: int, job: Job) -> None:
        """Shows the point that starts."""
        text = display.one_line(f"{job.name}{self._left}")
        self._bar.update(self._task, completed=index, description=text)

    def point(self, done: PointDone) -> None:
        """Prints the result of a point."""
        parts = [f"[{done.place}/{done.total}] {done.job.name}"]
        if done.error is not None:
            parts.append(f"failed: {done.error}")
        elif done.seconds is None:
            parts.append("had finished before")
        if done.value is not None:
            parts.append(f"{self._metric} {done.value:.4g}")
        if done.best is not None and done.best[0] != done.job.name:
            parts.append(f"best {done.best[1]:.4g} ({done.best[0]})")
        if done.seconds is not None:
            parts.append(duration(done.seconds))
        if done.seconds_left:
            self._left = f", {duration(done.seconds_left)} left"
            parts.append(self._left[2:])
        self._bar.update(self._task, completed=done.place)
        if not self._quiet or done.error is not None:
            self._console.print("  ".join(map(display.one_line, parts)))
