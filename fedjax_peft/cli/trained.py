"""The commands ``export`` and ``predict``: what a run has trained, in other formats and used."""

import argparse
import json
import sys
from pathlib import Path

from fedjax_peft.config import loading
from fedjax_peft.config.loading import TrainedModels
from fedjax_peft.peft.io import export as exporting
from fedjax_peft.peft.io.describe import describe
from fedjax_peft.report import hub
from fedjax_peft.report.records import load_run
from fedjax_peft.simulation.client_models import check_format
from fedjax_peft.simulation.rows import read_metrics
from fedjax_peft.simulation.storage import record
from fedjax_peft.simulation.summaries import personal_privacy_note
from fedjax_peft.support import display
from fedjax_peft.support.errors import InputError
from fedjax_peft.support.files import check_output, replace_file
from fedjax_peft.tasks import Task, inference


def export(options: argparse.Namespace) -> None:
    """Writes the trained leaves of a run in an exchange format."""
    models = (_export_to_hub if options.format == "hub" else _export)(options)
    _print_notes(models, options.run)
    if (models.chosen or options.client_folder is not None) and (
        note := personal_privacy_note(read_metrics(options.run / "metrics.jsonl"))
    ):
        print(f"fedjax-peft: {note}", file=sys.stderr)


def _export(options: argparse.Namespace) -> TrainedModels:
    """Writes the export of one model, or of each client, and prints how to load it."""
    models = _models(options)
    how = {name: getattr(options, name) for name in ("format", "overwrite", "run", "dtype")}
    if options.clients is None:
        params = models.params(models.first)
        first = out = exporting.export(models.model, params, options.out, **how)
    else:
        clients = ((c, models.params(c)) for c in models.chosen)
        out = exporting.export_clients(models.model, clients, options.out, **how)
        first = exporting.client_directory(out, models.chosen[0])
    print(f"{out}\n{describe(models.model, first, options.format)}")
    return models


def _export_to_hub(options: argparse.Namespace) -> TrainedModels:
    """Writes a folder for the Hugging Face hub, and uploads it on request."""
    if options.dtype != "float32":
        raise InputError("--dtype is for --format merged.")
    if options.clients is not None:
        raise InputError("A repository has one model: choose it with --client N.")
    if options.client_folder is not None:
        raise InputError("--client-folder is for the other formats: a card says who has a model.")
    if options.push is not None:
        hub.check_repository(options.push)
    models = _models(options)
    folder = hub.write_folder(
        models.model,
        models.params(models.first),
        load_run(options.run),
        options.out,
        choices=hub.Choices(options.merged, options.license, options.base_model),
        client=models.first,
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
    if options.clients is None:
        check_output(options.output)  # before the work whose result goes there
        if options.output.is_file() and options.output.resolve() == options.input.resolve():
            raise InputError(f"{options.output} is the input too: choose another --output.")
    config = record.read_config(options.run)
    task, length = loading.inputs_of(config)
    task = _sampled(task, options)
    rows, numbers = inference.read_inputs(options.input, task, config.get("data"))
    models = _models(options)
    if options.clients is not None:
        options.output.mkdir(parents=True, exist_ok=True)
    clients: list[int | None] = [*models.chosen] or [None]
    for client in clients:
        params = models.params(client)
        answers = inference.answer(models.model, params, rows, task=task, max_length=length or 128)
        found = dict(zip(numbers, map(json.dumps, answers), strict=True))
        # A line has the number of its row in the input, whose blank lines stay.
        lines = "".join(f"{found.get(i + 1, '')}\n" for i in range(max(numbers, default=0)))
        output = options.output
        if options.clients is not None:
            output = output / f"client_{client:04d}.jsonl"
        replace_file(output, lines.encode())
    _print_notes(models, options.run)


def _sampled(task: Task, options: argparse.Namespace) -> Task:
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


def _models(options: argparse.Namespace) -> TrainedModels:
    """Returns the models of a run that the options select."""
    clients = options.clients if options.client is None else [options.client]
    if options.client_folder is not None:
        models = loading.load_real_client(options.run, options.client_folder)
    else:
        models = loading.load_models(options.run, clients)
    if getattr(options, "format", "hub") != "hub":
        check_format(options.format, moved=models.algorithm.server.frozen_delta is not None)
    return models


def _print_notes(models: TrainedModels, run: Path) -> None:
    """Prints that selected clients never trained, and that the run is not at its end."""
    notes = [models.note] if models.note else []
    if len(models.chosen) == len(models.names) == 1:
        notes.append(f"client {models.chosen[0]} is {models.names[0]!r}.")
    known = load_run(run) if (run / "metrics.jsonl").is_file() else None
    if known is not None and not known.finished:
        planned = known.config.get("rounds")
        rounds = display.counted(planned, "round") if isinstance(planned, int) else "its rounds"
        notes.append(
            f"{run} is unfinished: it has done {known.rows[-1]['round'] if known.rows else 0} of"
            f" {rounds}. The model is that of its last checkpoint."
        )
    for note in notes:
        print(display.one_line(f"fedjax-peft: {note}"), file=sys.stderr)
