"""Measures on request: drift and spectrum of the global LoRA factors, CKA of adapters."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from fedjax_peft.dual_modes import mode
from fedjax_peft.measures.drift import variation
from fedjax_peft.measures.representation import cka, pool
from fedjax_peft.measures.spectrum import spectrum
from fedjax_peft.typing import Batch, ClientContext, Diagnosis, Metrics, Params

__all__ = ["adapters_cka", "diagnosis"]


def diagnosis(which: Sequence[str]) -> Diagnosis | None:
    """Returns the measures of the global model that ``which`` names, as one; None for none."""
    return _measures(tuple(sorted(set(which))))


@functools.cache  # the same function every time, so that its program is recognised
def _measures(which: tuple[str, ...]) -> Diagnosis | None:
    def measure(before: Params, after: Params, fixed: Params) -> dict[str, jax.Array]:
        moved = variation(before, after) if "variation" in which else {}
        return moved | (spectrum(after, fixed) if "spectrum" in which else {})

    return measure if {"variation", "spectrum"} & set(which) else None


def adapters_cka(context: ClientContext, params: Params, batch: Batch) -> Metrics:
    """Returns the CKA of a batch's representations through the global and the private adapter.

    Of batches of n examples it is the mean weighted by n. Near 1 for small n whatever the
    adapters are (FedMCP; :mod:`fedjax_peft.measures.representation`), so compare like with like.
    """
    both = (mode(params, "global"), mode(params, "private"))
    x, y = (pool(context.apply(p, batch, None, False), batch, "mean") for p in both)
    n = jnp.sum(batch["mask"], dtype=jnp.float32)
    return {"cka": (n * cka(x, y, batch["mask"]), n)}
