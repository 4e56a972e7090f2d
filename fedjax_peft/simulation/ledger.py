"""The bytes of a round, counted from the leaves that travel."""

import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.extend.core import Literal

from fedjax_peft.contracts import Algorithm, Params, PyTree, Transform
from fedjax_peft.models.base import Model
from fedjax_peft.numerics import tree
from fedjax_peft.numerics.summation import lifted_shapes
from fedjax_peft.peft.ranks import owned_shares
from fedjax_peft.transforms.packing import is_wire, wires_of

_Part: TypeAlias = tuple[PyTree, PyTree]
"""Shapes of leaves that travel, and the :class:`fedjax_peft.contracts.Wire` of each, or one for all
of them together."""


class Ledger:
    """Counts the bytes that a client sends and fetches in its next round.

    The ledger records the rounds of each client and of each leaf. Leaves are identified by their
    last dict key. Equal keys, such as a parameter and its control variate, are counted together, so
    they are sent together. A client sends the leaves of an upload that are not skipped in the
    round, or the shares of them that it chose (``Traffic.sent_shares``). It fetches

    * in its first round, the whole broadcast, or its part (``Traffic.received_part``). If the
      initial adapters determine the frozen weights (initialisation by an SVD), the client also
      fetches the initial value of every adapter leaf that is not in the broadcast or has changed
      since;
    * in later rounds, the leaves of the broadcast that the server has changed since the client's
      last round;
    * for relayed leaves (``Traffic.relayed_leaves``), whose uploads the server passes on one by
      one, the uploads of every round since then (in its first round: of all rounds). The client
      computes these leaves of the broadcast from the uploads itself. If it is smaller, the client
      instead fetches these leaves and the sums of all uploads as matrices
      (``ServerUpdate.frozen_delta``). Before any upload is passed on, it fetches the initial
      leaves. It never fetches leaves that it draws itself (``Traffic.redrawn_leaves``).

    Of a LoRA leaf, only the entries of the client's own rank are counted. An upload transform
    replaces the sizes of uploads (``Transform.wire``), and clients also fetch what the transform
    broadcasts. It may also replace the sizes of the broadcast (``Transform.down_wire``). If it
    draws random numbers for the broadcast, all leaves of it are new in every round. Where clients
    exchange models without a server (``Traffic.peers``), all of it counts once for each peer.
    """

    def __init__(
        self,
        model: Model,
        algorithm: Algorithm,
        server: PyTree,
        clients: int,
        ranks: Sequence[int] | None = None,
        transform: Transform | None = None,
    ):
        """Prepares to count the traffic of a run.

        Args:
          server: the server's state, or its shapes.
        """
        sent, received = _uploaded(algorithm, server, transform)
        lifted = {}
        if algorithm.aggregator.wire_bytes is not None:
            lifted = {_LIFTED: _lifted_bytes(algorithm, server, model.trainable)}
        leaves = jax.eval_shape(algorithm.server.broadcast, server)
        if algorithm.traffic.received_part is not None:
            leaves = jax.eval_shape(algorithm.traffic.received_part, leaves)
        down = wires_of(leaves)
        if transform is not None and transform.down_wire is not None:
            down = transform.down_wire(leaves, down)
        of_rank: dict[int | None, tuple[dict, dict]] = {}
        for rank in {None, *(ranks or ())}:
            shares = {} if rank is None else owned_shares(model.trainable, rank)
            upload = lifted or _sizes(sent, shares)
            of_rank[rank] = (upload, _sizes([(leaves, down)], shares) | received)
        upload, broadcast = of_rank[None]
        self._whole = upload
        compressed = transform is not None and transform.wire is not None
        self._compressed = sent if compressed else []
        cycle: Sequence[int | None] = ranks or [None]  # which clients repeat
        self._of_rank = [of_rank[rank] for rank in cycle]
        self._start = {}
        # If clients receive no leaf, they are one place with the server, or have none.
        talks = any(broadcast.values())
        if talks and model.method is not None and model.method.start_shapes_frozen:
            adapters = [n for n, kind in model.kinds.items() if kind == "adapter"]
            self._start = {n: tree.nbytes(model.trainable[n]) for n in adapters}
        traffic = algorithm.traffic
        self._peers = traffic.peers or (1,)
        self._forwarded = {n for n in upload if re.search(traffic.relayed_leaves or r"(?!)", n)}
        drawn = re.compile(traffic.redrawn_leaves or r"(?!)")
        self._redrawn = {n for n in broadcast if drawn.search(n)}
        self._moves_alone = algorithm.aggregator.every_round  # by its noise
        self._dense: float = math.inf
        if algorithm.server.frozen_delta is not None:
            self._dense = tree.nbytes(jax.eval_shape(algorithm.server.frozen_delta, server))
        self._drawn = set(_sizes([(leaves, down)], {})) if _draws(transform, leaves) else set()
        self._changed = dict.fromkeys(broadcast, 0)  # leaf -> the last round that changed it
        self._last = np.zeros(clients, np.int32)  # the last round of each client; 0: none
        self._passed_on: dict[int, int] = {}  # round -> bytes

    def _sizes_of(self, client: int) -> tuple[dict[str, int], dict[str, int]]:
        """Returns name -> bytes of what a client sends, and of what it receives."""
        return self._of_rank[client % len(self._of_rank)]

    def _copies(self, client: int) -> int:
        """Returns how often a client sends and receives its leaves in a round."""
        return self._peers[client % len(self._peers)]

    def up(
        self,
        client: int,
        skipped_leaves: Collection[str] = (),
        shares: Mapping[str, float] | None = None,
    ) -> int:
        """Returns the bytes of a client's upload without the skipped leaves.

        Args:
          shares: leaf name -> the share of the leaf that the client sends, if it is known already
            (``Traffic.sent_shares``); other leaves are sent whole, as far as its rank goes. What a
            transform makes of a leaf has no more entries than the share.
        """
        sizes = {n: x for n, x in self._sizes_of(client)[0].items() if n not in skipped_leaves}
        shares = shares or {}
        if self._compressed and (shares or skipped_leaves):  # one wire may be of all leaves
            of_shares = _sizes(self._compressed, dict.fromkeys(skipped_leaves, 0.0) | dict(shares))
        else:
            of_shares = {n: round(self._whole[n] * x) for n, x in shares.items() if n in sizes}
        return self._copies(client) * sum(min(x, of_shares.get(n, x)) for n, x in sizes.items())

    def down(self, client: int) -> int:
        """Returns the bytes that a client fetches at the start of its next round."""
        broadcast = self._sizes_of(client)[1]
        since = int(self._last[client])
        passed_on = sum(size for number, size in self._passed_on.items() if number >= since)
        start = 0
        if not since:
            start = sum(size for name, size in self._start.items() if self._changed.get(name, 1))
        changed = {n: size for n, size in broadcast.items() if self._changed[n] >= since}
        changed = {
            n: x for n, x in changed.items() if n not in self._redrawn or not self._changed[n]
        }
        # Leaves that the client computes from relayed uploads; initial leaves are always fetched.
        made = sum(
            n for name, n in changed.items() if name in self._forwarded and self._changed[name]
        )
        relayed = int(min(passed_on, self._dense + made))
        return start + self._copies(client) * sum(changed.values()) - made + relayed

    def whole(self, client: int, *, first: bool, moved: bool) -> int:
        """Returns the bytes of the whole broadcast that a client fetches.

        Args:
          first: whether it also fetches the initial adapters that determine the frozen weights.
          moved: whether the broadcast differs from the initial one, which has adapters in it.
        """
        broadcast = self._sizes_of(client)[1]
        start = sum(size for name, size in self._start.items() if moved or name not in broadcast)
        return self._copies(client) * sum(broadcast.values()) + (start if first else 0)

    def has_met(self, client: int) -> bool:
        """Returns whether a client has taken part in a round."""
        return bool(self._last[client])

    def record(self, row: Mapping[str, Any]) -> None:
        """Records a round: its clients, the accepted uploads and the skipped leaves."""
        clients, dropped = row.get("clients", ()), row.get("dropped", ())
        for client in (*clients, *row.get("failed", ()), *row.get("late", ())):
            self._last[client] = row["round"]
        self._changed |= dict.fromkeys(self._drawn, row["round"])
        taken = [client for client in clients if client not in dropped]
        if not taken and not self._moves_alone:
            return  # the server has not changed
        skipped_leaves = row.get("skipped_leaves", ())
        self._changed |= {
            name: row["round"] for name in self._changed if name not in skipped_leaves
        }
        if sent := self._forwarded.difference(skipped_leaves):
            uploads = [self._sizes_of(client)[0] for client in taken]
            self._passed_on[row["round"]] = sum(upload[n] for upload in uploads for n in sent)


