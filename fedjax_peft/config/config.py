"""Config files: TOML tables that name a function of the library and give its arguments.

The schema is read from the signatures of the functions that a config calls, and from the records
that ``simulate`` takes. A new algorithm can therefore be configured as soon as it exists, and a key
means the same as the argument in Python.

    rounds = 20                      # top level: arguments of simulate()
    preset = "federa/fedlr"          # optional: defaults from a published system
    [system]                         # fields of System: the clients' devices and network
    [placement]                      # fields of Placement: where and how it is computed
    [evaluation]                     # fields of Evaluation, and which examples are held out
    [records]                        # fields of Records
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

The parts: :mod:`.keys` and :mod:`.schema` (what a config can have), :mod:`.reading` (files,
methods, overrides), :mod:`.resolving` (the complete config), :mod:`.building` (its objects),
:mod:`.federation` (its data), and :mod:`.running`. This module has the names that others use.
"""

from fedjax_peft.config.building import (
    build_algorithm,
    build_asynchronous,
    build_attack,
    build_availability,
    build_method,
    build_model,
    build_privacy,
    build_records,
    build_transforms,
    named_task,
    task_of,
)
from fedjax_peft.config.federation import evaluation_data, federation, load_data
from fedjax_peft.config.keys import (
    CHAINED,
    FUNCTIONS,
    NAMESPACES,
    SCHEDULES,
    Config,
    Key,
    all_keys,
    in_words,
)
from fedjax_peft.config.reading import load, methods, override
from fedjax_peft.config.resolving import head_kind, is_constant, resolve, resolve_recorded
from fedjax_peft.config.running import describe, run, with_noise
from fedjax_peft.config.schema import check_arguments

__all__ = [
    "CHAINED",
    "FUNCTIONS",
    "NAMESPACES",
    "SCHEDULES",
    "Config",
    "Key",
    "all_keys",
    "build_algorithm",
    "build_asynchronous",
    "build_attack",
    "build_availability",
    "build_method",
    "build_model",
    "build_privacy",
    "build_records",
    "build_transforms",
    "check_arguments",
    "describe",
    "evaluation_data",
    "federation",
    "head_kind",
    "in_words",
    "is_constant",
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
