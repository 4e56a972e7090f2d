"""The calls of a run's parts in its ``config.toml``, in the tables of a config.

A run in Python is given parts, such as an algorithm with an optimizer. Their calls
(:mod:`fedjax_peft.contracts.part`) are written as a config would name them::

    [algorithm]                     [optimizer]
    name = "fedprox"                name = "adamw"
    mu = 0.1                        learning_rate = 0.001

A part without a call is written as its name, and can only be given again.
"""

from collections.abc import Mapping
from typing import Any

from fedjax_peft.contracts.part import Call, call_of

ROOMS = {
    "algorithm": "algorithms",
    "aggregator": "aggregators",
    "optimizer": "optimizers",
    "schedule": "schedules",
    "server_schedule": "schedules",
    "transforms": "transforms",
    "privacy": "privacy",
    "attack": "attacks",
    "asynchronous": "asynchronous",
    "availability": "availability",
}
"""Table of a config -> the room of the parts that it names."""
ARGUMENTS = ("optimizer", "aggregator", "server_schedule")
"""Arguments of an algorithm that have tables of their own."""
_SCHEDULED = "schedules.scheduled"


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
    if isinstance(algorithm := found.get("algorithm"), dict):
        return found | _apart(algorithm)
    return found


def _sequence(given: Any) -> Any:
    return given if isinstance(given, list) or type(given) is tuple else [given]


def _table(name: str, given: Any) -> Any:
    call = call_of(given)
    return given.name if call is None else _named(name, call.table())


def _chained(links: list[Any]) -> Any:
    """Returns name -> options of each transform, where their names differ; else a list."""
    names = [link["name"] if isinstance(link, dict) else "" for link in links]
    if "" in names or len(set(names)) < len(names):
        return links
    return {link.pop("name"): link for link in links}


def _named(name: str, table: Any) -> Any:
    """Returns a table whose name is the one that a config has in the table ``name``."""
    room, _, function = str(table["name"]).partition(".")
    return {**table, "name": function} if room == ROOMS[name] else table


def _apart(algorithm: dict[str, Any]) -> dict[str, Any]:
    """Returns the table of an algorithm, and those of its arguments that have one of their own."""
    found = {"algorithm": algorithm}
    for name in ARGUMENTS:
        if isinstance(algorithm.get(name), dict):
            found[name] = algorithm.pop(name)
    optimizer = found.get("optimizer", {})
    if optimizer.get("name") == _SCHEDULED:
        found |= {name: optimizer[name] for name in ("optimizer", "schedule")}
    return {name: _named(name, x) if "name" in x else x for name, x in found.items()}


def read(config: Mapping[str, Any], name: str) -> Call | None:
    """Returns the call of an argument of ``simulate``; None if the run has no call of it.

    Args:
      config: of a run that was made in Python.
      name: such as ``algorithm``.
    """
    table = config.get(name)
    if not isinstance(table, Mapping):
        return None
    table = {**table}
    if name == "algorithm":
        given = {n: _full(n, config[n]) for n in (*ARGUMENTS, "schedule") if n in config}
        if "schedule" in given:
            schedule, inner = given.pop("schedule"), given.pop("optimizer")
            given["optimizer"] = {"name": _SCHEDULED, "optimizer": inner, "schedule": schedule}
        table |= given
    return Call.read(_full(name, table))


def _full(name: str, table: Mapping[str, Any]) -> dict[str, Any]:
    own = table.get("name")
    plain = isinstance(own, str) and not {".", ":"} & set(own)
    return {**table, "name": f"{ROOMS[name]}.{own}"} if plain else {**table}
