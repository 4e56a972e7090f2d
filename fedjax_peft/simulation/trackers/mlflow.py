"""MLflow."""

import math
import re
import threading
import time
from collections.abc import Sequence
from typing import Any

from fedjax_peft.contracts.part import part
from fedjax_peft.simulation.rows import Row
from fedjax_peft.simulation.trackers.base import (
    TrackedRun,
    Tracker,
    needs,
    scalars,
    tag,
    taken_back,
)
from fedjax_peft.support.nested import flatten

_ID, _GROUP = "fedjax_peft.id", "fedjax_peft.group"
_BATCH = 100
"""Parameters that MLflow takes in one call."""
_LONGEST = 500
"""Letters of a parameter's value; earlier servers take no more."""
_REFUSED = re.compile(r"[^\w./ -]")
"""Characters that MLflow takes in no name of a parameter or a metric, on Windows ``:`` neither."""
_making = threading.Lock()
"""Trackers, which are threads, make one experiment and one parent."""


@part
def mlflow(*, experiment: str = "fedjax_peft", tracking_uri: str | None = None) -> Tracker:
    """MLflow: a run for each run, with its settings as parameters; a sweep is a parent run.

    The steps are the rounds. A resumed run continues the same MLflow run.

    Args:
      experiment: name of the experiment, which is made if there is none.
      tracking_uri: the server's address, or ``sqlite:///FILE``; by default the environment's
        ``MLFLOW_TRACKING_URI``, or else MLflow's own default.

    Raises:
      InputError: the package ``mlflow`` is missing.
    """
    needs("mlflow", "mlflow")

    def take(row: Row, run: TrackedRun, /) -> None:
        remote = run.opened(lambda: _Remote(run, experiment, tracking_uri), _Remote.close)
        lost = dict.fromkeys(map(tag, taken_back(row)), math.nan)
        remote.add(scalars(row) | lost, row["round"])

    return take


class _Remote:
    """A run of MLflow."""

    def __init__(self, run: TrackedRun, experiment: str, tracking_uri: str | None):
        from mlflow import MlflowClient

        self._run, self._client = run, MlflowClient(tracking_uri)
        self._known: dict[tuple[str, int], float] = {}
        with _making:
            self._experiment = self._experiment_of(experiment)
            self._id, new = self._run_of({_ID: run.id}, run.name, parent=self._parent())
        if new:
            self._log_settings()
        else:
            self._client.update_run(self._id, status="RUNNING")
            for name in self._client.get_run(self._id).data.metrics:
                history = self._client.get_metric_history(self._id, name)
                history = sorted(history, key=lambda metric: metric.timestamp)  # the last counts
                self._known |= {(name, metric.step): metric.value for metric in history}

    def _experiment_of(self, name: str) -> str:
        found = self._client.get_experiment_by_name(name)
        return self._client.create_experiment(name) if found is None else found.experiment_id

    def _parent(self) -> str | None:
        """Returns the id of the run that stands for the sweep, None outside of one."""
        if self._run.group is None:
            return None
        group = re.sub("[\"'`]", "_", self._run.group)  # which would end a query's text
        parent, new = self._run_of({_GROUP: group}, self._run.group, parent=None)
        if new:
            self._client.set_terminated(parent)
        return parent

    def _run_of(self, tags: dict[str, str], name: str, parent: str | None) -> tuple[str, bool]:
        """Returns the id of the run with these tags, and whether it was made now."""
        asked = " and ".join(f"tags.`{key}` = '{value}'" for key, value in tags.items())
        for found in self._client.search_runs([self._experiment], asked, max_results=1):
            return found.info.run_id, False
        over = {} if parent is None else {"mlflow.parentRunId": parent}
        made = self._client.create_run(self._experiment, tags={**tags, **over}, run_name=name)
        return made.info.run_id, True

    def _log_settings(self) -> None:
        from mlflow.entities import Param

        settings = flatten(self._run.config).items()
        given = [
            Param(_REFUSED.sub("_", key), str(value)[:_LONGEST])
            for key, value in settings
            if value is not None
        ]
        for some in _batches(given):
            self._client.log_batch(self._id, params=some)

    def add(self, numbers: dict[str, float], step: int) -> None:
        """Logs the numbers of a round, without those that MLflow has.

        A number that is taken back is NaN: MLflow removes no value.
        """
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        named = {_REFUSED.sub("_", name): x for name, x in numbers.items()}
        new = {name: x for name, x in named.items() if self._is_new(name, step, x)}
        self._known |= {(name, step): x for name, x in new.items()}
        for some in _batches([Metric(name, x, now, step) for name, x in new.items()]):
            self._client.log_batch(self._id, metrics=some)

    def _is_new(self, name: str, step: int, value: float) -> bool:
        """Returns whether MLflow lacks a number; a repeated round has other times, not sent."""
        known = self._known.get((name, step), math.nan)
        if math.isnan(value) or name.startswith("time/"):
            return math.isnan(known) != math.isnan(value)
        return known != value

    def close(self) -> None:
        """Marks the run as finished, or as killed."""
        self._client.set_terminated(self._id, "FINISHED" if self._run.ended else "KILLED")


def _batches(items: Sequence[Any]) -> list[Sequence[Any]]:
    return [items[i : i + _BATCH] for i in range(0, len(items), _BATCH)]
