"""MOON (Li et al. 2021): local representations are kept near those of the global model.

    client:  θ_k ← θ;  for each local step:
               θ_k ← optimizer step on F_k(θ_k) + μ · mean over the batch of
                     -log( e^{s(z, z_glob)/τ} / (e^{s(z, z_glob)/τ} + e^{s(z, z_prev)/τ}) )
    server:  θ ← Σ w_k θ_k, w_k ∝ n_k

s is the cosine. z is the representation of an example by θ_k, z_glob by the received θ, and z_prev
by θ_k at the end of the client's last round. z_glob and z_prev are computed without dropout and
without gradient (Eq 3 and 4, with one previous model, which is the paper's default).

The representation is the encoder's pooled output, without the paper's projection head, which a
pretrained encoder does not have. A client that takes part for the first time has the initial leaves
as its previous ones. If it also receives the initial leaves, z_glob = z_prev, and the term is log 2
without gradient. The head does not influence z.

A step costs two forward passes more than a step of FedAvg.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from fedjax_peft import contracts as c
from fedjax_peft.algorithms.checks import checked
from fedjax_peft.algorithms.common import Local, init_local, train, with_client_state
from fedjax_peft.algorithms.fedavg import averaging
from fedjax_peft.contracts.arguments import NotNegative, Positive
from fedjax_peft.numerics.measures.representation import Pooling, cosines, pool
from fedjax_peft.numerics.roles import HeadPolicy, head_roles


class Start(NamedTuple):
    """What a client had at the start of the round."""

    received: c.Params
    """The global model with the client's private leaves."""
    previous: c.Params
    """The client's own model, at the end of its last round."""


@checked
def moon(
    optimizer: c.Optimizer,
    *,
    mu: NotNegative = 1.0,
    temperature: Positive = 0.5,
    pooling: Pooling = "mean",
    aggregator: c.Aggregator | None = None,
    head: HeadPolicy = "shared",
    weights: c.Weights = "size",
) -> c.Algorithm:
    """MOON: FedAvg with a contrastive loss towards the global model's representations.

    Args:
      mu: μ, weight of the contrastive loss; 0 is FedAvg.
      temperature: τ of the contrastive loss.
      pooling: representation of an example: the ``mean`` over its tokens, or ``cls``, its first
        token (the last real one in a causal model).
    """

    def client(context: c.ClientContext) -> c.ClientUpdate:
        def init(broadcast: c.Params, client_state: c.PyTree, key: c.Key) -> Local:
            own = client_state["model"]
            start = Start({**broadcast, **own}, {**client_state["previous"], **own})
            return init_local(optimizer, broadcast, own, start)

        def step(local: Local, batch: c.Batch, key: c.Key) -> tuple[Local, c.Metrics]:
            def representation(params: c.Params, batch: c.Batch) -> Array:
                return pool(context.apply(params, batch, None, False), batch, pooling)

            def loss(params: c.Params, batch: c.Batch, key: c.Key) -> tuple[Array, c.Metrics]:
                near = representation(local.start.received, batch)
                far = representation(local.start.previous, batch)
                outputs = context.apply(params, batch, key, True)
                (total, count), measured = c.loss_and_metrics(context.task, outputs, batch)
                terms = contrastive(pool(outputs, batch, pooling), near, far, temperature)
                mask = batch["mask"].astype(terms.dtype)
                apart, examples = jnp.sum(terms * mask), jnp.sum(mask)
                metrics = {**measured, "contrastive": (apart, examples)}
                value = total / jnp.maximum(count, 1.0) + mu * apart / jnp.maximum(examples, 1.0)
                return value, jax.lax.stop_gradient(metrics)

            return train(optimizer, context, local, batch, key, loss=loss)

        def final(local: Local) -> tuple[c.Params, c.PyTree]:
            return local.shared, {"model": local.private, "previous": local.shared}

        return c.ClientUpdate(init, step, final)

    algorithm = averaging("moon", optimizer, head_roles(head), aggregator)
    return algorithm._replace(
        client=client,
        init_client_state=lambda shared, private: {"model": private, "previous": shared},
        model=with_client_state,
        weights=weights,
        lower_is_better=("contrastive",),
    )


def contrastive(z: Array, near: Array, far: Array, temperature: float) -> Array:
    """Returns the loss of every example, ``[batch]``: low where z is like ``near``, unlike ``far``.

    Args:
      z: ``[batch, width]``.
      near: ``[batch, width]``.
      far: ``[batch, width]``.
    """
    # -log(e^a / (e^a + e^b)) without overflow.
    return jax.nn.softplus((cosines(z, far) - cosines(z, near)) / temperature)
