"""A trained adapter for the Hugging Face hub: its files, a model card made from the run, upload."""

import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedjax_peft.contracts import Params
from fedjax_peft.contracts.part import OWN
from fedjax_peft.data.catalog import DATASETS
from fedjax_peft.models.base import Model
from fedjax_peft.models.hub import origin
from fedjax_peft.peft.io import describe
from fedjax_peft.peft.io.export import export, formats
from fedjax_peft.peft.io.files import Format
from fedjax_peft.report import wording
from fedjax_peft.report.judgement import tested_examples
from fedjax_peft.report.records import RunRecord, is_whole, load_run
from fedjax_peft.report.separation import wilson
from fedjax_peft.simulation.client_models import client_number
from fedjax_peft.simulation.run import Run
from fedjax_peft.simulation.score_names import Score
from fedjax_peft.simulation.storage.record import as_asked, config_text, environment
from fedjax_peft.simulation.summaries import personal_privacy_note, privacy_in_words, summary
from fedjax_peft.support import assets
from fedjax_peft.support.display import argument, markdown, one_line
from fedjax_peft.support.errors import InputError, users_level
from fedjax_peft.support.files import replace_file

_CONFIG = "config.toml"


class Choices(NamedTuple):
    """What only the owner of a repository can say."""

    merged: bool = False
    """Also write the merged model, into the folder ``merged``."""
    license: str | None = None
    """The hub's identifier of a licence, such as ``apache-2.0``."""
    base_model: str | None = None
    """The hub id of the base model; by default where the model came from."""


_NONE = Choices()


def write_folder(
    model: Model,
    params: Params,
    record: RunRecord,
    directory: str | Path,
    *,
    choices: Choices = _NONE,
    client: int | None = None,
    moved: bool = False,
    overwrite: bool = False,
) -> Path:
    """Writes an adapter, its model card and the run's config; returns the directory.

    The adapter is in PEFT's format if that can hold it, or else in AdapterHub's. A method that is
    no adapter is merged into the model. It appears completely or not at all.

    Args:
      model: the model that was trained, with initial values.
      params: its trained leaves.
      record: the run, for the card.
      directory: as for :func:`fedjax_peft.peft.io.export.export`.
      client: the client whose model it is.
      moved: whether the server has also changed frozen weights.
      overwrite: replace another export.

    Raises:
      InputError: no format can hold the method, or as ``export``.
    """
    possible = formats(model.method.name) if model.method is not None and not moved else []
    format: Format = possible[0] if possible else "merged"

    def finish(folder: Path) -> None:
        text = card(model, format, record, choices, client)
        replace_file(folder / "README.md", text.encode())
        config = config_text(_shareable(as_asked(record.config), set()))
        replace_file(folder / _CONFIG, config.encode())
        if choices.merged and format != "merged":
            base = _base(model, choices)
            export(model, params, folder / "merged", format="merged", base_model=base)

    how: dict[str, Any] = {"format": format, "overwrite": overwrite, "finish": finish}
    return export(model, params, directory, base_model=_base(model, choices), **how)


def write_run(
    run: Run,
    trained: tuple[Model, Params],
    directory: str | Path,
    chosen: Sequence[Any] = _NONE,
    *,
    client: int | str | None = None,
    overwrite: bool = False,
) -> Path:
    """Writes the folder of a run; see :func:`write_folder`.

    Args:
      trained: the model, and its leaves that the run has trained.
      chosen: the fields of :class:`Choices`.
    """
    return write_folder(
        *trained,
        record_of(run),
        directory,
        choices=Choices(*chosen),
        client=None if client is None else client_number(client, run.client_names),
        moved=run.algorithm.server.frozen_delta is not None,
        overwrite=overwrite,
    )


def push_run(
    run: Run,
    trained: tuple[Model, Params],
    repository: str,
    directory: str | Path | None,
    chosen: Sequence[Any],
    *,
    private: bool,
    **options: Any,
) -> str | None:
    """Does what :meth:`fedjax_peft.Run.push_to_hub` does; see :func:`write_run`."""
    check_repository(repository)
    usual = Path(repository).name if run.out is None else run.out / "hub"
    folder = write_run(run, trained, directory or usual, chosen, **options)
    try:
        return upload(folder, repository, private=private)
    except InputError as problem:
        warnings.warn(str(problem), stacklevel=users_level())
        return None


def record_of(run: Run) -> RunRecord:
    """Returns the record of a run: its files, or without a directory what it knows itself."""
    if run.out is not None:
        return load_run(run.out)
    config = {"algorithm": run.algorithm.name}
    return RunRecord(run.algorithm.name, Path(), config, environment(), run.metrics)


