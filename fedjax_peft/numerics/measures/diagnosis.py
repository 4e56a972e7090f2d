"""Measures on request: drift and spectrum of the global LoRA factors; FedMCP's adapters."""

import functools
from collections.abc import Sequence

import jax.numpy as jnp
from jax import Array

from fedjax_peft.contracts import Batch, ClientContext, Diagnosis, Metrics, Params, Probe
from fedjax_peft.contracts.dual_modes import mode
from fedjax_peft.numerics.measures.drift import variation
from fedjax_peft.numerics.measures.representation import cka, pool
from fedjax_peft.numerics.measures.spectrum import spectrum


def diagnosis(which: Sequence[str]) -> Diagnosis | None:
    """Returns one function for all global measures named in ``which``; None if none is named."""
    return _measures(tuple(sorted(set(which))))


@functools.cache  # the same function object, so that its compiled program is reused
def _measures(which: tuple[str, ...]) -> Diagnosis | None:
    def measure(before: Params, after: Params, fixed: Params) -> dict[str, Array]:
        moved = variation(before, after) if "variation" in which else {}
        return moved | (spectrum(after, fixed) if "spectrum" in which else {})

    return measure if {"variation", "spectrum"} & set(which) else None


def probe(which: Sequence[str]) -> Probe | None:
    """Returns one function for all measures on test examples in ``which``; None if none is named.

    They are ``cka`` (:func:`adapters_cka`) and ``second_classifier``.
    """
    return _measures_on_tests(tuple(name for name in _ON_TESTS if name in which))


@functools.cache  # as for _measures
def _measures_on_tests(which: tuple[str, ...]) -> Probe | None:
    def measure(context: ClientContext, params: Params, batch: Batch) -> Metrics:
        found: Metrics = {}
        for name in which:
            found |= _ON_TESTS[name](context, params, batch)
        return found

    return measure if which else None


def adapters_cka(context: ClientContext, params: Params, batch: Batch) -> Metrics:
    """Returns the CKA of a batch's representations through the global and the private adapter.

    The mean over batches is weighted by n, the number of examples of a batch. For small n the
    CKA is near 1 for any adapters (FedMCP; :mod:`fedjax_peft.numerics.measures.representation`):
    compare only values of the same batch size.
    """
    both = (mode(params, "global"), mode(params, "private"))
    x, y = (pool(context.apply(p, batch, None, False), batch, "mean") for p in both)
    n = jnp.sum(batch["mask"], dtype=jnp.float32)
    return {"cka": (n * cka(x, y, batch["mask"]), n)}


def second_classifier(context: ClientContext, params: Params, batch: Batch) -> Metrics:
    """Returns the task's metrics of the second classifier on the global adapter alone.

    FedMCP trains it and predicts with the first one. The names are those of the training metrics,
    such as ``accuracy_global``.
    """
    outputs = context.apply(mode(params, "global"), batch, None, False)
    assert outputs.second is not None, "the model has no second classifier"
    found = context.task.metrics(outputs._replace(logits=outputs.second), batch)
    return {f"{name}_global": value for name, value in found.items()}


_ON_TESTS: dict[str, Probe] = {"cka": adapters_cka, "second_classifier": second_classifier}
"""Diagnostic -> its measure of a model on test examples."""
