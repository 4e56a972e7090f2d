"""The evaluations of a run: their data sets, and the metrics that they give."""

import functools
import operator
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from fedjax_peft.contracts import Task
from fedjax_peft.data.dataset import Dataset
from fedjax_peft.engine.calls import Calling
from fedjax_peft.engine.devices.distributed import seconds_since
from fedjax_peft.engine.evaluator import Evaluator, Measured, figures, joined, repeated
from fedjax_peft.engine.session import Session
from fedjax_peft.engine.state import State
from fedjax_peft.numerics.random import host_rng
from fedjax_peft.simulation.moment import Moment
from fedjax_peft.simulation.progress import Phases
from fedjax_peft.simulation.records import Evaluation
from fedjax_peft.simulation.rows import BY_CLASS, Row, finite_or_none, seen_clients
from fedjax_peft.simulation.score_names import (
    BACKDOOR_SUCCESS,
    Score,
    is_global,
    is_lower_better,
    worst,
    worst_tenth,
)
from fedjax_peft.support.errors import InputError
from fedjax_peft.tasks.by_class import ByClass


class Evaluated(NamedTuple):
    """One evaluation: its data set, and whose models and examples its members have."""

    evaluator: Evaluator
    task: Task
    data: Dataset
    personal: bool
    """Whether each member has a model of its own."""
    own: bool
    """Whether each member has examples of its own."""
    backdoor: bool = False
    """Whether the examples have a trigger, and the accuracy is the success of a backdoor."""
    first: Evaluator | None = None
    """Evaluates the first member only, with the same program; None if members of equal models
    differ, in their examples or their ranks."""


def evaluations(
    session: Session,
    test: Dataset | None,
    validation: Dataset | None,
    how: Evaluation,
    *,
    triggered: Callable[[Dataset], Dataset] | None,
    seed: int,
) -> dict[str, Evaluated]:
    """Returns the evaluations by name; the name is the prefix of their metrics.

    ``test``: the global model on the test set. If clients have personal models, ``test`` is instead
    the average over the models of some clients, and ``global_test`` is the global model, if there
    is one, on the test set. ``client``: every client's model on its own examples. ``validation``,
    ``global_validation`` and ``client_validation`` are the same on the validation examples.
    ``test_backdoor`` and ``global_test_backdoor`` are the models of ``test`` and ``global_test`` on
    test examples with the trigger of a backdoor.

    Args:
      triggered: ``Attack.triggered``: test set -> the examples that test a backdoor.
      how: has the clients' own examples, ``test_clients`` and ``batch_size``.
      seed: the seed for the choice of these clients.
    """
    found: dict[str, Evaluated] = {}

    def add(name: str, data: Dataset, members: list, *, personal: bool, own: bool = False) -> None:
        backdoor = name.endswith(_BACKDOOR)
        twin = name.removesuffix("_validation") if own else name.replace("validation", "test")
        twin = twin.removesuffix(_BACKDOOR)
        # With the same shapes, if they fit.
        template = found[twin].evaluator if twin in found else None
        evaluator = session.evaluator(
            data.columns, members, how.batch_size, personal=personal, template=template
        )
        first = None
        if personal and not own and not session.setup.rank_mask:
            first = session.evaluator(
                data.columns, members[:1], how.batch_size, personal=True, template=evaluator
            )
        found[name] = Evaluated(evaluator, session.setup.task, data, personal, own, backdoor, first)

    backdoored = None if triggered is None or test is None else triggered(test)
    splits = {"test": test, "test_backdoor": backdoored, "validation": validation}
    for split, data in splits.items():
        if data is None:
            continue
        if session.personal:
            rows = np.arange(len(data), dtype=np.int32)
            order = host_rng(seed, "test clients").permutation(session.setup.clients)
            chosen = sorted(order[: how.test_clients].tolist())
            add(split, data, [(c, rows) for c in chosen], personal=True)
        if session.has_global_model:
            name = f"global_{split}" if session.personal else split
            add(name, data, session.global_members(len(data)), personal=False)
    own = {"client": how.client_test, "client_validation": how.client_validation}
    for name, clients in own.items():
        if clients is not None:
            owners = [(c, rows) for c, rows in enumerate(clients.indices) if len(rows)]
            add(name, clients.data, owners, personal=True, own=True)
    return found


