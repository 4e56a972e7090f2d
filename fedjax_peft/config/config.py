"""Config files: TOML tables that name a function of the library and give its arguments.

The schema is read from the signatures of the functions that a config calls. A new algorithm can
therefore be configured as soon as it exists, and a key means the same as the argument in Python.

    rounds = 20                      # top level: arguments of simulate()
    system = "federa/fedlr"          # optional: defaults from a published system
    [model]                          # load_model(name, dtype=..., ...), the kind of its head, or
                                     # the config.json of a model with random weights
    [data]                           # load_dataset(name, max_length=..., ...), and its tokenizer
    [partition]                      # name = a function of data.partition; or "paper", see presets
    [peft]                           # name = a function of peft
    [algorithm]                      # name = a function of algorithms
    [aggregator]                     # name = a function of aggregators
    [task]                           # optional: name = a function of tasks; default: the data's
    [optimizer]                      # name = adamw, adam or sgd
    [schedule]                       # optional: name = a function of schedules, for the clients
    [server_schedule]                # optional: likewise, for the server's learning rate
    [transforms.NAME]                # optional, one table for each: a function of transforms;
                                     # clients apply them to their uploads in this order
    [privacy]                        # optional: name = a function of privacy, and its keys, such as
                                     # noise_multiplier; or epsilon in its place
    [attack]                         # optional: name = a function of attacks
    [asynchronous]                   # optional: name = a function of asynchronous
    [availability]                   # optional: name = a function of availability
    [time]                           # TimeModel.preset(preset=..., ...)
    [stop]                           # optional: early_stop(target=..., patience=..., ...)
    [sweep]                          # optional: the settings and seeds of a sweep, which ``run``
                                     # ignores; see fedjax_peft.config.sweeps
    [methods.NAME]                   # optional: one run for each table; its keys replace the others

A string can stand for a table: ``algorithm = "fedprox"`` is ``[algorithm]`` with
``name = "fedprox"``. A list of names stands for tables without options:
``transforms = ["my.py:codec"]``. In a method, an empty list removes the transforms of the config.
A relative path is searched beside the config file first, then in the working directory.

``name`` can also be a function of yours, as ``module:function`` or ``file.py:function``, for
example ``[aggregator] name = "my:median"``. The module is searched in the config's folder, then
among the modules that Python can import. Reading such a config runs the code of that file.
"""

import contextlib
import copy
import functools
import inspect
import json
import operator
import os
import types
import typing
from collections import abc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pydantic

from fedjax_peft import (
    aggregators,
    algorithms,
    asynchronous,
    attacks,
    availability,
    peft,
    privacy,
    tasks,
    transforms,
)
from fedjax_peft.algorithms.checks import checked
from fedjax_peft.config import optimizers, plugins, presets
from fedjax_peft.config.parts import Parts
from fedjax_peft.contracts import Asynchronous, Attack, Availability, Batch, Privacy, Transform
from fedjax_peft.data import Clients, Dataset, partition, sources
from fedjax_peft.data.encode import with_options
from fedjax_peft.data.vocabulary import word_tokenizer
from fedjax_peft.models import heads, hub, registry
from fedjax_peft.models.base import Model
from fedjax_peft.numerics import schedules
from fedjax_peft.numerics.hyperparameters import Values, constants_of, maybe_nonzero
from fedjax_peft.numerics.random import host_rng
from fedjax_peft.peft.base import Method, attach
from fedjax_peft.privacy.accounting import smallest_noise
from fedjax_peft.simulation.cost import TimeModel
from fedjax_peft.simulation.origin import ORIGIN, base_seed, with_origin
from fedjax_peft.simulation.progress import Phase, PhaseName
from fedjax_peft.simulation.record import read_config
from fedjax_peft.simulation.run import Run
from fedjax_peft.simulation.session import federation_of, schedule_of
from fedjax_peft.simulation.simulate import simulate
from fedjax_peft.simulation.stopping import Stop, any_of, early_stop
from fedjax_peft.support import assets, toml
from fedjax_peft.support.display import show
from fedjax_peft.support.errors import InputError, nearest
from fedjax_peft.support.nested import flatten, merge, unset
from fedjax_peft.tasks import Task

__all__ = [
    "CHAINED",
    "NAMESPACES",
    "SCHEDULES",
    "Key",
    "all_keys",
    "build_algorithm",
    "build_asynchronous",
    "build_attack",
    "build_availability",
    "build_method",
    "build_model",
    "build_privacy",
    "build_transforms",
    "check_arguments",
    "describe",
    "evaluation_data",
    "federation",
    "in_words",
    "load",
    "load_data",
    "methods",
    "named_task",
    "override",
    "resolve",
    "resolve_recorded",
    "run",
    "task_of",
    "with_noise",
]

Config = dict[str, Any]

NAMESPACES: dict[str, types.ModuleType] = {
    "partition": partition,
    "peft": peft,
    "algorithm": algorithms,
    "aggregator": aggregators,
    "optimizer": optimizers,
    "schedule": schedules,
    "server_schedule": schedules,
    "transforms": transforms,
    "privacy": privacy,
    "attack": attacks,
    "asynchronous": asynchronous,
    "availability": availability,
    "task": tasks,
}
"""Tables whose ``name`` is a public function of a module."""
CHAINED = ("transforms",)
"""Keys of ``NAMESPACES`` with a table for each function instead of a ``name``. The functions are
applied in the order of the tables."""

_DEFAULT_NAMES = {"algorithm": "fedavg", "optimizer": "adamw", "peft": "lora"}
_NAME_KEYS = {"model": "name", "data": "name", "time": "preset"} | {
    table: "name" for table in NAMESPACES if table not in CHAINED
}
"""Table -> the key whose value a string in place of the table stands for."""
_PATHS = {
    "model": ("name",),
    "data": ("name", "source", "tokenizer"),
    "peft": ("adapter",),
    "availability": ("path",),
}
"""Table -> the keys whose values can be paths."""
SCHEDULES = ("schedule", "server_schedule")
"""Tables of a learning-rate schedule over rounds."""
_OPTIONAL = (
    *("aggregator", "asynchronous", "attack", "availability", "privacy", "stop", "task"),
    *SCHEDULES,
)
"""Tables that can be left out; the function that takes them then uses its own default."""
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "model": hub.load_model,
    "data": sources.load_dataset,
    "time": TimeModel.preset,
    "stop": early_stop,
}
_OF_THE_RUN = ("seed", "rounds")
"""Arguments of functions that are by default the run's own keys."""
# Arguments of simulate that the command line sets, and a config does not.
_NOT_CONFIG = ("out", "resume", "progress")


