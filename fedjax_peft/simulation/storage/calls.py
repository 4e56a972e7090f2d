"""The tables of a config for a run that was started in Python; its ``config.toml`` holds them.

The calls of its parts, of its model and of its data (:mod:`fedjax_peft.contracts.part`) are written
as a config would name them::

    [algorithm]                     [optimizer]                     [partition]
    name = "fedprox"                name = "adamw"                  name = "dirichlet"
    mu = 0.1                        learning_rate = 0.001           clients = 10

What no config can name has the key ``not_recorded`` in its place, with what was there.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedjax_peft.contracts.part import OWN, Call, call_of, written
from fedjax_peft.models.base import Model
from fedjax_peft.models.heads import WITHOUT_CLASSES
from fedjax_peft.numerics.hyperparameters import parametrised
from fedjax_peft.simulation.storage.named_data import data_tables, named
from fedjax_peft.simulation.storage.tracking import recorded

ARGUMENTS = ("optimizer", "aggregator", "server_schedule")
"""Arguments of an algorithm that have tables of their own."""
NO_METHOD = "none"
"""The name in ``[peft]`` of a model without a PEFT method."""
_SCHEDULED = "schedules.scheduled"
_TOP = (
    *("rounds", "clients_per_round", "sampling", "batch_size", "batch_sampling"),
    *("epochs", "local_steps", "seed"),
)
_PARTS = ("algorithm", "transforms", "privacy", "attack")


def settings(given: Any, origin: str | None = None) -> dict[str, Any]:
    """Returns the config of a run.

    Args:
      given: has the arguments of ``simulate`` as attributes.
      origin: where the run is that this one starts from.
    """
    system = dict(vars(given.system))
    time, availability = system.pop("time"), system.pop("availability")
    evaluation = given.evaluation
    parts = {name: parametrised(getattr(given, name), given.values)[0] for name in _PARTS}
    parts |= {"asynchronous": given.asynchronous, "availability": availability}
    found = tables(parts | {"stop": evaluation.stop})
    data = data_tables(given, *_tokenizer_of(given.model))
    plain = ("every", "batch_size", "test_clients", "diagnostics")
    data["evaluation"] |= _plain({name: getattr(evaluation, name) for name in plain})
    places = vars(given.placement).items()
    return {
        **_plain({name: getattr(given, name) for name in _TOP}),
        **_runtime(given.values, found),
        "system": _plain(system),
        "time": {"preset": "default", **time._asdict()},
        "placement": {name: x for name, x in places if isinstance(x, str | int | None)},
        "records": _plain({"checkpoint_every": given.records.checkpoint_every}),
        **model_tables(given.model, started=origin is not None),
        **data,
        **found,
        "origin": origin,
        **({"trackers": tracked} if (tracked := recorded(given.records.trackers)) else {}),
    }


def _plain(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: None if x is None else written(x) for name, x in options.items()}


def model_tables(model: Model, *, started: bool = False) -> dict[str, Any]:
    """Returns ``[model]`` and ``[peft]``.

    Args:
      started: whether the model is that of another run, which the config names.
    """
    call, seed = call_of(model), dict[str, Any]()
    exact = not (call and call.name == "quantize" and _starts_shape_weights(model))
    while isinstance(call, Call) and call.name in ("attach", "quantize"):
        options = dict(call.arguments)
        seed = {"seed": options["seed"]} if call.name == "attach" else seed
        call = options["model"]
    table = _model_table(model.recipe, model.labels, model.name)
    if model.recipe and not (started or (exact and isinstance(call, Call))):
        table[OWN] = "a model whose values were changed after it was made"
    method = {"name": NO_METHOD} if model.method is None else _table("peft", model.method)
    return {"model": table, "peft": method | seed}


def _starts_shape_weights(model: Model) -> bool:
    return model.method is not None and model.method.start_shapes_frozen


def _model_table(recipe: Mapping[str, Any], labels: Any, name: str) -> dict[str, Any]:
    if not recipe:
        return {OWN: "a module of your own, or merged weights"}
    table = {**recipe}
    table["fresh_head"] = table.pop("fresh", None)
    if table.pop("made_by") == "random_model":
        table["name"] = name
    elif Path(name).is_absolute() and str(Path(name).resolve()) == table["name"]:
        table["name"] = name  # as it was given, not as a link resolves
    if table["head"] not in WITHOUT_CLASSES:
        table["labels"] = list(labels)
    return table


def _tokenizer_of(model: Model) -> tuple[str, str | None]:
    """Returns the name and the source by which a config finds the tokenizer of its model."""
    return model.name, model.recipe.get("source")


def tables(parts: Mapping[str, Any]) -> dict[str, Any]:
    """Returns table of a config -> what it holds, for the parts of a run.

    Args:
      parts: argument of ``simulate`` -> its part, or a sequence of transforms; None is left out.
    """
    found: dict[str, Any] = {}
    for name, given in parts.items():
        if name == "transforms" and given is not None:
            found[name] = _chained([_table(name, one) for one in _sequence(given)])
        elif given is not None:
            found[name] = _table(name, given)
    if "algorithm" in found:
        return found | _apart(found["algorithm"])
    return found


def _sequence(given: Any) -> Any:
    return given if isinstance(given, list) or type(given) is tuple else [given]


def _table(name: str, given: Any) -> dict[str, Any]:
    call = call_of(given)
    if call is None:
        return {OWN: getattr(given, "name", None) or getattr(given, "__qualname__", "a function")}
    table = named(name, call.table())
    return {k: x for k, x in table.items() if k != "name"} if name == "stop" else table


def _chained(links: list[dict[str, Any]]) -> Any:
    """Returns name -> options of each transform; of equal names, the second is ``name#2``."""
    if missing := next((link for link in links if OWN in link), None):
        return missing
    found: dict[str, Any] = {}
    for place, link in enumerate(links):
        name = link.pop("name")
        found[f"{name}#{place + 1}" if name in found else name] = link
    return found


