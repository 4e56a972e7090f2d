"""The runs that ``fedjax-peft resume`` continues: one run, or those of several methods."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fedjax_peft.cli import console, faults
from fedjax_peft.config import config as configurations
from fedjax_peft.config import loading
from fedjax_peft.config.parts import Parts
from fedjax_peft.report.records import load_table
from fedjax_peft.report.study import METHODS, SWEEP
from fedjax_peft.simulation.interrupts import Terminated
from fedjax_peft.simulation.storage import fingerprint, record
from fedjax_peft.simulation.storage.record import has_begun
from fedjax_peft.support.display import argument, program
from fedjax_peft.support.errors import InputError, nearest
from fedjax_peft.support.files import replace_file


def note_methods(out: Path, configs: Mapping[str, Mapping[str, Any]]) -> None:
    """Writes the configs of several methods, so that methods without a run yet can be resumed too.

    The methods of an earlier command in the same folder are kept. A single run needs no such file,
    because its directory contains its config.
    """
    if list(configs) == [""]:
        return
    out.mkdir(parents=True, exist_ok=True)
    earlier = load_table(out / METHODS)
    written = {name: fingerprint.counting(one) for name, one in {**earlier, **configs}.items()}
    replace_file(out / METHODS, record.config_text(written).encode(errors="replace"))


def stored_configs(path: Path) -> dict[str, dict[str, Any]]:
    """Returns the configs of the runs in a directory: name -> config.

    The name is ``""`` if the directory itself is a run.

    Raises:
      InputError: the directory contains no run.
    """
    if has_begun(path):
        return {"": record.read_config(path)}
    inside = [run for run in sorted(path.glob("*")) if has_begun(run)]
    found = {run.name: record.read_config(run) for run in inside}
    found = {**load_table(path / METHODS), **found}
    if found:
        return found
    beside = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
    advice = "" if path.exists() else f" {nearest(path.name, beside)}"
    raise InputError(
        f"There is nothing to resume: {path} contains no run. A run is a directory that"
        f" `fedjax-peft run` has written.{advice}"
    )


def is_finished(run: Path, rounds: int) -> bool:
    """Returns whether a run has the checkpoint of its last round."""
    return (run / "checkpoints" / str(rounds)).is_dir()


def check_startable(configs: Iterable[Mapping[str, Any]]) -> None:
    """Raises the error that would end one of these runs before its first round.

    ``--overwrite`` asks before it removes the earlier runs. Nothing is compiled or written.
    """
    parts, stop = Parts(), console.dry_run("", "", lambda _: None)
    for config in configs:
        origin = None if config["origin"] is None else loading.load_run(config["origin"])
        with contextlib.suppress(console.DryRun):
            configurations.run(dict(config), on_phase=stop, parts=parts, origin=origin)


def command(out: Path) -> str:
    """Returns the command that continues the runs in ``out``."""
    return f"{program()} resume {argument(out)}"


@contextlib.contextmanager
def advising(out: Path) -> Iterator[None]:
    """Adds the command that continues the runs in ``out`` to the interrupts of the block.

    Raises:
      InputError: standard output has lost its reader, as in ``| head``.
    """
    try:
        yield
    except (KeyboardInterrupt, Terminated) as interrupt:
        raise type(interrupt)(_advice(out)) from None
    except (BrokenPipeError, SystemExit):  # rich exits where print raises
        faults.silence_output()
        raise InputError(
            f"The reader of the output has closed it, so the run has ended. {_advice(out)}"
        ) from None


def _advice(out: Path) -> str:
    begun = has_begun(out) or any((out / name).exists() for name in (METHODS, SWEEP))
    return f"Continue with: {command(out)}" if begun else _NOT_BEGUN


_NOT_BEGUN = "The run had not begun: give the command again."