class _Extra(NamedTuple):
    """Top-level keys that are not arguments of ``simulate``."""

    name: str | None = None
    """The run's name in tables and plots."""
    system: str | None = None
    """A published system of systems.toml; its settings are defaults for the other keys."""
    system_changes: Mapping[str, str] | None = None
    """Written by the program: the system's settings that the run replaced, as in "16 -> 8"."""
    origin: str | None = None
    """Written by ``run --from``: the directory of the run that this one starts from."""
    client_holdout: float | None = None
    """Share of each client's examples that is held out, to test the client's model on it."""
    client_test: bool = False
    """Test each client's model on the client's own examples of the test split; needs natural
    clients (``partition.natural``)."""
    global_test: bool = True
    """Evaluate on the whole test split."""
    client_validation_holdout: float | None = None
    """Share of each client's examples, after ``client_holdout``, that is held out to validate the
    client's model on it."""
    client_validation: bool = False
    """Validate each client's model on the client's own examples of the validation split; needs
    natural clients and a validation split (``data.validation_share``)."""
    global_validation: bool | None = None
    """Evaluate on the whole validation split, if the data have one; by default as
    ``global_test``."""
    validation: str | None = None
    """Written by the program: what the validation examples are, such as "official" or "10 % of
    train"."""
    runtime: Sequence[str] | None = None
    """Written by ``sweep``: the keys whose numbers are run-time values of the compiled program. The
    other numbers are constants in it, so a new value is compiled again."""
    metric: Literal["squad", "fednlp_raw"] | None = None
    """Which F1 is the headline metric, see ``tasks.question_answering``. Only without ``[task]``,
    whose function has this option itself."""


_Leaf = int | float | str | bool


class _Model(NamedTuple):
    """Keys of ``[model]`` that are not arguments of ``load_model``."""

    head: str | None = None
    """The kind of head (``models.heads.KINDS``), or a task that has this head; by default the head
    of the data's task."""
    config: Mapping[str, _Leaf | Sequence[_Leaf]] | None = None
    """The ``config.json`` of a model with random weights; ``name`` is then only a label."""


class _Data(NamedTuple):
    """Keys of ``[data]`` that are not arguments of ``load_dataset``."""

    tokenizer: str | None = None
    """Name or path of a tokenizer, as for ``load_tokenizer``; by default the model's tokenizer."""
    packing: int | None = None
    """Pack several training examples of a client into rows of this many tokens, for
    ``instruction_tuning`` (``Clients.pack``). ``batch_size`` then counts rows. By default each
    example is a row."""


class _Start(NamedTuple):
    """Keys of ``[peft]`` that are not arguments of its function; for ``lora_sb`` only."""

    gradient_start: float | None = None
    """The step of ``fp.peft.gradient_start``, which makes the bases of ``lora_sb`` and the start of
    its cores: the optimizer's learning rate, or a part of it. By default the bases are random."""
    gradient_examples: int = 50
    """How many training examples the gradient of ``gradient_start`` is taken of, drawn from all
    clients."""


class _Privacy(NamedTuple):
    """Keys of ``[privacy]`` that are not arguments of its function."""

    epsilon: float | None = None
    """The epsilon of the whole run, in place of ``noise_multiplier``: the smallest noise multiplier
    is computed for these clients and rounds, and recorded as ``noise_multiplier``. A run that is
    continued for more rounds keeps its noise, so that its epsilon grows."""


_EXTRA_KEYS: dict[str, type] = {"model": _Model, "data": _Data, "peft": _Start, "privacy": _Privacy}


# ------------------------------------------------------------------------------- reading a config


def load(path: str | Path) -> Config:
    """Returns the content of a config file, with absolute paths for files in the config's folder.

    Raises:
      InputError: the file does not exist or is not TOML.
    """
    path = Path(path)
    try:
        raw = toml.read_toml(path)
    except FileNotFoundError:
        raise InputError(f"There is no config file {str(path)!r}.") from None
    except OSError as error:
        raise InputError(
            f"The config {str(path)!r} cannot be read as a TOML file: {error.strerror}."
        ) from None
    except ValueError as error:
        raise InputError(f"The config {str(path)!r} is not a TOML file: {error}.") from None
    return _with_absolute_paths(raw, path.parent)


def _with_absolute_paths(raw: Config, folder: Path) -> Config:
    """Returns the config with absolute paths for the files in ``folder``.

    A run then finds its model and data from every working directory. Other values are unchanged:
    names, hub ids and paths from the working directory.
    """
    result = _expanded(raw)
    for table, keys in _PATHS.items():
        given = result.get(table)
        if isinstance(given, dict):
            found = {key: _absolute(given[key], folder) for key in keys if key in given}
            result[table] = given | found
    for table in NAMESPACES:
        given = result.get(table)
        if isinstance(given, dict) and plugins.is_user_function(given.get("name")):
            result[table] = given | {"name": plugins.with_absolute_path(given["name"], folder)}
    for table in CHAINED:
        given = result.get(table)
        if isinstance(given, dict):
            result[table] = {
                plugins.with_absolute_path(name, folder)
                if plugins.is_user_function(name)
                else name: options
                for name, options in given.items()
            }
    methods = result.get("methods")
    if isinstance(methods, dict):
        result["methods"] = {
            name: _with_absolute_paths(one, folder) if isinstance(one, dict) else one
            for name, one in methods.items()
        }
    return result


def _absolute(value: Any, folder: Path) -> Any:
    """Returns an existing file or folder as an absolute path, and anything else as it is."""
    names = {*sources.DATASETS, *assets.ASSETS, "auto", "hub", "tiny", ""}
    if not isinstance(value, str) or value in names:
        return value
    # The name can be too long, and `~user` can name an unknown user.
    with contextlib.suppress(OSError, ValueError, RuntimeError):
        path = folder.absolute() / Path(value).expanduser()
        if path.exists():
            return os.path.normpath(path)
    return value