def _sizes(parts: Sequence[_Part], shares: Mapping[str, Any]) -> dict[str, int]:
    """Returns leaf name (last dict key) -> bytes; leaves of the same name are added up.

    Args:
      shares: leaf name -> the share that a client owns. No more entries of the leaf travel: where a
        transform chooses some of all entries, those that the client does not own are zeros.
    """

    def owned(path: tuple[Any, ...], leaf: Any) -> int:
        return round(leaf.size * shares.get(tree.leaf_name(path), 1))

    sizes: dict[str, int] = {}
    for leaves, wires in parts:
        most = jax.tree.leaves(jax.tree_util.tree_map_with_path(owned, leaves))
        most = [sum(most)] if is_wire(wires) else most
        named = jax.tree_util.tree_leaves_with_path(wires, is_leaf=is_wire)
        for (path, wire), entries in zip(named, most, strict=True):
            own = wire._replace(entries=min(wire.entries, entries))
            sizes[tree.leaf_name(path)] = sizes.get(tree.leaf_name(path), 0) + own.nbytes
    return sizes


def _uploaded(
    algorithm: Algorithm, server: PyTree, transform: Transform | None
) -> tuple[list[_Part], dict[str, int]]:
    """Returns the parts of an upload, and name -> bytes of the transform's broadcast."""
    template = jax.eval_shape(algorithm.server.unchanged, server)
    if transform is None:
        return [(template, wires_of(template))], {}
    change = algorithm.change_part(template)
    wires = wires_of(change)
    if transform.wire is not None:
        wires = transform.wire(change, wires)
    field = algorithm.traffic.change_field
    rest = {} if field is None else {n: x for n, x in template.items() if n != field}
    received = jax.eval_shape(lambda x: transform.broadcast(transform.init(x)), change)
    fetched = {_RECEIVED: tree.nbytes(received)} if tree.nbytes(received) else {}
    return [(change, wires), (rest, wires_of(rest))], fetched


