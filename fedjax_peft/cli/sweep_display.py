"""The display of a sweep on the command line."""

import sys
from typing import Self

from fedjax_peft.simulation.points import Job, PointDone
from fedjax_peft.simulation.progress import Bar, duration
from fedjax_peft.support.display import one_line, redraws


class SweepDisplay:
    """A line for every point that has ended; in a terminal also a bar with the time left."""

    def __init__(self, points: int, metric: str | None, *, quiet: bool):
        self._metric, self._quiet, self._left = metric, quiet, ""
        shown = redraws(sys.stdout) and not quiet
        self._bar = Bar("sweep", points, sys.stdout) if shown else None
        self._error: str | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def start(self, index: int, job: Job) -> None:
        """Shows the point that starts."""
        if self._bar is not None:
            self._bar.show(one_line(f"{job.name}{self._left}"), index)

    def point(self, done: PointDone) -> None:
        """Prints the result of a point."""
        parts = [f"[{done.place}/{done.total}] {done.job.name}"]
        if done.error is not None:
            same = done.error == self._error
            parts.append("failed for the same reason" if same else f"failed: {done.error}")
            self._error = done.error
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
        if not self._quiet or done.error is not None:
            text = "  ".join(map(one_line, parts))
            if self._bar is None:
                print(text, flush=True)  # a log has it at once
            else:
                self._bar.print(text)