def override(raw: Config, text: str) -> Config:
    """Returns the config with one override applied.

    Args:
      raw: the config as written.
      text: ``dotted.key=value`` sets a key; the value is TOML or a word without quotes.
        ``dotted.key=`` removes a key or table, so that the system's value or the default applies.

    Raises:
      InputError: the override is not of this form, or a part of its key is not a table.
    """
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise InputError(f"The override {show(text)} is not of the form key=value.")
    if not value.strip():
        return unset(raw, key.strip())[0]
    try:
        parsed = toml.parse_value(value)
    except ValueError as error:
        raise InputError(f"The override {show(text)} has no usable value: {error}.") from None
    result = _expanded(copy.deepcopy(raw))
    *tables, last = key.strip().split(".")
    change: Any = parsed
    for table in reversed([*tables, last]):
        change = {table: change}
    change = _with_absolute_paths(change, Path())
    if not tables and last in _NAME_KEYS and isinstance(parsed, str):
        return _overlay(result, change)
    node = result
    for table in tables:
        node, change = node.setdefault(table, {}), change[table]
        if not isinstance(node, dict):
            raise InputError(
                f"The override {show(text)} treats {show(table)} as a table; it is a value."
            )
    node[last] = change[last]
    return result


def methods(raw: Config, overrides: Sequence[str] = ()) -> dict[str, Config]:
    """Returns the configs of a file: one per ``[methods.NAME]``, or the file itself as ``""``.

    Overrides are applied last. ``key=value`` replaces the key in every method;
    ``methods.NAME.key=value`` replaces it in one method. ``key=`` removes the key.

    Raises:
      InputError: an override is not of this form, or it removes a key that does not exist.
    """
    _check_removals(raw, overrides)
    for text in overrides:
        if text.startswith("methods."):
            raw = override(raw, text)
    written = result = _split(raw)
    for text in overrides:
        if not text.startswith("methods."):
            result = {name: override(one, text) for name, one in result.items()}
    return {name: _renamed(written[name], one) for name, one in result.items()}


def _renamed(before: Config, after: Config) -> Config:
    """Returns a config whose name shows which method the command line replaced.

    Without this, a run with ``--only fedlr algorithm=ditto`` would be "fedlr" in tables and plots.
    """
    if "name" not in before or after.get("name") != before["name"]:
        return after

    def name_of(config: Config, key: str) -> Any:
        value = _expanded(config).get(key)
        return value.get("name") if isinstance(value, dict) else value

    keys = ("system", "algorithm", "peft", "aggregator")
    changed = [key for key in keys if name_of(after, key) not in (None, name_of(before, key))]
    if not changed:
        return after
    changes = ", ".join(f"{key}={name_of(after, key)}" for key in changed)
    return {**after, "name": f"{before['name']} ({changes})"}


def _check_removals(raw: Config, overrides: Sequence[str]) -> None:
    """Raises InputError for an override ``key=`` if no method of the config has the key."""
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals or value.strip() or not key.strip():
            continue
        configs = {"": raw} if key.startswith("methods.") else _split(raw)
        if not any(unset(one, key.strip())[1] for one in configs.values()):
            keys = {name for one in configs.values() for name in flatten(one)}
            raise InputError(
                f"The override {show(text)} removes {show(key.strip())} from the config, which does"
                f" not have it. {nearest(key.strip(), keys)}"
            )


def _split(raw: Config) -> dict[str, Config]:
    tables = raw.get("methods")
    if tables is None:
        return {"": raw}
    if not isinstance(tables, dict) or not all(isinstance(t, dict) for t in tables.values()):
        raise InputError("[methods] must contain tables, one for each run: [methods.NAME].")
    base = {k: v for k, v in raw.items() if k != "methods"}
    return {name: _overlay(base, {"name": name, **table}) for name, table in tables.items()}


def _expanded(raw: Config) -> Config:
    """Returns the config with a table in place of each string or list that stands for one."""
    result = {
        key: {_NAME_KEYS[key]: value} if key in _NAME_KEYS and isinstance(value, str) else value
        for key, value in raw.items()
    }
    for table in CHAINED:
        names = result.get(table)
        names = [names] if isinstance(names, str) else names
        if isinstance(names, list) and all(isinstance(name, str) for name in names):
            result[table] = {name: {} for name in names}
    return result


def resolve(raw: Config) -> Config:
    """Returns the complete config: every key checked, every default filled in.

    Raises:
      InputError: a key or name is unknown (the message gives the nearest one), or a value has the
        wrong type.
    """
    raw = {key: value for key, value in raw.items() if key != "sweep"}
    expanded = presets.expand(_expanded(raw), _overlay)
    try:
        result = _resolved(expanded)
    except InputError as error:
        raise InputError(f"{error}{presets.missing_advice(raw, str(error))}") from None
    result["system_changes"] = presets.changes(result) or None
    _check_noise(result["privacy"])
    return result


def resolve_recorded(config: Config) -> Config:
    """Returns the complete config of a run's ``config.toml``, which contains every key.

    The run's own values are used, even if its preset was changed or renamed since then.

    Raises:
      InputError: as :func:`resolve`.
    """
    preset = {key: config.get(key) for key in ("system", "system_changes")}
    return _resolved({k: v for k, v in config.items() if k not in preset}) | preset


def _resolved(raw: Config) -> Config:
    """Returns the complete config; the system's settings are already in ``raw``."""
    tables = [*_FUNCTIONS, *NAMESPACES]
    result = _checked("", _fields(simulate) | _fields(_Extra), raw, tables)
    for table in tables:
        given = raw.get(table, {})
        if not isinstance(given, dict):
            raise InputError(f"[{table}] must be a table or a name, not {show(given)}.")
        if table in CHAINED:
            result[table] = {name: _resolved_link(table, name, x) for name, x in given.items()}
            continue
        if table in _OPTIONAL and not given:
            result[table] = {}
            continue
        if table in _FUNCTIONS:
            extra = _fields(_EXTRA_KEYS[table]) if table in _EXTRA_KEYS else {}
            fields = _fields(_FUNCTIONS[table]) | extra
            result[table] = _checked(table, fields, given)
            continue
        name = given.get("name", _DEFAULT_NAMES.get(table))
        function = _function(table, name)
        options = {k: v for k, v in given.items() if k != "name"}
        fields = _fields(function)
        if table == "privacy" and _NOISE in fields:  # epsilon can stand for it
            fields |= {_NOISE: (fields[_NOISE][0] | None, None), **_fields(_Privacy)}
        if table == "peft" and function is peft.lora_sb:
            fields |= _fields(_Start)
        result[table] = {"name": name, **_checked(table, fields, options)}
    if result["stop"]:
        early_stop(**result["stop"])  # raises InputError for values that cannot be used
    _check_schedules(result)
    _rate(result)  # raises InputError if it is missing
    result["model"]["head"] = head_kind(result["model"]["head"])
    return result


