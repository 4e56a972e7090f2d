"""What to measure on request: drift and spectrum of the global LoRA factors, CKA of adapters."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from fedjax_peft.aggregators.lora import pairs, scale
from fedjax_peft.algorithms.representation import cka, pool
from fedjax_peft.engine.round import Diagnosis
from fedjax_peft.modes import mode
from fedjax_peft.typing import Batch, Metrics, Params, Problem

__all__ = ["adapters_cka", "diagnosis", "spectrum", "variation"]


def diagnosis(which: Sequence[str]) -> Diagnosis | None:
    """Returns the measures of the global model that ``which`` names, as one; None for none."""
    return _measures(tuple(sorted(set(which))))


@functools.cache  # the same function every time, so that its program is recognised
def _measures(which: tuple[str, ...]) -> Diagnosis | None:
    def measure(before: Params, after: Params, fixed: Params) -> dict[str, jax.Array]:
        moved = variation(before, after) if "variation" in which else {}
        return moved | (spectrum(after, fixed) if "spectrum" in which else {})

    return measure if {"variation", "spectrum"} & set(which) else None


def variation(before: Params, after: Params) -> dict[str, jax.Array]:
    """Returns how much the factors' magnitudes and directions have changed (FeDeRA, Eq 11-14).

    Of every column w of the paper's A ``[r, in]`` and B ``[out, r]`` (here: rows of ``lora_a`` and
    ``lora_b``): ``ΔM = mean |‖w'‖ - ‖w‖|`` and ``ΔD = mean (1 - cos(w', w))``. The direction of a
    zero column (B before the first round) is undefined: it counts as 1 if one of the two is zero,
    as 0 if both are, our decision. The means over all matrices are metrics of their own.
    """
    metrics: dict[str, jax.Array] = {}
    totals: dict[str, list[jax.Array]] = {}
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


def _change(before: jax.Array, after: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns ΔM and ΔD of two matrices by rows."""
    old, new = (jnp.sqrt(jnp.sum(x.astype(jnp.float32) ** 2, axis=-1)) for x in (before, after))
    both = (old > 0) & (new > 0)
    dot = jnp.sum(before.astype(jnp.float32) * after.astype(jnp.float32), axis=-1)
    cosine = dot / jnp.where(both, old * new, 1.0)
    direction = jnp.where(both, 1 - cosine, jnp.where((old > 0) | (new > 0), 1.0, 0.0))
    return jnp.mean(jnp.abs(new - old)), jnp.mean(direction)


def spectrum(params: Params, fixed: Params) -> dict[str, jax.Array]:
    """Returns the largest singular value of every product ``s·AB`` and its effective rank.

    The effective rank is ``exp(-Σ p log p)`` with ``p = σ / Σσ`` (Roy and Vetterli, 2007): how many
    directions the adapter uses, from 1 to its rank; 0 where the product is zero.
    """
    found = pairs(params)
    shapes = {path: (params[a].shape, params[b].shape) for path, (a, b) in found.items()}
    largest, ranks = {}, {}
    for shape in sorted(set(shapes.values())):
        paths = [path for path in found if shapes[path] == shape]
        a = jnp.stack([scale(fixed, p) * params[found[p][0]] for p in paths])
        b = jnp.stack([params[found[p][1]] for p in paths])
        # One matrix at a time: concurrent LAPACK calls can deadlock XLA's small CPU thread pools.
        sigma = jax.lax.map(_singular_values, (a, b))
        for path, values in zip(paths, sigma, strict=True):
            largest[f"singular_value/{path}"] = values[0]
            ranks[f"effective_rank/{path}"] = _effective_rank(values)
    if not ranks:
        return {}
    return {"effective_rank": jnp.mean(jnp.stack(list(ranks.values())))} | ranks | largest


def _singular_values(factors: tuple[jax.Array, jax.Array]) -> jax.Array:
    a, b = (x.astype(jnp.float32) for x in factors)
    r_a, r_b = jnp.linalg.qr(a, mode="r"), jnp.linalg.qr(b.T, mode="r")
    return jnp.linalg.svd(jnp.matmul(r_a, r_b.T, precision="highest"), compute_uv=False)


def _effective_rank(sigma: jax.Array) -> jax.Array:
    total = jnp.sum(sigma)
    share = sigma / jnp.where(total > 0, total, 1.0)
    # p log p is 0 at 0.
    entropy = -jnp.sum(share * jnp.log(jnp.where(share > 0, share, 1.0)))
    return jnp.where(total > 0, jnp.exp(entropy), 0.0)


def adapters_cka(problem: Problem, params: Params, batch: Batch) -> Metrics:
    """Returns the CKA of a batch's representations through the global and the private adapter.

    Of batches of n examples it is the mean weighted by n. Near 1 for small n whatever the
    adapters are (FedMCP; :mod:`fedjax_peft.algorithms.representation`), so compare like with like.
    """
    both = (mode(params, "global"), mode(params, "private"))
    x, y = (pool(problem.apply(p, batch, None, False), batch, "mean") for p in both)
    n = jnp.sum(batch["mask"], dtype=jnp.float32)
    return {"cka": (n * cka(x, y, batch["mask"]), n)}
