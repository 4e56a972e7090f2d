"""What a round costs in bytes and in simulated seconds.

Nothing is typed in: bytes are those of the leaves that the server broadcasts and gets back, and
what a client fetches is what the server has changed since it was last there.
"""

import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax

from fedjax_peft import tree
from fedjax_peft.errors import InputError, nearest
from fedjax_peft.models.base import Model
from fedjax_peft.peft.ranks import owned_shares, spread
from fedjax_peft.random import host_rng
from fedjax_peft.run.history import Row
from fedjax_peft.typing import Algorithm, PyTree

__all__ = ["Costs", "Ledger", "TimeModel", "is_number"]

Preset = Literal["federa", "fedadapters"]


class TimeModel(NamedTuple):
    """Simulated seconds of a client's round: its local steps, and its transfers.

    ``steps * seconds_per_step * slowness + 8 * up / bandwidth_up + 8 * down / bandwidth_down + 2 *
    latency``; a round lasts as long as its slowest client.

    Defaults: the links of FeDeRA's testbed (25 Mbit/s WiFi, 0.4 s latency each way), and half a
    second a step, an edge device's pace on a base-size model (our choice; set your own).
    """

    seconds_per_step: float | Literal["measured"] = 0.5
    """``measured``: this machine's own, of the round (training time over all clients' steps). Then
    simulated seconds vary from run to run."""
    bandwidth_up: float = 25e6
    """Bits a second."""
    bandwidth_down: float = 25e6
    latency: float = 0.4
    """Seconds, each way."""
    spread: float = 0.0
    """How unequally fast clients compute: the standard deviation of the logarithm of their
    slowness, whose median is 1. 0 makes all equal; at 0.5 one in six takes 1.6 times as long."""

    @classmethod
    def preset(
        cls,
        preset: Preset = "federa",
        *,
        seconds_per_step: float | Literal["measured"] | None = None,
        bandwidth_up: float | None = None,
        bandwidth_down: float | None = None,
        latency: float | None = None,
        spread: float | None = None,
    ) -> "TimeModel":
        """Returns a paper's time model, with the given fields replaced.

        Args:
          preset: ``federa`` (25 Mbit/s, 0.4 s latency each way) or ``fedadapters`` (10 MB/s, no
            latency).
          seconds_per_step: of a local step, or ``measured``.
          bandwidth_up: bits a second.
          bandwidth_down: bits a second.
          latency: seconds, each way.
          spread: how unequally fast clients compute.

        Raises:
          InputError: no such preset.
        """
        given = {k: v for k, v in locals().items() if k in cls._fields and v is not None}
        papers = {"federa": cls(), "fedadapters": cls(0.5, 80e6, 80e6, 0.0)}
        if preset not in papers:
            raise InputError(f"There is no time model {preset!r}. {nearest(preset, papers)}")
        return papers[preset]._replace(**given)

    def round_seconds(
        self, steps: int, bytes_up: int, bytes_down: int, slowness: float = 1.0
    ) -> float:
        """Returns one client's seconds."""
        transfer = 0.0
        if bytes_up or bytes_down:
            up, down = 8 * bytes_up / self.bandwidth_up, 8 * bytes_down / self.bandwidth_down
            transfer = up + down + 2 * self.latency
        assert not isinstance(self.seconds_per_step, str)
        return steps * self.seconds_per_step * slowness + transfer

    def slowness(self, clients: int, seed: int) -> list[float]:
        """Returns how many times the median client's time each client needs for a step."""
        draws = (host_rng(seed, "slowness", client).normal() for client in range(clients))
        return [math.exp(self.spread * draw) for draw in draws]

    def check(self) -> None:
        """Raises InputError for a field that cannot be."""
        for name, value in self._asdict().items():
            if name == "seconds_per_step" and value == "measured":
                continue
            positive = name.startswith("bandwidth")
            if not is_number(value) or value < 0 or (positive and value == 0):
                kind = "a positive number" if positive else "a number from 0 up"
                other = " or 'measured'" if name == "seconds_per_step" else ""
                raise InputError(f"{name} = {value!r} of the time model must be {kind}{other}.")