_NOISE = "noise_multiplier"
"""The argument of a mechanism of differential privacy that ``epsilon`` can stand for."""


def _check_noise(table: Config) -> None:
    """Raises InputError if [privacy] says the noise not at all, or twice."""
    if _NOISE in table and (table[_NOISE] is None) == (table["epsilon"] is None):
        said = "neither" if table[_NOISE] is None else "both"
        raise InputError(
            f"[privacy] needs one of {_NOISE} and epsilon, and has {said}. On the command line,"
            f" 'privacy.{_NOISE}=' removes a key."
        )


def _rate(config: Config) -> Config:
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


def _check_schedules(config: Config) -> None:
    """Raises InputError for a schedule that its algorithm cannot follow, or a wrong number."""
    name = config["algorithm"]["name"]
    options = inspect.signature(_function("algorithm", name)).parameters
    for table in filter(config.get, SCHEDULES):
        _call(config, table)  # raises InputError for values that cannot be used
        if table == "schedule" and "optimizer" not in options:
            raise InputError(f"[schedule] is for an optimizer, and {show(name)} takes none.")
        if table == "server_schedule" and table not in options:
            known = [n for n in algorithms.__all__ if table in _options_of(n)]
            raise InputError(
                f"[server_schedule] is for a server with a learning rate, and that of {show(name)}"
                f" has none. Remove the table, or use one of {', '.join(known)}."
            )


def _options_of(algorithm: str) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(getattr(algorithms, algorithm)).parameters


def _resolved_link(table: str, name: str, options: Any) -> Config:
    """Returns the complete options of one function of a table such as ``[transforms]``."""
    function = _function(table, name)
    if not isinstance(options, dict):
        raise InputError(
            f"The config key {table}.{name} cannot be {show(options)}: it must be a table of the"
            f" options of {name!r}, [{table}.{name}]."
        )
    return _checked(f"{table}.{name}", _fields(function), options)


def head_kind(name: str | None) -> str | None:
    """Returns the kind of head that a config names by its kind or by a task.

    Raises:
      InputError: neither.
    """
    kind = None if name is None else tasks.head_kind(name)
    if kind is not None and kind not in heads.KINDS:
        raise InputError(
            f"The config key [model] 'head' cannot be {show(name)}. {nearest(kind, heads.KINDS)}"
        )
    return kind


def is_constant(key: str) -> bool:
    """Returns whether a dotted key such as ``transforms.top_k.share`` decides sizes."""
    table, _, rest = key.partition(".")
    name, _, option = rest.rpartition(".")
    return table in CHAINED and option in constants_of(_function(table, name))


def check_arguments(function: Callable[..., Any], given: Config) -> Config:
    """Returns all arguments of a function that takes plain values, with the defaults filled in.

    Raises:
      InputError: a key is unknown, or a value has the wrong type.
    """
    return _checked("", _fields(function), given)


# ------------------------------------------------------------------------------ running a config


def run(
    config: Config,
    *,
    out: str | Path | None = None,
    resume: bool = False,
    on_round: Callable[[dict[str, Any]], None] | None = None,
    on_phase: Callable[[Phase], None] | None = None,
    parts: Parts | None = None,
    stop: Stop | None = None,
    engine: Callable[..., Any] | None = None,
    act: Callable[..., Any] = simulate,
    origin: Run | None = None,
) -> Run:
    """Runs a resolved config.

    Args:
      config: from :func:`resolve`.
      out: as for ``simulate``, like ``resume``, ``on_round`` and ``on_phase``.
      resume: likewise.
      on_round: likewise.
      on_phase: likewise.
      parts: the parts of other runs of a sweep; data, models and programs are shared with them.
      stop: a rule that can end the run in addition to the one of the config's ``[stop]``.
      engine: makes the programs, as for :class:`fedjax_peft.engine.session.Session`; by default
        the config's ``engine``.
      act: what is called with the arguments of ``simulate`` and whose result is returned, such as
        :func:`fedjax_peft.simulation.simulate.check_recorded`.
      origin: the run of the config's ``origin``, which a new run starts from.
    """
    parts = Parts() if parts is None else parts

    def report_phase(name: PhaseName) -> None:
        if on_phase is not None:
            on_phase(Phase(name, 0, config["rounds"]))

    report_phase("reading")
    data = parts.get("data", _data_description(config), lambda: load_data(config))
    clients = _call(config, "partition", data["train"])
    train = data["train"]
    config = _explicit(config, data)
    clients, evaluated = evaluation_data(config, data, clients)
    config = with_noise(config, clients)
    options = {name: config[name] for name in _fields(simulate)}
    options |= {} if engine is None else {"engine": engine}
    task = tasks.for_data(train, config["metric"])
    report_phase("loading")
    model = _first_model(config, train, parts, origin, out)
    if config["origin"] is None:
        model = _started(config, model, clients, task)
    return act(
        model,
        origin=origin,
        clients=clients,
        **evaluated,
        **_made_from_values(config),
        task=task,
        time_model=TimeModel.preset(**config["time"]),
        asynchronous=build_asynchronous(config),
        availability=build_availability(config),
        stop=any_of(early_stop(**config["stop"]) if config["stop"] else None, stop),
        out=out,
        resume=resume,
        config=config,
        on_round=on_round,
        on_phase=on_phase,
        progress=False,
        **options,
    )


