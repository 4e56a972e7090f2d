"""A Flower app that stands alone: the command ``deploy`` writes it, and Flower runs it.

The app is a folder with the complete config of a run. Its two Python files only call :func:`client`
and :func:`server` of this module.
"""

import functools
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_peft.config import building
from fedjax_peft.config.keys import Config, DataKeys
from fedjax_peft.config.resolving import resolve_recorded
from fedjax_peft.config.running import arguments_of
from fedjax_peft.data.dataset import Clients
from fedjax_peft.data.formats import tabular
from fedjax_peft.deploy.nodes import client_app, nobody, server_app
from fedjax_peft.deploy.server import check_deployable
from fedjax_peft.simulation.arguments import Given
from fedjax_peft.simulation.classes import in_models_classes
from fedjax_peft.simulation.session import session_of
from fedjax_peft.simulation.simulate import arguments
from fedjax_peft.simulation.storage.record import config_text, read_config
from fedjax_peft.support.errors import InputError
from fedjax_peft.support.files import replace_file
from fedjax_peft.support.toml import literal
from fedjax_peft.tasks import sources

_SPLITS = ("name", "source", "split", "csv", "test_share", "validation_share")
_SIZES = ("train_examples", "validation_examples", "test_examples", "users", "user_examples")
_OWN_TESTS = ("client_test", "client_validation", "global_validation")
_HOLDOUTS = ("client_holdout", "client_validation_holdout", "holdout_seed")


def client(folder: Path) -> Any:
    """Returns the ``ClientApp`` of an app's folder.

    A SuperNode's config says ``client=NUMBER`` and ``data="FILE"``, perhaps ``state="FOLDER"``.
    """

    def make(context: Any) -> Given:
        config, path = _config(folder), context.node_config.get("data")
        if path is None:
            raise InputError(
                "The SuperNode does not say where its client's examples are: start it with"
                " --node-config 'client=0 data=\"FILE\"'."
            )
        return _given(config, own_examples(config, Path(str(path)).expanduser()))

    return client_app(make)


def server(folder: Path, clients: int) -> Any:
    """Returns the ``ServerApp`` of an app's folder; the keys of its ``--run-config`` are those of
    ``[tool.flwr.app.config]``.
    """

    def make(context: Any) -> Given:
        config, chosen = _config(folder), context.run_config
        test = None
        if chosen["test"]:
            path = Path(str(chosen["test"])).expanduser()
            test = own_examples(config, path, packed=False).data
        own = {"test": test, "out": chosen["out"], "resume": bool(chosen["resume"])}
        return _given(config, nobody(), **own)

    return server_app(make, clients)


@functools.cache
def _config(folder: Path) -> Config:
    return resolve_recorded(read_config(folder))


def _given(config: Config, clients: Clients, **objects: Any) -> Given:
    """Returns the arguments of the run, with the examples of one client."""
    model = building.build_model(config, config["model"]["labels"])
    made = arguments_of(config, {"config": config})
    return arguments(model, clients=clients, task=building.task_of(config), **made, **objects)


def own_examples(config: Config, path: Path, *, packed: bool = True) -> Clients:
    """Returns the rows of a file as the examples of one client, encoded as the config says.

    Args:
      packed: whether they are packed, if the config packs examples to train on.

    Raises:
      InputError: the file cannot be read, or its rows do not fit.
    """
    if not path.is_file() or tabular.kind(path) is None:
        endings = tabular.endings_advice(path)
        raise InputError(f"{path} must be a file with examples, which ends in {endings}")
    # Clusters are a key to partition by, and need the examples of all clients.
    table, left_out = config["data"], {*DataKeys._fields, *_SPLITS, *_SIZES, "clusters"}
    read = tabular.read_file(path, alone=True, form=tabular.csv_form(table["csv"])).columns
    rows = [dict(zip(read, row, strict=True)) for row in zip(*read.values(), strict=True)]
    options = {key: x for key, x in table.items() if key not in left_out}
    options |= {"name": {"train": rows, "test": rows}}
    if config["model"]["labels"]:
        options["label_names"] = config["model"]["labels"]
    parts = {"tokenizer": building.tokenizer_of(config), "task": building.named_task(config)}
    try:
        data = building.seeded(sources.load_dataset, config, options, **parts)["train"]
    except InputError as error:
        columns = ", ".join(read)
        raise InputError(
            f"{path}, with the columns {columns}, does not fit the config: {error}"
        ) from None
    one = Clients(data, (np.arange(len(data), dtype=np.int32),))
    return one.pack(table["packing"]) if packed and table["packing"] is not None else one