def upload(folder: Path, repository: str, *, private: bool = False) -> str:
    """Uploads a folder to the hub, and returns the address of the commit.

    Raises:
      InputError: the hub cannot be reached or refuses; the message has the command to type later.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        api.create_repo(repository, private=private, exist_ok=True)
        message = "Upload an adapter that was trained with fedjax_peft"
        done = api.upload_folder(repo_id=repository, folder_path=folder, commit_message=message)
    except Exception as error:  # what it raises depends on its version and HTTP library
        reason = one_line(f"{type(error).__name__}: {error}")[:300].rstrip(". ")
        raise InputError(
            f"The hub did not take {repository}: {reason}. The folder {folder} is complete. Upload"
            f" it later: {upload_command(folder, repository)}"
        ) from error
    return str(done.commit_url)


def upload_command(folder: Path, repository: str | None = None) -> str:
    """Returns the command line that uploads a folder."""
    return f"hf upload {repository or 'USER/NAME'} {argument(folder)} ."


def check_repository(name: str) -> None:
    """Raises InputError for what is no name of a repository on the hub."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise InputError(f"{one_line(str(error))} Name a repository as USER/NAME.") from None


# ----------------------------------------------------------------------------------- the model card


def card(
    model: Model,
    format: Format,
    record: RunRecord,
    choices: Choices = _NONE,
    client: int | None = None,
) -> str:
    """Returns the text of the model card: metadata in YAML, the run in a table, how to load it."""
    lines = ["---", _metadata(model, format, record, choices, client), "---", ""]
    lines += describe.body(model, format, _base(model, choices))
    if choices.merged and format != "merged":
        lines += ["The folder `merged` has the same model without an adapter.", ""]
    lines += ["## Training", "", "| | |", "|---|---|"]
    lines += [
        f"| {name} | {markdown(text)} |" for name, text in _facts(model, record, choices, client)
    ]
    lines += ["", *_licence(model, record, choices), *_again(record)]
    return "\n".join(lines)


def _metadata(
    model: Model, format: Format, record: RunRecord, choices: Choices, client: int | None
) -> str:
    """Returns the fields that the hub reads, in YAML.

    Their score is that of the model in the repository. That of one client's model is not known.
    """
    from huggingface_hub import EvalResult, ModelCardData

    fields = describe.fields(model, format)
    base = _base(model, choices)
    facts, metric = summary(record.rows), summary(record.rows)["headline"]
    name, hub = _data(record)
    score = facts["global_score"] if client is None else None
    results = []
    if score is not None and name is not None and "pipeline_tag" in fields:
        results = [
            EvalResult(
                task_type=fields["pipeline_tag"],
                dataset_type=hub or name,
                dataset_name=name,
                dataset_split="test",
                metric_type=metric,
                metric_name=f"test {wording.word(metric)}",
                metric_value=round(score, 6),
            )
        ]
    card = ModelCardData(
        **{key: value for key, value in fields.items() if key != "base_model"},
        base_model=base if _is_hub_id(base) else None,
        datasets=[hub] if hub else None,
        license=choices.license,
        metrics=[metric] if results else None,
        model_name=record.name if results else None,
        eval_results=results or None,
    )
    return card.to_yaml().rstrip()


def _facts(
    model: Model, record: RunRecord, choices: Choices, client: int | None
) -> list[tuple[str, str]]:
    """Returns what the card says about the run: (name, text)."""
    config, rows, facts = record.config, record.rows, summary(record.rows)
    data, hub = _data(record)
    environment = record.environment
    found: list[tuple[str, str | None]] = [
        ("Base model", _base(model, choices)),
        ("Data", f"{data} ({hub})" if hub else data),
        ("Partition", _named(config.get("partition"))),
        ("Algorithm", _named(config.get("algorithm"))),
        ("PEFT method", "full" if model.method is None else _named(_method(model))),
        ("Model", None if client is None else f"the personal model of client {client}"),
        ("Rounds", _rounds(record)),
        ("Clients in a round", _text(config.get("clients_per_round"))),
        ("Communication", _communication(facts)),
        ("Differential privacy", privacy_in_words(rows) or "none"),
        ("Caution", None if client is None else wording.capital(personal_privacy_note(rows))),
        *_scores(record, facts),
        ("Seed", _text(config.get("seed"))),
        ("Commit of fedjax_peft", environment.get("commit")),
        ("Versions", ", ".join(f"{k} {v}" for k, v in environment.get("versions", {}).items())),
        ("Device", environment.get("device")),
        ("Processor", environment.get("processor", {}).get("model")),
    ]
    return [(name, text) for name, text in found if text]


def _rounds(record: RunRecord) -> str | None:
    if not record.rows:
        return None
    done, planned = record.rows[-1]["round"], record.config.get("rounds")
    stopped = record.rows[-1].get("stopped")
    of = f" of {planned}" if planned and planned != done else ""
    return f"{done}{of}{f' ({stopped})' if stopped else ''}"