def _data_description(config: Config) -> Config:
    """Returns everything that the data of a config depend on."""
    names = {"data", "task", *_fields(_Extra)} - {"name", "runtime"}
    table, model = config["data"], config["model"]
    seed = config["seed"] if table["seed"] is None else table["seed"]
    tokenizer = [model[key] for key in ("name", "source", "config")]
    chosen = {name: config[name] for name in names}
    return {**chosen, "seed": seed, "tokenizer": tokenizer, "by": config["partition"]["name"]}


def _first_model(
    config: Config, train: Dataset, parts: Parts, origin: Run | None, out: str | Path | None
) -> Model:
    """Returns the model before round 1: that of the config, or that of the run it starts from.

    Raises:
      InputError: the run has another model, or is missing.
    """
    if config["origin"] is None:
        return _shared_model(config, train, parts)
    if origin is None:
        folder = Path(out or "")
        if out is None or not (folder / ORIGIN).exists():
            raise InputError("origin is written by the program: fedjax-peft run CONFIG --from RUN.")
        again = {**config, "seed": base_seed(folder, config)}
        return with_origin(_shared_model(again, train, parts), folder)
    before = read_config(Path(config["origin"]))
    if "model" in before:
        names = ("model", "peft")
        known = flatten({name: resolve_recorded(before)[name] for name in names})
        asked = flatten({name: config[name] for name in names})
        for key in [*asked, *known]:
            if asked.get(key) != known.get(key):
                raise InputError(
                    f"--from takes the model of {config['origin']}, with its [model] and [peft]:"
                    f" {key} is {known.get(key)!r} there and {asked.get(key)!r} here."
                )
    if tuple(train.label_names) != tuple(origin.model.labels):
        raise InputError(f"The labels of {config['origin']} are not those of this config's data.")
    return origin.trained


def _shared_model(config: Config, train: Dataset, parts: Parts) -> Model:
    """Returns the model of a config, with the forward pass of an equal model with another seed.

    Compiled programs belong to the forward pass, so the two models share them.
    """
    tables = [config["model"], config["peft"], config["data"]["tokenizer"]]
    description = [*tables, list(train.label_names), train.vocabulary]
    model = parts.get(
        "model",
        [description, config["seed"]],
        lambda: build_model(config, train.label_names, train.vocabulary),
    )
    return model.replace(apply=parts.get("forward pass", description, lambda: model.apply))


def _started(config: Config, model: Model, clients: Clients, task: Task) -> Model:
    """Returns the model of a run with the start that ``[peft]`` takes from training examples.

    Raises:
      InputError: a run with differential privacy, or a number that cannot be used.
    """
    step, number = (config["peft"].get(name) for name in _Start._fields)
    if step is None:
        return model
    if config["privacy"]:
        raise InputError(
            "peft.gradient_start reads the clients' examples without noise, so the run's epsilon"
            " would not hold. Leave gradient_start out, or the table [privacy]."
        )
    if number < 1:
        raise InputError(f"peft.gradient_examples = {number} must be at least 1.")
    rows = np.concatenate(clients.indices)
    rows = host_rng(config["seed"], "gradient start").permutation(rows)[:number]
    size = min(config["batch_size"], len(rows))

    def batch(start: int) -> Batch:
        place = np.arange(start, start + size)
        columns = clients.data.take(rows[np.minimum(place, len(rows) - 1)]).columns
        return {**columns, "mask": place < len(rows)}

    batches = map(batch, range(0, len(rows), size))
    return peft.gradient_start(model, batches, task, step=step)


@dataclass(frozen=True)
class _Made:
    """A function of the run-time values; equal configs are equal functions."""

    table: Literal["algorithm", "attack", "privacy", "transforms"]
    config: str
    """JSON of the tables that the function reads, without the run-time values."""

    def __call__(self, values: Values) -> Any:
        config = json.loads(self.config)
        for key, value in values.items():
            *tables, last = key.split(".")
            functools.reduce(operator.getitem, tables, config)[last] = value
        return _BUILDERS[self.table](config)


def _made_from_values(config: Config) -> dict[str, Any]:
    """Returns the arguments of ``simulate`` that depend on the run-time values, and the values."""
    # An epsilon was replaced by a noise multiplier, see with_noise.
    runtime = [
        f"privacy.{_NOISE}" if k == "privacy.epsilon" else k for k in config["runtime"] or ()
    ]
    if not runtime:
        return {name: build(config) for name, build in _BUILDERS.items()}
    flat = flatten(config)
    names = (*_BUILDERS, "aggregator", "optimizer", *SCHEDULES)
    tables, _ = unset({name: config[name] for name in names}, "privacy.epsilon")
    for name in _OF_THE_RUN:  # a function that draws random numbers needs the seed
        if any(key.endswith(f".{name}") for key in flatten(tables)):
            tables[name] = config[name]
    for key in runtime:
        tables, _ = unset(tables, key)
    text = json.dumps(tables, sort_keys=True)
    made = {name: _Made(name, text) for name in _BUILDERS if config[name] or name == "algorithm"}
    return {**made, "values": {key: flat[key] for key in runtime}}


def describe(config: Config) -> str:
    """Returns a short description of a resolved config: algorithm, PEFT method, model and data."""
    names = {table: config[table]["name"] for table in ("partition", "peft", "algorithm")}
    parts = [config["aggregator"].get("name"), *config.get("transforms", {})]
    if private := config.get("privacy", {}).get("name"):
        parts.append(f"{private} privacy")
    if hostile := config.get("attack", {}).get("name"):
        parts.append(f"{hostile} attack")
    if server := config.get("asynchronous", {}).get("name"):
        parts.append(f"{server} server")
    combined = " and ".join(part for part in parts if part)
    combined = f" with {combined}" if combined else ""
    model, data = (Path(config[table]["name"]).name for table in ("model", "data"))
    return (
        f"{names['algorithm']}{combined} over {names['peft']} on {model},"
        f" {data} by {names['partition']}"
    )


