"""A run on disk: config, environment, metrics, checkpoints."""

import contextlib
import json
import platform
import re
import shutil
import socket
import subprocess
import time
import warnings
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Self

import jax
import numpy as np
import safetensors.numpy
import tomli_w
from safetensors import SafetensorError, safe_open

from fedjax_peft.contracts import Params
from fedjax_peft.contracts.part import OWN, unrecorded
from fedjax_peft.engine.devices import distributed
from fedjax_peft.simulation.rows import Row, append_metrics, read_metrics, write_metrics
from fedjax_peft.simulation.storage import fingerprint, lock
from fedjax_peft.simulation.storage.checkpoint import Checkpoints
from fedjax_peft.simulation.storage.lock import RunLock
from fedjax_peft.simulation.storage.tracking import Tracking
from fedjax_peft.simulation.trackers.base import Tracker
from fedjax_peft.support.errors import InputError, users_level
from fedjax_peft.support.files import replace_file
from fedjax_peft.support.processor import processor
from fedjax_peft.support.secrets import without_secrets
from fedjax_peft.support.toml import read_toml

_VISIBLE = 30.0
"""Seconds until a file of one machine must be visible on the others."""
_PARAMS = "params.safetensors"
PROGRAMS = ("point", "values", "clients")
"""Keys of a recorded config that are none of a config: what a sweep's run, or a run of an earlier
version, says of itself."""
_PACKAGES = ("fedjax_peft", "jax", "jaxlib", "flax", "optax", "transformers", "numpy")


class Record:
    """Stores the rows of metrics in memory, and in the run directory if there is one.

    Of several processes only process 0 writes rows and files; the others have the same rows. All of
    them write checkpoints together.
    """

    def __init__(self, out: Path | None):
        self.rows: list[Row] = []
        self.out = out
        """The run directory; None if this process writes no files."""
        self.before: Mapping[str, Any] = {}
        """The config of a run that is resumed, as it was before; in process 0."""
        self.checkpoints: Checkpoints | None = None
        self._lock: RunLock | None = None
        self._tracking = Tracking(out, {})

    @classmethod
    def open(
        cls,
        out: str | Path | None,
        resume: bool,
        config: Mapping[str, Any],
        found: Mapping[str, Any],
        trackers: Sequence[Tracker] = (),
    ) -> "Record":
        """Opens a run directory; ``config`` and the fingerprint ``found`` are written to it.

        Raises:
          InputError: the directory holds a run, without ``resume``; it holds another run, with
            ``resume``; or another process runs in the directory.
        """
        if out is None:
            if resume:
                raise InputError("resume=True needs the run directory, out=...")
            record = cls(None)
            if distributed.is_writer():
                record._tracking = Tracking(None, config, trackers)
            return record
        out = Path(out)
        if not distributed.is_writer():
            record = cls(None)
            record._join(out)
            return record
        fits = out.is_dir() and (_is_run(out) or (resume and not (out / "config.toml").exists()))
        if out.exists() and not fits:
            raise InputError(f"{out} exists and is no run: choose another directory with --out.")
        out.mkdir(parents=True, exist_ok=True)
        record = cls(out)
        record._lock = RunLock.take(out)
        distributed.before_end(record._lock.release)
        try:
            record._begin(resume, config, found)
            record._tracking = Tracking(out, config, trackers)
        except BaseException:
            record.close()
            raise
        return record

    def _begin(self, resume: bool, config: Mapping[str, Any], found: Mapping[str, Any]) -> None:
        """Writes the first files of a new run, or reads the rows of a run that is resumed."""
        assert self.out is not None
        out, config_file = self.out, self.out / "config.toml"
        if config_file.exists() and resume:
            self.before = recorded_config(out)
            fingerprint.check_same(out, self.before, _without_none(config), found)
        elif config_file.exists():
            if _has_results(out):
                raise InputError(
                    f"{out} already holds a run: continue it with --resume (in Python resume=True),"
                    " replace it with --overwrite, or choose another directory with --out."
                )
            # It failed before its first row, maybe by its config, which may be another one now.
            (out / "environment.json").unlink(missing_ok=True)
        path = out / "environment.json"
        replace_file(path, (json.dumps(_with_first(path), indent=2) + "\n").encode())
        fingerprint.save(out, found)
        write_config(config_file, config)
        if (out / "metrics.jsonl").exists():
            self.rows = read_metrics(out / "metrics.jsonl")
        self._join(out)

    def _join(self, directory: Path) -> None:
        """Takes the rows of process 0, and opens the checkpoints together with all processes.

        Raises:
          InputError: this process does not see the files of process 0.
        """
        text, self.rows = distributed.agree([_lock_text(directory), self.rows])
        end = time.monotonic() + _VISIBLE
        while _lock_text(directory) != text:  # a network file system may show new files later
            if time.monotonic() > end:
                raise InputError(
                    f"Process {distributed.process()} on {socket.gethostname()} does not see the"
                    f" files that process 0 writes to {directory.resolve()}. All processes write"
                    " checkpoints, so choose a directory on a file system that they share, with"
                    " --out."
                )
            time.sleep(0.2)
        self.checkpoints = Checkpoints(directory / "checkpoints")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        self.close(ended=error is None)

    def rewind(self, round_index: int | None) -> None:
        """Removes the rows after ``round_index`` (all rows if None), which will be made again."""
        last = -1 if round_index is None else round_index
        self.rows = [row for row in self.rows if row["round"] <= last]
        if self.out is None:
            return
        if (self.out / "metrics.jsonl").exists():
            write_metrics(self.out / "metrics.jsonl", self.rows)
        self._tracking.catch_up(self.rows)

    def add(self, row: Row) -> None:
        """Records the row of a round."""
        self._write(row, row)

    def replace(self, rows: list[Row]) -> None:
        """Replaces all rows.

        Trackers get the rows that have lost fields, with None in their place.
        """
        before = {row["round"]: row for row in self.rows}
        self.rows = rows
        if self.out is not None:
            write_metrics(self.out / "metrics.jsonl", rows)
        for row in rows:
            lost = before.get(row["round"], row).keys() - row.keys()
            if lost:
                self._tracking.add({**row, **dict.fromkeys(sorted(lost))})

    def amend(self, row: Row) -> None:
        """Replaces the last row, which has new fields."""
        before = self.rows.pop()
        assert before["round"] == row["round"]
        self.replace(self.rows)
        new = {name: value for name, value in row.items() if name not in before}
        self._write({**row}, {"round": row["round"], **new})

    def _write(self, row: Row, tracked: Row) -> None:
        """Stores a row in memory, and on disk if there is a run directory.

        Args:
          tracked: what trackers get of it.
        """
        if self._lock is not None:
            self._lock.check()
        self.rows.append(row)
        if self.out is not None:
            append_metrics(self.out / "metrics.jsonl", row)
        self._tracking.add(tracked)

    def save_params(self, params: Params, labels: Sequence[str]) -> None:
        """Writes the global model's trainable leaves to a file that other programs can read."""
        if self.out is None:
            return
        arrays = {name: np.asarray(value) for name, value in params.items()}
        metadata = {"labels": json.dumps(list(labels))}
        replace_file(self.out / _PARAMS, safetensors.numpy.save(arrays, metadata))

    def close(self, *, ended: bool = False) -> None:
        """Closes all open files; the checkpoints are closed even if another file fails.

        Args:
          ended: whether the run has come to its end without an error.
        """
        with contextlib.ExitStack() as stack:
            if self._lock is not None:
                stack.callback(self._lock.release)
            if self.checkpoints is not None:
                stack.callback(self.checkpoints.close)
            stack.callback(self._tracking.close, ended=ended)


