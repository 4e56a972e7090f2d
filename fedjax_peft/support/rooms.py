"""The tables of a config that name a function, and the modules of these functions."""

import importlib
from typing import Any

TABLES = {
    "partition": "fedjax_peft.data.partition",
    "peft": "fedjax_peft.peft",
    "algorithm": "fedjax_peft.algorithms",
    "aggregator": "fedjax_peft.aggregators",
    "optimizer": "fedjax_peft.numerics.optimizers",
    "schedule": "fedjax_peft.numerics.schedules",
    "server_schedule": "fedjax_peft.numerics.schedules",
    "transforms": "fedjax_peft.transforms",
    "privacy": "fedjax_peft.privacy",
    "attack": "fedjax_peft.attacks",
    "asynchronous": "fedjax_peft.asynchronous",
    "availability": "fedjax_peft.availability",
    "task": "fedjax_peft.tasks",
    "trackers": "fedjax_peft.simulation.trackers",
}
"""Table -> the module whose public functions its ``name`` can be."""
ROOMS = {table: module.rpartition(".")[2] for table, module in TABLES.items()}
"""Table -> the first part of the names of its calls, such as ``algorithms`` of
``algorithms.fedprox``."""


def above(name: str) -> Any:
    """Returns a function of a room above, by its dotted name, such as ``report.plots.plot``.

    ``run.plot()`` is such a call: users expect the method, and a run knows nothing of figures.
    ``tests/test_layers.py`` lists all of them.
    """
    module, _, function = name.rpartition(".")
    return getattr(importlib.import_module(f"fedjax_peft.{module}"), function)