class Ledger:
    """Who has fetched what: the bytes that a client moves in its next round.

    A leaf is known by its last name, whatever it lies in, so that a control variate of a leaf moves
    with it. A client sends the leaves of an upload that move in the round, and fetches

    * at its first round all of the broadcast, and what the frozen tree was started with where that
      is told by the adapters (an SVD start): the initial value of every adapter leaf that is not in
      the broadcast, or no longer the initial one;
    * later the leaves of the broadcast that the server has changed since it was last there;
    * of leaves that the server passes on one by one (``Algorithm.forwards``) the uploads of every
      round since then (at its first round: of all rounds), from which it computes the broadcast's
      leaves itself; or those leaves and the matrices to which all uploads add up
      (``ServerUpdate.shift``), where that is smaller. Before anything is passed on it fetches the
      initial leaves.

    Of a LoRA leaf a client moves the share that it owns.
    """

    def __init__(
        self,
        model: Model,
        algorithm: Algorithm,
        server: PyTree,
        clients: int,
        ranks: Sequence[int] | None = None,
    ):
        """Args: what is run; ``server`` is its state (or shapes); ``ranks`` as in ``simulate``."""
        upload = _sizes(jax.eval_shape(algorithm.server.unchanged, server))
        broadcast = _sizes(jax.eval_shape(algorithm.server.broadcast, server))
        of_rank: dict[int | None, tuple[dict, dict]] = {None: (upload, broadcast)}
        for rank in set(ranks or ()):
            shares = owned_shares(model.trainable, rank)
            of_rank[rank] = (_owned(upload, shares), _owned(broadcast, shares))
        self._of_client = [of_rank[rank] for rank in spread(ranks or [None], clients)]
        self._start = {}
        # Where nothing is shared, nobody talks to a server.
        talks = any(upload.values()) or any(broadcast.values())
        if talks and model.method is not None and model.method.start_shapes_frozen:
            adapters = [n for n, kind in model.kinds.items() if kind == "adapter"]
            self._start = {n: tree.nbytes(model.trainable[n]) for n in adapters}
        self._forwarded = {n for n in upload if re.search(algorithm.forwards or r"(?!)", n)}
        self._dense: float = math.inf
        if algorithm.server.shift is not None:
            self._dense = tree.nbytes(jax.eval_shape(algorithm.server.shift, server))
        self._changed = dict.fromkeys(broadcast, 0)  # the last round that did
        self._last: dict[int, int] = {}  # client -> the last round that it was in
        self._passed_on: dict[int, int] = {}  # round -> bytes

    def up(self, client: int, unsent: Collection[str] = ()) -> int:
        """Returns the bytes of a client's upload without the leaves that do not move."""
        return sum(size for name, size in self._of_client[client][0].items() if name not in unsent)

    def down(self, client: int) -> int:
        """Returns the bytes that a client fetches at the start of its next round."""
        broadcast = self._of_client[client][1]
        since = self._last.get(client, 0)  # 0 at its first round
        passed_on = sum(size for number, size in self._passed_on.items() if number >= since)
        start = 0
        if not since:
            start = sum(size for name, size in self._start.items() if self._changed.get(name, 1))
        changed = {n: size for n, size in broadcast.items() if self._changed[n] >= since}
        # What the client makes itself from the uploads that are passed on: not the initial leaves.
        made = sum(
            n for name, n in changed.items() if name in self._forwarded and self._changed[name]
        )
        return start + sum(changed.values()) - made + int(min(passed_on, self._dense + made))

    def record(self, row: Mapping[str, Any]) -> None:
        """Notes a round: who was there, whose uploads were taken, and what did not move."""
        clients, dropped = row.get("clients", ()), row.get("dropped", ())
        for client in (*clients, *row.get("failed", ()), *row.get("late", ())):
            self._last[client] = row["round"]
        taken = [client for client in clients if client not in dropped]
        if not taken:
            return  # the server has stayed where it was
        unsent = row.get("unsent", ())
        self._changed |= {name: row["round"] for name in self._changed if name not in unsent}
        if sent := self._forwarded.difference(unsent):
            uploads = [self._of_client[client][0] for client in taken]
            self._passed_on[row["round"]] = sum(upload[n] for upload in uploads for n in sent)


class Costs:
    """The costs of a run: a ledger, and the clocks of its clients."""

    def __init__(
        self, ledger: Ledger, time: TimeModel, slowness: Sequence[float], deadline: float | None
    ):
        self._ledger, self._time, self._slowness = ledger, time, slowness
        self._deadline = math.inf if deadline is None else deadline

    def late(self, steps: Mapping[int, int], unsent: Collection[str] = ()) -> list[int]:
        """Returns the clients that will not be in time, of those with so many steps to make."""
        ledger, seconds = self._ledger, self._time.round_seconds
        return [
            c
            for c, n in steps.items()
            if seconds(n, ledger.up(c, unsent), ledger.down(c), self._slowness[c]) > self._deadline
        ]

    def charge(self, row: Row, steps: Mapping[int, int], train_seconds: float) -> Row:
        """Returns bytes and simulated seconds of a round, and notes it in the ledger.

        A client that fails has fetched the broadcast; a late one too, and the server has waited for
        it until the deadline. Neither upload is counted.

        Args:
          row: the round's, with ``clients`` and, where there are any, ``failed``, ``late`` and
            ``unsent``.
          steps: the local steps of its clients.
          train_seconds: what they took on this machine.
        """
        ledger, time = self._ledger, self._time
        if time.seconds_per_step == "measured":
            time = time._replace(seconds_per_step=train_seconds / max(sum(steps.values()), 1))
        failed, late = row.get("failed", []), row.get("late", [])
        up = {c: ledger.up(c, row.get("unsent", ())) for c in row["clients"]}
        down = {c: ledger.down(c) for c in (*row["clients"], *failed, *late)}
        slowest = max(
            (
                time.round_seconds(steps.get(c, 0), up.get(c, 0), down[c], self._slowness[c])
                for c in down
            ),
            default=0.0,
        )
        ledger.record(row)
        return {
            "bytes_up": sum(up.values()),
            "bytes_down": sum(down.values()),
            "simulated_seconds": self._deadline if late else min(slowest, self._deadline),
        }


def _sizes(shapes: PyTree) -> dict[str, int]:
    """Returns leaf name (its last key in a dict) -> bytes; namesakes are added up."""
    sizes: dict[str, int] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(shapes):
        keys = [key.key for key in path if isinstance(key, jax.tree_util.DictKey)]
        name = str(keys[-1]) if keys else ""
        sizes[name] = sizes.get(name, 0) + tree.nbytes(leaf)
    return sizes


def _owned(sizes: Mapping[str, int], shares: Mapping[str, Any]) -> dict[str, int]:
    return {name: round(size * shares.get(name, 1)) for name, size in sizes.items()}


def is_number(value: Any) -> bool:
    """Returns whether a value is a finite number, and no bool."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