def environment() -> dict[str, Any]:
    """Returns versions, devices and commit, on which results depend besides the config."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": {name: metadata.version(name) for name in _PACKAGES},
        "device": device_name(),
        "processor": processor(),
        "commit": _commit(),
    }


def _with_first(path: Path) -> dict[str, Any]:
    """Returns the environment; of a run that began in another one, also that: ``first``.

    It is another one with other versions, on another kind of device, or on a processor with other
    vector instructions. The bits of a continued run
    are then not those of one without a break, which a warning says.
    """
    now = environment()
    try:
        before = json.loads(path.read_text(encoding="utf-8"))
        first = before.pop("first", before)
        versions, kind = dict(first["versions"]), _kind(first["device"])
        known = first.get("processor", now["processor"])  # earlier runs have none
        flags = {*map(str, known["flags"])}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return now  # a new run, or a damaged file, which only reports read
    moved = [
        f"{name} {x} instead of {versions.get(name)}"
        for name, x in now["versions"].items()
        if x != versions.get(name)
    ]
    if kind != _kind(now["device"]):
        moved.append(f"{_kind(now['device'])} instead of {kind}")
    if other := sorted(flags.symmetric_difference(now["processor"]["flags"])):
        moved.append(f"a processor that differs in {', '.join(other)}")
    if not moved:
        return now
    warnings.warn(
        f"The run in {path.parent} began in another environment ({'; '.join(moved)}): its last"
        " digits may differ from those of a run without a break.",
        stacklevel=users_level(),
    )
    return {**now, "first": first}


def _kind(device: str) -> str:
    """Returns the kind in a device's name, of which the number does not change results."""
    return device.partition(" x ")[2].partition(" of ")[0]


def device_name() -> str:
    """Returns the number and the kind of the devices."""
    device = jax.devices()[0]
    several = distributed.processes()
    of = f" of {several} processes" if several > 1 else ""
    return f"{len(jax.devices())} x {device.device_kind} ({device.platform}){of}"


def write_config(path: Path, config: Mapping[str, Any]) -> None:
    """Writes a config as TOML.

    A lone surrogate, which UTF-8 cannot encode, becomes a question mark.
    """
    replace_file(path, config_text(config).encode(errors="replace"))