def write_app(given: Given, out: Path) -> list[str]:
    """Writes the app of a run to a new folder; returns notices about what it leaves out.

    Args:
      given: the arguments of the simulated run, with its complete config.

    Raises:
      InputError: the folder exists, or the run cannot be deployed.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"{out} exists: choose another folder with --out.")
    config, notices = _deployed(given)
    session_of(in_models_classes(given))  # refuses here what only Flower's log would say
    count, certificate = len(given.clients), literal(str(out.resolve() / "ca.crt"))
    files = {
        "config.toml": config_text(config),
        "pyproject.toml": _text("project.txt").format(
            name=literal(out.resolve().name), count=count
        ),
        "client_app.py": _APP.format(what="client", arguments="Path(__file__).parent"),
        "server_app.py": _APP.format(what="server", arguments=f"Path(__file__).parent, {count}"),
        "README.md": _readme(config, count),
        ".flwr/config.toml": _text("connections.txt").format(certificate=certificate),
    }
    for name, text in files.items():
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        replace_file(out / name, text.encode())
    return notices


def _deployed(given: Given) -> tuple[Config, list[str]]:
    """Returns the config of a deployed run, and what it leaves out of the simulated run's."""
    how = replace(given.evaluation, client_test=None, client_validation=None)  # left out below
    check_deployable(replace(given, evaluation=how))
    config = {**(given.records.config or {})}
    everyone = "no machine has the examples of all clients"
    for key, there, why in (
        ("peft.gradient_start", config["peft"].get("gradient_start"), everyone),
        ("peft.init = 'eva'", config["peft"].get("init") == "eva", everyone),
        ("data.vocabulary", config["data"].get("vocabulary"), everyone),
        ("data.instructions", config["data"].get("instructions"), "it is for named data sets"),
        ("origin", config.get("origin"), "its model is on this machine alone: export it"),
        ("metric", config.get("metric"), "write a [task] table with it"),
    ):
        if there:
            raise InputError(f"{key} cannot be deployed: {why}.")
    notices = []

    def without(table: str, values: Mapping[str, Any], why: str) -> None:
        before = {name: config[table].get(name) for name in values}
        config[table] = {**config[table], **values}
        if left := [f"{table}.{n}" for n, x in values.items() if before[n] not in (x, None)]:
            notices.append(f"{', '.join(left)}: left out, {why}")

    labels = list(given.clients.data.label_names)
    config["model"] = {**config["model"], "labels": labels or config["model"]["labels"]}
    real = "because real clients fail and rest on their own"
    without("system", {"failure_rate": 0.0, "failure_exponent": 0.0, "late": "drop"}, real)
    if config["availability"]:
        config["availability"] = {}
        notices.append(f"availability: left out, {real}")
    why = "because the clients' models and examples stay with them"
    without("evaluation", dict.fromkeys(_OWN_TESTS, False) | dict.fromkeys(_HOLDOUTS), why)
    return config, notices


def _text(name: str) -> str:
    """Returns a file of the app, with places to fill in."""
    return (Path(__file__).parent / "files" / name).read_text(encoding="utf-8")


def _readme(config: Config, count: int) -> str:
    data = Path(str(config["data"]["name"]))
    ending = data.suffix or ".jsonl"
    model = str(config["model"]["name"])
    return _text("readme.txt").format(last=count - 1, count=count, ending=ending, model=model)


_APP = """\
from pathlib import Path

from fedjax_peft.deploy import app as apps

app = apps.{what}({arguments})
"""
