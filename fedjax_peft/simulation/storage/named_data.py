"""The data of a run that was started in Python, as the tables of a config name them.

A config has one call of ``load_dataset``, one partition of its split ``train``, and perhaps
hold-outs of each client's examples. Data that were made in another way are not recorded.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fedjax_peft import tasks
from fedjax_peft.contracts.part import OWN, Call, call_of, item_of, written
from fedjax_peft.data.catalog import DATASETS
from fedjax_peft.data.dataset import Clients, Dataset
from fedjax_peft.data.packing import text_length
from fedjax_peft.support.assets import ASSETS
from fedjax_peft.support.rooms import ROOMS

PATHS = {
    "model": ("name",),
    "data": ("name", "source", "tokenizer"),
    "peft": ("adapter",),
    "availability": ("path",),
}
"""Table -> the keys whose values can be paths."""
_HOLDOUTS = {"test": "client_holdout", "validation": "client_validation_holdout"}


def absolute(value: Any, folder: Path) -> Any:
    """Returns an existing file or folder as an absolute path, and anything else as it is."""
    names = {*DATASETS, *ASSETS, "auto", "hub", "tiny", ""}
    if not isinstance(value, str) or value in names:
        return value
    try:  # the name can be too long, and `~user` can name an unknown user
        path = folder.absolute() / Path(value).expanduser()
        return os.path.normpath(path) if path.exists() else value
    except (OSError, ValueError, RuntimeError):
        return value


def data_tables(given: Any, model: str, source: str | None) -> dict[str, Any]:
    """Returns ``[data]``, ``[partition]``, ``[evaluation]`` and ``[task]``.

    Args:
      given: has the arguments of ``simulate`` as attributes.
      model: the name of the model, whose tokenizer is that of the data by default.
      source: where it was read from; None of random weights, which have no tokenizer.
    """
    clients = given.clients
    call, evaluation = call_of(clients), dict[str, Any]()
    packing = _arguments(call, "Clients.pack")
    call = packing["self"] if packing else call
    own = {split: getattr(given.evaluation, f"client_{split}") for split in _HOLDOUTS}
    call, unused = _held_out(call, own, evaluation)
    evaluation |= {f"client_{part}": False for part in _HOLDOUTS}
    partition, drawn = _partition(call, clients)
    split = _arguments(drawn, "contracts.item")
    loaded = _arguments(split.get("of"), "load_dataset") if split.get("key") == "train" else {}
    if unused:
        partition = {OWN: "clients with a hold-out that the run is not tested on"}
    for part, one in own.items():
        if one is not None and _HOLDOUTS[part] not in evaluation:
            natural = _is_natural(one, split.get("of"), part, partition, clients)
            evaluation[f"client_{part}"] = natural or {OWN: "clients"}
    for part in _HOLDOUTS:
        data = getattr(given, part)
        same = loaded and data is not None and call_of(data) == item_of(split["of"], part)
        evaluation[f"global_{part}"] = bool(same) if same or data is None else {OWN: _text(data)}
    table: dict[str, Any] = {OWN: _text(clients.data)}
    if loaded:
        table = _loaded(loaded, model, source)
    if (length := text_length(clients.data.columns)) is not None:
        table["packing" if packing else "max_length"] = length
    return {
        "data": table,
        "partition": partition,
        "evaluation": evaluation,
        **_task(given, loaded),
    }


def _arguments(call: Any, name: str) -> dict[str, Any]:
    """Returns the arguments of a call of a function; none of anything else."""
    return dict(call.arguments) if isinstance(call, Call) and call.name == name else {}


def _text(data: Any) -> str:
    name = data.name if isinstance(data, Dataset) else ""
    return f"the data set {name!r}" if name else f"a {type(data).__name__}"


def _holdouts(call: Any) -> Iterator[Call]:
    """Yields the hold-outs by which clients have fewer examples, the last one first."""
    while (kept := _arguments(call, "contracts.item")) and kept["key"] == 0:
        if not (held := _arguments(kept["of"], "Clients.holdout")):
            return
        yield kept["of"]
        call = held["self"]


def _held_out(call: Any, own: dict[str, Any], evaluation: dict[str, Any]) -> tuple[Any, bool]:
    """Returns the call of the clients before all hold-outs, and whether a config cannot say these.

    Args:
      own: the clients' own examples by what they are for.
      evaluation: gets the shares.
    """
    places = [*_holdouts(call)][::-1]
    left, seeds = list(_HOLDOUTS), set()
    for place in places:
        options = dict(place.arguments)
        while left and call_of(own[left[0]]) != item_of(place, 1):
            left.pop(0)
        if not left:
            return call, True
        evaluation[_HOLDOUTS[left.pop(0)]] = options["fraction"]
        seeds.add(options["seed"])
    if places:
        evaluation["holdout_seed"], call = min(seeds), dict(places[0].arguments)["self"]
    return call, len(seeds) > 1


def _partition(call: Any, clients: Clients[Any]) -> tuple[dict[str, Any], Any]:
    """Returns ``[partition]``, and the call of the data that were partitioned."""
    if not isinstance(call, Call) or not (call.name.startswith("partition.") or ":" in call.name):
        return {OWN: "clients"}, call_of(clients.data)
    (_, data), *options = call.arguments
    return named("partition", Call(call.name, tuple(options)).table()), data


def _is_natural(
    one: Any, loaded: Any, part: str, partition: dict[str, Any], clients: Clients[Any]
) -> bool:
    """Returns whether a split was dealt out to the users who are the clients, as a config does."""
    options = _arguments(call_of(one), "partition.natural")
    return (
        loaded is not None
        and options.get("data") == item_of(loaded, part)
        and partition.get("name") == "natural"
        and options["by"] == partition["by"]
        and options.get("names") == clients.names
    )


def _loaded(options: dict[str, Any], model: str, source: str | None) -> dict[str, Any]:
    """Returns ``[data]``, the arguments of ``load_dataset``."""
    table = {key: written(x) for key, x in options.items() if key not in ("task", "tokenizer")}
    table |= {key: absolute(table[key], Path()) for key in ("name", "source")}
    if (tokenizer := options.get("tokenizer")) is not None:
        known = _arguments(tokenizer, "load_tokenizer")
        if not known:
            table["tokenizer"] = written(tokenizer)
        elif (known["name"], known["source"]) != (model, source):  # else that of the model
            own = absolute(known["name"], Path())
            there = {OWN: f"the tokenizer {own!r} of the hub"}
            table["tokenizer"] = own if known["source"] == "auto" else there
    return table


def _task(given: Any, loaded: dict[str, Any]) -> dict[str, Any]:
    """Returns ``[task]``; without the table, the task is the one that the head has."""
    own, chosen = given.clients.data.task, given.task
    name = getattr(own, "name", own) or "classification"
    if chosen is not None and loaded and chosen.name != name:
        return {"task": {OWN: f"{chosen.name}, which is not the task of the data"}}
    if chosen is None:
        chosen = loaded.get("task")
        if chosen is None and name == tasks.for_head(given.model.recipe.get("head", "")).name:
            return {}
        if chosen is None:
            chosen = name if loaded else own
    call = chosen if isinstance(chosen, Call) else call_of(chosen)
    if call is not None:
        return {"task": named("task", call.table())}
    return {"task": {"name": chosen} if isinstance(chosen, str) else {OWN: name}}


def named(table: str, written: dict[str, Any]) -> dict[str, Any]:
    """Returns the table of a call, whose name is the one that a config has in ``table``."""
    room, _, function = str(written["name"]).partition(".")
    return {**written, "name": function} if room == ROOMS.get(table) else written