def evaluation_data(
    config: Config, data: Mapping[str, Dataset], clients: Clients
) -> tuple[Clients, dict[str, Any]]:
    """Returns the clients without what they hold out, and the data to evaluate on.

    Args:
      config: a resolved config.
      data: the splits, from :func:`federation`.
      clients: the clients of the training split, likewise.

    Returns:
      The clients, packed if ``[data]`` says so, and the arguments ``test``, ``client_test``,
      ``validation`` and ``client_validation`` of ``simulate``.
    """
    validates = config["global_validation"]
    validates = config["global_test"] if validates is None else validates
    result: dict[str, Any] = {
        "test": data["test"] if config["global_test"] else None,
        "validation": data.get("validation") if validates else None,
    }
    for split in ("test", "validation"):
        if config[f"client_{split}"]:
            by = config["partition"].get("by", "client")
            # A client can be without examples of this split.
            own = partition.natural(data[split], by=by, names=clients.names, min_size=0)
            result[f"client_{split}"] = own
    for split, key in (("test", "client_holdout"), ("validation", "client_validation_holdout")):
        if config[key] is not None:
            clients, result[f"client_{split}"] = clients.holdout(config[key], seed=config["seed"])
    if config["data"]["packing"] is not None:
        clients = clients.pack(config["data"]["packing"])
    return clients, result


def _explicit(config: Config, data: Mapping[str, Dataset]) -> Config:
    """Returns the config with the settings that follow from the data, so that it is complete."""
    config, train = copy.deepcopy(config), data["train"]
    config["validation"] = _kind_of_validation(config, data)
    # A run that is continued for more rounds keeps its schedule, and its correlated noise.
    for table in (*SCHEDULES, "privacy"):
        if "rounds" in config[table]:
            config[table]["rounds"] = config[table]["rounds"] or config["rounds"]
    task = tasks.for_data(train)
    if config["model"]["head"] is None:
        config["model"]["head"] = task.head
    # A later reader, such as ``predict``, does not have the data; a head serves several tasks.
    unsaid = not config["task"] and config["metric"] is None and task.name in tasks.__all__
    if unsaid and task.head == "causal_lm" and tasks.for_head(task.head).name != task.name:
        fields = _fields(_function("task", task.name))
        config["task"] = {"name": task.name, **_checked("task", fields, {})}
    if "input_ids" in train.columns:
        config["data"]["max_length"] = train.columns["input_ids"].shape[1]
    return config


def federation(config: Config) -> tuple[dict[str, Dataset], Clients]:
    """Returns the splits of a resolved config's data, and the clients of the training split.

    Raises:
      InputError: as :func:`load_data`, or the partition does not fit the data.
    """
    data = load_data(config)
    return data, _call(config, "partition", data["train"])


def load_data(config: Config) -> dict[str, Dataset]:
    """Returns the splits of a resolved config's data.

    Raises:
      InputError: the data are not available or cannot be read, or settings contradict each other.
    """
    _check_own_examples(config, "client_test", "tests", "client_holdout = 0.2")
    _check_own_examples(config, "client_validation", "validates", "client_validation_holdout = 0.1")
    task = named_task(config)
    if task is not None and config["metric"] is not None:
        raise InputError("With a [task] table, set metric there and not at the top level.")
    options = {k: v for k, v in config["data"].items() if k not in _Data._fields}
    tokenizer = _tokenizer(config)
    data = _seeded(sources.load_dataset, config, options, tokenizer=tokenizer, task=task)
    for key in ("client_validation", "global_validation"):
        if config[key] and "validation" not in data:
            raise InputError(
                f"{key} = true needs a validation split, and {config['data']['name']!r} has none."
                " To hold out a share of the training rows, set data.validation_share = 0.1."
            )
    return data


def _check_own_examples(config: Config, key: str, does: str, instead: str) -> None:
    """Raises InputError for clients that cannot have own examples of a split."""
    holdout = instead.split(" ")[0]
    if config[key] and config["partition"]["name"] != "natural":
        what = key.removeprefix("client_")
        raise InputError(
            f"{key} = true {does} clients on their own {what} examples. Only clients of"
            " [partition] name = 'natural' have such examples, not those of"
            f" {config['partition']['name']!r}. For other partitions, hold out a share of each"
            f" client's training examples: {instead}."
        )
    if config[key] and config[holdout] is not None:
        raise InputError(f"{key} = true and {holdout} exclude each other: use only one.")


def _kind_of_validation(config: Config, data: Mapping[str, Dataset]) -> str | None:
    """Returns what the validation examples of a run are, in words; None if there are none."""
    kinds = []
    share, holdout = config["data"]["validation_share"], config["client_validation_holdout"]
    if share is not None:
        kinds.append(f"{100 * share:g} % of train")
    elif "validation" in data:
        entry = sources.DATASETS.get(config["data"]["name"])
        rule = config["data"]["split"] or "6:2:2"
        kinds.append(f"a part of the split {rule}" if entry and entry.parts else "official")
    if holdout is not None:
        kinds.append(f"{100 * holdout:g} % of each client's examples")
    return "; ".join(kinds) or None


def _tokenizer(config: Config) -> Any:
    """Returns the tokenizer for a config's data; None if none is needed or known."""
    entry = sources.DATASETS.get(config["data"]["name"])
    name = config["data"]["tokenizer"]
    task = named_task(config) or (None if entry is None else entry.task)
    if task is not None and task.encoder is not None and not task.encoder.needs_tokenizer:
        return None
    if name is not None:
        return hub.load_tokenizer(name)
    if config["data"]["vocabulary"] is not None and config["model"]["config"] is None:
        raise InputError(
            "[data] vocabulary makes a new vocabulary of words, which a pretrained model does not"
            " know. Give the model random weights with [model.config], or leave vocabulary out."
        )
    if config["model"]["config"] is not None:
        return None  # random weights have no tokenizer; load_dataset raises if it needs one
    return hub.load_tokenizer(config["model"]["name"], source=config["model"]["source"])


def build_model(config: Config, labels: Sequence[str], vocabulary: Sequence[str] = ()) -> Model:
    """Returns the model of a resolved config, with its PEFT method attached.

    Args:
      config: the config.
      labels: names of the classes.
      vocabulary: the words of the data (``Dataset.vocabulary``), if they have replaced a tokenizer.
    """
    options = dict(config["model"])
    shape, kind = options.pop("config"), options.pop("head") or task_of(config).head
    head = heads.make(kind, tuple(labels))
    if shape is None:
        model = _seeded(hub.load_model, config, options, head=head)
    else:
        name, _ = options.pop("name"), options.pop("source")
        model = _seeded(registry.random_model, config, options, shape, head=head)
        tokenizer = word_tokenizer(vocabulary) if vocabulary else _tokenizer(config)
        model = model.replace(name=name, tokenizer=tokenizer)
    return attach(model, build_method(config), seed=config["seed"])


