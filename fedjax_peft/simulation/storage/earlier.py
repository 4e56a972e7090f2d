"""Configs of versions before 0.2, which had the options of a run's records at the top level.

``lanes = 2`` is now ``placement.lanes = 2``, and the preset of a published system, which was
``system = "federa"``, is ``preset = "federa"``. Runs that were recorded then are still read.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedjax_peft.support.display import argument
from fedjax_peft.support.errors import InputError
from fedjax_peft.support.nested import flatten, merge

_MOVED = {
    "system": (
        *("client_ranks", "stragglers", "failure_rate", "failure_exponent", "deadline", "late"),
        "nonfinite",
    ),
    "placement": (
        *("lanes", "devices", "model_parallel", "model_sharding", "client_state", "examples"),
        *("length_buckets", "engine"),
    ),
    "evaluation": (
        *("test_clients", "diagnostics", "client_test", "client_validation", "client_holdout"),
        *("client_validation_holdout", "global_test", "global_validation"),
    ),
    "records": ("checkpoint_every",),
}
RENAMED = {name: f"{table}.{name}" for table, names in _MOVED.items() for name in names} | {
    "eval_every": "evaluation.every",
    "eval_batch_size": "evaluation.batch_size",
    "system": "preset",
    "system_changes": "preset_changes",
    "time_model": "time",
}
"""Key at the top level of an earlier config -> dotted key of a present one."""


def new_key(key: str, value: Any = None) -> str:
    """Returns the present dotted key of a key at the top level; most are the same.

    Args:
      value: its value; ``system`` is today the table of a record.
    """
    return key if key == "system" and isinstance(value, Mapping) else RENAMED.get(key, key)


def is_earlier(config: Mapping[str, Any]) -> bool:
    """Returns whether a config, or a part of it, is of an earlier version."""
    return upgrade(config) != dict(config)


def upgrade(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a config with present keys; also in its methods and its sweep.

    Raises:
      InputError: the config has a key twice, in its earlier and in its present place.
    """
    present = flatten(config)
    result: dict[str, Any] = {}
    for key, value in config.items():
        new = new_key(key, value)
        if new != key and new in present:
            raise InputError(f"The config has both {key!r} and {new!r}.")
        table, _, last = new.rpartition(".")
        result = merge(result, {table: {last: value}} if table else {last: value})
    if isinstance(methods := result.get("methods"), dict):
        result["methods"] = {
            name: upgrade(one) if isinstance(one, dict) else one for name, one in methods.items()
        }
    if isinstance(result.get("preset_changes"), dict):
        result["preset_changes"] = _with_new_keys(result["preset_changes"])
    if isinstance(sweep := result.get("sweep"), dict):
        if isinstance(sweep.get("grid"), dict):
            sweep["grid"] = _with_new_keys(sweep["grid"])
        if isinstance(sweep.get("constants"), list):
            sweep["constants"] = [RENAMED.get(str(key), key) for key in sweep["constants"]]
    return result


def _with_new_keys(table: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a table whose names are dotted keys of a config."""
    return {new_key(key, value): value for key, value in table.items()}


def check_resumable(directory: Path, config: Mapping[str, Any]) -> None:
    """Raises InputError for a run of an earlier version, which cannot be continued."""
    if is_earlier(config):
        raise InputError(
            f"{directory} is a run of an earlier version of fedjax_peft, which cannot be continued:"
            " its config names the options of a run otherwise, and its checkpoints belong to that"
            " version. It can be read (report, predict, export). To train on, start a new run from"
            f" its model: fedjax-peft run CONFIG.toml --from {argument(directory)}."
        )
