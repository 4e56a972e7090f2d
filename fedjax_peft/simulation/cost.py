"""The costs of a round in bytes and in simulated seconds.

No size is entered by hand. Bytes are counted from the leaves that the server broadcasts and
receives. A client fetches the leaves that the server has changed since the client's last round.
"""

import bisect
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax

from fedjax_peft.contracts import Algorithm, Transform
from fedjax_peft.models.base import Model
from fedjax_peft.numerics import tree
from fedjax_peft.numerics.roles import assign_roles
from fedjax_peft.simulation.ledger import Ledger
from fedjax_peft.simulation.rows import Row
from fedjax_peft.simulation.time_model import Slowness, TimeModel, preload_bytes, start_seconds


@dataclass
class Costs:
    """The costs of a run: bytes from a ledger, and simulated seconds from a time model."""

    ledger: Ledger
    """Counts the bytes of each client."""
    time: TimeModel
    slowness: Sequence[float]
    """The slowness of every client."""
    deadline: float | None
    """Simulated seconds after which the server accepts no more uploads; None: no deadline."""
    preload: int = 0
    """Bytes that a client downloads before its first round (:func:`preload_bytes`)."""
    extra: int = 0
    """Bytes that are added to every upload and every download."""

    @property
    def _end(self) -> float:
        return math.inf if self.deadline is None else self.deadline

    def late(
        self, steps: Mapping[int, int], skipped_leaves: Collection[str] = ()
    ) -> dict[int, int]:
        """Returns the clients that will miss the deadline with all of their steps.

        The value of a client is the number of steps with which it can still upload in time; 0 if it
        cannot upload in time even with a single step. The transfers are those of all clients, also
        of the late ones.
        """
        up = {c: self.up(c, skipped_leaves) for c in steps}
        down = {c: self.down(c) for c in steps}
        transfers = self.time.clients_seconds({}, up, down, self.slowness)

        def end(client: int, steps: int) -> float:
            compute = self.time.compute_seconds(steps, self.slowness[client])
            return transfers[client] + compute

        fitting = {
            c: bisect.bisect_right(range(1, n + 1), self._end, key=partial(end, c))
            for c, n in steps.items()
        }
        return {c: k for c, k in fitting.items() if k < steps[c]}

    def finish_seconds(
        self, steps: Mapping[int, int], skipped_leaves: Collection[str] = ()
    ) -> dict[int, float]:
        """Returns the seconds from the beginning of a round to the end of each client's upload.

        No client works longer than until the deadline.
        """
        up = {c: self.up(c, skipped_leaves) for c in steps}
        down = {c: self.down(c) for c in steps}
        seconds = self.time.clients_seconds(steps, up, down, self.slowness)
        return {client: min(s, self._end) for client, s in seconds.items()}

    def charge(
        self,
        row: Row,
        steps: Mapping[int, int],
        train_seconds: float,
        shares: Mapping[int, Mapping[str, float]] | None = None,
    ) -> Row:
        """Returns bytes and simulated seconds of a round, and records the round in the ledger.

        Failed and late clients have fetched the broadcast, but their uploads are not counted. The
        server waits for late clients until the deadline.

        Args:
          row: the row of the round, with ``clients`` and, if there are any, ``failed``, ``late``
            and ``skipped_leaves``.
          train_seconds: wall-clock seconds of these steps on this machine.
          shares: client -> ``Traffic.sent_shares`` of its upload.
        """
        time = self.time
        if time.seconds_per_step == "measured":
            time = time._replace(seconds_per_step=train_seconds / max(sum(steps.values()), 1))
        failed, late = row.get("failed", []), row.get("late", [])
        skipped, shares = row.get("skipped_leaves", ()), shares or {}
        up = {c: self.up(c, skipped, shares.get(c)) for c in row["clients"]}
        down = {c: self.down(c) for c in (*row["clients"], *failed, *late)}
        seconds = time.clients_seconds(steps, up, down, self.slowness)
        slowest = max(seconds.values(), default=0.0)
        self.ledger.record(row)
        return {
            "bytes_up": sum(up.values()),
            "bytes_down": sum(down.values()),
            "simulated_seconds": self._end if late else min(slowest, self._end),
        }

    def up(
        self,
        client: int,
        skipped_leaves: Collection[str] = (),
        shares: Mapping[str, float] | None = None,
    ) -> int:
        """Returns the bytes of a client's upload; see :meth:`Ledger.up`."""
        return self.ledger.up(client, skipped_leaves, shares) + self.extra

    def down(self, client: int) -> int:
        """Returns the bytes that a client fetches in its next round, including the preload."""
        new = 0 if self.ledger.has_met(client) else self.preload
        return self.ledger.down(client) + new + self.extra

    def fetch(self, client: int, *, first: bool, version: int) -> int:
        """Returns the bytes that a client of an asynchronous server fetches for a job.

        The server has usually changed since the client's last job, so it fetches everything.

        Args:
          first: whether this is the client's first job.
          version: of the server that it fetches; 0: the initial one.
        """
        preload = self.preload if first else 0
        fetched = self.ledger.whole(client, first=first, moved=version > 0)
        return fetched + preload + self.extra

    def job_seconds(self, client: int, steps: int, *, first: bool, version: int) -> float:
        """Returns the seconds of a job, from the beginning of its download to its upload's end."""
        up, down = self.up(client), self.fetch(client, first=first, version=version)
        return self.time.round_seconds(steps, up, down, self.slowness[client])


class Forecast(NamedTuple):
    """The expected costs of a run, by its time model."""

    bytes_up: int
    """Bytes that all clients upload in all rounds."""
    bytes_down: int
    seconds: float
    """Simulated seconds, including those before the first round."""


def forecast(
    model: Model,
    algorithm: Algorithm,
    *,
    clients: int,
    rounds: int,
    steps: int,
    clients_per_round: int | None = None,
    time_model: TimeModel | None = None,
    whole: bool = False,
    transform: Transform | None = None,
) -> Forecast:
    """Returns the bytes and simulated seconds of a run, without running it.

    Clients take turns, and all leaves of an upload are sent in every round.

    Args:
      model: the model with its method; shapes suffice (``peft.base.abstract_model``).
      algorithm: the algorithm; the learning rate of its optimizer does not matter.
      steps: local steps of a client in a round.
      clients_per_round: clients in a round; None: all clients.
      whole: add the whole checkpoint, frozen weights included, to every transfer, because some
        frameworks send it (and FedAdapters counts full fine-tuning in this way).
    """
    time = time_model or TimeModel()
    time.check()
    names = assign_roles(model.kinds, algorithm.roles)
    shared = tree.select(model.trainable, names["shared"])
    server = jax.eval_shape(algorithm.server.init, shared)
    ledger = Ledger(model, algorithm, server, clients, transform=transform)
    checkpoint = preload_bytes(time._replace(preload=True), model)
    preload, extra = (0, checkpoint) if whole else (preload_bytes(time, model), 0)
    slowness = Slowness(time.spread, clients, seed=0)
    costs = Costs(ledger, time, slowness, None, preload, extra)
    total, per_round = Forecast(0, 0, start_seconds(time, model)), clients_per_round or clients
    for number in range(1, rounds + 1):
        chosen = [(number * per_round + i) % clients for i in range(per_round)]
        row: Row = {"round": number, "clients": chosen, "dropped": []}
        row = costs.charge(row, dict.fromkeys(chosen, steps), 0.0)
        total = Forecast(
            total.bytes_up + row["bytes_up"],
            total.bytes_down + row["bytes_down"],
            total.seconds + row["simulated_seconds"],
        )
    return total
