"""Runs that were started in Python when their ``config.toml`` did not hold everything.

Their ``model.json`` says how ``load_model`` or ``random_model`` made the model, and what was
attached.
"""

import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedjax_peft import peft
from fedjax_peft.contracts.part import OWN
from fedjax_peft.support.errors import InputError

_NAME = "model.json"


def complete(directory: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the config of a run with the tables that an earlier version has written elsewhere.

    Raises:
      InputError: ``model.json`` is damaged.
    """
    if "model" in config:
        return {**config}
    unknown = {OWN: "not recorded by the version that ran it"}
    found = {"model": unknown, "peft": unknown, "data": unknown, "partition": unknown, **config}
    if isinstance(config.get("algorithm"), str):
        found |= {"algorithm": {OWN: config["algorithm"]}, "optimizer": unknown}
    if (directory / _NAME).exists():
        try:
            found |= _tables(json.loads((directory / _NAME).read_text(encoding="utf-8")))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(f"{directory / _NAME} is damaged: {error!r}.") from None
    return found


def _tables(written: dict[str, Any]) -> dict[str, Any]:
    task, method = written.get("task") or {OWN: "a task of the user's"}, written["method"]
    data = {OWN: "not recorded by the version that ran it", "max_length": written["max_length"]}
    if written["reason"]:
        return {"model": {OWN: written["reason"]}, "data": data}
    model = {**written["model"], "fresh_head": written["model"].get("fresh")}
    model |= {"name": model.get("name") or f"random {model['config']['model_type']}"}
    model = {key: x for key, x in model.items() if key not in ("made_by", "fresh")}
    return {
        "model": model | {"labels": written["labels"]},
        "peft": {"name": "none"} if method is None else _method(method["name"], method["options"]),
        "data": data | task.get("encoder", {}),
        "task": {key: x for key, x in task.items() if key != "encoder"},
    }


def _method(name: str, options: dict[str, Any]) -> dict[str, Any]:
    # Some options are fixed by the function, such as the places of Houlsby's adapters.
    taken = inspect.signature(getattr(peft, name)).parameters
    return {"name": name, **{key: x for key, x in options.items() if key in taken}}
