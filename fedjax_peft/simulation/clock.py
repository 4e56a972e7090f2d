"""The clock of a run: who works in a round, how long, what is lost, and what it costs.

A round begins when a client is available. Clients fail, are late for a deadline,
or leave before their upload has arrived; the plan is made without them. Afterwards the clock
charges the bytes and the simulated seconds of the round. The rounds of an asynchronous server come
from its timeline, see :mod:`fedjax_peft.simulation.asynchrony`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from fedjax_peft.engine.schedule import Schedule
from fedjax_peft.engine.session import Session
from fedjax_peft.engine.state import RoundInfo, State
from fedjax_peft.simulation.asynchrony import aggregation_row
from fedjax_peft.simulation.cost import Costs
from fedjax_peft.simulation.moment import Measure, Moment
from fedjax_peft.simulation.records import System
from fedjax_peft.simulation.round_rows import sent_shares, skipped_leaves
from fedjax_peft.simulation.rows import Row
from fedjax_peft.simulation.turn import Opening, Turn, leaving, open_round


@dataclass
class Clock:
    """Makes the turn of each round, and charges its costs."""

    session: Session
    system: System
    costs: Costs
    rounds: int
    """The last round."""

    def turn(self, state: State, rows: Sequence[Row]) -> Turn:
        """Returns who works in the round after a state.

        Args:
          rows: of all rounds before it, with their simulated seconds.
        """
        schedule, late, left, opening = self.expected(state, rows)
        without = [*left, *(client for client, steps in late.items() if not steps)]
        index, seed = state.round_index + 1, int(state.seed)
        plan = self.session.plan(index, seed, without, late, schedule.among)
        return Turn(plan, schedule, late, left, opening)

    def expected(
        self, state: State, rows: Sequence[Row]
    ) -> tuple[Schedule, dict[int, int], dict[int, float], Opening | None]:
        """Returns the fields of the next turn without its plan."""
        seed = int(state.seed)
        opening = self._opening(seed, rows)
        among = None if opening is None else opening.among
        schedule = self.session.schedule(seed)._replace(among=among)
        return schedule, *self._absent(state, schedule, opening), opening

    def look_ahead(self, state: State) -> None:
        """Plans the round after a state while the device computes; the session caches the plan.

        With a deadline or an availability this is not possible: the clients of the next round
        depend on the costs of this one.
        """
        index, seed = min(state.round_index + 1, self.rounds), int(state.seed)
        if self.system.deadline is None and not self._intermittent(seed):
            self.session.plan(index, seed, [], {}, None)

    def _intermittent(self, seed: int) -> bool:
        asynchronous = self.session.schedule(seed).timelines is not None
        return self.system.availability is not None and not asynchronous

    def _opening(self, seed: int, rows: Sequence[Row]) -> Opening | None:
        availability = self.system.availability
        if availability is None or not self._intermittent(seed):
            return None
        clients = np.flatnonzero(self.session.schedule(seed).sizes)
        now = sum(row["simulated_seconds"] for row in rows)
        return open_round(availability, seed, clients, now)

    def _absent(
        self, state: State, schedule: Schedule, opening: Opening | None
    ) -> tuple[dict[int, int], dict[int, float]]:
        """Returns ``late`` and ``left`` of a turn."""
        if self.system.deadline is None and opening is None:
            return {}, {}
        index = state.round_index + 1
        steps, skipped, left = schedule.client_steps(index), self.skipped(state), dict[int, float]()
        late = self.costs.late(steps, skipped)
        if self.system.late == "drop":
            late = dict.fromkeys(late, 0)
        if opening is not None:  # who sends a part ends earlier, perhaps before it leaves
            done = {**steps, **{client: n for client, n in late.items() if n}}
            left = leaving(opening, self.costs.finish_seconds(done, skipped))
            late = {client: n for client, n in late.items() if client not in left}
        return late, left

    def skipped(self, state: State) -> list[str]:
        """Returns the leaves that clients do not send in the round after a state."""
        algorithm, index = self.session.setup.algorithm, jnp.int32(state.round_index + 1)
        broadcast = algorithm.server.broadcast(state.server)
        return skipped_leaves(algorithm.traffic.sent_leaves(broadcast, index))

    def charge(self, turn: Turn, row: Row, info: RoundInfo, seconds: float) -> Row:
        """Returns the fields of a round about its clients, its bytes and its simulated seconds.

        Args:
          row: of the round, with ``clients``.
          seconds: for which this machine has trained.
        """
        index, (planned, schedule, late, left, opening) = info.round_index, turn
        plan = info.plan
        found: Row = {"failed": schedule.failed(index)} if schedule.failure_rate else {}
        if lost := planned.client_steps.keys() - plan.client_steps.keys():
            found["failed"] = sorted({*found.get("failed", ()), *lost})
        if self.system.deadline is not None:
            found["late"] = [client for client, steps in late.items() if not steps]
        if self.system.late == "partial":
            found["partial"] = [client for client, steps in late.items() if steps]
        if schedule.draws or self.system.late == "partial" or plan.silent_slots.any():
            found["client_steps"] = list(plan.client_steps.values())
        if opening is not None:
            found["failed"] = sorted({*found.get("failed", ()), *left})
            found |= {"available": len(opening.among), "waited": opening.waited}
        if schedule.timelines is not None:
            before = schedule.aggregation(index - 1).time if index > 1 else 0.0
            return found | aggregation_row(schedule.aggregation(index), before, self.costs)
        shares = sent_shares(info)
        found |= self.costs.charge({**row, **found}, plan.client_steps, seconds, shares)
        if opening is not None:  # the server waits for a client until it is gone
            worked = max([found["simulated_seconds"], *left.values()])
            found["simulated_seconds"] = opening.waited + worked
        return found

    def recall(self, rows: Sequence[Row]) -> None:
        """Records rounds that were charged before a run was interrupted."""
        for row in rows:
            self.costs.ledger.record(row)

    def measure(self, start: Row) -> Measure:
        """Returns the measure of clients, bytes and simulated seconds.

        Args:
          start: its fields of row 0.
        """

        def measure(moment: Moment) -> Row:
            if "bytes_up" in moment.row:
                return {}
            if moment.info is None or moment.turn is None:
                self.costs.ledger.record({"round": 0})
                return start
            return self.charge(moment.turn, moment.row, moment.info, moment.seconds["train_s"])

        return measure
