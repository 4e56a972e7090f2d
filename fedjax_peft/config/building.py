"""The objects of a resolved config: model, algorithm, transforms, records and so on."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fedjax_peft import tasks
from fedjax_peft.algorithms.checks import checked
from fedjax_peft.config.keys import CHAINED, Config, MethodKeys, function_of
from fedjax_peft.config.schema import OF_THE_RUN, fields_of, parts_in
from fedjax_peft.contracts import Privacy
from fedjax_peft.contracts.part import OWN, made, unrecorded
from fedjax_peft.data.catalog import DATASETS
from fedjax_peft.data.encode import with_options
from fedjax_peft.data.vocabulary import word_tokenizer
from fedjax_peft.models import heads, hub, registry
from fedjax_peft.models.base import Model
from fedjax_peft.numerics import schedules
from fedjax_peft.numerics.hyperparameters import maybe_nonzero
from fedjax_peft.numerics.optimizers import Kept
from fedjax_peft.peft.base import Method, attach
from fedjax_peft.simulation.records import RECORDS
from fedjax_peft.simulation.stopping import Stop, any_of, early_stop
from fedjax_peft.simulation.storage.calls import NO_METHOD
from fedjax_peft.simulation.time_model import TimeModel
from fedjax_peft.simulation.trackers.base import tracker_without
from fedjax_peft.support.display import show
from fedjax_peft.support.errors import InputError
from fedjax_peft.support.plugins import is_user_function
from fedjax_peft.support.secrets import hidden_option
from fedjax_peft.tasks import Task

NOISE = "noise_multiplier"
"""The argument of a mechanism of differential privacy that ``epsilon`` can stand for."""


def build_model(config: Config, labels: Sequence[str], vocabulary: Sequence[str] = ()) -> Model:
    """Returns the model of a resolved config, with its PEFT method attached.

    Args:
      vocabulary: the words of the data (``Dataset.vocabulary``), if they have replaced a tokenizer.
    """
    options = dict(config["model"])
    shape, kind = options.pop("config"), options.pop("head") or task_of(config).head
    labels = options.pop("labels") or labels
    head = heads.make(kind, tuple(labels))._replace(fresh=bool(options.pop("fresh_head", None)))
    if shape is None:
        model = seeded(hub.load_model, config, options, head=head)
    else:
        name, _ = options.pop("name"), options.pop("source")
        model = seeded(registry.random_model, config, options, shape, head=head)
        tokenizer = word_tokenizer(vocabulary) if vocabulary else tokenizer_of(config)
        model = model.replace(name=name, tokenizer=tokenizer)
    if config["peft"]["name"] == NO_METHOD:
        return model
    seed = config["peft"]["seed"]
    return attach(model, build_method(config), seed=config["seed"] if seed is None else seed)


def tokenizer_of(config: Config) -> Any:
    """Returns the tokenizer for a config's data; None if none is needed or known."""
    entry = DATASETS.get(str(config["data"].get("name")))
    name = config["data"].get("tokenizer")
    task = named_task(config) or (None if entry is None else tasks.as_task(entry.task))
    if task is not None and task.encoder is not None and not task.encoder.needs_tokenizer:
        return None
    if name is not None:
        return hub.load_tokenizer(name)
    if config["data"].get("vocabulary") is not None and config["model"]["config"] is None:
        raise InputError(
            "[data] vocabulary makes a new vocabulary of words, which a pretrained model does not"
            " know. Give the model random weights with [model.config], or leave vocabulary out."
        )
    if config["model"]["config"] is not None:
        return None  # random weights have no tokenizer; load_dataset raises if it needs one
    return hub.load_tokenizer(config["model"]["name"], source=config["model"]["source"])


def task_of(config: Config) -> Task:
    """Returns the task of a run: the one of ``[task]``, or one for the head of its model."""
    head = config.get("model", {}).get("head")
    task = named_task(config) or tasks.for_head(tasks.head_kind(head or "classification"))
    data = config.get("data", {})
    names = ("template", "doc_stride", "order")
    return with_options(task, **{k: data[k] for k in names if data.get(k) is not None})


def named_task(config: Config) -> Task | None:
    """Returns the task of ``[task]``, None if the config has no such table.

    Raises:
      InputError: the function of ``[task]`` returns something else.
    """
    known = "task" in config and OWN not in config["task"]
    task = build(config, "task") if known else None
    if task is not None and not isinstance(task, Task):
        raise InputError(
            f"The task {show(config['task']['name'])} returns {type(task).__name__}, not a"
            " fedjax_peft.tasks.Task."
        )
    return task


def build_method(config: Config) -> Method:
    """Returns the PEFT method of a resolved config."""
    options = {key: x for key, x in config["peft"].items() if key not in MethodKeys._fields}
    return call({**config, "peft": options}, "peft")


def build_algorithm(config: Config, **others: Any) -> Any:
    """Returns the algorithm of a resolved config.

    Args:
      **others: objects in place of those that tables name, such as ``optimizer``.
    """
    check_recorded(config["algorithm"], "algorithm")
    name = config["algorithm"]["name"]
    function = function_of("algorithm", name)
    parameters = inspect.signature(function).parameters
    objects = {
        table: call(config, table)
        for table in ("optimizer", "aggregator", "server_schedule")
        if table in parameters and config[table] and table not in others
    } | others
    if config["schedule"]:
        schedule = call(config, "schedule")
        objects["optimizer"] = schedules.scheduled(objects["optimizer"], schedule)
    if is_user_function(name) and isinstance(objects.get("optimizer"), Kept | schedules.Scheduled):
        function = checked(function)  # it may not be decorated
    options = options_of(config, "algorithm")
    return seeded(function, config, options | rate(config), **objects)


