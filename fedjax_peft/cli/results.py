"""The commands ``report``, ``export`` and ``predict``: they read the directories of runs.

Heavy modules are imported inside the functions, so that ``--help`` answers at once.
"""

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedjax_peft.cli.process import prepare_jax
from fedjax_peft.support.errors import InputError
from fedjax_peft.support.files import check_output, replace_file

if TYPE_CHECKING:
    from fedjax_peft.config.loading import TrainedModels
    from fedjax_peft.report.methods import Options
    from fedjax_peft.report.records import RunRecord
    from fedjax_peft.report.study import Study
    from fedjax_peft.tasks import Task


def report(options: argparse.Namespace) -> None:
    """Prints the comparison of runs and writes ``report.html`` with its figures and tables."""
    from rich.console import Console

    from fedjax_peft.report import page as pages
    from fedjax_peft.report.methods import Options, compare
    from fedjax_peft.report.study import read_study
    from fedjax_peft.report.targets import target_table

    asked = Options(options.metric, options.at, options.choose_by, options.baseline, options.detect)
    shown = {"target": options.target, "options": asked, "smooth": options.smooth, "x": options.x}
    if options.watch:
        _watch(options, shown)
        return
    study = read_study(*options.runs)
    print_study(study, asked)
    common = Path(os.path.commonpath([path.resolve() for path in options.runs]))
    page = pages.write_report(study, options.out or common, **shown)
    if options.target is not None:
        console = Console()
        reached = target_table(compare(study, asked).rows, options.target, console.width)
        console.print("", reached, sep="\n")
    print(page)


