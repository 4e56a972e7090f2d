"""The contract of a tracker, and what trackers share."""

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from fedjax_peft.contracts.part import Call, tagged
from fedjax_peft.simulation.rows import Row, number
from fedjax_peft.simulation.score_names import Score
from fedjax_peft.support.errors import InputError
from fedjax_peft.support.libraries import install
from fedjax_peft.support.secrets import HIDDEN

_Made = TypeVar("_Made")

_MACHINE = ("steps", "lanes", "slot_utilisation", "padded_utilisation", "padding_share")
_GROUPS = {
    **dict.fromkeys(("bytes_up", "bytes_down"), "comm"),
    "simulated_seconds": "time",
    **dict.fromkeys(_MACHINE, "engine"),
    **dict.fromkeys(("epsilon", "delta"), "privacy"),
}


@dataclass(kw_only=True)
class TrackedRun:
    """What a tracker knows of the run whose rows it takes."""

    id: str
    """Names the run in every service. A resumed run has the id that it had before."""
    name: str
    """The run's name: that of its config, or of its directory."""
    group: str | None
    """The name of the sweep's directory, if the run is a point of a sweep that has one."""
    out: Path | None
    """The run directory."""
    config: Mapping[str, Any]
    """The settings of the run's ``config.toml``."""
    ended: bool = False
    """Whether the run has come to its end without an error; known when trackers are closed."""
    _made: list[Any] = field(default_factory=list, repr=False)
    _close: list[Callable[[], object]] = field(default_factory=list, repr=False)

    def path(self, name: str) -> Path:
        """Returns a path in the run directory, or in the working directory without one."""
        return (self.out or Path()) / name

    def opened(self, make: Callable[[], _Made], close: Callable[[_Made], object]) -> _Made:
        """Returns what a tracker opens once for a run, such as a file or a connection.

        Args:
          make: called at the first row.
          close: called with what ``make`` has returned, after the last row.
        """
        if not self._made:
            made = make()
            self._made.append(made)
            self._close.append(lambda: close(made))
        return self._made[0]

    def close(self) -> None:
        """Closes what :meth:`opened` has made."""
        while self._close:
            self._close.pop()()


class Tracker(Protocol):
    """Takes the rows of a run, one after the other. ``lambda row, run: ...`` is a tracker.

    It is called in a thread of its own, so a run does not wait for it. If it raises an exception,
    it gets no more rows: the run goes on, and warns once. ``fedjax-peft sync`` calls it again for
    the rows that it has not taken. After a crash, a row that it has taken may come again.
    """

    def __call__(self, row: Row, run: TrackedRun, /) -> None:
        """Takes a row. A row that has gained fields comes again, with these fields only.

        A resumed run can take back scores, which its former last row had because the run ended
        there. This row comes again, with None in their place.
        """


def needs(package: str, extra: str) -> None:
    """Raises InputError if a package that a tracker needs is missing."""
    if importlib.util.find_spec(package) is None:
        raise InputError(f"The tracker {extra} needs the package {package}: {install(extra)}.")


def tracker_without(name: str, options: dict[str, Any], unknown: str) -> Tracker:
    """Returns a tracker that takes no row, because an option was recorded without its secret."""

    def take(row: Row, run: TrackedRun, /) -> None:
        raise InputError(
            f"A run records no passwords and tokens, so its {unknown!r} has {HIDDEN} in their"
            f" place. Give it again: trackers.{name}.{unknown}=VALUE."
        )

    made: Tracker = tagged(take, Call(f"trackers.{name}", tuple(options.items())))
    return made


def check_tracker(given: Any) -> None:
    """Raises InputError for what is not a tracker."""
    if hasattr(given, "part"):
        raise InputError(
            f"fp.trackers.{given.__name__} makes a tracker: write fp.trackers.{given.__name__}()."
        )
    if not callable(given):
        raise InputError(
            f"A tracker is a function with the arguments (row, run), not {type(given).__name__}."
        )


def scalars(row: Row) -> dict[str, float]:
    """Returns tag -> value of the finite numbers of a row, without those of single layers."""
    times = {f"time/{name}": value for name, value in row.get("time", {}).items()}
    found = {tag(name): value for name, value in row.items() if name != "round"} | times
    return {name: x for name in found if (x := number(found, name)) is not None}


def taken_back(row: Row) -> list[str]:
    """Returns the fields of a row that are None: the number is not finite, or is taken back."""
    return [name for name, value in row.items() if value is None]


def tag(field: str) -> str:
    """Returns the tag of a row's field, such as ``test/accuracy`` or ``comm/bytes_up``.

    Fields in no other group, which mostly describe the update, are in the group ``update``, such
    as ``update/update_norm`` and ``update/aggregation_error``.
    """
    score = Score.read(field)
    if score is not None and not score.tuned and score.evaluation != "local":
        return f"{score.evaluation}/{score._replace(evaluation='').name}"
    return f"{_GROUPS.get(field, 'update')}/{field}"
