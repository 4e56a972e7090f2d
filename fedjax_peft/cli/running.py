"""The commands ``run`` and ``resume``: they train and print the table of the runs."""

import argparse
import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedjax_peft.cli import console, resuming, sweeping
from fedjax_peft.cli.process import join_processes
from fedjax_peft.cli.results import print_study
from fedjax_peft.config import config as configs
from fedjax_peft.config import early, labels, loading, origins, presets, sweeps
from fedjax_peft.config.parts import Parts
from fedjax_peft.engine.devices.distributed import is_writer
from fedjax_peft.peft.io.export import formats
from fedjax_peft.report.records import RunRecord, load_run
from fedjax_peft.report.study import make_study
from fedjax_peft.simulation.planning import product_rates
from fedjax_peft.simulation.run import Run
from fedjax_peft.simulation.storage import record
from fedjax_peft.support import display
from fedjax_peft.support.errors import InputError


def run(options: argparse.Namespace) -> None:
    """Runs the methods of a config file."""
    join_processes(options)
    path, out = options.config, Path("runs") / options.config.stem
    if options.resume and path.name == "config.toml" and resuming.has_begun(path.parent):
        out = path.parent  # the config of a run: continue this run in its own directory
    records = run_file(path, options, default_out=out)
    _print_next(records, options.out or out, options)


def resume(options: argparse.Namespace) -> None:
    """Continues a run, the runs of a config with several methods, or a sweep."""
    if options.distributed and sweeping.is_sweep(options.run):
        raise InputError(f"{options.run} is a sweep, which runs in one process.")
    join_processes(options)
    if sweeping.is_sweep(options.run):
        sweeping.resume(options)
        return
    if options.share or options.workers or options.devices or options.take_over:
        raise InputError(f"{options.run} is no sweep: only the points of a sweep can be shared.")
    stored = resuming.stored_configs(options.run)
    for text in options.overrides:
        if configs.of_method({"methods": stored}, text)[1].partition("=")[0].strip() == "preset":
            raise InputError(
                f"{text} changes no setting of {options.run}: what is resumed has a complete"
                " config. Start a new run with it, in another directory."
            )
    written = configs.methods({"methods": stored}, options.overrides)
    # `methods` fills in a missing name with that of the folder, which is not part of the config.
    for name in (name for name, one in stored.items() if "name" not in one):
        written[name] = {**written[name], "name": None}
    resolved = {name: configs.resolve_recorded(one) for name, one in written.items()}
    if options.overrides:
        labels.check_apart(resolved, options.overrides)
    done = [resuming.is_finished(options.run / n, one["rounds"]) for n, one in resolved.items()]
    if all(done) and not options.overrides:  # whether these may change is the run's question
        rounds = max(one["rounds"] for one in resolved.values())
        print(
            f"There is nothing to resume: {options.run} has finished its"
            f" {display.counted(rounds, 'round')}. To train for more:"
            f" {resuming.command(options.run)} rounds={2 * rounds}"
        )
        return
    records = _run_all(resolved, options, options.run, options.run.resolve().name)
    _print_next(records, options.run, options)


def _print_next(records: Sequence[RunRecord], out: Path, options: argparse.Namespace) -> None:
    """Prints the commands that read the finished runs."""
    if records and not options.quiet and is_writer():
        print("\nNext:", *(f"  {line}" for line in next_commands(records[0], out)), sep="\n")


def next_commands(run: RunRecord, out: Path) -> list[str]:
    """Returns the commands that read a run: ``report``, and what it allows of the others.

    Args:
      out: the folder of all runs.
    """
    path, inputs = display.argument(run.path), configs.task_of(run.config).inputs
    program = display.program()
    private = run.rows[0].get("roles", {}).get("private", 0) if run.rows else 0
    client = " --client 0" if private else ""
    lines = [f"{program} report {display.argument(out)}  # curves, and a page to read"]
    if inputs is not None:
        lines.append(
            f"{program} predict {path}{client} --input rows.jsonl --output answers.jsonl"
            f'  # rows such as {{"{inputs.fields[0].name}": ...}}'
        )
    if possible := formats(run.config["peft"]["name"]):
        how = f"--format {possible[0]} --out {path}-export"
        lines.append(f"{program} export {path}{client} {how}")
    return lines


