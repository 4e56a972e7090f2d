"""HierFAVG (Liu et al. 2020, Algorithm 1): clients, edges and a cloud, with two periods.

    client of edge ℓ:  θ_k ← κ₁ optimizer steps on F_k, from θ_ℓ
    edge, each round:  θ_ℓ ← Σ_{k in ℓ} n_k θ_k / Σ_{k in ℓ} n_k
    cloud, each κ₂ rounds:  θ_ℓ ← θ = Σ_ℓ N_ℓ θ_ℓ / Σ_ℓ N_ℓ,   for all edges

A round of a run is one aggregation at the edges: κ₁ is ``local_steps``, κ₂ is ``period``.

Decided here:

* In the paper all clients are in every round, and N_ℓ is the number of examples at edge ℓ. Here it
  is the weight of the uploads that the edge has received since the last aggregation of the cloud,
  which is the same there. An edge that has received none keeps the last θ, and counts for nothing.
* Rounds without an upload do not count, so that the cloud waits for one.
* Between two aggregations of the cloud the global model is the average that it would take now.
  A client predicts with the model of its edge, and before its first round with the global one.

**Bytes**: ``bytes_up`` and ``bytes_down`` are those between clients and edges. Those between edges
and the cloud are the metrics ``edge_bytes_up`` (edges that have received an upload) and
``edge_bytes_down`` (all edges), 0 in rounds without the cloud.

Checked against a loop in NumPy float64.
"""

from collections.abc import Collection, Sequence
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np
from annotated_types import MinLen
from jax import Array

from fedjax_peft import contracts as c
from fedjax_peft.algorithms import rows
from fedjax_peft.algorithms.checks import checked
from fedjax_peft.contracts.arguments import Count, FromZero
from fedjax_peft.numerics import tree
from fedjax_peft.numerics.roles import HeadPolicy, head_roles
from fedjax_peft.support.errors import InputError


@checked
def hierfavg(
    optimizer: c.Optimizer,
    *,
    edges: Count | Annotated[Sequence[FromZero], MinLen(1)] = 2,
    period: Count = 2,
    head: HeadPolicy = "shared",
    weights: c.Weights = "size",
) -> c.Algorithm:
    """Hierarchical averaging: edges average their clients, and a cloud the edges (HierFAVG).

    Args:
      edges: how many edges there are (client k belongs to edge ``k % edges``), or the edge of each
        client, such as ``(0, 0, 1, 1)``.
      period: κ₂, the rounds at the edges between two aggregations of the cloud.

    Raises:
      InputError: an edge without clients; on use, edges of another number of clients.
    """
    count = _count(edges)
    given = jnp.asarray([*edges], jnp.int32) if isinstance(edges, Collection) else None

    def edge_of(client: Array | int) -> Array:
        number = jnp.asarray(client, jnp.int32)
        return number % count if given is None else tree.row(given, number)

    def client(context: c.ClientContext) -> c.ClientUpdate:
        edge = edge_of(jnp.maximum(context.client, 0))
        return rows.client(optimizer, context, edge, "edge")

    return c.Algorithm(
        "hierfavg",
        head_roles(head),
        client,
        rows.by_row("hierfavg", count),
        _server(count, period),
        init_client_state=lambda shared, private: {"model": private, "edge": jnp.int32(-1)},
        model=_model,
        local_model=rows.local_model,
        weights=weights,
        traffic=c.Traffic(
            sent_leaves=rows.resting,
            received_part=rows.one_model,
            change_field="model",
        ),
        check=lambda kinds, clients: _check(edges, clients),
        incompatible={
            c.Feature.CLIENT_PRIVACY: rows.NO_NOISE,
            c.Feature.ASYNCHRONY: "The edges of HierFAVG wait for each other at the cloud.",
        },
    )


def _model(broadcast: c.PyTree, own: c.PyTree) -> c.Params:
    met, row = rows.known(own["edge"])
    edge, cloud = tree.take(broadcast["models"], row), _average(broadcast)
    return {**tree.where(met, edge, cloud), **own["model"]}


def _average(state: c.PyTree) -> c.Params:
    """Returns the average of the edges, by the weights that they have received."""
    weights = state["weights"]
    shares = weights / jnp.maximum(jnp.sum(weights), jnp.finfo(jnp.float32).tiny)
    # Edges without weight all have the cloud's last model, to which changes are added: what no
    # client has changed stays bit-identical.
    last = jnp.argmin(weights)

    def one(x: Array) -> Array:
        base = x[last]
        return base + jnp.tensordot(shares, x - base[None], axes=1, precision="highest")

    return {n: one(x) for n, x in state["models"].items()}


def _server(edges: int, period: int) -> c.ServerUpdate:
    def start(shared: c.Params) -> c.PyTree:
        nothing = jnp.zeros(edges)
        models = rows.repeated(shared, edges)
        return {"models": models, "weights": nothing, "rounds": jnp.int32(0), "sent": jnp.int32(0)}

    def update(state: c.PyTree, new: c.PyTree, context: c.RoundContext) -> c.PyTree:
        here = {
            "models": jax.tree.map(jnp.add, state["models"], new["changes"]),
            "weights": state["weights"] + new["weights"],
            "rounds": state["rounds"] + 1,
            "sent": jnp.int32(0),
        }
        heard = jnp.sum(here["weights"] > 0, dtype=jnp.int32)
        after = {**start(_average(here)), "sent": heard}
        moved = tree.where(here["rounds"] >= period, after, here)
        return tree.where(context.participants > 0, moved, {**state, "sent": jnp.int32(0)})

    def metrics(state: c.PyTree) -> dict[str, Array]:
        size = tree.nbytes({n: x[0] for n, x in state["models"].items()})
        sent = state["sent"].astype(jnp.float32)
        down = jnp.where(sent > 0, jnp.float32(edges * size), 0.0)
        return {"edge_bytes_up": sent * size, "edge_bytes_down": down}

    return c.ServerUpdate(
        init=start,
        update=update,
        broadcast=lambda state: {n: state[n] for n in ("models", "weights")},
        params=_average,
        template=lambda state: rows.unchanged(state["models"]),
        metrics=metrics,
    )


def _count(edges: int | Collection[int]) -> int:
    """Returns the number of edges; raises InputError for one without clients."""
    if not isinstance(edges, Collection):
        return edges
    found = np.bincount(np.asarray([*edges]))
    if not found.all():
        raise InputError(
            f"Edge {int(found.argmin())} of hierfavg has no clients: edges = {[*edges]} gives"
            f" the edge of each client, and has the edges from 0 to {len(found) - 1}."
        )
    return len(found)


def _check(edges: int | Collection[int], clients: int) -> None:
    if not isinstance(edges, Collection):
        if edges > clients:
            raise InputError(
                f"edges = {edges} of hierfavg are more than the {clients} clients, so that edge"
                f" {clients} has no clients: set edges to at most {clients}."
            )
    elif len(edges) != clients:
        raise InputError(
            f"edges of hierfavg gives the edge of {len(edges)} clients, and the federation has"
            f" {clients}: give one number for each client."
        )
