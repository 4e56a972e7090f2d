"""An aggregator for uploads of several parts, such as a model and a control variate."""

import jax
from jax import Array

from fedjax_peft.contracts import Aggregated, Aggregator, Params, PyTree, RoundContext, Total
from fedjax_peft.numerics.random import stream


def by_field(**fields: Aggregator) -> Aggregator:
    """Returns an aggregator for uploads that are dicts: each field has its own aggregator.

    The name and the declared properties are those of the first field's aggregator. The
    exception is ``needs_all_uploads``: it is true if any field needs all uploads.

    Args:
      **fields: field of the upload -> aggregator.
    """
    first, *_ = fields.values()
    plain = {f: a.unmeasured or a for f, a in fields.items()}

    def lift(upload: PyTree, template: PyTree, fixed: Params) -> PyTree:
        return {f: a.lift(upload[f], template[f], fixed) for f, a in fields.items()}

    def finish(total: Total, template: PyTree, context: RoundContext, state: PyTree) -> Aggregated:
        parts = {
            f: a.finish(
                total._replace(value=total.value[f]),
                template[f],
                context._replace(key=stream(context.key, f)),
                state[f] if state else (),
            )
            for f, a in fields.items()
        }
        metrics: dict[str, Array] = {}
        for part in reversed(parts.values()):  # of equal names the first field's counts
            metrics |= part.metrics
        return Aggregated(
            {f: part.update for f, part in parts.items()},
            metrics,
            {f: part.state for f, part in parts.items()} if state else (),
        )

    def init(template: PyTree) -> PyTree:
        states = {f: a.init(template[f]) for f, a in fields.items()}
        return states if jax.tree.leaves(states) else ()

    return first._replace(
        lift=lift,
        finish=finish,
        init=init,
        needs_all_uploads=any(a.needs_all_uploads for a in fields.values()),
        refactor=None,
        finish_products=None,
        unmeasured=None if plain == fields else by_field(**plain),
    )
