"""Simulate federated parameter-efficient fine-tuning of transformers, many clients at once."""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Name -> module of the public API. Modules are imported at first use, so that the import is fast.
_PUBLIC = {
    "InputError": "support.errors",
    "Model": "models.base",
    "bind": "models.base",
    "load_model": "models.hub",
    "load_run": "config.loading",
    "load_tokenizer": "models.hub",
    "random_model": "models.registry",
    "heads": "models",
    "lm_eval": "config",
    "attach": "peft.base",
    "count": "peft.base",
    "merge": "peft.base",
    "quantize": "peft.base",
    "lora": "peft.lora",
    "peft": "",
    "Clients": "data.dataset",
    "Dataset": "data.dataset",
    "load_clients": "data.clients",
    "load_dataset": "data.sources",
    "combine": "data.combine",
    "embed": "models.inference",
    "generate": "models.generation",
    "heterogeneity": "data",
    "partition": "data",
    "tasks": "",
    "aggregators": "",
    "algorithms": "",
    "transforms": "",
    "privacy": "",
    "attacks": "",
    "asynchronous": "",
    "availability": "",
    "schedules": "numerics",
    "distributed": "engine",
    "Run": "simulation.run",
    "simulate": "simulation.simulate",
    "System": "simulation.records",
    "Placement": "simulation.records",
    "Evaluation": "simulation.records",
    "Records": "simulation.records",
    "grid": "report.sweep",
    "sweep": "report.sweep",
    "Sweep": "report.sweep",
    "tune": "report.tune",
    "Tuned": "report.tune",
    "session": "simulation.session",
    "devices": "simulation",
    "differentiable": "engine",
    "RoundInfo": "engine.state",
    "State": "engine.state",
    "early_stop": "simulation.stopping",
    "TimeModel": "simulation.time_model",
    "testing": "",
    "trackers": "simulation",
    "tree": "numerics",
    "contracts": "",
}
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
    "combine",
    "contracts",
    "count",
    "devices",
    "differentiable",
    "distributed",
    "early_stop",
    "embed",
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
        peft,
        privacy,
        tasks,
        testing,
        transforms,
    )
    from fedjax_peft.config import lm_eval
    from fedjax_peft.config.loading import load_run
    from fedjax_peft.data import heterogeneity, partition
    from fedjax_peft.data.clients import load_clients
    from fedjax_peft.data.combine import combine
    from fedjax_peft.data.dataset import Clients, Dataset
    from fedjax_peft.data.sources import load_dataset
    from fedjax_peft.engine import differentiable, distributed
    from fedjax_peft.engine.state import RoundInfo, State
    from fedjax_peft.models import heads
    from fedjax_peft.models.base import Model, bind
    from fedjax_peft.models.generation import generate
    from fedjax_peft.models.hub import load_model, load_tokenizer
    from fedjax_peft.models.inference import embed
    from fedjax_peft.models.registry import random_model
    from fedjax_peft.numerics import schedules, tree
    from fedjax_peft.peft.base import attach, count, merge, quantize
    from fedjax_peft.peft.lora import lora
    from fedjax_peft.report.sweep import Sweep, grid, sweep
    from fedjax_peft.report.tune import Tuned, tune
    from fedjax_peft.simulation import devices, trackers
    from fedjax_peft.simulation.records import Evaluation, Placement, Records, System
    from fedjax_peft.simulation.session import session
    from fedjax_peft.simulation.simulate import Run, simulate
    from fedjax_peft.simulation.stopping import early_stop
    from fedjax_peft.simulation.time_model import TimeModel
    from fedjax_peft.support.errors import InputError


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'fedjax_peft' has no attribute {name!r}")
    owner = _PUBLIC[name]
    module = importlib.import_module(f"fedjax_peft.{owner}" if owner else f"fedjax_peft.{name}")
    if not owner:
        return module
    if not hasattr(module, name):  # a submodule of a package
        return importlib.import_module(f"fedjax_peft.{owner}.{name}")
    return getattr(module, name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