def config_text(config: Mapping[str, Any]) -> str:
    """Returns a config as TOML, without secrets.

    TOML has no null: keys whose value is None are left out.
    """
    return tomli_w.dumps(_written(config))


def _written(config: Mapping[str, Any]) -> dict[str, Any]:
    return fingerprint.counting(without_secrets(_without_none(config)))


def as_asked(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a run's config without PROGRAMS and the noise that was computed for its epsilon.

    A new run may have other rounds or clients, for which this noise would not give the epsilon.
    """
    config = {k: x for k, x in config.items() if k not in PROGRAMS or unrecorded(x)}
    privacy = config.get("privacy")
    if not isinstance(privacy, Mapping) or "epsilon" not in privacy:
        return config
    own = {key: value for key, value in privacy.items() if key != "noise_multiplier"}
    return {**config, "privacy": own}


def read_config(directory: Path) -> dict[str, Any]:
    """Returns the config of a run directory.

    One that ``Records.config`` gave may have no model. What it lacks is then unknown.

    Raises:
      InputError: the directory holds no run, or its config is damaged.
    """
    config = recorded_config(directory)
    if "model" in config:
        return config
    unknown = {OWN: "not recorded"}
    if isinstance(config.get("algorithm"), str):
        config |= {"algorithm": {OWN: config["algorithm"]}, "optimizer": unknown}
    return {"model": unknown, "peft": unknown, "data": unknown, "partition": unknown, **config}


def recorded_config(directory: Path) -> dict[str, Any]:
    """Returns the content of a run's ``config.toml``; errors are those of :func:`read_config`."""
    path = directory / "config.toml"
    try:
        return read_toml(path)
    except OSError:
        raise InputError(f"{directory} is not a run directory: it has no config.toml.") from None
    except ValueError as error:
        raise InputError(f"{path} is not valid TOML: {error}.") from None


def read_params(directory: Path) -> tuple[Params, tuple[str, ...]]:
    """Returns the global model's trainable leaves and label names.

    Raises:
      InputError: the run has no checkpoint yet, or the file is damaged.
    """
    path = directory / _PARAMS
    if not path.exists():
        raise InputError(
            f"{directory} has no {_PARAMS} yet: the run has not reached its first checkpoint."
            " Continue it with --resume."
        )
    try:
        with safe_open(path, framework="flax") as file:
            names = json.loads(file.metadata()["labels"])
            return {key: file.get_tensor(key) for key in file.keys()}, tuple(names)  # noqa: SIM118
    except (SafetensorError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError(f"{path} is damaged: {error}.") from None


def has_begun(run: Path) -> bool:
    """Returns whether a directory holds a run: its environment is written before its config."""
    return all((run / name).is_file() for name in ("environment.json", "config.toml"))


def remove_run(out: Path) -> None:
    """Removes a run directory; refuses to remove any other directory.

    Raises:
      InputError: the path is not a run directory, or a process runs in it.
    """
    if not out.exists():
        return
    if not out.is_dir():
        raise InputError(
            f"{out} is a file, and a run is a directory: choose another one with --out."
        )
    if not _is_run(out):
        raise InputError(f"{out} is not a run directory, so --overwrite does not remove it.")
    with RunLock.take(out):
        # These are removed last, so that an interrupted removal still leaves a run directory.
        last = ("config.toml", "environment.json")
        for path in sorted(out.iterdir(), key=lambda path: (path.name in last, path.name)):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path.name != lock.NAME:
                path.unlink()
    if not out.is_symlink():  # a link stays, and so does the directory that it leads to
        with contextlib.suppress(OSError):  # it cannot be removed, such as a mounted disk
            out.rmdir()


def _is_run(directory: Path) -> bool:
    """Returns whether a directory is empty or that of a run, which can have died while it began.

    A config alone may be that of a user's project.
    """
    names = {path.name for path in directory.iterdir()}
    begun = "config.toml" in names and not names.isdisjoint({"environment.json", "metrics.jsonl"})
    early = rf"{lock.NAME}|environment\.json|{fingerprint.NAME}|\..+\.tmp"
    return begun or all(re.fullmatch(early, name) for name in names)


def _has_results(run: Path) -> bool:
    """Returns whether a run's directory has rows or checkpoints."""
    rows, checkpoints = run / "metrics.jsonl", run / "checkpoints"
    return (rows.exists() and rows.stat().st_size > 0) or (
        checkpoints.is_dir() and any(checkpoints.iterdir())
    )


def _without_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: _without_none(v) for k, v in value.items() if v is not None}
    if isinstance(value, list | tuple):
        return [_without_none(v) for v in value]
    return value


def _lock_text(directory: Path) -> str:
    """Returns the content of a directory's lock file, which no other directory has; "" without."""
    try:
        return (directory / lock.NAME).read_text(encoding="utf-8")
    except OSError:
        return ""


def _commit() -> str | None:
    """Returns the commit of the source checkout, None for an installed package."""
    try:
        done = subprocess.run(
            ["git", "rev-parse", "HEAD"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
