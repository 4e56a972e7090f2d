"""The tables and keys of a config, read off what they configure.

A key is an argument of ``simulate``, a field of a record (:mod:`fedjax_peft.simulation.records`),
an argument of a function that a table names, or one of the config's own keys below.
"""

import importlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from fedjax_peft.config.schema import fields_of
from fedjax_peft.contracts.part import Call
from fedjax_peft.models import hub
from fedjax_peft.simulation.records import RECORDS
from fedjax_peft.simulation.simulate import simulate
from fedjax_peft.simulation.stopping import early_stop
from fedjax_peft.simulation.time_model import TimeModel
from fedjax_peft.support import plugins
from fedjax_peft.support.errors import InputError, check_known, nearest
from fedjax_peft.support.rooms import TABLES
from fedjax_peft.tasks.sources import load_dataset

Config = dict[str, Any]

NAMESPACES = {table: importlib.import_module(module) for table, module in TABLES.items()}
"""Tables whose ``name`` is a public function of a module."""

CHAINED = ("transforms", "trackers")
"""Keys of ``NAMESPACES`` with a table for each function instead of a ``name``. Transforms are
applied in the order of the tables."""

OF_A_STUDY = ("sweep", "executor")
"""Tables that say which runs there are and where they run, and nothing of a run."""

SCHEDULES = ("schedule", "server_schedule")
"""Tables of a learning-rate schedule over rounds."""

DEFAULT_NAMES = {"algorithm": "fedavg", "optimizer": "adamw", "peft": "lora"}
"""Table -> the function of a table without ``name``."""

OPTIONAL = (
    *("aggregator", "asynchronous", "attack", "availability", "privacy", "stop", "task"),
    *SCHEDULES,
)
"""Tables that can be left out; the function that takes them then uses its own default."""

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "model": hub.load_model,
    "data": load_dataset,
    "time": TimeModel.preset,
    "stop": early_stop,
    **RECORDS,
}
"""Tables of one function or record, whose arguments are their keys."""


class RunKeys(NamedTuple):
    """Top-level keys that are not arguments of ``simulate``."""

    name: str | None = None
    """The run's name in tables and plots."""
    preset: str | None = None
    """A published system of presets.toml; its settings are defaults for the other keys."""
    preset_changes: Mapping[str, str] | None = None
    """Written by the program: the preset's settings that the run replaced, as in "16 -> 8"."""
    origin: str | None = None
    """Written by ``run --from``: the directory of the run that this one starts from."""
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
_Field = _Leaf | Sequence[_Leaf]


class ModelKeys(NamedTuple):
    """Keys of ``[model]`` that are not arguments of ``load_model``."""

    head: str | None = None
    """The kind of head (``models.heads.KINDS``), or a task that has this head; by default the head
    of the data's task."""
    fresh_head: bool | None = None
    """Start from a new head where the checkpoint holds one, as for classes that it does not know;
    by default its own head is used."""
    config: Mapping[str, _Field | Mapping[str, _Field]] | None = None
    """The ``config.json`` of a model with random weights; ``name`` is then only a label."""
    labels: Sequence[str] | None = None
    """The names of the head's classes; by default those of the data."""


class DataKeys(NamedTuple):
    """Keys of ``[data]`` that are not arguments of ``load_dataset``."""

    tokenizer: str | None = None
    """Name or path of a tokenizer, as for ``load_tokenizer``; by default the model's tokenizer."""
    packing: int | None = None
    """Pack several training examples of a client into rows of this many tokens, for
    ``instruction_tuning`` (``Clients.pack``). ``batch_size`` then counts rows. By default each
    example is a row."""


class EvaluationKeys(NamedTuple):
    """Keys of ``[evaluation]`` that are not plain fields of the record ``Evaluation``."""

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
    holdout_seed: int | None = None
    """The seed by which both shares are drawn; by default that of the run, and in a run that starts
    from another one, that of the other run."""
    client_validation: bool = False
    """Validate each client's model on the client's own examples of the validation split; needs
    natural clients and a validation split (``data.validation_share``)."""
    global_validation: bool | None = None
    """Evaluate on the whole validation split, if the data have one; by default as
    ``global_test``."""


class MethodKeys(NamedTuple):
    """Keys of ``[peft]`` that are not arguments of its function; some are for one method only."""

    seed: int | None = None
    """The seed of the adapters' initial values."""
    gradient_start: float | None = None
    """The step of ``fp.peft.gradient_start``, which makes the bases of ``lora_sb`` and the start of
    its cores: the optimizer's learning rate, or a part of it. By default the bases are random."""
    gradient_examples: int | None = None
    """How many training examples the gradient of ``gradient_start`` is taken of, drawn from all
    clients; by default 50."""
    activation_examples: int | None = None
    """How many training examples, drawn from all clients, give the activations for ``init = "eva"``
    of ``lora``; by default 200."""


class PrivacyKeys(NamedTuple):
    """Keys of ``[privacy]`` that are not arguments of its function."""

    epsilon: float | None = None
    """The epsilon of the whole run, in place of ``noise_multiplier``: the smallest noise multiplier
    is computed for these clients and rounds, and recorded as ``noise_multiplier``. A run that is
    continued for more rounds keeps its noise, so that its epsilon grows."""


MORE_KEYS: dict[str, type] = {
    "model": ModelKeys,
    "data": DataKeys,
    "evaluation": EvaluationKeys,
    "peft": MethodKeys,
    "privacy": PrivacyKeys,
}
"""Table -> its keys that configure the config itself."""


def in_words(table: str) -> str:
    """Returns what a table names, in the singular, for messages."""
    words = {"transforms": "transform", "trackers": "tracker"}
    return (words | {"asynchronous": "asynchronous server"}).get(table, table)


def function_of(table: str, name: Any) -> Callable[..., Any]:
    module, one = NAMESPACES[table], in_words(table)
    if name is None:
        raise InputError(f"[{table}] needs a name. {nearest('', module.__all__)}")
    text = re.sub(r"#\d+$", "", str(name))  # the second transform of a name
    if text.startswith("__main__:") or "<" in text or ("." in text and ":" not in text):
        return Call(text, ()).factory()
    if plugins.is_user_function(name):
        return plugins.load_function(one, text)
    if not hasattr(getattr(module, text, None), "part"):  # a part need not be listed
        check_known(one, name, module.__all__)
    return getattr(module, text)


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
    owners: list[tuple[str, Callable[..., Any]]] = [("", simulate), ("", RunKeys)]
    functions = {table: [function] for table, function in FUNCTIONS.items()} | {
        table: [getattr(module, name) for name in module.__all__]
        for table, module in NAMESPACES.items()
    }
    for table, several in functions.items():
        own = [MORE_KEYS[table]] if table in MORE_KEYS else []
        owners += [(table, owner) for owner in (*several, *own)]
    return [
        Key(table, name, owner, kind, default)
        for table, owner in owners
        for name, (kind, default) in fields_of(owner).items()
    ]
