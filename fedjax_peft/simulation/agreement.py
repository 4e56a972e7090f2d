"""The check, at the start, that all processes of a run do the same."""

import json
from collections.abc import Mapping
from importlib import metadata
from typing import Any

from fedjax_peft.engine.distributed import agree, process, processes
from fedjax_peft.simulation.fingerprint import differences
from fedjax_peft.support.errors import InputError
from fedjax_peft.support.nested import flatten

__all__ = ["check_same_run"]

_PACKAGES = ("fedjax_peft", "jax", "jaxlib", "numpy")


def check_same_run(settings: Mapping[str, Any]) -> None:
    """Raises InputError if another process runs something else than process 0.

    Such processes would compute different programs on different data, or wait for each other for
    ever.

    Args:
      settings: the settings of the run and its fingerprint.
    """
    if processes() == 1:
        return
    mine = flatten(settings)
    mine |= {f"the version of {name}": metadata.version(name) for name in _PACKAGES}
    first = agree(json.loads(json.dumps(mine, default=str)))
    if differing := differences(first, mine):
        shown = "; ".join(f"{k} is {mine.get(k)} here and {first.get(k)} there" for k in differing)
        raise InputError(
            f"Process {process()} does not run the same as process 0: {shown}. Start all processes"
            " with the same config, data, weights and versions."
        )
