"""Simulate federated parameter-efficient fine-tuning of transformers, many clients at once."""

import importlib
from typing import TYPE_CHECKING, Any

from fedjax_peft.support.version import __version__ as __version__

_PLACES = {
    "": (
        *("aggregators", "algorithms", "asynchronous", "attacks", "availability", "contracts"),
        *("deploy", "peft", "privacy", "tasks", "testing", "transforms"),
    ),
    "config": ("lm_eval",),
    "contracts.part": ("call_of", "part"),
    "config.loading": ("load_run",),
    "data": ("heterogeneity", "partition"),
    "data.combine": ("combine",),
    "data.dataset": ("Clients", "Dataset"),
    "engine": ("differentiable",),
    "engine.devices": ("distributed",),
    "engine.state": ("RoundInfo", "State"),
    "models": ("heads",),
    "models.base": ("Model", "bind"),
    "models.hub": ("load_model", "load_tokenizer"),
    "models.registry": ("random_model",),
    "numerics": ("optimizers", "schedules", "tree"),
    "peft.base": ("attach", "count", "merge", "quantize"),
    "peft.lora": ("lora",),
    "report": ("executors",),
    "report.sweep": ("Sweep", "grid", "sweep"),
    "report.tune": ("Tuned", "tune"),
    "simulation": ("trackers",),
    "simulation.planning": ("devices",),
    "simulation.records": ("Evaluation", "Placement", "Records", "System"),
    "simulation.run": ("Run",),
    "simulation.session": ("session",),
    "simulation.simulate": ("simulate",),
    "simulation.stopping": ("early_stop",),
    "simulation.time_model": ("TimeModel",),
    "support.errors": ("InputError",),
    "tasks.clients": ("load_clients",),
    "tasks.generation": ("generate",),
    "tasks.inference": ("embed",),
    "tasks.sources": ("load_dataset",),
}
"""Module -> its names in the public API, some of which are modules too. They are imported at first
use, so that the import of the package is fast."""
_OWNERS = {name: module for module, names in _PLACES.items() for name in names}
__all__ = [
    "Clients",
    "Dataset",
    "Evaluation",
    "InputError",
    "Model",
    "Placement",
    "Records",
    "RoundInfo",
    "Run",
    "State",
    "Sweep",
    "System",
    "TimeModel",
    "Tuned",
    "aggregators",
    "algorithms",
    "asynchronous",
    "attach",
    "attacks",
    "availability",
    "bind",
    "call_of",
    "combine",
    "contracts",
    "count",
    "deploy",
    "devices",
    "differentiable",
    "distributed",
    "early_stop",
    "embed",
    "executors",
    "generate",
    "grid",
    "heads",
    "heterogeneity",
    "lm_eval",
    "load_clients",
    "load_dataset",
    "load_model",
    "load_run",
    "load_tokenizer",
    "lora",
    "merge",
    "optimizers",
    "part",
    "partition",
    "peft",
    "privacy",
    "quantize",
    "random_model",
    "schedules",
    "session",
    "simulate",
    "sweep",
    "tasks",
    "testing",
    "trackers",
    "transforms",
    "tree",
    "tune",
]

if TYPE_CHECKING:
    from fedjax_peft import (
        aggregators,
        algorithms,
        asynchronous,
        attacks,
        availability,
        contracts,
        deploy,
        peft,
        privacy,
        tasks,
        testing,
        transforms,
    )
    from fedjax_peft.config import lm_eval
    from fedjax_peft.config.loading import load_run
    from fedjax_peft.contracts.part import call_of, part
    from fedjax_peft.data import heterogeneity, partition
    from fedjax_peft.data.combine import combine
    from fedjax_peft.data.dataset import Clients, Dataset
    from fedjax_peft.engine import differentiable
    from fedjax_peft.engine.devices import distributed
    from fedjax_peft.engine.state import RoundInfo, State
    from fedjax_peft.models import heads
    from fedjax_peft.models.base import Model, bind
    from fedjax_peft.models.hub import load_model, load_tokenizer
    from fedjax_peft.models.registry import random_model
    from fedjax_peft.numerics import optimizers, schedules, tree
    from fedjax_peft.peft.base import attach, count, merge, quantize
    from fedjax_peft.peft.lora import lora
    from fedjax_peft.report import executors
    from fedjax_peft.report.sweep import Sweep, grid, sweep
    from fedjax_peft.report.tune import Tuned, tune
    from fedjax_peft.simulation import trackers
    from fedjax_peft.simulation.planning import devices
    from fedjax_peft.simulation.records import Evaluation, Placement, Records, System
    from fedjax_peft.simulation.session import session
    from fedjax_peft.simulation.simulate import Run, simulate
    from fedjax_peft.simulation.stopping import early_stop
    from fedjax_peft.simulation.time_model import TimeModel
    from fedjax_peft.support.errors import InputError
    from fedjax_peft.tasks.clients import load_clients
    from fedjax_peft.tasks.generation import generate
    from fedjax_peft.tasks.inference import embed
    from fedjax_peft.tasks.sources import load_dataset


def __getattr__(name: str) -> Any:
    if name not in _OWNERS:
        raise AttributeError(f"module 'fedjax_peft' has no attribute {name!r}")
    owner = importlib.import_module(f"fedjax_peft.{_OWNERS[name]}".rstrip("."))
    if name in vars(owner):
        return vars(owner)[name]
    return importlib.import_module(f"{owner.__name__}.{name}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
