"""AFL (Mohri et al. 2019, "Agnostic Federated Learning"): the worst mixture of the clients' losses.

    objective:  min over θ of max over λ of Σ_k λ_k F_k(θ),  λ_k ≥ 0,  Σ_k λ_k = 1
    client:     θ_k ← optimizer steps on F_k, from θ;   send θ_k and F_k(θ)
    server:     θ ← θ + Σ_S λ_k (θ_k - θ) / Σ_S λ_k
                λ ← projection onto the simplex of λ + γ N/|S| (F_k(θ) for k in S, 0 for others)

Both updates use the old λ. With one local step of SGD, and all N clients in each round, S, this is
Stochastic-AFL with a domain for each client: θ ← θ - η Σ λ_k ∇F_k. The maximum over λ is that of a
linear function, so the objective is the loss of the worst client, and λ moves to it.

Decided here:

* The paper knows no local work. More local steps take the place of the gradient, as in
  Agnostic FedAvg (Ro et al. 2021), whose λ moves by factors instead of by a projection.
* In the paper all domains are in each step. For a cohort S the clients' gradient of λ is scaled to
  its mean over cohorts, by N/|S|; λ of other clients changes by the projection alone. The average
  is that of the cohort: its weights sum to 1. A cohort whose λ are all 0 does not move θ.
* N counts the clients that can take part, because they have examples and a weight. λ starts at one
  over the number of all clients: the others hold a share of it until the projection takes it.
* The paper returns the mean of θ over all rounds; here the last θ is the model.
* F_k(θ) is measured during the local steps (:mod:`fedjax_peft.algorithms.received_loss`).

The server sends a client its λ_k, with which the client's change is added. The bytes are the
model and λ_k down, the model and F_k up: the server knows λ_k.

Checked against a loop in NumPy float64, whose projection is found by bisection.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from fedjax_peft import contracts as c
from fedjax_peft.algorithms.checks import checked, federation_of
from fedjax_peft.algorithms.received_loss import MEASURES, Measuring, begin, step
from fedjax_peft.contracts.arguments import Count, Positive
from fedjax_peft.numerics import tree
from fedjax_peft.numerics.roles import HeadPolicy, head_roles


class State(NamedTuple):
    """A client during its local steps."""

    measuring: Measuring
    weight: Array
    """λ_k."""


@checked
def afl(
    optimizer: c.Optimizer,
    *,
    clients: Count,
    mixture_rate: Positive = 0.1,
    head: HeadPolicy = "shared",
) -> c.Algorithm:
    """Agnostic federated learning: a model for the worst mixture of the clients.

    Args:
      clients: how many the federation has; the server keeps a weight for each.
      mixture_rate: γ, the learning rate of the clients' weights.

    Raises:
      InputError: on use, another number of clients.
    """

    def client(context: c.ClientContext) -> c.ClientUpdate:
        def init(broadcast: c.PyTree, private: c.Params, key: c.Key) -> State:
            weight = tree.row(broadcast["mixture"], jnp.maximum(context.client, 0))
            return State(begin(optimizer, broadcast["model"], private), weight)

        def train(state: State, batch: c.Batch, key: c.Key) -> tuple[State, c.Metrics]:
            measuring, metrics = step(optimizer, context, state.measuring, batch, key)
            return State(measuring, state.weight), metrics

        def final(state: State) -> tuple[c.PyTree, c.Params]:
            local, loss = state.measuring
            told = {"received_loss": loss.mean, "own_weight": state.weight}
            return {"model": local.shared, "told": told}, local.private

        return c.ClientUpdate(init, train, final)

    return c.Algorithm(
        "afl",
        head_roles(head),
        client,
        _aggregator(),
        _server(clients, mixture_rate),
        model=lambda broadcast, private: {**broadcast["model"], **private},
        local_model=lambda broadcast, upload, private: {**upload["model"], **private},
        weights="uniform",
        traffic=c.Traffic(
            sent_leaves=lambda broadcast, round_index: {"own_weight": jnp.array(False)},
            received_part=lambda broadcast: {**broadcast, "mixture": broadcast["mixture"][0]},
            change_field="model",
        ),
        check=federation_of(clients, "afl"),
        incompatible={
            c.Feature.EXAMPLE_PRIVACY: MEASURES,
            c.Feature.ASYNCHRONY: "The server weighs the clients of a round by losses of one"
            " model, which all of them have received.",
        },
    )


def _aggregator() -> c.Aggregator:
    """Returns the aggregator of changes, which are weighed by λ, and of single losses."""

    def lift(upload: c.PyTree, template: c.PyTree, fixed: c.Params) -> c.PyTree:
        weight = upload["told"]["own_weight"]
        change = jax.tree.map(jnp.subtract, upload["model"], template["model"])
        return {
            "changes": {n: weight * x for n, x in change.items()},
            "weight": weight,
            "losses": c.Stacked(upload["told"]["received_loss"]),
        }

    def finish(
        total: c.Total, template: c.PyTree, context: c.RoundContext, state: c.PyTree
    ) -> c.Aggregated:
        weight, changes = total.value["weight"], total.value["changes"]
        by = jnp.where(weight > 0, weight, 1.0)
        model = {n: x + changes[n] / by for n, x in template["model"].items()}
        heard = {"received_loss": total.value["losses"].value, "own_weight": total.weights}
        return c.Aggregated({"model": model, "told": heard}, {}, state)

    return c.Aggregator("afl", lift, finish, needs_all_uploads=True)


def _server(clients: int, rate: float) -> c.ServerUpdate:
    """Returns the server of θ and λ."""

    def update(state: c.PyTree, new: c.PyTree, context: c.RoundContext) -> c.PyTree:
        losses, accepted = new["told"]["received_loss"], new["told"]["own_weight"] > 0
        places = jnp.where(accepted, context.clients, clients)
        losses = jnp.zeros(clients).at[places].set(losses, mode="drop")
        scale = context.total_clients / jnp.maximum(context.participants, 1)
        mixture = onto_simplex(state["mixture"] + rate * scale * losses)
        moved = {"model": new["model"], "mixture": mixture}
        return tree.where(context.participants > 0, moved, state)

    return c.ServerUpdate(
        init=lambda shared: {"model": shared, "mixture": jnp.full(clients, 1 / clients)},
        update=update,
        broadcast=lambda state: state,
        params=lambda state: state["model"],
        template=lambda state: {
            "model": state["model"],
            "told": {"received_loss": jnp.zeros(()), "own_weight": jnp.zeros(())},
        },
    )


def onto_simplex(x: Array) -> Array:
    """Returns the nearest vector whose entries are not negative and sum to 1 (Duchi et al. 2008).

    It is ``max(x - τ, 0)``, where τ makes the sum 1.
    """
    falling = -jnp.sort(-x)
    taus = (jnp.cumsum(falling) - 1) / jnp.arange(1, len(x) + 1)
    last = jnp.sum(falling > taus) - 1  # they are the first ones
    return jnp.maximum(x - taus[last], 0.0)
