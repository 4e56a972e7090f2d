"""The files of a run's directory, read for reports."""

import itertools
import json
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedjax_peft.contracts.part import unrecorded
from fedjax_peft.simulation.rows import Row, has_ended, read_metrics
from fedjax_peft.simulation.storage.fingerprint import counting
from fedjax_peft.support.display import one_line
from fedjax_peft.support.errors import InputError, nearest
from fedjax_peft.support.files import read_text
from fedjax_peft.support.secrets import without_secrets
from fedjax_peft.support.toml import read_toml

SEED = re.compile(r"(^|\.|_)seed$")
"""Config keys of random seeds."""


class RunRecord(NamedTuple):
    """The recorded files of a run."""

    name: str
    """The config's ``name`` on one line; the name of the directory if the config has none."""
    path: Path
    config: dict[str, Any]
    environment: dict[str, Any]
    rows: list[Row]

    @property
    def finished(self) -> bool:
        """Whether the run has done all its rounds, or was stopped by a rule in its last row."""
        planned = self.config.get("rounds")
        return has_ended(self.rows, planned if isinstance(planned, int) else 0)


def load_run(path: str | os.PathLike[str]) -> RunRecord:
    """Returns the record of a run's directory; the run can be unfinished.

    Raises:
        InputError: the directory is not that of a run, or one of its files is damaged.
    """
    path = Path(path)
    missing = [name for name in ("config.toml", "metrics.jsonl") if not (path / name).is_file()]
    if missing:
        raise InputError(
            f"{path} is not a run: it has no {' and no '.join(missing)}. {_advice(path)}"
        )
    # Runs can have recorded secrets, and epochs that do not count.
    config = counting(without_secrets(load_table(path / "config.toml")))
    return RunRecord(
        name=one_line(str(config.get("name") or path.resolve().name)),
        path=path,
        config=config,
        environment=load_table(path / "environment.json", lambda path: json.loads(read_text(path))),
        rows=read_metrics(path / "metrics.jsonl"),
    )


def is_whole(config: Mapping[str, Any]) -> bool:
    """Returns whether a config says everything of its run, so that it runs again."""
    return "model" in config and not unrecorded(config)


def chain_of(run: RunRecord) -> tuple[str, ...]:
    """Returns the names of a run's upload transforms, in the order in which they are applied."""
    return tuple(run.config.get("transforms", ()))


def find_runs(path: str | os.PathLike[str]) -> list[Path]:
    """Returns the directories of runs at or below a path, at any depth, sorted."""
    return [one for one in _below(Path(path)) if _is_run(one)]


def unstarted(path: str | os.PathLike[str]) -> list[Path]:
    """Returns the directories of runs at or below a path that have no rows yet, sorted."""
    return [one for one in _below(Path(path)) if not _is_run(one)]


def _below(path: Path) -> list[Path]:
    """Returns the directories of runs at or below a path, with rows or without, sorted.

    Directories inside them, such as checkpoints, are not searched. A ``config.toml`` alone is that
    of a user's project, which may contain runs, or that of an export.
    """
    found = []
    for folder, inside, files in os.walk(path):
        if "config.toml" in files and not {"environment.json", "metrics.jsonl"}.isdisjoint(files):
            found.append(Path(folder))
            inside.clear()
    return sorted(found)


def distinct(runs: Sequence[RunRecord]) -> list[RunRecord]:
    """Returns the runs with different names.

    Equal names are extended by the parts of the paths that differ, or else by a number, as for the
    same run given twice.
    """
    paths = [run.path.resolve() for run in runs]
    names: list[str] = []
    for run, path in zip(runs, paths, strict=True):
        same = {p for other, p in zip(runs, paths, strict=True) if other.name == run.name}
        part = os.path.relpath(path, os.path.commonpath(same))
        if len({p.name for p in same}) == 1:
            part = os.path.dirname(part) or part  # the last component is common to all of them
        name = run.name if part == "." else f"{run.name} ({one_line(part)})"
        names.append(unique(name, names))
    return [run._replace(name=name) for run, name in zip(runs, names, strict=True)]


def unique(name: str, names: Collection[str]) -> str:
    """Returns the name, or ``name (2)`` and so on if it is among ``names``."""
    candidates = itertools.chain([name], (f"{name} ({i})" for i in itertools.count(2)))
    return next(one for one in candidates if one not in names)


def load_table(path: Path, read: Callable[[Path], Any] = read_toml) -> dict[str, Any]:
    """Returns the table in a file; an empty one if the file does not exist.

    Raises:
        InputError: the file is damaged.
    """
    if not path.is_file():
        return {}
    try:
        content = read(path)
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path} cannot be read: {error}.") from error
    if not isinstance(content, dict):
        raise InputError(f"{path} cannot be read: it must contain names and values.")
    return content


def _advice(path: Path) -> str:
    """Returns advice for a path that is not a run."""
    if path.is_file() and _is_run(path.parent):
        return f"Give the directory: {path.parent}."
    if inside := _runs_in(path):
        more = f" and {len(inside) - 3} more" if len(inside) > 3 else ""
        return f"It contains runs: {', '.join(map(str, inside[:3]))}{more}."
    if not path.exists() and (beside := _runs_in(path.parent)):
        return nearest(path.name, [run.name for run in beside])
    return "A run is a directory that `fedjax-peft run` has made."


def _is_run(path: Path) -> bool:
    return (path / "config.toml").is_file() and (path / "metrics.jsonl").is_file()


def _runs_in(path: Path) -> list[Path]:
    return sorted(run for run in path.iterdir() if _is_run(run)) if path.is_dir() else []
