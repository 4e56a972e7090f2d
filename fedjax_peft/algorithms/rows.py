"""Several models in rows: one for each cluster, edge or node of a federation.

    server state   θ_1 ... θ_m: the shared leaves, ``[rows, ...]``
    broadcast      all rows, of which a client uses some (``Traffic.received_part``)
    upload         the change of one model, and the number r of its row
    aggregator     D_j = Σ_{r = j} w_k (change of k) / W_j,   W_j = Σ_{r = j} w_k

So the engine needs nothing new: clients of all rows train side by side in the same lanes, and
changes are added row by row (:class:`fedjax_peft.contracts.Segmented`).

A client knows its number only while it works. So it keeps what it needs to predict, such as its
row, after its first round; before, it has -1.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from fedjax_peft import contracts as c
from fedjax_peft.algorithms.common import Local, init_local, train
from fedjax_peft.numerics import tree

NO_NOISE = (
    "Its server averages the changes of groups of clients, each by the weights of its own group,"
    " and noise is added to one sum over all clients. Use 'fedavg'."
)
"""Why noise on the sum is refused."""


def repeated(shared: c.Params, rows: int) -> c.Params:
    """Returns equal models in all rows."""
    return {n: jnp.repeat(x[None], rows, axis=0) for n, x in shared.items()}


def upload(change: c.Params, row: Array) -> c.PyTree:
    """Returns an upload of a change of the model in a row."""
    return {"model": change, "place": {"row": jnp.asarray(row, jnp.float32)}}


def client(
    optimizer: c.Optimizer, context: c.ClientContext, row: Array, name: str
) -> c.ClientUpdate:
    """Returns the work of a client on the model of a row, which it keeps under a name."""

    def init(broadcast: c.PyTree, own: c.PyTree, key: c.Key) -> Local:
        received = tree.take(broadcast["models"], row)
        return init_local(optimizer, received, own["model"], received)

    def step(local: Local, batch: c.Batch, key: c.Key) -> tuple[Local, c.Metrics]:
        return train(optimizer, context, local, batch, key)

    def final(local: Local) -> tuple[c.PyTree, c.PyTree]:
        change = jax.tree.map(jnp.subtract, local.shared, local.start)
        return upload(change, row), {"model": local.private, name: jnp.int32(row)}

    return c.ClientUpdate(init, step, final)


def local_model(broadcast: c.PyTree, upload: c.PyTree, own: c.PyTree) -> c.Params:
    """Returns a client's model after its local work (``Algorithm.local_model``)."""
    return {**moved(broadcast["models"], upload), **own["model"]}


def one_model(broadcast: c.PyTree) -> c.PyTree:
    """Returns what a client receives that needs one row (``Traffic.received_part``)."""
    return {"models": tree.take(broadcast["models"], jnp.int32(0))}


def unchanged(models: c.Params) -> c.PyTree:
    """Returns the upload of a client that learned nothing."""
    return upload({n: jnp.zeros_like(x[0]) for n, x in models.items()}, jnp.int32(0))


def moved(models: c.Params, upload: c.PyTree) -> c.Params:
    """Returns the model at the end of an upload's change."""
    own = tree.take(models, upload["place"]["row"].astype(jnp.int32))
    return jax.tree.map(jnp.add, own, upload["model"])


def by_row(name: str, rows: int) -> c.Aggregator:
    """Returns the aggregator that gives the server ``{"changes": D, "weights": W}``.

    D is 0 in a row without an upload.
    """

    def lift(upload: c.PyTree, template: c.PyTree, fixed: c.Params) -> c.PyTree:
        place = jnp.arange(rows) == upload["place"]["row"]
        return c.Segmented(place.astype(jnp.float32), upload["model"])

    def finish(
        total: c.Total, template: c.PyTree, context: c.RoundContext, state: c.PyTree
    ) -> c.Aggregated:
        weights, sums = total.value
        by = jnp.where(weights > 0, weights, 1.0)
        changes = {n: x / along(by, x) for n, x in sums.items()}
        return c.Aggregated({"changes": changes, "weights": weights}, {}, state)

    return c.Aggregator(name, lift, finish)


def along(numbers: Array, x: Array) -> Array:
    """Returns a number for each row in the shape that multiplies ``x``, ``[rows, ...]``."""
    return jnp.reshape(numbers, (-1,) + (1,) * (x.ndim - 1))


def resting(broadcast: c.PyTree, round_index: Array) -> dict[str, Array]:
    """Returns that the number of the row is not sent, for a server that knows it.

    It is a ``Traffic.sent_leaves``.
    """
    return {"row": jnp.array(False)}


def known(own: Any) -> tuple[Array, Array]:
    """Returns (whether a client has been met, its row, or 0 if it has not)."""
    return own >= 0, jnp.maximum(own, 0)
