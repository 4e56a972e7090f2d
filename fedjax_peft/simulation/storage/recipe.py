"""The description of a model that a run in Python stores, so that the model can be made again.

``model.json``, next to the metrics, says how ``load_model`` or ``random_model`` made the model and
which method was attached. The base weights are not copied. Their sums are stored, and compared when
the model is made again. A run of a config file needs no description, because its config has the
same information.
"""

import inspect
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedjax_peft import peft, tasks
from fedjax_peft.contracts import Params
from fedjax_peft.data.encode import with_options
from fedjax_peft.models import heads, hub, registry
from fedjax_peft.models.base import Model
from fedjax_peft.peft.base import Method, attach
from fedjax_peft.simulation.storage.fingerprint import changed_leaf, sums
from fedjax_peft.support.errors import InputError
from fedjax_peft.support.files import replace_file
from fedjax_peft.tasks.base import Task

NAME = "model.json"
_ADVICE = "Give the model: fp.load_run(directory, model=...)."


def save_recipe(directory: Path, model: Model, max_length: int | None, task: Any) -> None:
    """Writes how to make a model again, or why this is not possible.

    Args:
      max_length: the number of tokens of a text; None if the data are not texts.
      task: what is trained. Of a task of the library, the name and the options of its encoder are
        written.
    """
    reason, method = "", None
    if not model.recipe:
        reason = "it is a module of your own, or was changed after loading, and only code makes it"
    elif model.method is not None:
        method = {"name": model.method.name, "options": _plain(model.method.options)}
        if _method(method) is None:
            reason = f"its method {model.method.name!r} is of your own, and only code makes it"
    metadata = {
        "reason": reason,
        "model": _plain(model.recipe),
        "labels": list(model.labels),
        "method": method,
        "max_length": max_length,
        "task": _task_of(task),
        "frozen": {} if reason else {name: sums(x) for name, x in model.frozen.items()},
    }
    replace_file(directory / NAME, (json.dumps(metadata, indent=1) + "\n").encode())


def load_recipe(directory: Path) -> dict[str, Any]:
    """Returns the description that :func:`save_recipe` has written.

    Raises:
      InputError: the file does not exist or is damaged.
    """
    path = directory / NAME
    try:
        metadata = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(
            f"{directory} was made by fp.simulate in Python, and has no {NAME} that says how to"
            f" make its model again. {_ADVICE}"
        ) from None
    except ValueError as error:
        raise InputError(f"{path} is damaged: {error}.") from None
    keys = {"reason", "model", "labels", "method", "max_length", "frozen"}
    if not isinstance(metadata, dict) or not keys <= metadata.keys():
        raise InputError(f"{path} is damaged: it needs the fields {', '.join(sorted(keys))}.")
    return metadata


def task_of(metadata: Mapping[str, Any]) -> Task:
    """Returns the task of a run, or the first one that fits the head of its model."""
    written = metadata.get("task")
    if isinstance(written, dict) and written.get("name") in tasks.__all__:
        return with_options(tasks.find(written["name"])(), **written.get("encoder", {}))
    head = (metadata["model"] or {}).get("head", "classification")
    return tasks.for_head(head)


def _task_of(task: Any) -> dict[str, Any] | None:
    """Returns the name of a task of the library and its encoder's options; None for another."""
    if getattr(task, "name", None) not in tasks.__all__:
        return None
    options = getattr(getattr(task.encoder, "encode", None), "keywords", {})
    return {"name": task.name, "encoder": _plain(options)}


def make_model(directory: Path) -> Model:
    """Returns the model of a run that was made in Python, with its initial values."""
    metadata = load_recipe(directory)
    if metadata["reason"]:
        raise InputError(
            f"The model of {directory} cannot be made again from what the run keeps:"
            f" {metadata['reason']}. {_ADVICE}"
        )
    try:
        options = dict(metadata["model"])
        made_by, kind = options.pop("made_by"), options.pop("head")
        make: Any = {"load_model": hub.load_model, "random_model": registry.random_model}[made_by]
        fresh = options.pop("fresh", False)
        head = heads.make(kind, tuple(metadata["labels"]))._replace(fresh=fresh)
        model: Model = make(**options, head=head)
        if metadata["method"] is not None:
            method = _method(metadata["method"])
            assert method is not None
            model = attach(model, method)
        changed = _difference(model.frozen, metadata["frozen"])
    except (KeyError, IndexError, TypeError, AttributeError, AssertionError) as error:
        raise InputError(f"{directory / NAME} is damaged: {error!r}.") from None
    if changed:
        raise InputError(
            f"The base weights of {model.name!r} are not those that the run in {directory} began"
            f" with ({changed!r} differs): they were changed after loading, or the checkpoint is"
            f" another one now. {_ADVICE}"
        )
    return model


def _method(metadata: Mapping[str, Any]) -> Method | None:
    """Returns the library's method of this name and options, None if it does not exist."""
    factory = getattr(peft, metadata["name"], None) if metadata["name"] in peft.__all__ else None
    if factory is None:
        return None
    # Some options are fixed by the function, such as the places of Houlsby's adapters.
    taken = inspect.signature(factory).parameters
    method = factory(**{k: v for k, v in metadata["options"].items() if k in taken})
    return method if _plain(method.options) == metadata["options"] else None


def _plain(value: Any) -> Any:
    """Returns a value in types that JSON supports."""
    return json.loads(json.dumps(value, default=_listed))


def _listed(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    return list(value) if isinstance(value, Sequence | set | frozenset) else str(value)


def _difference(leaves: Params, then: Mapping[str, Any]) -> str | None:
    """Returns the first leaf that differs by more than an SVD differs between machines."""
    for name in sorted({*leaves, *then}):
        if name not in leaves or name not in then:
            return name
        if changed_leaf(then[name], sums(leaves[name])):
            return name
    return None
