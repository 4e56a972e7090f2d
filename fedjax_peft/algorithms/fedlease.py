"""FedLEASE (Wang et al. 2025): a LoRA expert for each cluster of clients, mixed by routers.

    warm-up, until round R:
      client i:  (A_i, B_i) ← optimizer steps on F_i, from its own last ones
        y = x W + s (x A_i) B_i
      at its end, by the server:
        d_ij = the mean over layers of 1 - cos(B_i, B_j)
        clusters 1 ... M: average linkage, M ≤ ``max_experts`` by the silhouette (linkage.py)
        expert m:  (A_m, B_m) ← Σ_{i in m} w_i (A_i, B_i)
    experts, from then on:
      client i in m:  expert m and the router R_m ← steps on F_i; the other experts are frozen
        y = x W + s Σ_j g_j(x) (x A_j) B_j,   g: the adaptive top-M of x R_m (peft/lora_experts.py)
      server:    (A_m, B_m, R_m) ← Σ_{i in m} w_i (those of client i),   over the round's clients

Weights are equal, as in the authors' code (github.com/lei-wang-link/FedLEASE). The paper's text
could not be read as a whole: this follows its abstract, public notes on it, and that code, which
has the defaults, the distance, average linkage, the silhouette, and what is averaged and sent.

Decided here:

* The first steps of an expert begin at the average of its cluster, as the notes say. In the code
  each client goes on from its own LoRA in the first round after the warm-up, beside other experts
  with B = 0; the average that it computes there is not used.
* The clients' LoRAs start from the same A, or their B could not be compared. (In the code each is
  drawn after a trainer has set its seed.) All routers start alike; they rest in the warm-up.
* A shared head is a part of the expert: each client trains its own in the warm-up, and then the
  clients of a cluster average theirs. In the code the head is not trained: ``head="frozen"``.
* In the code all clients are in every round. Here the server keeps the last LoRA of each client. A
  client that has not been met when the warm-up ends belongs to the largest cluster, and does not
  count in the average of it. An expert of a cluster without a client in the round stays.
* The warm-up ends with the first round from R on that has an upload. There are two clusters at
  least, where more than two clients are known: the silhouette of one cluster is not defined.

The simulation keeps clients' LoRAs and experts in one array of models, so that the server needs
memory for a model of each client; a client takes its row of it. Between warm-up rounds the server
sends a client's own LoRA back, as in the code.

**Bytes**. Up: the LoRA in the warm-up, then the expert and the router (and a shared head). Down:
the same, and the other experts: all that the model has room for in a client's first round, and in
the one after the warm-up, then the M - 1 that there are.

Metric: ``client_clusters``, M; 0 in the warm-up.

Checked against a loop in NumPy float64.
"""

import re
from collections.abc import Mapping
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
from annotated_types import Ge
from jax import Array

from fedjax_peft import contracts as c
from fedjax_peft.algorithms import rows
from fedjax_peft.algorithms.checks import checked, federation_of
from fedjax_peft.algorithms.common import Local, freeze_where, init_local, loss_beside, train
from fedjax_peft.algorithms.linkage import cosine_distances, linkage_clusters
from fedjax_peft.contracts.arguments import Count
from fedjax_peft.numerics import tree
from fedjax_peft.numerics.roles import HeadPolicy, head_roles
from fedjax_peft.support.errors import InputError

_OWN = re.compile(r"\.own(\.lora_[ab])$")
_OTHER = re.compile(r"\.other_\d+\.lora_[ab]$")
"""The ends of the names of the leaves of experts."""
_ROUTER = ".router"


class Start(NamedTuple):
    """What a client had at the start of the round."""

    received: c.Params
    """The leaves that it trains and sends."""
    others: c.Params
    """The leaves of the other experts."""
    row: Array
    """Of the model that it trains."""
    found: Array
    """M, or 0 in the warm-up."""


