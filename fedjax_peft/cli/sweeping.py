"""The command ``sweep``: it runs all points of a sweep and prints the table of its methods."""

import argparse
import sys
from pathlib import Path
from typing import Any

import tomli_w

from fedjax_peft.cli import resuming
from fedjax_peft.cli.results import print_study
from fedjax_peft.cli.sweep_display import SweepDisplay
from fedjax_peft.config import config as configs
from fedjax_peft.config import early, labels, sweeps
from fedjax_peft.config.parts import Parts
from fedjax_peft.report.records import find_runs, unstarted
from fedjax_peft.report.study import SWEEP, read_study, read_sweep
from fedjax_peft.simulation.arguments import Given
from fedjax_peft.simulation.points import Job, run_points
from fedjax_peft.simulation.simulate import arguments, check_recorded
from fedjax_peft.simulation.storage import record
from fedjax_peft.support import display
from fedjax_peft.support.errors import InputError
from fedjax_peft.support.files import replace_file
from fedjax_peft.support.secrets import hide, without_secrets


def sweep(options: argparse.Namespace) -> None:
    """Runs the points of a sweep, and prints the table of its methods."""
    raw, options.overrides = sweeps.read(options.config, options.overrides)
    planned = sweeps.plan(raw, options.overrides, options.only)
    out, title = options.out or Path("runs") / options.config.stem, options.config.stem
    early.check(point.config for point in planned.points)
    for point in {one.method: one for one in planned.points}.values():
        for line in () if options.quiet else labels.notices(point.method, point.config):
            print(display.one_line(f"fedjax-peft: {line}"), file=sys.stderr)
    if options.dry_run:
        for point in planned.points:
            print(display.printable(point.folder))
        print(f"{len(planned.points)} runs, swept: {', '.join(planned.keys)}")
        return
    again = {
        "title": title,
        "overrides": options.overrides,
        "only": options.only,
        "early_stop": options.early_stop,
        "config": raw,
    }
    parts = Parts()
    if options.resume:
        before = read_sweep(out / SWEEP)
        if any(before.get(key) != again[key] for key in ("overrides", "config")):
            _check_begun(planned, out, title, parts)
    _begin(out, planned, again, options)
    _run(planned, out, title, options, parts)


def is_sweep(directory: Path) -> bool:
    """Returns whether a directory is that of a sweep from the command line."""
    return "config" in read_sweep(directory / SWEEP)


def resume(options: argparse.Namespace) -> None:
    """Runs the points of the sweep in ``options.run`` that are missing or interrupted.

    Overrides of this command count for the next one too, as in the config of a single run.
    """
    table = read_sweep(options.run / SWEEP)
    try:
        again = {name: table[name] for name in ("title", "only", "early_stop", "config")}
        again["overrides"] = [*table["overrides"], *options.overrides]
        planned = sweeps.plan({**again["config"]}, again["overrides"], again["only"])
    except (KeyError, TypeError):
        raise InputError(
            f"{options.run / SWEEP} is damaged. Give the sweep's command again, with --resume."
        ) from None
    options.only, options.early_stop, options.replicas = again["only"], again["early_stop"], None
    parts = Parts()
    if options.overrides:
        _check_begun(planned, options.run, again["title"], parts)
    _begin(options.run, planned, again, options)
    _run(planned, options.run, again["title"], options, parts)


def _check_begun(planned: sweeps.Sweep, out: Path, title: str, parts: Parts) -> None:
    """Raises the error of a begun run of a method that has other settings than its point.

    Such settings must not be kept in ``sweep.toml``, and no other point may be run with them.
    """
    begun = [point for point in planned.points if resuming.has_begun(out / point.folder)]
    for point in {point.method: point for point in begun}.values():
        check_recorded(_job(point, title, parts).given(out / point.folder, True, None))


def _run(
    planned: sweeps.Sweep, out: Path, title: str, options: argparse.Namespace, parts: Parts
) -> None:
    """Runs the points of a planned sweep that have not finished; ``parts`` are shared by all."""
    shown = SweepDisplay(len(planned.points), planned.choose_by, quiet=options.quiet)
    with shown, resuming.advising(out):
        run_points(
            [_job(point, title, parts) for point in planned.points],
            out=out,
            metric=planned.choose_by,
            early_stop=options.early_stop,
            replicas=options.replicas or "auto",
            on_start=shown.start,
            on_point=shown.point,
            keep=False,
        )
    study = read_study(out)
    present = study.baseline in study.methods  # `--only` may have left it out
    print_study(study if present else study._replace(baseline=None))
    print(f"\nCurves, and tables as files: {display.program()} report {display.argument(out)}")


def _job(point: sweeps.Point, title: str, parts: Parts) -> Job:
    """Returns a point of a sweep with this title as a job; ``parts`` are shared by all."""
    config = {**point.config, "name": point.config["name"] or point.method or title}

    def given(path: Path | None, resume: bool, stop: Any) -> Given:
        how = {"out": path, "resume": resume, "stop": stop}
        made: Given = configs.run(config, parts=parts, act=arguments, **how)
        return made

    return Job(point.folder, config["rounds"], given, point.method)


def _begin(
    out: Path, planned: sweeps.Sweep, again: dict[str, Any], options: argparse.Namespace
) -> None:
    """Writes ``sweep.toml``, beside the runs that stay of an earlier sweep in the same directory.

    With ``options.resume`` they all stay, and what they vary stays swept. ``options.overwrite``
    removes them, also those of points that the new sweep does not have; with ``options.only``,
    those of these methods.

    Args:
      again: everything that :func:`resume` needs to plan the sweep again.

    Raises:
      InputError: the directory holds another sweep or anything else.
    """
    file = out / SWEEP
    known_keys: list[str] = []
    if file.exists():
        if not (options.resume or options.overwrite):
            raise InputError(
                f"{out} already holds a sweep: continue it, or add points to it, with --resume;"
                " replace it with --overwrite; or choose another directory with --out."
            )
        if options.resume or options.only:
            known_keys = read_sweep(file)["keys"]
        if options.overwrite:
            old = {out / point.folder for point in planned.points}
            for place in [out / name for name in options.only] or [out]:
                old |= {*find_runs(place), *unstarted(place)}
            if any(map(resuming.has_begun, old)):
                first = {point.method: point.config for point in reversed(planned.points)}
                resuming.check_startable(first.values())
            for run in old:
                record.remove_run(run)
    elif out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"{out} exists and is no sweep: choose another directory with --out.")
    elif options.resume and not options.quiet:
        text = f"fedjax-peft: there is nothing to continue in {out}, so the sweep begins"
        print(display.one_line(text), file=sys.stderr)
    out.mkdir(parents=True, exist_ok=True)
    table = {"choose_by": planned.choose_by, "baseline": planned.baseline}
    keys = list(dict.fromkeys([*known_keys, *planned.keys]))
    known = {key: value for key, value in table.items() if value is not None}
    given = [hide(text) if "trackers" in text else text for text in again["overrides"]]
    table = without_secrets({**known, "keys": keys, **again, "overrides": given})
    replace_file(file, tomli_w.dumps(table).encode())