def run_file(path: Path, options: argparse.Namespace, default_out: Path) -> list[RunRecord]:
    """Runs every method of a config file, prints the table and returns the records."""
    out = options.out or default_out
    # All configs are checked before the first run starts.
    written, options.overrides = sweeps.read(path, options.overrides)
    raw = configs.methods(written, options.overrides)
    raw = configs.only(raw, getattr(options, "only", []))
    if origin := getattr(options, "origin", None):
        if any(origin.resolve() == (out / name).resolve() for name in raw):
            raise InputError(f"{origin} is the run to start from: choose another --out.")
        raw = {name: {**one, "origin": str(origin.resolve())} for name, one in raw.items()}
    resolved = {name: configs.resolve(one) for name, one in raw.items()}
    labels.check_apart(resolved, options.overrides)
    if options.quiet <= options.verbose:
        for line in product_rates.notices(resolved.values()):
            print(f"fedjax-peft: {line}", file=sys.stderr)
        for name, config in resolved.items():
            title = config["name"] or name or path.stem
            lines = [*presets.notices(raw[name], config), *origins.notices(config)]
            lines += labels.notices(name, config)
            if options.resume and not options.dry_run and not resuming.has_begun(out / name):
                lines.append(f"there is nothing to continue in {out / name}, so the run begins")
            for line in lines:
                print(display.one_line(f"fedjax-peft: {title}: {line}"), file=sys.stderr)
    early.check(resolved.values())
    return _run_all(resolved, options, out, path.stem)


def _run_all(
    resolved: dict[str, dict[str, Any]], options: argparse.Namespace, out: Path, title: str
) -> list[RunRecord]:
    """Runs resolved configs, prints the table and returns the records.

    Args:
      resolved: name -> config; the run's directory is ``out`` / name.
      title: the title of a run without a name.
    """
    titles = {name: config["name"] or name or title for name, config in resolved.items()}
    if options.dry_run:
        for name, config in resolved.items():
            print(*map(display.printable, record.config_text(config).split("\n")), sep="\n")
            show = console.dry_run(titles[name], configs.describe(config), print)
            with contextlib.suppress(console.DryRun):
                configs.run(config, on_phase=show, origin=_origin(config, out / name))
        return []
    if is_writer():
        if options.overwrite:
            if not getattr(options, "distributed", False):  # otherwise all processes must ask
                begun = [one for name, one in resolved.items() if resuming.has_begun(out / name)]
                resuming.check_startable(begun)
            for name in resolved:
                record.remove_run(out / name)
        resuming.note_methods(out, resolved)
    records, parts = [], Parts(most=1)
    with resuming.advising(out):
        for name, config in resolved.items():
            with console.screen(
                titles[name],
                configs.describe(config),
                config["rounds"],
                out / name / "metrics.jsonl",
                verbosity=options.verbose - options.quiet,
            ) as shown:
                configs.run(
                    config,
                    out=out / name,
                    resume=options.resume,
                    on_round=None if shown is None else shown.on_round,
                    on_phase=shown,
                    parts=parts,
                    origin=_origin(config, out / name),
                )
            records.append(load_run(out / name))
    print_study(make_study(records))  # one process prints; the others' standard output is closed
    return records


def _origin(config: dict[str, Any], directory: Path) -> Run | None:
    """Returns the run that a config starts from; None without one, or if it has begun."""
    if config["origin"] is None or any((directory / "checkpoints").glob("[0-9]*")):
        return None
    return loading.load_run(config["origin"])
