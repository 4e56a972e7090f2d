"""q-FedAvg (Li et al. 2020, "Fair Resource Allocation", Algorithm 2): larger losses count for more.

    objective:  f_q(θ) = Σ_k p_k F_k(θ)^(q+1) / (q+1)
    client:     θ_k ← optimizer steps on F_k, from θ;   send θ_k and F_k(θ)
    server:     Δ_k = F_k(θ)^q L (θ - θ_k)
                h_k = q F_k(θ)^(q-1) ‖L (θ - θ_k)‖² + L F_k(θ)^q
                θ ← θ - Σ w_k Δ_k / Σ w_k h_k

L (θ - θ_k) takes the place of the gradient of F_k, and h_k bounds the local curvature of
F_k^(q+1)/(q+1). So one L serves every q: the paper tunes the learning rate of FedAvg, q = 0, and
takes L = 1 / learning rate. With q = 0 this is FedAvg.

Decided here:

* The paper draws clients by their size and adds them without weights. Here clients are drawn
  uniformly and w_k ∝ n_k, as for FedProx. (The authors' code, github.com/litian96/fair_flearn,
  draws uniformly and adds without weights: ``weights="uniform"``.)
* Clients send θ_k and F_k, from which the server computes Δ_k and h_k. So an upload transform
  changes θ_k - θ before it is scaled, and the bytes are the paper's: the model and one number.
* F_k(θ) is measured during the local steps (:mod:`fedjax_peft.algorithms.received_loss`).
* A loss below 1e-10 counts as 1e-10, where the authors add 1e-10.
* Private leaves, such as a head of the client's own, have no part in Δ_k and ‖·‖; F_k has them.

Checked against a loop in NumPy float64, and sums by hand.
"""

from functools import partial

import jax
import jax.numpy as jnp

from fedjax_peft import contracts as c
from fedjax_peft.algorithms.checks import checked
from fedjax_peft.algorithms.received_loss import MEASURES, Measuring, begin, step
from fedjax_peft.contracts.arguments import NotNegative, Positive
from fedjax_peft.numerics import tree
from fedjax_peft.numerics.roles import HeadPolicy, head_roles

_LEAST = 1e-10
"""The smallest loss."""


@checked
def q_fedavg(
    optimizer: c.Optimizer,
    *,
    q: NotNegative = 1.0,
    lipschitz: Positive,
    head: HeadPolicy = "shared",
    weights: c.Weights = "size",
) -> c.Algorithm:
    """FedAvg for the sum of powers of the clients' losses: large losses count for more (q-FFL).

    Args:
      q: the power is ``q + 1``: 0 is FedAvg, and a large q minimises the largest loss. The paper
        tries 0.001 to 15.
      lipschitz: L, the Lipschitz constant of the gradients. Take 1 / the learning rate that is best
        for FedAvg with SGD.
    """
    return c.Algorithm(
        "q_fedavg",
        head_roles(head),
        lambda context: _client(optimizer, context),
        _aggregator(q, lipschitz),
        _server(),
        local_model=lambda broadcast, upload, private: {**upload["model"], **private},
        weights=weights,
        traffic=c.Traffic(change_field="model"),
        incompatible={
            c.Feature.CLIENT_PRIVACY: "Each change is weighed by the loss of its client, and the"
            " server divides by a sum that noise could bring to 0. Use 'fedavg'.",
            c.Feature.EXAMPLE_PRIVACY: MEASURES,
            c.Feature.ASYNCHRONY: "The server weighs the changes of a round by losses of one model,"
            " which all of its clients have received.",
        },
    )


def _client(optimizer: c.Optimizer, context: c.ClientContext) -> c.ClientUpdate:
    def init(broadcast: c.Params, private: c.Params, key: c.Key) -> Measuring:
        return begin(optimizer, broadcast, private)

    def final(state: Measuring) -> tuple[c.PyTree, c.Params]:
        upload = {"model": state.local.shared, "loss": {"received_loss": state.loss.mean}}
        return upload, state.local.private

    return c.ClientUpdate(init, partial(step, optimizer, context), final)


def _aggregator(q: float, lipschitz: float) -> c.Aggregator:
    """Returns the aggregator of the changes, scaled by L, and of h_k / L."""

    def lift(upload: c.PyTree, template: c.PyTree, fixed: c.Params) -> c.PyTree:
        change = jax.tree.map(jnp.subtract, upload["model"], template["model"])
        loss = jnp.maximum(upload["loss"]["received_loss"], _LEAST)
        gain = loss**q
        bend = q * loss ** (q - 1) * lipschitz * tree.norm(change) ** 2
        return {"changes": {n: gain * x for n, x in change.items()}, "curvature": gain + bend}

    def finish(
        total: c.Total, template: c.PyTree, context: c.RoundContext, state: c.PyTree
    ) -> c.Aggregated:
        curvature, changes = total.value["curvature"], total.value["changes"]
        by = jnp.where(curvature > 0, curvature, 1.0)
        model = {n: x + changes[n] / by for n, x in template["model"].items()}
        return c.Aggregated({**template, "model": model}, {}, state)

    return c.Aggregator("q_fedavg", lift, finish)


def _server() -> c.ServerUpdate:
    return c.ServerUpdate(
        init=lambda shared: shared,
        update=lambda state, new, context: new["model"],
        broadcast=lambda state: state,
        template=lambda state: {"model": state, "loss": {"received_loss": jnp.zeros(())}},
    )
