"""Config files: TOML tables that name a function of the library and give its arguments.

The schema is read from the signatures of the functions that a config calls, and from the records
that ``simulate`` takes. A new algorithm can therefore be configured as soon as it exists, and a key
means the same as the argument in Python.

    rounds = 20                      # top level: arguments of simulate()
    preset = "federa/fedlr"          # optional: defaults from a published system
    [evaluation]                     # fields of a record: System, Placement, Evaluation, Records
    [data]                           # arguments of one function: load_dataset(name, ...)
    [algorithm]                      # name = a function of algorithms, and its arguments
    [transforms.NAME]                # one table for each function, in the order of application
    [[trackers]]                     # likewise with its name inside; both tables take both forms
    [methods.NAME]                   # one run for each table; its keys replace the others

:mod:`.keys` has all tables; ``fedjax-peft list keys`` and the reference page describe them.

A string can stand for a table: ``algorithm = "fedprox"`` is ``[algorithm]`` with
``name = "fedprox"``. A list of names stands for tables without options:
``transforms = ["my.py:codec"]``. In a method, an empty list removes the transforms of the config.
A relative path is searched beside the config file first, then in the working directory; that of an
override the other way round.

``name`` can also be a function of yours, as ``module:function`` or ``file.py:function``, for
example ``[aggregator] name = "my:median"``. The module is searched in the config's folder, then
among the modules that Python can import. Reading such a config runs the code of that file.

The parts: :mod:`.keys` and :mod:`.schema` (what a config can have), :mod:`.reading` (files,
methods, overrides), :mod:`.resolving` (the complete config), :mod:`.building` (its objects),
:mod:`.federation` (its data), and :mod:`.running`. This module has the names that others use.
"""
# ruff: noqa: F401 -- the imports are the names that other modules use

from fedjax_peft.config.building import (
    build,
    build_algorithm,
    build_method,
    build_model,
    build_privacy,
    build_records,
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
from fedjax_peft.config.reading import (
    expanded,
    key_parts,
    load,
    methods,
    of_method,
    only,
    override,
    placed,
)
from fedjax_peft.config.resolving import (
    head_kind,
    is_constant,
    resolve,
    resolve_recorded,
    resolve_table,
)
from fedjax_peft.config.running import describe, run, with_noise
