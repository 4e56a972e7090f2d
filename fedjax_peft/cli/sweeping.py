"""The command ``sweep``: it runs all points of a sweep and prints the table of its methods.

Heavy modules are imported inside the functions, so that ``--help`` answers at once.
"""

import argparse
from pathlib import Path
from typing import Any

import tomli_w

from fedjax_peft import display
from fedjax_peft.cli.process import prepare_jax
from fedjax_peft.cli.results import print_study
from fedjax_peft.errors import InputError
from fedjax_peft.files import replace_file
from fedjax_peft.toml import read_toml

__all__ = ["sweep"]

NAME = "sweep.toml"


def sweep(options: argparse.Namespace) -> None:
    """Runs the points of a sweep one after the other, and prints the table."""
    prepare_jax()
    from fedjax_peft.cli.sweep_display import SweepDisplay
    from fedjax_peft.config import config as configs
    from fedjax_peft.config import parts as shared
    from fedjax_peft.config import sweeps
    from fedjax_peft.report.study import read_study
    from fedjax_peft.simulation import record
    from fedjax_peft.simulation.points import Job, run_points

    planned = sweeps.plan(configs.load(options.config), options.overrides, options.only)
    out = options.out or Path("runs") / options.config.stem
    if options.dry_run:
        _print_plan(planned)
        return
    for point in planned.points if options.overwrite else ():
        record.remove_run(out / point.folder)
    _begin(out, planned, resume=options.resume or options.overwrite)
    parts, title = shared.Parts(), options.config.stem

    def job(point: Any) -> Job:
        config = {**point.config, "name": point.config["name"] or point.method or title}

        def run(path: Path | None, resume: bool, stop: Any, engine: Any) -> Any:
            shared = {"parts": parts, "stop": stop, "engine": engine}
            return configs.run(config, out=path, resume=resume, **shared)

        return Job(point.folder, config["rounds"], run, point.method)

    with SweepDisplay(len(planned.points), planned.choose_by, quiet=options.quiet) as display:
        try:
            run_points(
                [job(point) for point in planned.points],
                out=out,
                metric=planned.choose_by,
                early_stop=options.early_stop,
                replicas=options.replicas or "auto",
                on_start=display.start,
                on_point=display.point,
            )
        except KeyboardInterrupt:
            raise KeyboardInterrupt("Continue with the same command and --resume.") from None
    print_study(read_study(out))
    print(f"\nCurves, and tables as files: fedjax-peft report {out}")


def _begin(out: Path, planned: Any, *, resume: bool) -> None:
    """Writes ``sweep.toml``; keys of an earlier sweep in the same directory stay swept.

    Raises:
      InputError: the directory holds another sweep, or anything else, and ``resume`` is False.
    """
    file = out / NAME
    earlier: list[str] = []
    if file.exists():
        if not resume:
            raise InputError(
                f"{out} already holds a sweep: continue it, or add points to it, with --resume;"
                " replace it with --overwrite; or choose another directory with --out."
            )
        earlier = [key for key in read_toml(file).get("keys", []) if isinstance(key, str)]
    elif out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"{out} exists and is no sweep: choose another directory with --out.")
    elif resume and not out.exists():
        raise InputError(f"There is nothing to resume: {out} does not exist.")
    out.mkdir(parents=True, exist_ok=True)
    table = {"choose_by": planned.choose_by, "baseline": planned.baseline}
    keys = list(dict.fromkeys([*earlier, *planned.keys]))
    known = {key: value for key, value in table.items() if value is not None}
    replace_file(file, tomli_w.dumps({**known, "keys": keys}).encode())


def _print_plan(planned: Any) -> None:
    """Prints the runs of a sweep and the number of programs that they need."""
    for point in planned.points:
        print(display.printable(point.folder))
    print(f"{len(planned.points)} runs, swept: {', '.join(planned.keys)}")