@checked
def fedlease(
    optimizer: c.Optimizer,
    *,
    clients: Count,
    warmup_rounds: Count = 5,
    max_experts: Annotated[int, Ge(2)] = 4,
    head: HeadPolicy = "shared",
    weights: c.Weights = "uniform",
) -> c.Algorithm:
    """FedLEASE: LoRA experts of clusters of clients, mixed by a router (``peft.lora_experts``).

    Args:
      clients: how many the federation has; the server keeps a LoRA of each.
      warmup_rounds: R, the rounds in which each client trains alone, before the clusters.
      max_experts: the most clusters; as many as the model has experts.

    Raises:
      InputError: a kept optimizer; on use, a model without ``peft.lora_experts`` or with another
        number of experts, or another number of clients.
    """
    return c.Algorithm(
        "fedlease",
        head_roles(head),
        lambda context: _client(optimizer, context),
        rows.by_row("fedlease", clients + max_experts),
        _server(clients, max_experts, warmup_rounds),
        init_client_state=lambda shared, private: {"model": private, "client": jnp.int32(-1)},
        model=_model,
        local_model=_local_model,
        personal=True,
        weights=weights,
        traffic=c.Traffic(
            sent_leaves=lambda broadcast, number: _sent(broadcast, number >= warmup_rounds),
            received_part=lambda broadcast: _part(broadcast, _row(broadcast, jnp.int32(-1))),
            change_field="model",
        ),
        check=lambda kinds, count: _check(kinds, count, clients, max_experts),
        incompatible={
            c.Feature.ASYNCHRONY: "The warm-up of FedLEASE ends for all clients at once, and they"
            " then train beside the experts of one version of the server.",
            c.Feature.KEPT_OPTIMIZER: "A client of FedLEASE trains its own LoRA, and then its"
            " cluster's expert and a router, to which the moments of the first do not belong. Use"
            " 'fedavg'.",
            c.Feature.CLIENT_PRIVACY: rows.NO_NOISE,
        },
    )


def _row(broadcast: c.PyTree, client: Array) -> Array:
    """Returns the row of a client's model; -1 is a client that has not been met."""
    clients = len(broadcast["assignment"])  # the rows of the experts follow those of the clients
    cluster = broadcast["assignment"][jnp.maximum(client, 0)]
    met = jnp.where(broadcast["found"] > 0, clients + cluster, client)
    return jnp.where(client < 0, clients + broadcast["newcomers"], met)


def _part(broadcast: c.PyTree, row: Array) -> c.PyTree:
    """Returns what the client of a row receives: its model, the other experts, and M."""
    own = tree.take(broadcast["models"], row)
    return {"model": own, "others": _others(broadcast, row), "found": broadcast["found"]}


def _others(broadcast: c.PyTree, row: Array) -> c.Params:
    """Returns the other experts, in the order of their numbers; those that are not there are 0."""
    clients, found = len(broadcast["assignment"]), broadcast["found"]
    experts = {n: x[clients:] for n, x in broadcast["models"].items() if _OWN.search(n)}
    room = len(next(iter(experts.values())))
    others = {}
    for i in range(1, room):
        number = jnp.where(i <= row - clients, i - 1, i)  # the client's own expert is left out
        for n, x in experts.items():
            others[_other(n, i)] = jnp.where(number < found, x[number], 0.0)
    return others


def _other(name: str, i: int) -> str:
    """Returns the name of a leaf of the own expert for the i-th other one."""
    return _OWN.sub(rf".other_{i}\1", name)


def _model(broadcast: c.PyTree, own: c.PyTree) -> c.Params:
    part = _part(broadcast, _row(broadcast, own["client"]))
    return {**part["model"], **part["others"], **own["model"]}


def _local_model(broadcast: c.PyTree, upload: c.PyTree, own: c.PyTree) -> c.Params:
    others = _others(broadcast, upload["place"]["row"].astype(jnp.int32))
    return {**others, **rows.local_model(broadcast, upload, own)}


def _client(optimizer: c.Optimizer, context: c.ClientContext) -> c.ClientUpdate:
    def moving(found: Array) -> c.Optimizer:
        return freeze_where(optimizer, lambda name: not name.endswith(_ROUTER) or found > 0)

    def init(broadcast: c.PyTree, own: c.PyTree, key: c.Key) -> Local:
        row = _row(broadcast, jnp.maximum(context.client, 0))
        model, others, found = _part(broadcast, row).values()
        return init_local(moving(found), model, own["model"], Start(model, others, row, found))

    def step(local: Local, batch: c.Batch, key: c.Key) -> tuple[Local, c.Metrics]:
        loss = loss_beside(context, local.start.others)
        return train(moving(local.start.found), context, local, batch, key, loss=loss)

    def final(local: Local) -> tuple[c.PyTree, c.PyTree]:
        change = jax.tree.map(jnp.subtract, local.shared, local.start.received)
        kept = {"model": local.private, "client": jnp.int32(context.client)}
        return rows.upload(change, local.start.row), kept

    return c.ClientUpdate(init, step, final)