def task_of(config: Config) -> Task:
    """Returns the task of a run: the one of ``[task]``, or one for the head of its model."""
    head = config.get("model", {}).get("head")
    task = named_task(config) or tasks.for_head(tasks.head_kind(head or "classification"))
    template = config.get("data", {}).get("template")
    return task if template is None else with_options(task, template=template)


def named_task(config: Config) -> Task | None:
    """Returns the task of ``[task]``, None if the config has no such table.

    Raises:
      InputError: the function of ``[task]`` returns something else.
    """
    if not config.get("task"):
        return None
    task = _call(config, "task")
    if not isinstance(task, Task):
        raise InputError(
            f"The task {show(config['task']['name'])} returns {type(task).__name__}, not a"
            " fedjax_peft.tasks.Task."
        )
    return task


def build_method(config: Config) -> Method:
    """Returns the PEFT method of a resolved config."""
    options = {key: x for key, x in config["peft"].items() if key not in _Start._fields}
    return _call({**config, "peft": options}, "peft")


def build_algorithm(config: Config) -> Any:
    """Returns the algorithm of a resolved config."""
    function = _function("algorithm", config["algorithm"]["name"])
    parameters = inspect.signature(function).parameters
    objects = {
        table: _call(config, table)
        for table in ("optimizer", "aggregator", "server_schedule")
        if table in parameters and config[table]
    }
    if config["schedule"]:
        schedule = _call(config, "schedule")
        objects["optimizer"] = schedules.scheduled(objects["optimizer"], schedule)
        function = checked(function)  # a user's function may not be decorated
    options = {k: v for k, v in config["algorithm"].items() if k != "name"}
    return _seeded(function, config, options | _rate(config), **objects)


def build_transforms(config: Config) -> list[Transform]:
    """Returns the upload transforms of a resolved config, in their order."""
    return [
        _seeded(_function("transforms", name), config, options)
        for name, options in config["transforms"].items()
    ]


def build_privacy(config: Config) -> Privacy | None:
    """Returns the mechanism of differential privacy of a resolved config, None without one.

    Raises:
      InputError: the noise of ``privacy.epsilon`` is not known yet, see :func:`with_noise`.
    """
    options = {k: v for k, v in config["privacy"].items() if k not in ("name", "epsilon")}
    if not config["privacy"]:
        return None
    if options.get(_NOISE, 0) is None:
        raise InputError("The noise of privacy.epsilon depends on the clients: run the config.")
    return _seeded(_function("privacy", config["privacy"]["name"]), config, options)


def build_attack(config: Config) -> Attack | None:
    """Returns what the hostile clients of a resolved config do, None without any."""
    return _call(config, "attack") if config["attack"] else None


def build_asynchronous(config: Config) -> Asynchronous | None:
    """Returns the asynchronous server of a resolved config, None for a synchronous one."""
    return _call(config, "asynchronous") if config["asynchronous"] else None


def build_availability(config: Config) -> Availability | None:
    """Returns when the clients of a resolved config are available, None for always."""
    return _call(config, "availability") if config["availability"] else None


def with_noise(config: Config, clients: Clients) -> Config:
    """Returns the config with the noise multiplier that gives it ``privacy.epsilon``.

    A config that says its noise is returned as it is.

    Args:
      config: a resolved config.
      clients: the clients of the run.

    Raises:
      InputError: no noise is enough, or the mechanism does not fit the run.
    """
    table = config["privacy"]
    if table.get("epsilon") is None or table[_NOISE] is not None:
        return config
    names = [name for name in inspect.signature(schedule_of).parameters if name != "clients"]
    schedule = schedule_of(clients, **{name: config[name] for name in names})
    facts = federation_of(schedule, clients.data, build_algorithm(config))

    def epsilon_of(noise: float) -> float:
        made = build_privacy({**config, "privacy": {**table, _NOISE: noise}})
        assert made is not None
        return made.guarantee(facts, config["rounds"]).epsilon

    noise = smallest_noise(epsilon_of, table["epsilon"])
    return {**config, "privacy": {**table, _NOISE: noise}}


_BUILDERS: dict[Any, Callable[[Config], Any]] = {
    "algorithm": build_algorithm,
    "transforms": build_transforms,
    "privacy": build_privacy,
    "attack": build_attack,
}
"""Argument of ``simulate`` -> function that makes it from a resolved config."""


def _call(config: Config, table: str, *arguments: Any, **objects: Any) -> Any:
    """Calls the function that a table names."""
    options = {k: v for k, v in config[table].items() if k != "name"}
    function = _function(table, config[table]["name"])
    return _seeded(function, config, options, *arguments, **objects)


def _seeded(
    function: Callable[..., Any], config: Config, options: Config, *arguments: Any, **objects: Any
) -> Any:
    """Calls a function with a table's options; a missing seed or ``rounds`` is that of the run."""
    for name in _OF_THE_RUN:
        if options.get(name, 0) is None:
            options = {**options, name: config[name]}
    return function(*arguments, **objects, **options)


# ------------------------------------------------------------------------------------- signatures


def in_words(table: str) -> str:
    """Returns what a table names, in the singular, for messages."""
    return {"transforms": "transform", "asynchronous": "asynchronous server"}.get(table, table)


def _function(table: str, name: Any) -> Callable[..., Any]:
    module, one = NAMESPACES[table], in_words(table)
    if name is None:
        raise InputError(f"[{table}] needs a name. {nearest('', module.__all__)}")
    if plugins.is_user_function(name):
        return plugins.load_function(one, name)
    if name not in module.__all__:
        raise InputError(f"There is no {one} {show(name)}. {nearest(str(name), module.__all__)}")
    return getattr(module, name)


