"""The check, at the start, that all processes of a run do the same."""

import zlib
from collections.abc import Mapping
from importlib import metadata
from typing import Any

import jax
import numpy as np

from fedjax_peft.distributed import agree, process, processes
from fedjax_peft.errors import InputError
from fedjax_peft.nested import flatten
from fedjax_peft.typing import PyTree

__all__ = ["check_same_run"]

_PACKAGES = ("fedjax_peft", "jax", "jaxlib", "numpy")


def check_same_run(settings: Mapping[str, Any], arrays: Mapping[str, PyTree]) -> None:
    """Raises InputError if another process runs something else than process 0.

    Such processes would compute different programs on different data, or wait for each other for
    ever.

    Args:
      settings: the settings of the run, of plain types.
      arrays: name -> arrays that must be equal, such as the weights.
    """
    if processes() == 1:
        return
    mine = {name: repr(value) for name, value in flatten(settings).items()}
    mine |= {f"the version of {name}": metadata.version(name) for name in _PACKAGES}
    mine |= {f"the checksum of the {name}": _checksum(tree) for name, tree in arrays.items()}
    first = agree(mine)
    differing = sorted(k for k in mine.keys() | first.keys() if mine.get(k) != first.get(k))
    if differing:
        shown = "; ".join(f"{k} is {mine.get(k)} here and {first.get(k)} there" for k in differing)
        raise InputError(
            f"Process {process()} does not run the same as process 0: {shown}. Start all processes"
            " with the same config, data, weights and versions."
        )


def _checksum(arrays: PyTree) -> str:
    """Returns the CRC-32 of the names, shapes and bytes of arrays."""
    found = 0
    for path, x in jax.tree.leaves_with_path(arrays):
        x = np.asarray(x)
        text = f"{jax.tree_util.keystr(path)} {x.dtype} {x.shape}"
        found = zlib.crc32(x.tobytes(), zlib.crc32(text.encode(), found))
    return f"{found:08x}"
