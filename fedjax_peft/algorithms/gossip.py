"""Gossip, or D-PSGD (Lian et al. 2017, Algorithm 1): no server, neighbours in a graph average.

    node i:  Δ_i ← optimizer steps on F_i from x_i, minus x_i
             x_i ← Σ_j W_ij x_j + Δ_i               over its neighbours and itself

W is :mod:`fedjax_peft.algorithms.graphs`'s. The change is that of the node's own x_i, not of the
average: in the paper a node computes its gradient while its neighbours' models arrive. With one
local step of SGD, Δ_i = -η ∇F_i(x_i), it is the paper's algorithm.

Decided here:

* More local steps take the place of the gradient, as in cooperative SGD (Wang and Joshi 2021),
  whose average comes after the local steps.
* In the paper all nodes are in each iteration. A node that is not in the round (not drawn, failed
  or dropped) neither trains nor sends. Its weight W_ij goes to its neighbour's own model, W_ii, so
  that W stays symmetric and the mean of all models moves by the mean of Δ_i alone.
* Nodes count equally, as in the paper: they have no weights by size.
* The global model is the mean of all x_i, as in the paper. A node predicts with its own.
* A head of the node's own (``head="private"``) is trained and never exchanged.

The simulation keeps all x_i in one array, which is the "server" of the run. **Bytes** are those of
the graph: a node in the round sends its model to each neighbour, and fetches each neighbour's
(``Traffic.peers``), neighbours outside of the round included.

Metric: ``consensus_distance``, the root mean square distance of the x_i from their mean.

Checked against a loop in NumPy float64.
"""

from collections.abc import Callable, Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray

from fedjax_peft import contracts as c
from fedjax_peft.algorithms import graphs, rows
from fedjax_peft.algorithms.checks import checked, federation_of
from fedjax_peft.contracts.arguments import Count, FromZero
from fedjax_peft.numerics import tree
from fedjax_peft.numerics.roles import HeadPolicy, head_roles


@checked
def gossip(
    optimizer: c.Optimizer,
    *,
    clients: Count,
    graph: Literal["ring", "torus", "random", "complete"] | Sequence[Sequence[FromZero]] = "ring",
    degree: Count = 4,
    head: HeadPolicy = "shared",
    seed: FromZero = 0,
) -> c.Algorithm:
    """Peer-to-peer averaging over a graph, without a server (D-PSGD).

    Args:
      clients: how many the federation has, each a node of the graph.
      graph: ``ring``, ``torus``, ``random``, ``complete``, or pairs of neighbours, such as
        ``((0, 1), (1, 2))``.
      degree: of a random graph: the mean number of neighbours of a node.
      seed: of a random graph.

    Raises:
      InputError: a graph that is not connected; on use, another number of clients.
    """
    links = _links(clients, graph, degree, seed)
    return c.Algorithm(
        "gossip",
        head_roles(head),
        lambda context: rows.client(optimizer, context, jnp.maximum(context.client, 0), "node"),
        rows.by_row("gossip", clients),
        _server(links),
        init_client_state=lambda shared, private: {"model": private, "node": jnp.int32(-1)},
        model=_model,
        local_model=rows.local_model,
        personal=True,
        weights="uniform",
        traffic=c.Traffic(
            sent_leaves=rows.resting,
            received_part=rows.one_model,
            peers=tuple(links.sum(axis=1).tolist()),
            change_field="model",
        ),
        check=federation_of(clients, "gossip"),
        incompatible={
            c.Feature.CLIENT_PRIVACY: "Neighbours see each other's models, and there is no server"
            " that adds noise to a sum. Use privacy of examples, or 'fedavg'.",
            c.Feature.ASYNCHRONY: "The nodes of a round exchange models with each other, without a"
            " server that could wait for some of them.",
        },
    )


def _links(
    clients: int, graph: str | Sequence[Sequence[int]], degree: int, seed: int
) -> NDArray[np.bool_]:
    """Returns which clients are neighbours, ``[clients, clients]``."""
    if not isinstance(graph, str):
        links, advice = graphs.of_pairs(clients, graph), "Add pairs of neighbours to graph."
    elif graph == "random":
        links = graphs.random(clients, degree, seed)
        advice = f"Set degree above {degree}, or take another seed."
    else:
        links, advice = _REGULAR[graph](clients), ""
    graphs.check_connected(links, advice)
    return links


_REGULAR: dict[str, Callable[[int], NDArray[np.bool_]]] = {
    "ring": graphs.ring,
    "torus": lambda clients: graphs.torus(*graphs.sides(clients)),
    "complete": graphs.complete,
}


def _model(broadcast: c.PyTree, own: c.PyTree) -> c.Params:
    met, row = rows.known(own["node"])
    # A node that has not been met has its initial model: others have not moved it.
    model = tree.where(met, tree.take(broadcast["models"], row), broadcast["start"])
    return {**model, **own["model"]}


def _server(links: NDArray[np.bool_]) -> c.ServerUpdate:
    """Returns what moves all nodes."""
    weights = jnp.asarray(graphs.metropolis(links), jnp.float32)

    def update(state: c.PyTree, new: c.PyTree, context: c.RoundContext) -> c.PyTree:
        here = new["weights"] > 0
        own = jnp.where(here[:, None] & here[None], weights, 0.0)
        given = jnp.sum(own, axis=1)

        def mixed(x: Array, change: Array) -> Array:
            # x_i + Σ_j W_ij (x_j - x_i) + Δ_i: a node that is not here stays bit-identical.
            others = jnp.tensordot(own, x, axes=1, precision="highest")
            return x + (others - rows.along(given, x) * x) + change

        return {**state, "models": jax.tree.map(mixed, state["models"], new["changes"])}

    def params(state: c.PyTree) -> c.Params:
        # From the first node, so that equal models have exactly this mean.
        return {n: x[0] + jnp.mean(x - x[:1], axis=0) for n, x in state["models"].items()}

    def metrics(state: c.PyTree) -> dict[str, Array]:
        centre = rows.repeated(params(state), len(links))
        distance = tree.distance(state["models"], centre) / jnp.sqrt(float(len(links)))
        return {"consensus_distance": distance}

    return c.ServerUpdate(
        init=lambda shared: {"models": rows.repeated(shared, len(links)), "start": shared},
        update=update,
        broadcast=lambda state: state,
        params=params,
        template=lambda state: rows.unchanged(state["models"]),
        metrics=metrics,
    )
