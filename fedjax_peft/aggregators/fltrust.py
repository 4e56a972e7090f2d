"""FLTrust (Cao et al. 2021): clients count as far as they agree with the server's own update.

    TS_k = max(0, cos(x_k, x_0))                         x_0: the change of the server's own model
    x = Σ TS_k (‖x_0‖ / ‖x_k‖) x_k / Σ TS_k              x_k: a client's change

The server has a small clean data set, and trains on it as the clients train on theirs. Here these
data are those of one client of the federation, ``trusted``, so that its local work is exactly the
clients' local work. Its upload is only the direction; it is not in the sum. The result is at most
as long as x_0, whatever any number of clients send, and has no component against x_0.

In a round without the trusted upload, or in which no client agrees with it, nothing changes.
"""

import jax.numpy as jnp

from fedjax_peft.aggregators.robust import (
    Changes,
    Combined,
    Space,
    inner_products,
    robust,
    weighted_sum,
)
from fedjax_peft.contracts import Aggregator, PyTree, RoundContext
from fedjax_peft.contracts.arguments import FromZero
from fedjax_peft.contracts.part import part


@part
def fltrust(trusted: FromZero = 0, *, space: Space = "factors") -> Aggregator:
    """Mean of uploads by their agreement with a trusted one (FLTrust, Cao et al. 2021).

    The trusted client must take part in every round: let all clients take part. In other rounds the
    model stays as it is. The metric ``trusted`` says whether its upload arrived, ``trust_score`` is
    the mean of TS_k over the other clients.

    Args:
      trusted: the id of the client whose data are the server's own.
      space: whether cosines and norms are those of LoRA's ``factors`` or of their ``product``,
        which is then factored anew.

    Raises:
      InputError: on use, an id of no client, of one without examples or of one that an attack makes
        hostile, or ``product`` with a model without LoRA pairs.
    """

    def rule(changes: Changes, context: RoundContext, state: PyTree) -> Combined:
        own = changes.here & (context.clients == trusted)
        others = changes.here & ~own
        gram = inner_products(changes)
        lengths = jnp.sqrt(jnp.maximum(jnp.diagonal(gram), 0.0))
        reference = jnp.sum(jnp.where(own, lengths, 0.0))
        along = jnp.sum(jnp.where(own[None], gram, 0.0), axis=1)
        both = lengths * reference
        agrees = others & (along > 0) & (both > 0)
        scores = jnp.where(agrees, along / jnp.where(agrees, both, 1.0), 0.0)
        total = jnp.sum(scores)
        shares = scores / jnp.where(total > 0, total, 1.0)
        weights = jnp.where(agrees, shares * reference / jnp.where(agrees, lengths, 1.0), 0.0)
        metrics = {
            "trusted": jnp.sum(own, dtype=jnp.float32),
            "trust_score": total / jnp.maximum(jnp.sum(others), 1),
        }
        return Combined(weighted_sum(changes, weights), metrics, state)

    return robust("fltrust", rule, space)._replace(trusted=trusted)
