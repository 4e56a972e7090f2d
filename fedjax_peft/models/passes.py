"""Forward passes over all rows of a data set, batch by batch, outside of rounds."""

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from fedjax_peft.contracts import Batch, Outputs, Params
from fedjax_peft.engine.compilation import programs
from fedjax_peft.models.base import Model
from fedjax_peft.support.checks import check_count
from fedjax_peft.support.errors import InputError


def over_batches(
    model: Model,
    params: Params,
    columns: Mapping[str, np.ndarray],
    function: Callable[[Outputs, Batch], Mapping[str, Any]],
    batch_size: int,
) -> dict[str, np.ndarray]:
    """Returns the values of ``function(outputs, batch)`` for all rows, each ``[rows, ...]``."""
    check_count("the predictions", "batch_size", batch_size)
    forward: Any = weakref.ref(model.apply)  # the program is dropped with the model

    def run(f: Params, p: Params, batch: Batch) -> Mapping[str, Any]:
        return function(forward()(f, p, batch, None, False), batch)

    compiled = programs.get(model.apply, ("predict", function), lambda: jax.jit(run))
    frozen, n = model.compute_frozen(), len(next(iter(columns.values())))
    if not n:
        raise InputError("There are no examples to predict for.")
    parts = []
    for start in range(0, n, batch_size):
        batch = {name: column[start : start + batch_size] for name, column in columns.items()}
        missing = max(start + batch_size - n, 0)
        padded = {
            name: np.pad(c, ((0, missing), *[(0, 0)] * (c.ndim - 1)), mode="edge")
            for name, c in batch.items()
        }
        try:
            part = jax.device_get(compiled(frozen, params, padded))
        except KeyError as error:
            raise InputError(
                f"The model reads the column {error}, and the data have only {', '.join(columns)}."
            ) from None
        parts.append({name: x[: batch_size - missing] for name, x in part.items()})
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