def _sent(broadcast: c.PyTree, late: Array) -> dict[str, Array]:
    """Returns which leaves travel: no router in the warm-up, and no experts that are not there.

    Other experts are never sent; those that change in the round are fetched after it.

    Args:
      late: whether the warm-up ends with this round, or has ended.
    """
    found, models = broadcast["found"], broadcast["models"]
    room = len(next(iter(models.values()))) - len(broadcast["assignment"])
    sent = {n: found > 0 for n in models if n.endswith(_ROUTER)}
    for n in [n for n in models if _OWN.search(n)]:
        for i in range(1, room):
            sent[_other(n, i)] = jnp.where(found > 0, i < found, late)
    never = jnp.array(False)
    return {**sent, "row": never, "found": never}  # the server knows the row; M is fetched once


def _server(clients: int, room: int, warmup: int) -> c.ServerUpdate:
    """Returns the server; its models are those of the clients, and then the experts."""

    def start(shared: c.Params) -> c.PyTree:
        own = {n: x for n, x in shared.items() if not _OTHER.search(n)}
        return {
            "models": rows.repeated(own, clients + room),
            "weights": jnp.zeros(clients),
            "assignment": jnp.zeros(clients, jnp.int32),
            "newcomers": jnp.int32(0),
            "found": jnp.int32(0),
        }

    def update(state: c.PyTree, new: c.PyTree, context: c.RoundContext) -> c.PyTree:
        received, sizes = context.participants > 0, new["weights"][:clients]
        moved = {
            **state,
            "models": jax.tree.map(jnp.add, state["models"], new["changes"]),
            "weights": jnp.where(sizes > 0, sizes, state["weights"]),
        }
        state = tree.where(received, moved, state)
        ends = received & (state["found"] == 0) & (context.round_index >= warmup)
        return jax.lax.cond(ends, _allocated, lambda state: state, state)

    def broadcast(state: c.PyTree) -> c.PyTree:
        return {n: state[n] for n in ("models", "assignment", "newcomers", "found")}

    return c.ServerUpdate(
        init=start,
        update=update,
        broadcast=broadcast,
        params=lambda state: _model(state, {"model": {}, "client": jnp.int32(-1)}),
        template=lambda state: rows.unchanged(state["models"]),
        metrics=lambda state: {"client_clusters": state["found"].astype(jnp.float32)},
    )


def _allocated(state: c.PyTree) -> c.PyTree:
    """Returns the state with the clusters of the clients, and an expert for each."""
    weights, models = state["weights"], state["models"]
    met, clients = weights > 0, len(weights)
    room = len(next(iter(models.values()))) - clients
    layers = [x[:clients] for n, x in models.items() if n.endswith(".own.lora_b")]
    apart = jnp.stack([cosine_distances(x.reshape(clients, -1)) for x in layers])
    labels, found = linkage_clusters(jnp.mean(apart, axis=0), met, room)
    member = (labels[None] == jnp.arange(room)[:, None]) & met[None]
    shares = jnp.where(member, weights[None], 0.0)
    total = jnp.sum(shares, axis=1, keepdims=True)
    shares = shares / jnp.where(total > 0, total, 1.0)

    def averaged(x: Array) -> Array:
        # Experts are at the start until now: what no client has changed stays bit-identical.
        change = x[:clients] - x[clients][None]
        mean = x[clients:] + jnp.tensordot(shares, change, axes=1, precision="highest")
        return jnp.concatenate([x[:clients], mean])

    newcomers = jnp.argmax(jnp.sum(member, axis=1)).astype(jnp.int32)
    return {
        **state,
        "models": {n: averaged(x) for n, x in models.items()},
        "assignment": jnp.where(met, labels, newcomers),
        "newcomers": newcomers,
        "found": found,
    }


def _check(kinds: Mapping[str, str], count: int, clients: int, room: int) -> None:
    own = [n for n in kinds if _OWN.search(n)]
    if not own or not any(n.endswith(_ROUTER) for n in kinds):
        raise InputError(
            "'fedlease' needs LoRA experts with a router at every site: attach"
            f" fp.peft.lora_experts(experts={room})."
        )
    experts = 1 + len([n for n in kinds if _OTHER.search(n)]) // len(own)
    if experts != room:
        raise InputError(
            f"The model has room for {experts} experts, and max_experts = {room} of fedlease: set"
            f" max_experts = {experts}, or attach fp.peft.lora_experts(experts={room})."
        )
    federation_of(clients, "fedlease")(kinds, count)