def _watch(options: argparse.Namespace, shown: Mapping[str, Any]) -> None:
    """Serves the page of runs that go on, until Ctrl-C.

    Raises:
      InputError: a path does not exist, the port is not free, or ``--out`` is given.
    """
    from fedjax_peft.report import live
    from fedjax_peft.report.page import render_report
    from fedjax_peft.report.study import read_study

    if options.out is not None:
        raise InputError("--watch writes no report: leave --out out.")

    def render(version: str) -> str:
        study = read_study(*options.runs, unfinished=True)
        return render_report(study, version=version, **shown)

    with live.server(options.runs, render, port=options.port) as server:
        print(f"http://{live.HOST}:{server.server_port}/ (Ctrl-C ends it)", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()


def sync(options: argparse.Namespace) -> None:
    """Sends to the trackers of runs the rows that they have not taken, and prints how many."""
    from fedjax_peft.config import config as configs
    from fedjax_peft.report.records import find_runs
    from fedjax_peft.simulation import record, tracking

    runs = find_runs(options.run)
    if not runs:
        raise InputError(f"There is no run in {options.run}.")
    for path in runs:
        config = record.read_config(path)
        asked = {"trackers": config.get("trackers", {})}
        for text in options.overrides:
            asked = configs.override(asked, text)
        table = configs.resolve_table("trackers", configs.expanded(asked)["trackers"])
        if not table:
            raise InputError(
                f"The config of {path} names no tracker: add one, such as trackers=mlflow."
            )
        for name, rows in tracking.sync(
            path, config, configs.build_trackers({"trackers": table})
        ).items():
            print(f"{path}: {name} {f'has taken {rows} rows' if rows else 'had all rows'}")


def print_table(runs: "Sequence[RunRecord]") -> None:
    """Prints the table of runs and, if there are several, a sentence about the best one."""
    from fedjax_peft.report.study import make_study

    print_study(make_study(runs))


def print_study(study: "Study", options: "Options | None" = None) -> None:
    """Prints runs with one seed each as rows; otherwise methods over their seeds."""
    from rich.console import Console

    from fedjax_peft.report.comparison import explanations
    from fedjax_peft.report.methods import compare
    from fedjax_peft.simulation.summaries import privacy_in_words

    console, shown = Console(), compare(study, options)
    tables = shown.terminal_tables(console.width)
    texts = [shown.lead] if shown.over_seeds or len(shown.names) > 1 else []
    texts += [shown.power] if shown.power else []
    texts += [f"Note: {warning}" for warning in shown.warnings]
    if not shown.over_seeds:
        words = {run.name: privacy_in_words(run.rows) for run in shown.runs}
        texts += [f"{name}: {text}" for name, text in words.items() if text]
    if console.is_terminal:  # other outputs are read by programs too
        texts += explanations(tables)
    for i, table in enumerate(tables):
        console.print(*[""] * bool(i), table, sep="\n")
    if texts:
        console.print("", *texts, sep="\n", markup=False, highlight=False)


def export(options: argparse.Namespace) -> None:
    """Writes the trained leaves of a run in an exchange format."""
    prepare_jax()
    from fedjax_peft.simulation.rows import read_metrics
    from fedjax_peft.simulation.summaries import personal_privacy_note

    models = (_export_to_hub if options.format == "hub" else _export)(options)
    _print_note(models)
    if models.chosen and (
        note := personal_privacy_note(read_metrics(options.run / "metrics.jsonl"))
    ):
        print(f"fedjax-peft: {note}", file=sys.stderr)


def _export(options: argparse.Namespace) -> "TrainedModels":
    """Writes the export of one model, or of each client, and prints how to load it."""
    from fedjax_peft.peft.io import export as exporting
    from fedjax_peft.peft.io.describe import describe

    models = _models(options)
    how = {"format": options.format, "overwrite": options.overwrite}
    if options.clients is None:
        params = models.params(options.client)
        first = out = exporting.export(models.model, params, options.out, **how)
    else:
        clients = ((c, models.params(c)) for c in models.chosen)
        out = exporting.export_clients(models.model, clients, options.out, **how)
        first = exporting.client_directory(out, models.chosen[0])
    print(f"{out}\n{describe(models.model, first, options.format)}")
    return models


def _export_to_hub(options: argparse.Namespace) -> "TrainedModels":
    """Writes a folder for the Hugging Face hub, and uploads it on request."""
    from fedjax_peft.report import hub
    from fedjax_peft.report.records import load_run

    if options.clients is not None:
        raise InputError("A repository has one model: choose it with --client N.")
    if options.push is not None:
        hub.check_repository(options.push)
    models = _models(options)
    folder = hub.write_folder(
        models.model,
        models.params(options.client),
        load_run(options.run),
        options.out,
        choices=hub.Choices(options.merged, options.license, options.base_model),
        client=options.client,
        moved=models.algorithm.server.frozen_delta is not None,
        overwrite=options.overwrite,
    )
    print(folder)
    if options.push is None:
        print(f"Upload it: {hub.upload_command(folder)}")
    else:
        print(hub.upload(folder, options.push, private=options.private))
    return models


def predict(options: argparse.Namespace) -> None:
    """Writes the predictions of a run's model for the lines of a file."""
    prepare_jax()
    from fedjax_peft.config import loading
    from fedjax_peft.models import inference
    from fedjax_peft.simulation import record

    check_output(options.output)  # before the work whose result goes there
    task, length = loading.inputs_of(options.run, record.read_config(options.run))
    task = _sampled(task, options)
    rows = inference.read_inputs(options.input, task)
    models = _models(options)
    clients: list[int | None] = [*models.chosen] or [None]
    for client in clients:
        params = models.params(client)
        answers = inference.answer(models.model, params, rows, task=task, max_length=length or 128)
        lines = "".join(f"{json.dumps(line)}\n" for line in answers)
        output = options.output
        if options.clients is not None:
            output.mkdir(parents=True, exist_ok=True)
            output = output / f"client_{client:04d}.jsonl"
        replace_file(output, lines.encode())
    _print_note(models)


def _sampled(task: "Task", options: argparse.Namespace) -> "Task":
    """Returns the task with the options of generated texts.

    Raises:
      InputError: an option for a task that generates no text.
    """
    names = ("max_new_tokens", "temperature", "top_p")
    given = {n: getattr(options, n) for n in names if getattr(options, n) is not None}
    if not given:
        return task
    if task.inputs is None or task.inputs.sampling is None:
        option = "--" + next(iter(given)).replace("_", "-")
        raise InputError(f"{option} is for language models, and this run's task is {task.name}.")
    sampling = task.inputs.sampling._replace(**given)
    return task._replace(inputs=task.inputs._replace(sampling=sampling))


def _models(options: argparse.Namespace) -> "TrainedModels":
    """Returns the models of a run that the options select."""
    from fedjax_peft.config.loading import load_models
    from fedjax_peft.simulation.client_models import check_format

    clients = options.clients if options.client is None else [options.client]
    models = load_models(options.run, clients)
    if getattr(options, "format", "hub") != "hub":
        check_format(options.format, moved=models.algorithm.server.frozen_delta is not None)
    return models


def _print_note(models: "TrainedModels") -> None:
    if models.note:
        print(f"fedjax-peft: {models.note}", file=sys.stderr)
