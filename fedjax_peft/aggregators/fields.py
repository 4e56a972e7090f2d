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

    def zero(template: PyTree, slots: int) -> PyTree:
        return {f: a.zero(template[f], slots) for f, a in fields.items()}

    def add(
        acc: PyTree, uploads: PyTree, weights: jax.Array, slots: jax.Array, template: PyTree
    ) -> PyTree:
        return {
            f: a.add(acc[f], uploads[f], weights, slots, template[f]) for f, a in fields.items()
        }

    def finish(acc: PyTree, template: PyTree, fixed: Params) -> Aggregated:
        parts = {f: a.finish(acc[f], template[f], fixed) for f, a in fields.items()}
        metrics = {n: x for part in parts.values() for n, x in part.metrics.items()}
        return Aggregated({f: part.update for f, part in parts.items()}, metrics)

    return first._replace(zero=zero, add=add, finish=finish, refactor=None)