def build(config: Config, table: str) -> Any:
    """Returns the object of a table that names a function; None if the table is left out.

    Of ``[transforms]`` and ``[trackers]``, the objects in their order.
    """
    if table in CHAINED:
        return [_link(config, table, *link) for link in config[table].items()]
    return call(config, table) if config[table] else None


def _link(config: Config, table: str, name: str, options: dict[str, Any]) -> Any:
    if table == "trackers" and (unknown := hidden_option(options)) is not None:
        return tracker_without(name, options, unknown)
    return seeded(function_of(table, name), config, options)


def build_privacy(config: Config) -> Privacy | None:
    """Returns the mechanism of differential privacy of a resolved config, None without one.

    Raises:
      InputError: the noise of ``privacy.epsilon`` is not known yet, see :func:`with_noise`.
    """
    table = {k: v for k, v in config["privacy"].items() if k != "epsilon"}
    if table.get(NOISE, 0) is None:
        raise InputError("The noise of privacy.epsilon depends on the clients: run the config.")
    return build({**config, "privacy": table}, "privacy")


def build_records(
    config: Config, objects: Mapping[str, Any] | None = None, *, stop: Stop | None = None
) -> dict[str, Any]:
    """Returns the records that ``simulate`` takes, by the names of its arguments.

    Args:
      objects: fields of the records that are no values of a config, such as ``client_test``.
      stop: a rule that can end the run in addition to the one of ``[stop]``.

    Raises:
      InputError: values that cannot be used, alone or together.
    """
    own = early_stop(**config["stop"]) if config["stop"] else None
    objects = {
        **(objects or {}),
        "time": TimeModel.preset(**config["time"]),
        "availability": build(config, "availability"),
        "stop": any_of(own, stop),
        "trackers": build(config, "trackers"),
    }
    made = {}
    for table, record in RECORDS.items():
        names = inspect.signature(record).parameters
        values = {name: config[table][name] for name in fields_of(record)}
        made[table] = record(**values, **{k: x for k, x in objects.items() if k in names})
    return made


BUILDERS: dict[Any, Callable[[Config], Any]] = {
    "algorithm": build_algorithm,
    "transforms": functools.partial(build, table="transforms"),
    "privacy": build_privacy,
    "attack": functools.partial(build, table="attack"),
}
"""Argument of ``simulate`` -> function that makes it from a resolved config."""


def rate(config: Config) -> Config:
    """Returns the ``learning_rate`` of an algorithm that needs the step size of plain SGD.

    Returns:
      ``{}`` if the algorithm's table has its value; else ``[optimizer] learning_rate``.

    Raises:
      InputError: the table has none, and the optimizer is not plain SGD.
    """
    table, optimizer = config["algorithm"], config["optimizer"]
    if table.get("learning_rate", 0) is not None:
        return {}
    momentum, clip = (optimizer.get(name) for name in ("momentum", "clip_norm"))
    if (
        optimizer["name"] != "sgd"
        or maybe_nonzero(0 if momentum is None else momentum)
        or clip is not None
    ):
        raise InputError(
            f"algorithm.learning_rate is missing: {table['name']!r} needs the clients' step size."
            " With plain SGD (optimizer.name = 'sgd', no momentum, no clip_norm) it is that of the"
            " optimizer. Of another optimizer it cannot be known: write algorithm.learning_rate ="
            f" {optimizer.get('learning_rate', 0.1)}."
        )
    return {"learning_rate": optimizer["learning_rate"]}


def call(config: Config, table: str, *arguments: Any, **objects: Any) -> Any:
    """Calls the function that a table names."""
    check_recorded(config[table], table)
    options = options_of(config, table)
    function = function_of(table, config[table]["name"])
    return seeded(function, config, options, *arguments, **objects)


def seeded(
    function: Callable[..., Any], config: Config, options: Config, *arguments: Any, **objects: Any
) -> Any:
    """Calls a function with a table's options; a missing seed or ``rounds`` is that of the run."""
    for name in OF_THE_RUN:
        if options.get(name, 0) is None:
            options = {**options, name: config[name]}
    for name, value in parts_in(function, options).items():
        part, parameter = made(value, name), inspect.signature(function).parameters[name]
        options = {key: x for key, x in options.items() if key != name}
        if parameter.kind is parameter.VAR_POSITIONAL:
            arguments = (*arguments, *part)
        else:
            objects = {**objects, name: part}
    return function(*arguments, **objects, **options)


def options_of(config: Config, table: str) -> Config:
    """Returns the arguments in a table that names a function."""
    return {key: value for key, value in config[table].items() if key != "name"}


def check_recorded(given: Any, at: str = "", advice: str = "") -> None:
    """Raises InputError for what a run that was started from Python could not record.

    Args:
      given: the config, or a table of it.
      at: the name of the table.
      advice: a sentence that ends the message.
    """
    if missing := unrecorded(given, at):
        named = ", ".join(f"{key} ({what})" for key, what in missing.items())
        are, were = ("are", "they were") if len(missing) > 1 else ("is", "it was")
        text = f"{named} {are} not recorded: no config can name how {were} made. {advice}"
        raise InputError(text.rstrip())