def _fields(function: Callable[..., Any]) -> dict[str, tuple[Any, Any]]:
    """Returns the arguments that a config can set: name -> (type, default; ``...`` if required).

    These are the arguments of plain types. Models, optimizers and other objects have tables.
    """
    hints = typing.get_type_hints(function.__new__ if isinstance(function, type) else function)
    fields = {}
    takes_optimizer = "optimizer" in inspect.signature(function).parameters
    for name, parameter in inspect.signature(function).parameters.items():
        default = parameter.default
        kind = hints.get(name, _unannotated(name, default))
        if not _is_plain(kind) or name in _NOT_CONFIG:
            continue
        if name in _OF_THE_RUN and function is not simulate:
            kind, default = int | None, None  # None: that of the run
        if name == "learning_rate" and default is parameter.empty and takes_optimizer:
            kind, default = float | None, None  # None: that of [optimizer], see _rate
        fields[name] = (
            str if kind == str | Path else kind,
            ... if default is parameter.empty else default,
        )
    return fields


def _unannotated(name: str, default: Any) -> Any:
    """Returns the type of an argument without annotation, of a user's function.

    An argument without a default is a number, a string or a boolean, unless its name is that of an
    object.
    """
    if name in ("optimizer", "aggregator", "server_schedule", "data", "dataset", "train"):
        return object
    if default is None or default is inspect.Parameter.empty:
        return int | float | str | bool | None
    return int | float if type(default) is float else type(default)


class Key(NamedTuple):
    """A key that a config can have."""

    table: str
    """The table of the key; empty for a key at the top level."""
    name: str
    owner: Callable[..., Any]
    """The function with this argument, or the class with this field."""
    kind: Any
    """The type of the value."""
    default: Any
    """The default value; ``...`` if the key is required."""

    @property
    def functions(self) -> Sequence[str]:
        """The function with this argument; none for the config's own keys."""
        return [] if isinstance(self.owner, type) else [self.owner.__name__]

    @property
    def dotted(self) -> str:
        """The key as the command line takes it, such as ``peft.rank``."""
        if self.table in CHAINED:
            return f"{self.table}.{self.owner.__name__}.{self.name}"
        return f"{self.table}.{self.name}" if self.table else self.name


def all_keys() -> list[Key]:
    """Returns every key of a config; in a table with a ``name``, the keys of each function."""
    owners: list[tuple[str, Callable[..., Any]]] = [("", simulate), ("", _Extra)]
    for table, function in _FUNCTIONS.items():
        owners += [(table, function)]
        owners += [(table, _EXTRA_KEYS[table])] if table in _EXTRA_KEYS else []
    for table, module in NAMESPACES.items():
        owners += [(table, getattr(module, name)) for name in module.__all__]
        owners += [(table, _EXTRA_KEYS[table])] if table in _EXTRA_KEYS else []
    return [
        Key(table, name, owner, kind, default)
        for table, owner in owners
        for name, (kind, default) in _fields(owner).items()
    ]


def _is_plain(kind: Any) -> bool:
    """Returns whether TOML can express the values of a type (paths are strings)."""
    origin = typing.get_origin(kind)
    if origin is Literal:
        return True
    if origin in (typing.Union, types.UnionType, abc.Sequence, abc.Mapping):
        return all(_is_plain(k) for k in typing.get_args(kind))
    return kind in (int, float, str, bool, Path, types.NoneType)


def _checked(
    table: str, fields: Mapping[str, tuple[Any, Any]], given: Config, others: Sequence[str] = ()
) -> Config:
    """Returns the values of all fields: the given ones, strictly checked, and the defaults."""
    where = f"[{table}] " if table else ""
    for key in given:
        if key not in fields and key not in others:
            known = [*fields, *others]
            raise InputError(f"Unknown config key {where}{show(key)}. {nearest(key, known)}")
    schema = pydantic.create_model(
        "schema",
        __config__=pydantic.ConfigDict(strict=True, arbitrary_types_allowed=True),
        **fields,  # type: ignore[call-overload]
    )
    try:
        return schema(**{k: v for k, v in given.items() if k in fields}).model_dump()
    except pydantic.ValidationError as error:
        raise InputError(_explain(table, fields, error)) from None


def _explain(
    table: str, fields: Mapping[str, tuple[Any, Any]], error: pydantic.ValidationError
) -> str:
    """Returns a sentence for each wrong field, with a corrected value where one can be guessed."""
    where = f"[{table}] " if table else ""
    wrong: dict[str, tuple[Any, list[str]]] = {}
    for item in error.errors():
        _, reasons = wrong.setdefault(str(item["loc"][0]), (item.get("input"), []))
        reasons.append(item["msg"][0].lower() + item["msg"][1:])
    sentences = []
    for key, (value, reasons) in wrong.items():
        if reasons == ["field required"]:
            sentences.append(f"The config key {where}{key!r} is missing.")
        else:
            sentences.append(
                f"The config key {where}{key!r} cannot be {show(value)}: {', or '.join(reasons)}."
            )
            if (guess := _corrected(fields[key][0], value)) is not None:
                literal = toml.literal(guess)
                shown = f"{table}.{key}" if table else key
                sentences.append(
                    f"Write {key} = {literal}, or on the command line '{shown}={literal}'."
                )
    return " ".join(sentences)


def _corrected(kind: Any, value: Any) -> Any:
    """Returns a value of the right type that the user may have meant; None if there is none.

    Corrected are single elements of lists (``diagnostics=clients``), and numbers and booleans that
    are not written as in TOML (``.5``, ``True``).
    """
    guesses: list[Any] = [[value]]
    if isinstance(value, str):
        guesses += [{"true": True, "false": False}.get(value.lower())]
        for number in (int, float):
            with contextlib.suppress(ValueError):
                guesses.append(number(value))
    check = pydantic.TypeAdapter(kind, config=pydantic.ConfigDict(arbitrary_types_allowed=True))
    for guess in guesses:
        with contextlib.suppress(pydantic.ValidationError):
            if guess is not None:
                return check.validate_python(guess, strict=True)
    return None


def _overlay(base: Config, over: Config) -> Config:
    """Returns ``base`` with the keys of ``over`` in place of its own.

    A table with another function replaces the whole table, because options belong to a function.
    """
    base, over = _expanded(base), _expanded(over)
    for table in NAMESPACES:
        old, new = base.get(table), over.get(table)
        if isinstance(old, dict) and isinstance(new, dict):
            name = old.get("name", _DEFAULT_NAMES.get(table))
            if new.get("name", name) != name:
                del base[table]
    for table in CHAINED:
        if over.get(table) == {}:
            base.pop(table, None)
    return merge(base, over)
