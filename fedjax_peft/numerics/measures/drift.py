"""How far the global LoRA factors move in a round (FeDeRA)."""

import jax.numpy as jnp
from jax import Array

from fedjax_peft.contracts import Params


def variation(before: Params, after: Params) -> dict[str, Array]:
    """Returns how much the factors' magnitudes and directions have changed (FeDeRA, Eq 11-14).

    For every column w of the paper's A ``[r, in]`` and B ``[out, r]`` (here: rows of ``lora_a`` and
    ``lora_b``), w' is the column after the round: ``ΔM = mean |‖w'‖ - ‖w‖|`` and
    ``ΔD = mean (1 - cos(w', w))``. A zero column has no direction (B before the first round). We
    define its change of direction as 1 if one of the two columns is zero, and as 0 if both are.
    The means over all matrices are reported too.
    """
    metrics: dict[str, Array] = {}
    totals: dict[str, list[Array]] = {}
    for kind in ("a", "b"):
        names = sorted(n for n in before if n.endswith(f".lora_{kind}"))
        for name in names:
            m, d = _change(before[name], after[name])
            totals.setdefault(f"variation_magnitude_{kind}", []).append(m)
            totals.setdefault(f"variation_direction_{kind}", []).append(d)
            path = name.rpartition(".")[0]
            metrics[f"variation_magnitude_{kind}/{path}"] = m
            metrics[f"variation_direction_{kind}/{path}"] = d
    return {name: jnp.mean(jnp.stack(parts)) for name, parts in totals.items()} | metrics


def _change(before: Array, after: Array) -> tuple[Array, Array]:
    """Returns ΔM and ΔD between the rows of two matrices."""
    old, new = (jnp.sqrt(jnp.sum(x.astype(jnp.float32) ** 2, axis=-1)) for x in (before, after))
    both = (old > 0) & (new > 0)
    dot = jnp.sum(before.astype(jnp.float32) * after.astype(jnp.float32), axis=-1)
    cosine = dot / jnp.where(both, old * new, 1.0)
    direction = jnp.where(both, 1 - cosine, jnp.where((old > 0) | (new > 0), 1.0, 0.0))
    return jnp.mean(jnp.abs(new - old)), jnp.mean(direction)
