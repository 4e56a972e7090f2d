"""``diagnostics=["local"]``: the clients' models between their local work and the aggregation."""

import time

import jax
import numpy as np

from fedjax_peft.data.dataset import Dataset
from fedjax_peft.engine.devices.distributed import seconds_since
from fedjax_peft.engine.evaluator import figures
from fedjax_peft.engine.plan import Plan
from fedjax_peft.engine.session import Session
from fedjax_peft.engine.state import State
from fedjax_peft.engine.work import check_local_models
from fedjax_peft.simulation.evaluation import worst
from fedjax_peft.simulation.progress import Phases
from fedjax_peft.simulation.rows import Row, finite_or_none
from fedjax_peft.support.errors import InputError


class LocalTest:
    """The test of every participant's model before the aggregation, on the global test set."""

    def __init__(self, session: Session, state: State, test: Dataset | None, batch_size: int):
        """Takes the parts of a run, and its state before the first round.

        Raises:
          InputError: there is no test set, or the clients' models are not known.
        """
        check_local_models(session.setup, state.server)
        if test is None:
            raise InputError('diagnostics=["local"] needs a test set: give test=...')
        self._session, self._test, self._batch_size = session, test, batch_size

    def __call__(self, state: State, plan: Plan, phases: Phases) -> Row:
        """Returns the ``local_...`` fields of the next round, with ``local_s`` in ``time``.

        Args:
          state: the state before the round; it is not consumed.
        """
        if not plan.useful:  # nobody takes part
            return {}
        began, session, task = time.perf_counter(), self._session, self._session.setup.task
        trained, finite = session.train_locally(state, plan)
        rows = np.arange(len(self._test), dtype=np.int32)
        evaluator = session.evaluator(
            self._test.columns,
            [(slot, rows) for slot in range(len(plan.client))],
            self._batch_size,
            personal=True,
            cohort=plan.client,
        )
        if not evaluator.known(trained):
            phases.send("compiling", program="local")
        total = evaluator.examples
        measured = evaluator(trained, lambda done: phases.evaluating("local", total, done))
        row: Row = {}
        good = jax.device_get(finite)
        took_part = np.flatnonzero(plan.client >= 0)
        found = [figures(measured, slot, task, self._test) for slot in took_part.tolist()]
        for metric in found[0]:
            each = np.array([one[metric] for one in found], np.float64)
            each[~good[took_part]] = np.nan
            row[f"local_{metric}"] = [finite_or_none(x) for x in each]
            if len(known := each[good[took_part]]):
                row[f"local_{metric}_mean"] = finite_or_none(known.mean())
                row[f"local_{metric}_std"] = finite_or_none(known.std())
                row[f"local_{metric}_worst"] = finite_or_none(
                    worst(known, metric, task.lower_is_better)
                )
        return {**row, "time": {"local_s": seconds_since(began)}}