def _draws(transform: Transform | None, leaves: PyTree) -> bool:
    """Returns whether the broadcast that a transform makes of leaves depends on its key."""
    if transform is None or (receive := transform.receive) is None:
        return False
    state = jax.eval_shape(transform.init, leaves)
    key = jax.eval_shape(lambda: jax.random.key(0))
    trace = jax.make_jaxpr(lambda key, leaves, state: receive(leaves, state, key)[0])
    traced = trace(key, leaves, state).jaxpr
    drawn = {traced.invars[0]}

    def some(variables: Sequence[Any]) -> bool:
        return any(not isinstance(v, Literal) and v in drawn for v in variables)

    for equation in traced.eqns:
        drawn |= {*equation.outvars} if some(equation.invars) else set()
    return some(traced.outvars)


def _lifted_bytes(algorithm: Algorithm, server: PyTree, leaves: Params) -> int:
    """Returns the bytes of an upload that its client lifts before it sends it."""
    aggregator, fixed = algorithm.aggregator, jax.eval_shape(lambda: leaves)
    template = jax.eval_shape(algorithm.server.unchanged, server)
    assert aggregator.wire_bytes is not None
    return aggregator.wire_bytes(lifted_shapes(aggregator, template, fixed))


_LIFTED = "lifted upload"
"""The name under which the ledger counts an upload that its client lifts before it sends it."""

_RECEIVED = "upload transform"
"""The name under which the ledger counts the broadcast of an upload transform."""
