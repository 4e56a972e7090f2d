"""The fingerprint of a run: what its results depend on, as dotted names with plain values.

A run records it in ``fingerprint.json``, beside its config. A resumed run and a finished point of a
sweep compare it, and refuse to go on with anything else. It consists of

* the settings of the run's ``config.toml``;
* the arguments of ``simulate``: numbers and names, and of algorithms, optimizers and mechanisms
  the calls that made them (:mod:`fedjax_peft.contracts.part`); of what has no call, the names of
  its functions with the values that these hold (:mod:`fedjax_peft.simulation.description`);
* digests of the examples and of the clients' rows (of more than 1 GiB, of evenly spaced pieces);
* for each leaf of the model, its shape and three sums (:func:`sums`).

The traced program of a round is not a part: the functions and their values decide it, and tracing a
large model takes longer than all of the above.
"""

import json
import math
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_peft import tasks
from fedjax_peft.contracts import Params
from fedjax_peft.engine.devices.distributed import agree, process, processes
from fedjax_peft.numerics.hyperparameters import parametrised
from fedjax_peft.simulation.checks import clients_a_round
from fedjax_peft.simulation.description import CODE, EMPTY, Plain, describe, flat
from fedjax_peft.support.display import argument, show
from fedjax_peft.support.errors import InputError
from fedjax_peft.support.files import replace_file
from fedjax_peft.support.nested import flatten
from fedjax_peft.support.secrets import without_secrets

Fingerprint = Mapping[str, Plain]
"""Dotted name -> plain value; of a leaf of the model, its sums."""

MAY_CHANGE = {
    "the end": ("evaluation.stop", "stop"),  # and more rounds; [stop] is a table of its own
    "placement": tuple(
        f"placement.{name}"
        for name in (
            *("lanes", "devices", "model_parallel", "model_sharding", "length_buckets"),
            *("examples", "engine", "reuse"),
        )
    ),
    "evaluation": ("evaluation.every", "evaluation.batch_size", "evaluation.diagnostics"),
    "records": ("records", "trackers"),  # [trackers] is a table of its own
}
"""The options of ``simulate``, and keys of a config, that a resumed run may change."""

_FREE = tuple(name for names in MAY_CHANGE.values() for name in names)
_APART = ("records", "out", "resume", "diagnostics")
"""Arguments that are not described. A config is compared key by key, and it names an origin, whose
leaves are those of the model."""
NAME = "fingerprint.json"
FORMAT = 2
"""Of the file. The first described the closures of parts, in place of their calls."""


def fingerprint(arguments: Mapping[str, Any]) -> dict[str, Plain]:
    """Returns the fingerprint of a run, without the settings of its config."""
    given = {name: value for name, value in arguments.items() if name not in _APART}
    for name in ("algorithm", "transforms", "privacy", "attack"):
        given[name] = parametrised(given[name], given["values"])[0]
    clients = given["clients"]
    given["clients_per_round"] = clients_a_round(
        clients, given["clients_per_round"], given["sampling"]
    )
    given["task"] = given["task"] or tasks.for_data(clients.data)
    for table in ("system", "placement", "evaluation"):
        options = vars(given[table]).items()
        given[table] = {n: value for n, value in options if not _is_free(f"{table}.{n}")}
    model = given.pop("model")
    given["model"] = {name: getattr(model, name) for name in ("apply", "kinds", "dtype", "wide")}
    found: dict[str, Plain] = {}
    for name, value in given.items():
        found |= flat(describe(value), name)
    for tree in ("frozen", "trainable"):
        leaves = getattr(model, tree)
        found |= {f"model.{tree}.{leaf}": sums(leaves[leaf]) for leaf in sorted(leaves)}
    return found