def _apart(algorithm: dict[str, Any]) -> dict[str, Any]:
    """Returns the table of an algorithm, and those of its arguments that have one of their own."""
    found = {"algorithm": algorithm}
    for name in ARGUMENTS:
        if isinstance(algorithm.get(name), dict):
            found[name] = algorithm.pop(name)
    optimizer = found.get("optimizer", {})
    if optimizer.get("name") == _SCHEDULED:
        found |= {name: optimizer[name] for name in ("optimizer", "schedule")}
    return {name: named(name, x) if "name" in x else x for name, x in found.items()}


def _runtime(values: Mapping[str, Any] | None, found: Mapping[str, Any]) -> dict[str, Any]:
    """Returns which numbers of the tables are run-time values of the program.

    Args:
      values: of ``simulate``. Those of a user's function have names of its own.
    """
    keys = [_config_key(name, found) for name in values or {}]
    if all(keys):
        return {"runtime": keys} if keys else {}
    return {"values": {**(values or {}), OWN: "a function that makes parts of these values"}}


def _config_key(name: str, found: Mapping[str, Any]) -> str | None:
    """Returns the key of a config for a place in a part, such as ``optimizer.learning_rate``."""
    table, _, rest = name.partition(".")
    if table == "transforms" and len(links := found.get(table, {})) == 1:
        return f"{table}.{next(iter(links))}.{rest}"
    if table == "algorithm" and "schedule" in found:
        name = name.replace("optimizer.optimizer.", "optimizer.")
        name = name.replace("algorithm.optimizer.schedule.", "algorithm.schedule.")
    *place, key = name.removeprefix("algorithm.").split(".")
    own = found.get(".".join(place) if place else table)
    return ".".join([*(place or [table]), key]) if isinstance(own, dict) and key in own else None
