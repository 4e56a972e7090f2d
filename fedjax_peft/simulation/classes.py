"""The arguments of ``session`` and ``simulate`` with one meaning for the number of a class."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from fedjax_peft import tasks
from fedjax_peft.data.classes import (
    has_names,
    in_classes,
    known_names,
    numbered,
    with_all_names,
)
from fedjax_peft.data.dataset import Clients, Dataset
from fedjax_peft.models.base import Model
from fedjax_peft.simulation.arguments import Given, OfSession

Arguments = TypeVar("Arguments", bound=OfSession)


def in_models_classes(given: Arguments) -> Arguments:
    """Returns the arguments with all data in the classes of the model, which has names then.

    A model that knows numbers only gets the names of the training data. Data whose numbers mean
    these classes already are not copied. Arguments of another type stay: a check refuses them.

    Raises:
      InputError: data have a class that the model does not have.
    """
    model, clients = given.model, given.clients
    if not (isinstance(model, Model) and isinstance(clients, Clients)):
        return given
    if not isinstance(clients.data, Dataset) or "labels" not in clients.data.columns:
        return given
    known, whose = _known(model, clients)
    data = in_classes(clients.data, known, "training", whose)
    changed: dict[str, Any] = {}
    if data is not clients.data:
        changed["clients"] = replace(clients, data=data)
    labels = known[: len(model.labels)]
    if model.labels != labels:
        changed["model"] = model.replace(labels=labels)
    others = reader(model, clients)

    def read(value: Any, what: str) -> Any:
        return others(data if value is clients.data else value, what)  # one copy for both

    if isinstance(given, Given):
        how = given.evaluation
        changed["evaluation"] = replace(how, **{n: _read(getattr(how, n), n, read) for n in _OWN})
        changed |= {n: _read(getattr(given, n), n, read) for n in _GLOBAL}
    found = replace(given, **changed)
    return in_models_classes(found) if "model" in changed else found  # it has names now


def prepared(given: Arguments) -> Arguments:
    """Returns the arguments as a run uses them: in the classes of the model, and with what the task
    adds to examples before the first round (``Task.prepare``).

    Raises:
      InputError: data have a class that the model does not have, or the task cannot use them.
    """
    given = in_models_classes(given)
    model, clients = given.model, given.clients
    usable = isinstance(model, Model) and isinstance(clients, Clients)
    if not (usable and isinstance(clients.data, Dataset)):
        return given  # a check refuses it
    prepare = getattr(given.task or tasks.for_data(clients.data), "prepare", None)
    if prepare is None:
        return given

    def read(value: Any) -> Any:
        if isinstance(value, Clients):
            return replace(value, data=prepare(model, value.data, value.indices))
        return prepare(model, value, ()) if isinstance(value, Dataset) else value

    changed: dict[str, Any] = {"clients": read(clients)}
    if isinstance(given, Given):
        how = given.evaluation
        changed["evaluation"] = replace(how, **{name: read(getattr(how, name)) for name in _OWN})
        changed |= {name: read(getattr(given, name)) for name in _GLOBAL}
    return replace(given, **changed)


_GLOBAL = ("test", "validation")
_OWN = ("client_test", "client_validation")


def reader(model: Model, clients: Clients, task: Any = None) -> Callable[..., Any]:
    """Returns the function (examples, role) -> the same in the classes of a model.

    Examples that are no :class:`Dataset` stay as they are. A ``task`` prepares the others too.
    """
    known, whose = _known(model, clients)

    def read(data: Any, what: str = "test") -> Any:
        if not isinstance(data, Dataset):
            return data
        # A model without labels may have more classes than its training data.
        more = () if model.labels else numbered(len(data.label_names))[len(known) :]
        prepare = getattr(task, "prepare", None)
        data = data if prepare is None else prepare(model, data, ())
        return with_all_names(in_classes(data, (*known, *more), what, whose), (*known, *more))

    return read


def _read(value: Any, what: str, read: Callable[..., Any]) -> Any:
    """Returns a data set, or the clients of one, after ``read``; anything else as it is."""
    if not isinstance(value, Clients):
        return read(value, what)
    data = read(value.data, what)
    return value if data is value.data else replace(value, data=data)


def _known(model: Model, clients: Clients) -> tuple[tuple[str, ...], str]:
    """Returns the names of the classes, and what they are the names of."""
    whose = "the model" if has_names(model.labels) else "the training data"
    return known_names(model.labels, clients.data.label_names), whose
