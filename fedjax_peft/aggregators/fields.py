"""An aggregator for uploads of several parts, such as a model and a control variate."""

import jax

from fedjax_peft.typing import Aggregated, Aggregator, Params, PyTree

__all__ = ["by_field"]


def by_field(**fields: Aggregator) -> Aggregator:
    """Returns the aggregator of dicts that combines each field by an aggregator of its own.

    Everything else (its name, what it does with directions that a client does not own) is the first
    one's.
    """
    first, *_ = fields.values()

    def zero(like: PyTree, slots: int) -> PyTree:
        return {f: a.zero(like[f], slots) for f, a in fields.items()}

    def add(
        acc: PyTree, uploads: PyTree, weights: jax.Array, slots: jax.Array, like: PyTree
    ) -> PyTree:
        return {f: a.add(acc[f], uploads[f], weights, slots, like[f]) for f, a in fields.items()}

    def finish(acc: PyTree, like: PyTree, fixed: Params) -> Aggregated:
        parts = {f: a.finish(acc[f], like[f], fixed) for f, a in fields.items()}
        metrics = {n: x for part in parts.values() for n, x in part.metrics.items()}
        return Aggregated({f: part.update for f, part in parts.items()}, metrics)

    return first._replace(zero=zero, add=add, finish=finish, refactor=None)