def sums(leaf: Any) -> dict[str, Any]:
    """Returns the shape of an array, its sum, sum of squares, and sum with alternating signs.

    Values that were computed on another device differ in rounding, which changes a digest but
    hardly the sums; see :func:`changed_leaf`.
    """
    total = square = signed = 0.0
    flattened = np.asarray(leaf).reshape(-1)
    for start in range(0, len(flattened), len(_SIGNS)):  # the blocks stay in the cache
        block = flattened[start : start + len(_SIGNS)].astype(np.float32)
        total += float(block.sum())
        square += float(np.dot(block, block))
        signed += float(np.dot(block, _SIGNS[: len(block)]))
    return {"shape": f"{leaf.dtype}{list(leaf.shape)}", "sums": [total, square, signed]}


_SIGNS = np.where((np.arange(1 << 16) * 2654435761 >> 13) & 1, 1.0, -1.0).astype(np.float32)


def changed_leaf(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Returns whether the sums of two leaves differ by more than an SVD does between machines."""
    if before["shape"] != now["shape"]:
        return True
    was, found = before["sums"], now["sums"]
    tolerance = 1e-3 * math.sqrt(max(was[1], found[1])) + 1e-12
    near = math.isclose(was[1], found[1], rel_tol=1e-3) and all(
        abs(was[i] - found[i]) <= tolerance for i in (0, 2)
    )
    return not near and _text(was) != _text(found)  # NaN equals NaN


def changed_base(directory: Path, frozen: Params) -> str | None:
    """Returns a frozen leaf that differs from what a run began with; None if all are the same.

    A difference of the size by which an SVD differs between machines does not count.

    Raises:
      InputError: the file of the fingerprint is damaged.
    """
    if not (directory / NAME).exists():
        return None
    prefix = "model.frozen."
    run = _read(directory)["run"].items()
    then = {name.removeprefix(prefix): x for name, x in run if name.startswith(prefix)}
    for name in sorted({*frozen, *then}) if then else ():
        if name not in frozen or name not in then or changed_leaf(then[name], sums(frozen[name])):
            return name
    return None


def differences(before: Fingerprint, now: Fingerprint) -> list[str]:
    """Returns the names whose values differ; a name that is missing has the value None."""
    names = dict.fromkeys([*before, *now])
    return [name for name in names if not _same(before.get(name), now.get(name))]


def _is_free(name: str) -> bool:
    """Returns whether a resumed run may change an option."""
    return any(name == free or name.startswith(f"{free}.") for free in _FREE)


def _same(a: Plain, b: Plain) -> bool:
    if isinstance(a, Mapping) and isinstance(b, Mapping):  # of a leaf
        return not changed_leaf(a, b)
    numbers = all(isinstance(x, int | float) and not isinstance(x, bool) for x in (a, b))
    if numbers and isinstance(a, float) | isinstance(b, float):
        return math.isclose(a, b, rel_tol=1e-9) or (a != a and b != b)
    return _text(a) == _text(b)


def _text(value: Plain) -> str:
    """Returns a value as JSON, in which tuples are lists, and nothing is an empty list too."""
    return json.dumps(None if isinstance(value, str) and value == EMPTY else value, default=str)


def save(directory: Path, found: Fingerprint) -> None:
    """Writes the fingerprint of a run, without the settings of its config."""
    table = {"format": FORMAT, "versions": _versions(), "run": found}
    replace_file(directory / NAME, (json.dumps(table, indent=1) + "\n").encode())


def check_same(
    directory: Path, recorded: Mapping[str, Any], config: Mapping[str, Any], found: Fingerprint
) -> None:
    """Raises InputError, with the first differences, if a directory holds another run."""
    changed = _changed(_settings(recorded), _settings(config))
    stored, versions, hint = _load(directory), _versions(), ""
    described = _changed(stored["run"], found)
    changed |= {name: pair for name, pair in described.items() if name not in changed}
    if stored["versions"]["python"] != versions["python"]:
        changed = {name: pair for name, pair in changed.items() if not name.endswith(CODE)}
    if others := _changed(stored["versions"], versions):
        hint = "".join(
            f" Of {name}, the run has {a}, this is {b}." for name, (a, b) in others.items()
        )
    if not changed:
        return
    was = "; ".join(
        f"{name}: {_shown(a)} -> {_shown(b)}" for name, (a, b) in list(changed.items())[:_MOST]
    )
    more = f"; and {len(changed) - _MOST} more" if len(changed) > _MOST else ""
    raise InputError(
        f"{directory} was run with another config: {was}{more}. Only more rounds, another stop"
        " rule, another placement, and other rounds of evaluations and checkpoints can be asked of"
        f" a resumed run. {_ANEW.format(argument(directory))}{hint}"
    )


def check_same_run(settings: Mapping[str, Any]) -> None:
    """Raises InputError if another process runs something else than process 0.

    Such processes would compute different programs on different data, or wait for each other for
    ever.
    """
    if processes() == 1:
        return
    mine = flatten(settings)
    names = ("fedjax_peft", "jax", "jaxlib", "numpy")
    mine |= {f"the version of {name}": metadata.version(name) for name in names}
    first = agree(json.loads(json.dumps(mine, default=str)))
    if differing := differences(first, mine):
        shown = "; ".join(f"{k} is {mine.get(k)} here and {first.get(k)} there" for k in differing)
        raise InputError(
            f"Process {process()} does not run the same as process 0: {shown}. Start all processes"
            " with the same config, data, weights and versions."
        )


_ANEW = (
    "Start a new one in another directory, with out= or --out; from the model of this one with"
    " --from {} (in Python fp.simulate(run.trained, ..., records=fp.Records(origin=run)))."
)
_MOST = 3
"""The number of differences that an error names."""


def _changed(before: Fingerprint, now: Fingerprint) -> dict[str, tuple[Plain, Plain]]:
    """Returns name -> (recorded value, value now) of what a resumed run may not change."""
    names = [name for name in differences(before, now) if not _is_free(name)]
    if "rounds" in names and (now.get("rounds") or 0) > (before.get("rounds") or 0):
        names.remove("rounds")
    # Of an object of another type, all fields differ.
    first = [n for i, n in enumerate(names) if not n.startswith(tuple(f"{x}." for x in names[:i]))]
    return {name: (before.get(name), now.get(name)) for name in first}


def counting(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a config without ``epochs`` where ``local_steps`` counts in its place."""
    replaced = config.get("local_steps") is not None
    return {key: value for key, value in config.items() if not (replaced and key == "epochs")}


def _settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what a run records of a config; its ``validation`` only says what others decide."""
    known = flatten(counting(without_secrets(config)))
    return {name: value for name, value in known.items() if name != "validation"}


def _load(directory: Path) -> dict[str, Any]:
    """Returns what :func:`save` has written."""
    path = directory / NAME
    if not path.exists():
        raise InputError(
            f"{directory} has no {NAME}, which says what was run, so the run cannot be continued."
            " It can be read (report, predict, export)."
        )
    table = _read(directory)
    if table["format"] != FORMAT:
        raise InputError(
            f"The run in {directory} was recorded by another version of fedjax_peft, whose"
            " description of it cannot be compared with that of this version. It can be read,"
            " reported and exported, but not continued."
            f" {_ANEW.format(argument(directory))}"
        )
    return table


def _read(directory: Path) -> dict[str, Any]:
    path = directory / NAME
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
        found = {"versions": dict(table["versions"]), "run": dict(table["run"])}
        return {"format": table.get("format"), **found}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path} is damaged: {error!r}.") from None


def _versions() -> dict[str, str]:
    found = {name: metadata.version(name) for name in ("fedjax_peft", "jax", "flax", "optax")}
    return {"python": ".".join(map(str, sys.version_info[:2])), **found}


def _shown(value: Plain) -> str:
    """Returns a value in words; of a leaf, its shape, norm and sum."""
    if not isinstance(value, Mapping):
        return show(value, 100)
    total, square, _ = value["sums"]
    return f"{value['shape']} of norm {math.sqrt(square):.6g} and sum {total:.6g}"