@dataclass
class Scores:
    """The measure of a run's evaluations, in the rounds that have one and in the last."""

    session: Session
    evaluated: Mapping[str, Evaluated]
    how: Evaluation
    phases: Phases
    _seen: set[int] = field(default_factory=set)
    """The clients that have trained in the first ``_read`` rows."""
    _read: int = 0

    def __call__(self, moment: Moment) -> Calling[Row]:
        """Returns the scores that a row still lacks."""
        found: Row = {}
        if "eval_s" not in moment.seconds and (moment.last or self.how.due(moment.round_index)):
            began = time.perf_counter()
            if any(one.personal for one in self.evaluated.values()):
                rows = [*moment.rows[self._read :], moment.row]
                self._seen |= seen_clients(rows)
                self._read += len(rows)
            # `Algorithm.init_client_state` knows no client, so that all begin with the same state.
            equal = moment.info is None and "origin" not in moment.row
            each = "clients" in self.how.diagnostics
            how: dict[str, Any] = {"each": each, "seen": self._seen, "equal": equal}
            if self.evaluated or moment.info is None:
                found = yield from evaluate(self.evaluated, moment.state, self.phases, **how)
            moment.by_class = {BY_CLASS: found.pop(BY_CLASS)} if BY_CLASS in found else {}
            moment.seconds["eval_s"] = seconds_since(began)
        return (
            found if not moment.last else found | moment.by_class | (yield from self._tuned(moment))
        )

    @property
    def examples(self) -> dict[str, int]:
        """Name of an evaluation -> its examples, each counted once for every model."""
        return {name: one.evaluator.examples for name, one in self.evaluated.items()}

    def _tuned(self, moment: Moment) -> Calling[Row]:
        """Returns the scores after every client has tuned the last model."""
        tunes = self.session.setup.algorithm.tuning is not None
        if not (self.evaluated and tunes) or moment.info is None or "tune_s" in moment.seconds:
            return {}
        began = time.perf_counter()
        state = yield from self.session.tuning(moment.state)
        tuned = yield from evaluate(self.evaluated, state, self.phases, each=False)
        moment.seconds["tune_s"] = seconds_since(began)
        scores = ((Score.read(name), x) for name, x in tuned.items() if isinstance(x, float))
        return {
            score._replace(tuned=True).name: x
            for score, x in scores
            if score is not None and not is_global(score.name)
        }


def evaluate(
    evaluations: Mapping[str, Evaluated],
    state: State,
    phases: Phases,
    *,
    each: bool,
    seen: Collection[int] = (),
    equal: bool = False,
) -> Calling[Row]:
    """Returns the metrics of the test and validation sets and of the clients' own examples.

    The fields are described in :mod:`fedjax_peft.simulation.rows`.

    Args:
      state: holds the models; it is not consumed.
      each: also return the metrics of every client, as ``client_tests`` and
        ``client_validations``.
      seen: the clients that have trained so far; the other clients have their initial models.
      equal: whether all clients still have the same state. On a common test set, one of their
        models is then evaluated for all.
    """
    row = _words(evaluations)
    for name, (whole, task, data, personal, has_own, backdoor, first) in evaluations.items():
        evaluator = whole if first is None or not equal else first
        row["headline"] = task.headline
        lower = is_lower_better(task.headline, task.lower_is_better)
        row["headline_better"] = "lower" if lower else "higher"
        if not evaluator.known(state):
            phases.send("compiling", program=name)
        on_part = partial(phases.evaluating, name, evaluator.examples)
        on_part(0)
        measured = yield from evaluator.measuring(state, on_part)
        if not personal:  # the members are parts of one evaluation
            measured = joined(measured)
        elif evaluator is first:
            measured = repeated(measured, whole.plan.client.tolist())
        if backdoor:
            measured, name = _success(measured), name.removesuffix(_BACKDOOR)
        members = [  # members with something to measure: a text of one token has no next token
            m for m in range(len(measured.examples)) if any(n[m] for _, n in measured.sums.values())
        ]
        found = [figures(measured, member, task, data) for member in members]
        sizes = np.array([_units(data, measured.examples[m]) for m in members], np.float64)
        clients = [measured.clients[m] for m in members]
        groups = _groups(clients, seen) if personal else {"": np.ones(len(members), bool)}
        if backdoor:
            found = [{BACKDOOR_SUCCESS: one[BACKDOOR_SUCCESS]} for one in found]
        elif personal:
            row |= {Score(name, "count", "", x).name: int(own.sum()) for x, own in groups.items()}
        # Several models see the same test set, but every client has a test of its own.
        if not backdoor:
            units = int(sizes.sum() if has_own else sizes.max(initial=0))
            row[Score(name, "examples").name] = units
        for metric in found[0] if found else ():
            values = np.array([one[metric] for one in found], np.float64)
            for group, own in groups.items():
                if not own.any():
                    continue
                if has_own:
                    row |= {
                        Score(name, metric, kind, group).name: finite_or_none(x)
                        for kind, x in _spread(values[own], sizes[own], metric, task).items()
                    }
                    continue
                pair = measured.sums.get(metric)  # a mean over examples: pool all examples
                total, count = (x[members][own].sum() for x in pair) if pair else (0.0, 0.0)
                joint = total / count if pair else values[own].mean()
                row[Score(name, metric, group=group).name] = finite_or_none(joint)
            if personal and not has_own:
                row[Score(name, metric, "std").name] = finite_or_none(values.std())
        if name in _BY_CLASS and (counts := _by_class(measured, members, task, data)):
            row.setdefault(BY_CLASS, {})[name] = counts.record()
        if has_own and each:
            names = found[0] if found else ()
            row[_EACH[name]] = {"client": clients} | {
                metric: [finite_or_none(one[metric]) for one in found] for metric in names
            }
    return row


