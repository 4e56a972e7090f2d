"""The checkpoints of a run: where its rounds begin again, and where they are saved."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedjax_peft.engine.devices.distributed import agree_on_signal
from fedjax_peft.engine.session import Session
from fedjax_peft.engine.state import State
from fedjax_peft.engine.stores.client_store import StoredClients
from fedjax_peft.models.base import Model
from fedjax_peft.simulation.interrupts import Request, end
from fedjax_peft.simulation.moment import Moment
from fedjax_peft.simulation.progress import Phases
from fedjax_peft.simulation.rows import Row, without_end, without_scores
from fedjax_peft.simulation.run import learned_leaves
from fedjax_peft.simulation.storage.checkpoint import saved_parts, with_saved_parts
from fedjax_peft.simulation.storage.client_checkpoints import ClientCheckpoints, index_template
from fedjax_peft.simulation.storage.record import Record
from fedjax_peft.support.nested import flatten


@dataclass
class Saver:
    """Saves and restores the states of one run; without a run directory, it only hears signals."""

    session: Session
    model: Model
    """The model before training."""
    record: Record
    phases: Phases
    request: Request
    """Notes the signals that ask the run to end."""
    every: int
    """Rounds between checkpoints."""

    def __post_init__(self) -> None:
        host = self.session.client_place == "host"
        self.clients = ClientCheckpoints(self.record.out, host=host)

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

    def pause(self, moment: Moment, *, due: bool) -> None:
        """Saves a checkpoint if one is due, or if a signal asks the run to end.

        The row stays that of an uninterrupted run: a signal is no rule that stops a run.

        Raises:
          KeyboardInterrupt: Ctrl-C, in this process or another one of the run.
          Terminated: SIGTERM, likewise.
        """
        index, number = moment.round_index, agree_on_signal(self.request.number)
        if due or number or moment.last or (index and index % self.every == 0):
            self._save(moment.state)
        if number:
            end(number)

    def _save(self, state: State) -> None:
        if self.record.checkpoints:
            self.phases.send("saving")
            algorithm = self.session.setup.algorithm
            leaves = learned_leaves(self.model, algorithm, state.server)
            self.record.save_params(leaves, self.model.labels)
            # The row is written before the checkpoint: a resumed run repeats the rounds after it.
            parts = saved_parts(self.clients.write(self.session.trimmed(state)))
            self.record.checkpoints.save(state.round_index, parts)
            self.clients.keep(self.record.checkpoints.rounds)


def going_on(
    rows: Sequence[Row], due: Callable[[int], bool], before: Mapping[str, Any]
) -> list[Row]:
    """Returns the rows of a run that goes on as those of a run that was never interrupted.

    They lose what they have because the run ended or was stopped there: a stop rule would count the
    scores of an evaluation that the schedule does not have.

    Args:
      due: round -> whether it has an evaluation.
      before: the config of the run before it was resumed. Rounds that were due by it keep theirs.
    """
    found, every = [], flatten(before).get("evaluation.every")
    for row in rows:
        if row is rows[-1] or "stopped" in row:
            was_due = type(every) is int and every > 0 and row["round"] % every == 0
            row = without_end(row if was_due or due(row["round"]) else without_scores(row))
        found.append(row)
    return found
