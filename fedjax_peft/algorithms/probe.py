"""Properties of an optimizer that are found by trial steps."""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from fedjax_peft import contracts as c

_SCALES = (1.0, 1e-6, 1e12, 0.0)
"""Scales of the gradients: large ones reveal clipping, 0 reveals weight decay and momentum."""
_LATER = (10, 1_000, 100_000, 10_000_000)
"""Numbers of earlier steps at which a schedule is tried."""


def sgd_rate(optimizer: c.Optimizer, names: Sequence[str]) -> float | None:
    """Returns the step size of an optimizer that makes the steps of plain SGD, else None.

    It is tried on gradients of very different sizes, and after its counters of steps were set to
    later values, so that momentum, Nesterov's momentum, weight decay, clipping, noise, schedules
    and different rates for different leaves all show. A momentum of 0 is plain SGD.

    Args:
      names: names of the leaves in the trial; their shapes are not the model's.
    """
    values = jnp.array([[0.7, -1.3], [0.2, 5.0]])
    params = dict.fromkeys(names, values)
    gradients = {scale: dict.fromkeys(names, scale * values[::-1]) for scale in _SCALES}
    try:
        state = optimizer.init(params)
        trials = []
        for scale, gradient in gradients.items():
            updates, state = optimizer.update(gradient, state, params)
            trials.append((scale, updates))
        for steps in _LATER:
            updates, _ = optimizer.update(gradients[1.0], _later(state, steps), params)
            trials.append((1.0, updates))
    except Exception:  # an optimizer for leaves of certain shapes: SGD takes any
        return None
    rate = -float(trials[0][1][names[0]][0, 0] / values[1, 0])
    for scale, updates in trials:
        for name in names:
            expected = -rate * scale * values[::-1]
            if not jnp.allclose(updates[name], expected, rtol=1e-4, atol=0.0):
                return None
    return rate if math.isfinite(rate) and rate >= 0 else None


def _later(state: c.PyTree, steps: int) -> c.PyTree:
    """Returns an optimizer's state with ``steps`` more on its counters."""
    return jax.tree.map(
        lambda x: x + steps if jnp.issubdtype(jnp.result_type(x), jnp.integer) else x, state
    )
