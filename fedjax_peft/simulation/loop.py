"""The steps of ``simulate``: each round is run, charged, evaluated, recorded and saved."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from fedjax_peft.contracts import Federation
from fedjax_peft.engine.devices.distributed import agree, agree_on_signal, seconds_since
from fedjax_peft.engine.plan import Plan
from fedjax_peft.engine.schedule import Schedule
from fedjax_peft.engine.session import Session
from fedjax_peft.engine.state import State
from fedjax_peft.engine.stores.client_store import StoredClients
from fedjax_peft.models.base import Model
from fedjax_peft.simulation.asynchrony import aggregation_row
from fedjax_peft.simulation.cost import Costs
from fedjax_peft.simulation.evaluation import Evaluated, evaluate
from fedjax_peft.simulation.guarantee import Accounted
from fedjax_peft.simulation.interrupts import Request, end
from fedjax_peft.simulation.local_models import LocalTest
from fedjax_peft.simulation.opening import Opening, leaving, open_round
from fedjax_peft.simulation.progress import Phases
from fedjax_peft.simulation.records import Evaluation, System
from fedjax_peft.simulation.round_rows import round_row, sent_shares, skipped_leaves, start_row
from fedjax_peft.simulation.rows import (
    BY_CLASS,
    CLIENT_NAMES,
    Row,
    seen_clients,
    without_scores,
)
from fedjax_peft.simulation.run import learned_leaves
from fedjax_peft.simulation.stopping import Stop
from fedjax_peft.simulation.storage.checkpoint import saved_parts, with_saved_parts
from fedjax_peft.simulation.storage.client_checkpoints import ClientCheckpoints, index_template
from fedjax_peft.simulation.storage.record import Record
from fedjax_peft.support.errors import InputError


@dataclass(kw_only=True)
class Loop:
    """The rounds of one run. Methods take and return the state, and add rows to the record."""

    session: Session
    """Runs the rounds."""
    model: Model
    """The model before training."""
    tested: dict[str, Evaluated]
    """The evaluations by name."""
    costs: Costs
    """Counts bytes and simulated seconds."""
    record: Record
    """Takes the rows and the checkpoints."""
    phases: Phases
    """Receives the events of the run."""
    request: Request
    """Notes the signals that ask the run to end."""
    stop: Stop | None
    """The rule that ends the run, with the warnings that it needs under privacy."""
    rounds: int
    system: System
    evaluation: Evaluation
    checkpoint_every: int
    local: LocalTest | None = None
    """Tests the clients' models before the aggregation in evaluated rounds."""
    private: Accounted | None = None
    """Accounts for the mechanism of differential privacy."""
    wrapped_for: Federation | None = None
    """The facts that a mechanism of differential privacy or an attack depends on; recorded, so that
    the algorithm of the run can be made again."""
    notes: Sequence[str] = ()
    """Sentences on what was done to the data, for row 0."""
    client_names: Sequence[str] = ()
    """Names of the clients, for row 0."""

    def __post_init__(self) -> None:
        self.algorithm = self.session.setup.algorithm
        host = self.session.client_place == "host"
        self.clients = ClientCheckpoints(self.record.out, host=host)
        self.each = "clients" in self.evaluation.diagnostics
        lower = (self.session.setup.task.lower_is_better, self.algorithm.lower_is_better)
        self.lower = (*lower[0], *lower[1], "update_norm")
        self.by_class: Row = {}  # of the newest evaluation

    def restore(self, state: State) -> State | None:
        """Returns the state of the last checkpoint, None if there is none; drops later rows.

        Args:
          state: the state before the first round, which gives the structure and the shapes.
        """
        saved, rows, checkpoints = None, self.record.rows, self.record.checkpoints
        template = index_template(self.session.trimmed(state))
        if checkpoints:
            last = rows[-1]["round"] if rows else -1
            saved = checkpoints.restore(saved_parts(template), last)
        self.record.rewind(saved[0] if saved else None)
        if saved is None:
            return None
        restored = with_saved_parts(template, saved[1])
        if isinstance(state.client_state, StoredClients):
            assert checkpoints is not None
            parts = checkpoints.readable(saved_parts(template)) | {saved[0]: saved[1]}
            indices = {index: with_saved_parts(template, one) for index, one in parts.items()}
            restored = self.clients.resume(state, indices, saved[0])
        return self.session.placed(restored)._replace(round_index=saved[0])

    def start(self, state: State, seconds: float, origin: Row) -> str | None:
        """Evaluates and records the initial model; returns why the run ends, None if it goes on.

        Args:
          seconds: simulated seconds before the first round.
          origin: the field of row 0 about the run that this one starts from; empty without one.
            Its states are in a checkpoint at once, because only the directory of this run has them.
        """
        began = time.perf_counter()
        # `Algorithm.init_client_state` knows no client, so that all have the same state.
        seen, equal = seen_clients([origin]), not origin
        scores = evaluate(
            self.tested, state, each=self.each, seen=seen, equal=equal, phases=self.phases
        )
        row = start_row(self.model, self.algorithm, self._scored(scores), seconds) | origin
        if self.private is not None:
            row |= {**self.private.fields(0), **self.private.start()}
        if self.wrapped_for is not None:
            row["federation"] = self.wrapped_for._asdict()
        row |= {"notes": [*self.notes]} if self.notes else {}
        row |= {CLIENT_NAMES: [*self.client_names]} if self.client_names else {}
        row["time"] = {"eval_s": seconds_since(began)}
        stopped = _asked(self.record.add(row))
        self.costs.ledger.record(row)
        if stopped:
            self.record.amend({**row, **self.by_class, "stopped": stopped})
        self._pause(state, due=bool(stopped or origin))
        return stopped

    def resume(self) -> str | None:
        """Charges the recorded rounds; returns why the run has ended, None if it goes on.

        If it goes on, its rows are then those of a run that was never interrupted.
        """
        for row in self.record.rows:
            self.costs.ledger.record(row)
        if self.record.rows[-1]["round"] >= self.rounds:
            return None
        rows = self._scheduled(self.record.rows)
        stopped = self._met(rows)
        if not stopped:
            self.record.replace(rows)
        return stopped

    def _scheduled(self, rows: Sequence[Row]) -> list[Row]:
        """Returns the rows without what they have because the run ended or was stopped there.

        A stop rule would count the scores of an evaluation that the schedule does not have.
        """
        found = []
        for row in rows:
            if row is rows[-1] or "stopped" in row:
                row = row if row["round"] % self.evaluation.every == 0 else without_scores(row)
                ended = ("stopped", BY_CLASS, *(name for name in row if name.startswith("tuned_")))
                row = {name: row[name] for name in row if name not in ended}
            found.append(row)
        return found

    def round(self, state: State) -> tuple[State, str | None]:
        """Runs, evaluates and records the next round, and saves a checkpoint if one is due.

        Returns the state after the round, and why the run ends after it, None if it goes on.
        """
        index = state.round_index + 1
        last, measured = index == self.rounds, self._local(state)
        state, row = self._train(state)
        row |= {**measured, "time": row["time"] | measured.get("time", {})}
        row |= self._scores(state, row, last=last)
        stopped = None if last else self._met([*self.record.rows, row])
        if stopped:
            row |= {**self._scores(state, row, last=True), "stopped": stopped}
        spent = (row["time"].get(part, 0.0) for part in ("train_s", "eval_s", "local_s"))
        self.phases.took(sum(spent))
        asked = _asked(self.record.add(row))
        if asked and not stopped and not last:
            stopped = asked
            scores = self._scores(state, row, last=True)
            self.record.amend({**row, **scores, "stopped": stopped})
        self._pause(state, due=bool(stopped or last or index % self.checkpoint_every == 0))
        return state, stopped

    def _pause(self, state: State, *, due: bool) -> None:
        """Saves a checkpoint after a row if one is due, or if a signal asks the run to end.

        The row stays that of an uninterrupted run: a signal is no rule that stops a run.

        Raises:
          KeyboardInterrupt: Ctrl-C, in this process or another one of the run.
          Terminated: SIGTERM, likewise.
        """
        number = agree_on_signal(self.request.number)
        if due or number:
            self.save(state)
        if number:
            end(number)

    def save(self, state: State) -> None:
        """Writes a checkpoint if there is a run directory."""
        if self.record.checkpoints:
            self.phases.send("saving")
            leaves = learned_leaves(self.model, self.algorithm, state.server)
            self.record.save_params(leaves, self.model.labels)
            # The row is written before the checkpoint: a resumed run repeats the rounds after it.
            parts = saved_parts(self.clients.write(self.session.trimmed(state)))
            self.record.checkpoints.save(state.round_index, parts)
            self.clients.keep(self.record.checkpoints.rounds)

    def skipped_leaves(self, state: State, round_index: int) -> list[str]:
        """Returns the leaves that clients do not send in a round."""
        broadcast = self.algorithm.server.broadcast(state.server)
        return skipped_leaves(self.algorithm.traffic.sent_leaves(broadcast, jnp.int32(round_index)))

    def late_steps(self, state: State, round_index: int) -> dict[int, int]:
        """Returns the late clients of the next round, with the local steps that they still send.

        A client that sends nothing has 0 steps.
        """
        return self._absent(state, round_index, self._opening(state))[0]

    def _absent(
        self, state: State, round_index: int, opening: Opening | None
    ) -> tuple[dict[int, int], dict[int, float]]:
        """Returns the late clients (:meth:`late_steps`), and when others leave during the round."""
        if self.system.deadline is None and opening is None:
            return {}, {}
        schedule, skipped = self._schedule(state, opening), self.skipped_leaves(state, round_index)
        steps, left = schedule.client_steps(round_index), dict[int, float]()
        late = self.costs.late(steps, skipped)
        if self.system.late == "drop":
            late = dict.fromkeys(late, 0)
        if opening is not None:  # who sends a part ends earlier, perhaps before it leaves
            done = {**steps, **{client: n for client, n in late.items() if n}}
            left = leaving(opening, self.costs.finish_seconds(done, skipped))
            late = {client: n for client, n in late.items() if client not in left}
        return late, left

    def _schedule(self, state: State, opening: Opening | None) -> Schedule:
        """Returns the schedule of a round with this opening."""
        schedule = self.session.schedule(int(state.seed))
        return schedule._replace(among=None if opening is None else opening.among)

    def _opening(self, state: State) -> Opening | None:
        """Returns the opening of the next round; None if all clients are always available."""
        availability = self.system.availability
        asynchronous = self.session.schedule(int(state.seed)).timelines is not None
        if availability is None or asynchronous:
            return None
        indices = self.session.schedule(int(state.seed)).indices
        clients = np.array([client for client, rows in enumerate(indices) if len(rows)])
        now = sum(row["simulated_seconds"] for row in self.record.rows)
        return open_round(availability, int(state.seed), clients, now)

    def _plan(
        self, state: State, round_index: int
    ) -> tuple[Plan, Mapping[int, int], dict[int, float], Opening | None]:
        """Returns the plan of a round, the clients of :meth:`_absent`, and the opening."""
        index, seed, opening = min(round_index, self.rounds), int(state.seed), self._opening(state)
        late, left = self._absent(state, index, opening)
        without = [*left, *(client for client, steps in late.items() if not steps)]
        among = None if opening is None else opening.among
        return self.session.plan(index, seed, without, late, among), late, left, opening

    def _train(self, state: State) -> tuple[State, Row]:
        """Returns the state after another round, and its row without scores."""
        session, index = self.session, state.round_index + 1
        plan, late, left, opening = self._plan(state, index)
        if not session.known(state, plan):
            self.phases.send("compiling", index, program="round")
        self.phases.send("training", index)
        began, compiled = time.perf_counter(), session.compile_seconds
        state, info = session.step(state, plan)
        if self.system.deadline is None and opening is None:
            # The next plan is made while the device computes, and the session caches it. This is
            # not possible with a deadline or an availability:
            # the clients of the next round depend on the costs of this round.
            self._plan(state, index + 1)
        row = round_row(info, each=self.each, lower=self.lower)
        share = session.padding_share(plan, state.seed) if plan.useful else None
        row |= {} if share is None else {"padding_share": share}
        row |= {} if self.private is None else self.private.fields(index)
        schedule = self._schedule(state, opening)
        row |= self._work_fields(schedule, plan, index, late)
        if opening is not None:
            row["failed"] = sorted({*row.get("failed", ()), *left})
            row |= {"available": len(opening.among), "waited": opening.waited}
        compiled = agree(session.compile_seconds - compiled)
        spent = {"train_s": seconds_since(began) - compiled}
        spent |= {"compile_s": compiled} if compiled else {}
        if self.system.nonfinite == "raise" and row["dropped"]:
            raise InputError(
                f"In round {index} the uploads of the clients {row['dropped']} were not finite."
            )
        if schedule.timelines is not None:
            before = schedule.aggregation(index - 1).time if index > 1 else 0.0
            row |= aggregation_row(schedule.aggregation(index), before, self.costs)
        else:
            shares = sent_shares(info)
            row |= self.costs.charge(row, plan.client_steps, spent["train_s"], shares)
        if opening is not None:  # the server waits for a client until it is gone
            worked = max([row["simulated_seconds"], *left.values()])
            row["simulated_seconds"] = opening.waited + worked
        return state, {**row, "time": spent}

    def _work_fields(
        self, schedule: Schedule, plan: Plan, index: int, late: Mapping[int, int]
    ) -> Row:
        """Returns the fields of a row about clients that fail, are late or have drawn their work.

        Args:
          late: the late clients, with the steps that they send.
        """
        row: Row = {"failed": schedule.failed(index)} if schedule.failure_rate else {}
        if self.system.deadline is not None:
            row["late"] = [client for client, steps in late.items() if not steps]
        if self.system.late == "partial":
            row["partial"] = [client for client, steps in late.items() if steps]
        if schedule.draws or self.system.late == "partial":
            row["client_steps"] = list(plan.client_steps.values())
        return row

    def _local(self, state: State) -> Row:
        """Returns the fields of ``diagnostics=["local"]`` for the next round, if it is evaluated.

        A round that becomes the last one by a stop rule has none: the rule is asked when the state
        before the round is gone.
        """
        index = state.round_index + 1
        if self.local is None or (index != self.rounds and index % self.evaluation.every):
            return {}
        return self.local(state, self._plan(state, index)[0], self.phases)

    def _scores(self, state: State, row: Row, *, last: bool) -> Row:
        """Returns the scores that a round's row still lacks, and its updated ``time``."""
        scores: Row = {}
        spent = dict(row["time"])
        if "eval_s" not in spent and (last or state.round_index % self.evaluation.every == 0):
            began = time.perf_counter()
            if self.tested:
                seen = seen_clients([*self.record.rows[: state.round_index], row])
                how: dict[str, Any] = {"each": self.each, "phases": self.phases}
                scores |= self._scored(evaluate(self.tested, state, seen=seen, **how))
            spent["eval_s"] = seconds_since(began)
        scores |= self.by_class if last else {}
        if last and self.tested and self.algorithm.tuning is not None:
            began = time.perf_counter()
            tuned = evaluate(self.tested, self.session.tune(state), each=False, phases=self.phases)
            kinds = ("test_", "validation_", "client_")
            scores |= {
                f"tuned_{name}": value
                for name, value in tuned.items()
                if name.startswith(kinds) and isinstance(value, float)
            }
            spent["tune_s"] = seconds_since(began)
        return {**scores, "time": spent}

    def _scored(self, scores: Row) -> Row:
        """Returns scores without those by class, which only a run's last row has."""
        self.by_class = {name: value for name, value in scores.items() if name == BY_CLASS}
        return {name: value for name, value in scores.items() if name != BY_CLASS}

    def _met(self, rows: Sequence[Row]) -> str | None:
        """Returns why the stop rule ends the run after these rows, None if it does not."""
        answer = None if self.stop is None else self.stop(rows)
        if answer and not isinstance(answer, str):
            answer = "the stop rule was met"
        return agree(answer or None)


def _asked(answer: Any) -> str | None:
    """Returns why ``on_round`` ends the run, None if it does not."""
    asked = isinstance(answer, bool | np.bool_) and bool(answer)
    return agree("on_round returned True" if asked else None)
