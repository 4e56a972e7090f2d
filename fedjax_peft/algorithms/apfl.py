"""APFL (Deng et al. 2020, Algorithm 1): a client predicts with a mixture of two models.

    client:  w_k ← w;  for each local step, both from the same batch and the same old values:
               w_k ← optimizer step on F_k(w_k)
               v_k ← optimizer step on F_k(α_k v_k + (1 - α_k) w_k), with respect to v_k
    server:  w ← mean of w_k;  v_k and α_k never leave the client
    a client predicts with  α_k v_k + (1 - α_k) w

By the chain rule the gradient with respect to v_k is α_k times the gradient at the mixture.

With ``adaptive`` the client also takes gradient steps on α_k, by ⟨v_k - w_k, ∇F_k(mixture)⟩, kept
within [0, 1]. The paper makes one step on α_k in each communication round and does not specify its
batch. Here it is the first batch, where w_k is the received model and v_k is still the one of the
client's last round. The step has a separate learning rate, because α_k is not a weight of the
model. Some implementations add a penalty on α_k; it is neither in the paper nor here.

Models are mixed leaf by leaf. For LoRA this mixes the factors, not their products: halfway
between (A, B) and (A', B') the model has (A + A')(B + B')/4. A private head is mixed like any other
leaf: w_k and v_k have one head each.
"""

from typing import NamedTuple

import jax.numpy as jnp
import optax
from jax import Array

from fedjax_peft import contracts as c
from fedjax_peft.algorithms.checks import checked
from fedjax_peft.algorithms.common import Local, init_local, train, with_client_state
from fedjax_peft.algorithms.fedavg import averaging
from fedjax_peft.contracts.arguments import NotNegative, Share
from fedjax_peft.numerics.roles import HeadPolicy, head_roles


class State(NamedTuple):
    """A client during its local steps."""

    model: Local
    """w_k, shared and private leaves together."""
    personal: c.Params
    """v_k."""
    optimizer: c.PyTree
    """The optimizer state of v_k."""
    alpha: Array


@checked
def apfl(
    optimizer: c.Optimizer,
    *,
    alpha: Share = 0.5,
    adaptive: bool = False,
    alpha_rate: NotNegative = 0.1,
    aggregator: c.Aggregator | None = None,
    head: HeadPolicy = "shared",
    weights: c.Weights = "uniform",
) -> c.Algorithm:
    """APFL: clients predict with a mixture of a personal model and the global one.

    Metrics of training are those of the mixture.

    Args:
      optimizer: the clients' optimizer, for both models.
      alpha: the personal model's part, from 0 (FedAvg) to 1 (training alone).
      adaptive: every client learns its own alpha, which starts at ``alpha``.
      alpha_rate: learning rate of alpha; it follows a schedule of the optimizer over rounds.
      head: policy of the global model's head: ``shared``, ``private`` or ``frozen``.
    """

    def client(context: c.ClientContext) -> c.ClientUpdate:
        def init(broadcast: c.Params, client_state: c.PyTree, key: c.Key) -> State:
            v = client_state["personal"]
            model = init_local(optimizer, broadcast, client_state["model"])
            return State(model, v, optimizer.init(v), client_state["alpha"])

        def step(state: State, batch: c.Batch, key: c.Key) -> tuple[State, c.Metrics]:
            model, v, opt, a = state
            w = {**model.shared, **model.private}
            gradient, metrics = context.gradient(context.objective, _mixture(a, v, w), batch, key)
            updates, opt = optimizer.update({n: a * g for n, g in gradient.items()}, opt, v)
            if adaptive:
                slope = sum(jnp.sum((v[n] - w[n]) * g) for n, g in gradient.items())
                moved = jnp.clip(a - alpha_rate * slope, 0.0, 1.0)
                a = jnp.where(batch["step"] == 0, moved, a)
            model, _ = train(optimizer, context, model, batch, key)
            return State(model, optax.apply_updates(v, updates), opt, a), metrics

        def final(state: State) -> tuple[c.Params, c.PyTree]:
            client_state = {"personal": state.personal, "alpha": state.alpha}
            return state.model.shared, {"model": state.model.private, **client_state}

        return c.ClientUpdate(init, step, final)

    def init_client_state(shared: c.Params, private: c.Params) -> c.PyTree:
        personal = {**shared, **private}
        return {"model": private, "personal": personal, "alpha": jnp.float32(alpha)}

    def model(broadcast: c.Params, client_state: c.PyTree) -> c.Params:
        w = with_client_state(broadcast, client_state)
        return _mixture(client_state["alpha"], client_state["personal"], w)

    algorithm = averaging("apfl", optimizer, head_roles(head), aggregator)
    return algorithm._replace(
        client=client,
        init_client_state=init_client_state,
        model=model,
        personal=True,
        weights=weights,
        gradients_per_step=2,
        incompatible={
            c.Feature.NEW_FACTORS: "APFL mixes a client's own factors of earlier rounds with the"
            " received ones, entry by entry. Leave the aggregator out to average A and B."
        },
    )


def _mixture(alpha: Array, v: c.Params, w: c.Params) -> c.Params:
    return {n: alpha * x + (1 - alpha) * w[n] for n, x in v.items()}
