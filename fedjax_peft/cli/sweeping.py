"""The command ``sweep``: it runs all points of a sweep and prints the table of its methods."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedjax_peft.cli import resuming, submitting, sweep_file, workers
from fedjax_peft.cli.results import print_study
from fedjax_peft.cli.sweep_display import SweepDisplay
from fedjax_peft.config import config as configs
from fedjax_peft.config import early, labels, sweeps
from fedjax_peft.config.parts import Parts
from fedjax_peft.engine.compilation import count_programs
from fedjax_peft.report.records import find_runs, unstarted
from fedjax_peft.report.study import SWEEP, read_study, read_sweep
from fedjax_peft.simulation.arguments import Given
from fedjax_peft.simulation.points import Job, run_points
from fedjax_peft.simulation.settings import check_recorded
from fedjax_peft.simulation.sharing import Share, failure_file
from fedjax_peft.simulation.simulate import arguments
from fedjax_peft.simulation.storage import record
from fedjax_peft.support import display
from fedjax_peft.support.errors import InputError


def sweep(options: argparse.Namespace) -> None:
    """Runs the points of a sweep, and prints the table of its methods."""
    workers.choose_devices(options)
    raw, options.overrides = sweeps.read(options.config, options.overrides)
    out, title = options.out or Path("runs") / options.config.stem, options.config.stem
    again = {
        "title": title,
        "overrides": options.overrides,
        "only": options.only,
        "early_stop": options.early_stop,
        "config": raw,
    }
    planned = sweep_file.plan([again])
    early.check(point.config for point in planned.points)
    for point in {one.method: one for one in planned.points}.values():
        for line in () if options.quiet else labels.notices(point.method, point.config):
            print(display.one_line(f"fedjax-peft: {line}"), file=sys.stderr)
    if options.dry_run:
        for point in planned.points:
            print(display.printable(point.folder))
        print(f"{display.counted(len(planned.points), 'run')}, swept: {', '.join(planned.keys)}")
        return
    parts = Parts()
    if (options.resume or options.share) and again not in sweep_file.read(out):
        _check_begun(planned, out, parts)
    _begin(out, planned, options)
    removed = list(dict.fromkeys(p.method for p in planned.points)) if options.only else None
    sweep_file.add(out, [again], removed=removed if options.overwrite else ())
    words = ["sweep", options.config.resolve(), *options.overrides, "--out", out.resolve()]
    words += [word for name in options.only for word in ("--only", name)]
    words += ["--early-stop"] * options.early_stop
    words += ["--replicas", options.replicas] * (options.replicas is not None)
    if options.submit:
        _submit(planned, out, words, options)
    else:
        _run(planned, out, words, options, parts)


def is_sweep(directory: Path) -> bool:
    """Returns whether a directory is that of a sweep from the command line."""
    return "config" in read_sweep(directory / SWEEP)


def resume(options: argparse.Namespace) -> None:
    """Runs the points of the sweep in ``options.run`` that are missing or interrupted.

    Overrides of this command count for the next one too, as in the config of a single run.
    """
    workers.choose_devices(options)
    out, calls, parts = options.run, sweep_file.read(options.run), Parts()
    options.early_stop, options.replicas = all(call["early_stop"] for call in calls), None
    calls = [{**call, "overrides": [*call["overrides"], *options.overrides]} for call in calls]
    planned = sweep_file.plan(calls)
    if options.overrides:
        _check_begun(planned, out, parts)
    sweep_file.add(out, calls)
    _run(planned, out, ["resume", out.resolve()], options, parts)


def _check_begun(planned: sweeps.Sweep, out: Path, parts: Parts) -> None:
    """Raises the error of a begun run of a method that has other settings than its point.

    Such settings must not be kept in ``sweep.toml``, and no other point may be run with them.
    """
    begun = [point for point in planned.points if resuming.has_begun(out / point.folder)]
    for point in {point.method: point for point in begun}.values():
        check_recorded(_job(point, parts).given(out / point.folder, True, None))


def _submit(
    planned: sweeps.Sweep, out: Path, words: Sequence[Any], options: argparse.Namespace
) -> None:
    """Submits workers, and returns at once."""
    own = workers.own_words(options)
    names = submitting.submit(planned.executor, [*words, *own], out)
    who = display.counted(len(names), "worker")
    what = display.counted(len(planned.points), "point")
    print(f"Submitted {who} for {what}: {', '.join(names)}")
    print(f"What has become of them: {display.program()} status {display.argument(out)}")


def _run(
    planned: sweeps.Sweep,
    out: Path,
    words: Sequence[Any],
    options: argparse.Namespace,
    parts: Parts,
) -> None:
    """Runs the points that have not finished, by several workers if they are asked for.

    Args:
      words: the command of another worker, without the options for workers.
      parts: shared by all points.
    """
    shown = SweepDisplay(len(planned.points), planned.choose_by, quiet=options.quiet)
    programs = count_programs() if options.share and not options.quiet else None
    with workers.started(words, out, options), shown, resuming.advising(out):
        run_points(
            [_job(point, parts) for point in planned.points],
            out=out,
            metric=planned.choose_by,
            early_stop=options.early_stop,
            replicas=options.replicas or "auto",
            on_start=shown.start,
            on_point=shown.point,
            keep=False,
            share=Share(options.take_over) if options.share else None,
        )
    if programs is not None:
        print(programs())
    print_study(read_study(out))
    print(f"\nCurves, and tables as files: {display.program()} report {display.argument(out)}")


def _job(point: sweeps.Point, parts: Parts) -> Job:
    """Returns a point of a sweep as a job; ``parts`` are shared by all."""

    def given(path: Path | None, resume: bool, stop: Any) -> Given:
        how = {"out": path, "resume": resume, "stop": stop}
        made: Given = configs.run(point.config, parts=parts, act=arguments, **how)
        return made

    return Job(point.folder, point.config["rounds"], given, point.method)


def _begin(out: Path, planned: sweeps.Sweep, options: argparse.Namespace) -> None:
    """Makes room for a sweep, beside the runs that stay of an earlier one in the same directory.

    With ``options.resume`` they all stay, and what they vary stays swept. ``options.overwrite``
    removes them, also those of points that the new sweep does not have; with ``options.only``,
    those of these methods.

    Raises:
      InputError: the directory holds another sweep or anything else.
    """
    if sweep_file.holds_something_else(out):
        raise InputError(f"{out} exists and is no sweep: choose another directory with --out.")
    if not (out / SWEEP).exists():
        if options.resume and not options.quiet:
            text = f"fedjax-peft: there is nothing to continue in {out}, so the sweep begins"
            print(display.one_line(text), file=sys.stderr)
    elif options.overwrite:
        old = {out / point.folder for point in planned.points}
        methods = {point.method for point in planned.points} if options.only else {""}
        for place in [out / name for name in methods]:
            old |= {*find_runs(place), *unstarted(place)}
        if any(map(resuming.has_begun, old)):
            first = {point.method: point.config for point in reversed(planned.points)}
            resuming.check_startable(first.values())
        for run in old:
            record.remove_run(run)
            failure_file(run).unlink(missing_ok=True)
    elif not (options.resume or options.share):
        raise InputError(
            f"{out} already holds a sweep: continue it, or add points to it, with --resume;"
            " work on it together with other processes with --share; replace it with --overwrite;"
            " or choose another directory with --out."
        )
