"""``diagnostics=["local"]``: the clients' models between their local work and the aggregation."""

import time
from functools import partial

import jax
import numpy as np

from fedjax_peft.data.dataset import Dataset
from fedjax_peft.engine.calls import Calling
from fedjax_peft.engine.devices.distributed import seconds_since
from fedjax_peft.engine.evaluator import figures
from fedjax_peft.engine.session import Session
from fedjax_peft.engine.state import State
from fedjax_peft.engine.work import check_local_models
from fedjax_peft.simulation.moment import Moment
from fedjax_peft.simulation.progress import Phases
from fedjax_peft.simulation.records import Evaluation
from fedjax_peft.simulation.rows import Row, finite_or_none
from fedjax_peft.simulation.score_names import Score, worst
from fedjax_peft.support.errors import InputError


class LocalTest:
    """The measure of every participant's model before the aggregation, on the global test set."""

    def __init__(
        self, session: Session, state: State, test: Dataset | None, how: Evaluation, phases: Phases
    ):
        """Takes the parts of a run, and its state before the first round.

        Raises:
          InputError: there is no test set, or the clients' models are not known.
        """
        check_local_models(session.setup, state.server)
        if test is None:
            raise InputError('diagnostics=["local"] needs a test set: give test=...')
        self._session, self._test, self._how, self._phases = session, test, how, phases

    def __call__(self, moment: Moment) -> Calling[Row]:
        """Returns the ``local_...`` fields of the round that begins, if it is evaluated.

        A round that becomes the last one by a stop rule has none: the rule is asked when the state
        before the round is gone.

        Args:
          moment: its state is that before the round; it is not consumed.
        """
        state, turn = moment.state, moment.turn
        due = moment.last or self._how.due(moment.round_index + 1)
        if not due or turn is None or not turn.plan.useful:  # nobody takes part
            return {}
        plan, phases = turn.plan, self._phases
        began, session, task = time.perf_counter(), self._session, self._session.setup.task
        trained, finite = yield from session.training_locally(state, plan)
        rows = np.arange(len(self._test), dtype=np.int32)
        evaluator = session.evaluator(
            self._test.columns,
            [(slot, rows) for slot in range(len(plan.client))],
            self._how.batch_size,
            personal=True,
            cohort=plan.client,
        )
        if not evaluator.known(trained):
            phases.send("compiling", program="local")
        total = evaluator.examples
        part = partial(phases.evaluating, "local", total)
        measured = yield from evaluator.measuring(trained, part)
        row: Row = {}
        took_part = np.flatnonzero(plan.client >= 0)
        # A client that sends its noise alone has not trained.
        good = (jax.device_get(finite) & ~plan.silent_slots)[took_part]
        found = [figures(measured, slot, task, self._test) for slot in took_part.tolist()]
        for metric in found[0]:
            each = np.array([one[metric] for one in found], np.float64)
            each[~good] = np.nan
            row[Score("local", metric).name] = [finite_or_none(x) for x in each]
            if len(known := each[good]):
                low = worst(known, metric, task.lower_is_better)
                over = {"mean": known.mean(), "std": known.std(), "worst": low}
                row |= {Score("local", metric, n).name: finite_or_none(x) for n, x in over.items()}
        moment.seconds["local_s"] = seconds_since(began)
        return row