def _communication(facts: Mapping[str, Any]) -> str | None:
    """Returns the bytes of the whole run, of all clients together."""
    amounts = [facts[name] for name in ("bytes_up", "bytes_down")]
    if None in amounts:
        return None
    up, down = (wording.amount("bytes", x) for x in amounts)
    return f"{up} from all clients to the server, {down} back"


def _scores(record: RunRecord, facts: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    """Yields the scores on the test set and on the clients' own examples, with their spread."""
    metric, score = facts["headline"], facts["final_score"]
    text, word = wording.score_text(wording.is_share(metric)), wording.word(metric)
    whose = "" if facts["test_count"] is None else " of personal models, a mean"
    if score is not None:
        examples = tested_examples(record, Score("test", metric).name, score)
        if examples is None:
            within = "no interval is known for it"
        else:
            low, high = map(text, wilson(score, examples))
            within = f"95 % interval {low} to {high} over samples of test examples"
        after = f"after round {facts['final_round']}"
        yield f"Test {word}{whose}", f"{text(score)} {after}; {within}. One seed; others differ."
    elif facts["final_round"]:
        yield f"Test {word}{whose}", f"not finite after round {facts['final_round']}"
    if whose and facts["global_score"] is not None:
        yield f"Test {word} of the global model", text(facts["global_score"])
    if facts["client_mean"] is not None:
        count, deviation = facts["client_count"], facts["client_std"]
        spread = "" if deviation is None else f", standard deviation {text(deviation)}"
        of = f" of {count:.0f} clients" if count else ""
        yield f"Clients’ {word}", f"mean {text(facts['client_mean'])}{of}{spread}"


def _licence(model: Model, record: RunRecord, choices: Choices) -> list[str]:
    """Returns the section on licences; those of the base model and the data bind its readers."""
    own = (
        f"This adapter: {markdown(choices.license)}." if choices.license else "None was chosen yet."
    )
    name, _ = _data(record)
    known = {"base model": assets.ASSETS.get(model.name), "data": assets.ASSETS.get(name or "")}
    lines = [f"Licence of the {what}: {one.licence}." for what, one in known.items() if one]
    if len(lines) < len(known):
        lines.append("Look at the licences of the base model and of the data before you share it.")
    return ["## Licence", "", " ".join([own, *lines]), ""]


def _again(record: RunRecord) -> list[str]:
    """Returns the section that says how to repeat the run."""
    lines = ["## Run it again", ""]
    if not is_whole(record.config):
        return [*lines, f"A program made the run; `{_CONFIG}` says what it does not hold.", ""]
    lines += ["```console", f"$ fedjax-peft run {_CONFIG}", "```", ""]
    files: set[str] = set()
    _shareable(record.config, files)
    if files:
        names = ", ".join(map(markdown, sorted(files)))
        lines += [f"It reads files that are not here: put them beside it ({names}).", ""]
    return lines


def _data(record: RunRecord) -> tuple[str | None, str | None]:
    """Returns the name of the data set and its id on the hub; None for what is not known."""
    table = record.config.get("data")
    name = table.get("name") if isinstance(table, Mapping) else None
    if not isinstance(name, str):
        return None, None
    return Path(name).name, DATASETS[name].hub if name in DATASETS else None


def _base(model: Model, choices: Choices) -> str:
    """Returns the base model's id on the hub; of a checkpoint here, the name of its folder."""
    known = choices.base_model or origin(model)
    return Path(known).name if Path(known).is_absolute() else known


def _method(model: Model) -> dict[str, Any]:
    assert model.method is not None
    plain = {k: v for k, v in model.method.options.items() if isinstance(v, int | float | str)}
    return {"name": model.method.name, **plain}


def _named(table: Any) -> str | None:
    """Returns a table of a config in words, such as ``dirichlet (clients = 10, alpha = 0.5)``."""
    if not isinstance(table, Mapping):
        return _text(table)
    name = table.get("name", table.get(OWN))
    options = [
        f"{k} = {v}" for k, v in table.items() if not (k in ("name", OWN) or v in (None, {}, []))
    ]
    return f"{name} ({', '.join(options)})" if options else str(name)


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


def _is_hub_id(name: str) -> bool:
    return re.fullmatch(r"[\w.-]{1,96}(/[\w.-]{1,96})?", name) is not None


def _shareable(value: Any, files: set[str]) -> Any:
    """Returns a config with the names of files in place of absolute paths, without trackers.

    Paths have the names of people, and trackers those of servers.

    Args:
      files: gets the names; of ``/home/me/my.py:function``, ``my.py``.
    """
    if isinstance(value, Mapping):
        kept = {k: v for k, v in value.items() if k != "trackers"}
        return {_shareable(k, files): _shareable(v, files) for k, v in kept.items()}
    if isinstance(value, list | tuple):
        return [_shareable(item, files) for item in value]
    if not isinstance(value, str) or not Path(value).is_absolute():
        return value
    name = Path(value).name
    files.add(re.sub(r"(\.py):\w+$", r"\1", name))
    return name