def _words(evaluations: Mapping[str, Evaluated]) -> Row:
    """Returns the field ``tokenizer``: how scores of texts find words, if any do."""
    asked = [(getattr(one.task, "words", None), one.data) for one in evaluations.values()]
    rules = [rule for words, data in asked if words and (rule := words(data))]
    return {"tokenizer": next((x for x in rules if x == "unicode"), rules[0])} if rules else {}


_BACKDOOR = "_backdoor"
"""The end of the names of evaluations on examples with a trigger."""


def _success(measured: Measured) -> Measured:
    """Returns measurements on examples with a trigger, whose accuracy is a backdoor's success.

    Raises:
      InputError: the task measures no accuracy.
    """
    if "accuracy" not in measured.sums:
        raise InputError(
            "The success of a backdoor is the accuracy on examples with its trigger, and this task"
            f" measures {', '.join(measured.sums)}. Give it a metric 'accuracy'."
        )
    return measured._replace(sums={BACKDOOR_SUCCESS: measured.sums["accuracy"]})


_EACH = {"client": "client_tests", "client_validation": "client_validations"}
"""Evaluation of clients on their own examples -> the field with the values of every client."""


_BY_CLASS = ("test", "global_test", "client")
"""The evaluations with scores by class. Validation is for choosing by one number."""


def _by_class(
    measured: Measured, members: Sequence[int], task: Task, data: Dataset
) -> ByClass | None:
    """Returns the counts of each class, summed over members; None for a task without classes."""
    count = getattr(task, "by_class", None)
    if count is None or not members:
        return None
    found = (count(measured.predictions[m], data.take(measured.examples[m])) for m in members)
    return functools.reduce(operator.add, found)


def _groups(clients: Sequence[int], seen: Collection[int]) -> dict[str, np.ndarray]:
    """Returns which clients are in each group, bool ``[clients]``, by its name; all are ``""``."""
    trained = np.isin(clients, list(seen))
    return {"": np.ones(len(clients), bool), "seen": trained, "unseen": ~trained}


def _spread(
    values: np.ndarray, sizes: np.ndarray, metric: str, task: Task
) -> dict[str, float | np.floating]:
    """Returns statistics of one metric over clients, whose tests have ``sizes`` examples."""
    lower = is_lower_better(metric, task.lower_is_better)
    return {
        "mean": values.mean(),
        "weighted": np.average(values, weights=sizes),
        "std": values.std(),
        "worst": worst(values, metric, task.lower_is_better),
        "worst_tenth": worst_tenth(values.tolist(), lower=lower),
    }


def _units(data: Dataset, rows: np.ndarray) -> int:
    """Returns the number of examples; all windows of one question or text count as one."""
    return len(np.unique(data.meta["unit"][rows])) if "unit" in data.meta else len(rows)
