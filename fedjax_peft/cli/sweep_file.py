"""``sweep.toml``: the commands that asked for the points of a sweep, so that all can be resumed."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import tomli_w

from fedjax_peft.config import sweeps
from fedjax_peft.report.study import SWEEP, read_sweep
from fedjax_peft.simulation.storage.lock import NAME, RunLock
from fedjax_peft.support.errors import InputError
from fedjax_peft.support.files import replace_file
from fedjax_peft.support.secrets import hide, without_secrets

Call = dict[str, Any]
"""A command: everything that plans its points again."""
_KEYS = ("title", "overrides", "only", "early_stop", "config")
_WAIT = 60.0
"""Seconds to wait for another worker that writes the file."""


def plan(calls: Sequence[Call]) -> sweeps.Sweep:
    """Returns the points of some commands, each with the name that its run has in tables."""
    planned = []
    for call in calls:
        own = sweeps.plan({**call["config"]}, call["overrides"], call["only"])
        named = [(p, p.config["name"] or p.method or call["title"]) for p in own.points]
        points = [p._replace(config={**p.config, "name": name}) for p, name in named]
        planned.append(own._replace(points=points))
    return sweeps.together(planned)


def read(out: Path) -> list[Call]:
    """Returns the commands of a sweep's directory, the last one last; [] of other directories.

    Raises:
      InputError: the file is damaged.
    """
    table = read_sweep(out / SWEEP)
    if "config" not in table:
        return []
    try:
        calls = [{key: one[key] for key in _KEYS} for one in (*table.get("earlier", ()), table)]
    except (KeyError, TypeError):
        calls = [{"config": None}]
    if not all(isinstance(call["config"], dict) for call in calls):
        raise InputError(
            f"{out / SWEEP} is damaged. Give the sweep's command again, with --resume."
        )
    return calls


def without(calls: Iterable[Call], methods: Iterable[str]) -> list[Call]:
    """Returns the commands for other methods than these."""
    removed = set(methods)
    left = [(c, [p.method for p in plan([c]).points if p.method not in removed]) for c in calls]
    return [{**call, "only": list(dict.fromkeys(names))} for call, names in left if names]


def holds_something_else(out: Path) -> bool:
    """Returns whether a directory exists and is not that of a sweep, nor empty."""
    if not out.exists():
        return False
    names = {path.name for path in out.iterdir()} if out.is_dir() else {""}
    return SWEEP not in names and any(n != NAME and not n.startswith(".") for n in names)


def add(out: Path, calls: Sequence[Call], *, removed: Sequence[str] | None = ()) -> None:
    """Adds commands to the file of a directory, which is made.

    An earlier command stays if it has points that no later one has.

    Args:
      removed: methods that earlier commands are not for any more; None: nothing of them stays.
    """
    out.mkdir(parents=True, exist_ok=True)
    with RunLock.take(out, wait=_WAIT):  # workers of a study begin at the same time
        before = [] if removed is None else without(read(out), removed)
        keys = [] if removed is None else read_sweep(out / SWEEP)["keys"]
        needed, known = list[Call](), set[str]()
        for call in reversed([*before, *calls]):
            own = {point.folder for point in plan([call]).points}
            if not own <= known:
                needed.insert(0, call)
                known |= own
        planned = plan(needed)
        *earlier, last = map(_recorded, needed)
        study = {"choose_by": planned.choose_by, "baseline": planned.baseline}
        study = {key: value for key, value in study.items() if value is not None}
        every = list(dict.fromkeys([*keys, *planned.keys]))
        table = {**study, "keys": every, **last, **({"earlier": earlier} if earlier else {})}
        replace_file(out / SWEEP, tomli_w.dumps(table).encode())


def _recorded(call: Call) -> dict[str, Any]:
    """Returns a command without secrets."""
    texts = [hide(text) if "trackers" in text else text for text in call["overrides"]]
    return without_secrets({**call, "overrides": texts})
