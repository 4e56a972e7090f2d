"""``tune``: a search by Optuna, whose trials run side by side as the points of a sweep do."""

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from fedjax_peft.contracts import Algorithm
from fedjax_peft.data.dataset import Clients
from fedjax_peft.models.base import Model
from fedjax_peft.numerics.hyperparameters import Values
from fedjax_peft.report.points import Point, Points, point_key
from fedjax_peft.report.sweep import Sweep, collect, named_points, write_table
from fedjax_peft.simulation.points import PointDone, read_rows, run_points
from fedjax_peft.simulation.rows import Row, field_is_lower_better, fields, has_ended, number
from fedjax_peft.simulation.run import Run
from fedjax_peft.simulation.settings import check_recorded
from fedjax_peft.simulation.stopping import Stop, pruned
from fedjax_peft.simulation.storage.lock import RunLock
from fedjax_peft.support.display import counted
from fedjax_peft.support.errors import InputError, check_known, first_line, users_level
from fedjax_peft.support.libraries import install, log_level

_REFUSED = "refused"
"""The attribute of a failed trial with the reason why its point was refused."""
_OUT = "out"
"""The attribute of a trial with the directory of its process: "" without one."""
_FILE = "optuna.db"
"""Optuna's storage in the directory of a search."""


class Tuned(NamedTuple):
    """The results of :func:`tune`."""

    sweep: Sweep
    """The runs, as those of a sweep: ``tuned.sweep.best()``, ``tuned.sweep.table()``."""
    study: Any
    """Optuna's study: ``tuned.study.best_params``, ``tuned.study.trials``. A trial has the name of
    its run in ``trial.user_attrs["run"]``."""


def tune(
    model: Model | Callable[[Point], Model],
    algorithm: Algorithm | Callable[[Values], Algorithm],
    clients: Clients | Callable[[Point], Clients],
    *,
    space: Callable[[Any], Point],
    choose_by: str,
    trials: int = 32,
    batch: int = 8,
    out: str | Path | None = None,
    study: Any = None,
    replicas: int | Literal["auto"] = "auto",
    transforms: Any = None,
    privacy: Any = None,
    attack: Any = None,
    **options: Any,
) -> Tuned:
    """Searches for the values with the best metric; needs the extra ``optuna``.

    Optuna is asked for ``batch`` trials at once, which run as the points of a sweep: one program
    for all numbers, and on an accelerator side by side. Every evaluation is reported to Optuna. A
    trial that its pruner gives up ends after that round, and the others of the batch go on. A trial
    whose point is refused has failed; its point is not run again, and a warning names the first.

    Args:
      model: the model, or a function of the point.
      algorithm: as for :func:`sweep`; a part, or a function of a point's values.
      clients: the clients, or a function of the point.
      space: returns the point of an Optuna trial, such as
        ``lambda t: {"learning_rate": t.suggest_float("learning_rate", 1e-4, 1e-1, log=True)}``.
      choose_by: the metric of the rows to optimise, such as ``validation_accuracy``. A trial
        has the value of its last evaluation.
      trials: the number of trials of the whole search. Trials of earlier calls in the same study
        count, and so do trials that were given up or refused, or whose point had been drawn before.
      batch: trials that are asked for at once. A larger batch runs faster and learns less from the
        trials before it.
      out: a directory for the runs, as for :func:`sweep`, and for Optuna's storage ``optuna.db``.
        Another call continues the search there. Several processes that search together have one
        ``study`` in a storage that they share, and each its own ``out``.
      study: an Optuna study with a direction, a sampler, a pruner and a storage of your choice; by
        default Optuna's own, with a seed.
      replicas: as for :func:`sweep`.
      transforms: as for :func:`sweep`, as are ``privacy`` and ``attack``.
      privacy: likewise.
      attack: likewise.
      **options: of ``simulate``, the same for all trials, such as ``rounds`` and ``validation``.

    Raises:
      InputError: Optuna is missing; another search runs in ``out``, or one of another space, of
        other arguments or of other rounds was made there; the metric is not recorded; the study has
        several objectives, or optimises in the wrong direction; all trials were refused; or as
        :func:`sweep`.
    """
    if trials < 1 or batch < 1:
        raise InputError(f"trials = {trials} and batch = {batch} must be at least 1.")
    path = None if out is None else Path(out)
    if study is None and (bad := sorted({*"?%"} & {*str(path)})):
        raise InputError(
            f"out = {str(out)!r} has {bad[0]!r} in its name, which the address of Optuna's storage"
            " cannot hold. Choose another name."
        )
    functions = {"transforms": transforms, "privacy": privacy, "attack": attack}
    made, runs = Points(model, algorithm, clients, functions, options), dict[str, Run]()
    with contextlib.ExitStack() as stack:
        stack.enter_context(log_level("optuna", logging.WARNING))  # it reports every trial
        if path is not None:  # a second search would take the trials that run for those of a crash
            path.mkdir(parents=True, exist_ok=True)
            stack.enter_context(RunLock.take(path))
        found = _study(path, choose_by) if study is None else study
        search = _Search(found, space, choose_by, path)
        if path is not None:
            search.check_earlier(path, made, options.get("rounds", 0))
        while (missing := trials - search.asked) > 0:
            names = search.ask(min(batch, missing))
            rounds = options.get("rounds", 0)
            write_table(path, search.points, choose_by, rounds=rounds, locked=True)
            new = run_points(
                [made.job(name, search.points[name]) for name in names],
                out=path,
                metric=choose_by,
                replicas=replicas,
                stop=search.rule,
                on_point=search.tell,
                raises=False,
            )
            runs |= new
            search.check(new.values())
            search.settle()
        search.settle(last=True)
    kept = {n: point for n, point in search.finished.items() if path is not None or n in runs}
    return Tuned(collect(path, kept, runs, choose_by), search.study)


def _study(out: Path | None, choose_by: str) -> Any:
    """Returns a new Optuna study, or the one in a directory.

    Raises:
      InputError: Optuna is missing.
    """
    try:
        import optuna
    except ModuleNotFoundError:
        raise InputError(f"A search needs the package optuna: {install('optuna')}.") from None
    storage = None
    if out is not None:
        storage = f"sqlite:///{out / _FILE}"
    lower = field_is_lower_better([], choose_by)
    study = optuna.create_study(
        study_name="fedjax_peft",
        storage=storage,
        load_if_exists=True,
        direction="minimize" if lower else "maximize",
    )
    # Another seed for every call, which would otherwise draw the values of the first one again.
    study.sampler = optuna.samplers.TPESampler(seed=len(study.trials), constant_liar=True)
    return study


class _Search:
    """The trials of a study, and the points that are run for them."""

    def __init__(self, study: Any, space: Callable[[Any], Point], choose_by: str, out: Path | None):
        """Trials of an earlier call in ``out`` that has not ended are asked for again."""
        from optuna.trial import TrialState

        if len(study.directions) != 1:
            raise InputError(
                f"The study has {len(study.directions)} objectives, and tune optimises one,"
                f" {choose_by}. Give study=optuna.create_study(direction=...) with one direction."
            )
        self.study, self._space, self._choose_by = study, space, choose_by
        self._states = TrialState
        self._out = "" if out is None else str(out.resolve())
        self.points: dict[str, dict[str, Any]] = {}
        """Name -> point, in the order of the trials."""
        self._names: dict[str, str] = {}
        self._open: dict[str, list[Any]] = {}
        """Name -> the trials that wait for its run."""
        self._told: dict[str, dict[str, Any]] = {}
        """Name -> what Optuna was told of its run."""
        self._refused: dict[str, str] = {}
        """Name -> why its run was refused, in this call."""
        self._held: list[tuple[Any, str]] = []
        """The trials that have failed, and the names of their points."""
        self._pruned: set[str] = set()
        for trial in study.get_trials(deepcopy=False):
            if trial.user_attrs.get(_OUT, self._out) != self._out:
                continue  # of another process, which may be at work
            if trial.state == TrialState.RUNNING:
                study.tell(trial.number, state=TrialState.FAIL)
                study.enqueue_trial(trial.params)
            elif trial.state != TrialState.FAIL or _REFUSED in trial.user_attrs:
                value = trial.value if trial.state == TrialState.COMPLETE else None
                name = self._named(self._repeated(trial))
                self._told[name] = {"state": trial.state, "values": value}

    def check_earlier(self, out: Path, made: Points, rounds: int) -> None:
        """Checks that the values of earlier trials in ``out`` are those of this call's runs.

        Raises:
          InputError: a run there has other arguments, or another number of rounds.
        """
        for name, point in self.finished.items():
            rows = read_rows(out / name)
            if not has_ended(rows, rounds) or rows[-1]["round"] > rounds:
                made_there = rows[-1]["round"] if rows else "no"
                raise InputError(
                    f"The trial {name} in {out} has {made_there} rounds, and this call asks for"
                    f" {rounds}. A search compares trials of equal rounds: choose another out."
                )
            check_recorded(made.job(name, point).given(out / name, True, None))

    @property
    def asked(self) -> int:
        """The trials of the study, those of other processes included, that count."""
        lost = (
            self._states.WAITING,
            self._states.FAIL,
        )  # these are asked for again, but for refused
        trials = self.study.get_trials(deepcopy=False)
        return sum(one.state not in lost or _REFUSED in one.user_attrs for one in trials)

    def _repeated(self, trial: Any) -> dict[str, Any]:
        """Returns the point of an earlier trial.

        Raises:
          InputError: the space does not ask for the values of this trial.
        """
        from optuna.distributions import check_distribution_compatibility
        from optuna.trial import FixedTrial

        again = FixedTrial(trial.params)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # a narrower range may go on from a wider one
                point = dict(self._space(again))
            for name, before in trial.distributions.items():
                check_distribution_compatibility(before, again.distributions[name])
        except (ValueError, KeyError) as error:
            values, reason = ", ".join(trial.params), first_line(error).partition(". ")[0]
            raise InputError(
                f"The study has trials of another space ({values or 'no values'}), which this one"
                f" cannot continue: {reason}. Choose another out, or give the space of the first"
                " call."
            ) from None
        return point

    def ask(self, count: int) -> list[str]:
        """Returns the names of the points to run for the next trials of the study.

        A point that was run before is not run again: its trial gets the same value.
        """
        for _ in range(count):
            trial = self.study.ask()
            name = self._named(dict(self._space(trial)))
            trial.set_user_attr("run", name)
            trial.set_user_attr(_OUT, self._out)
            if name in self._told:
                self._tell(trial, name)
            else:
                self._open.setdefault(name, []).append(trial)
        return list(self._open)

    def _tell(self, trial: Any, name: str) -> None:
        if self._told[name]["state"] == self._states.FAIL:
            self._held.append((trial, name))
        else:
            self.study.tell(trial, **self._told[name])

    def settle(self, *, last: bool = False) -> None:
        """Tells Optuna of the trials that have failed, once others have not.

        Before, the fault may be that of the call, whose trials the next call does not count.

        Args:
          last: tell it anyway.

        Raises:
          InputError: all trials of the search have failed.
        """
        if not (self.finished or last):
            return
        for trial, name in self._held:
            if self.finished:
                trial.set_user_attr(_REFUSED, self._refused.get(name, ""))
            self.study.tell(trial, **self._told[name])
        self._held.clear()
        if last and self._refused:
            name, reason = next(iter(self._refused.items()))
            points = f"{len(self._refused)} of {counted(len(self.points), 'point')} of the search"
            text = f"{points} failed. The first failure, of {name}: {reason}"
            if not self.finished:
                raise InputError(text)
            warnings.warn(text, stacklevel=users_level())

    def _named(self, point: dict[str, Any]) -> str:
        """Returns the name of a point, which is added if it is new."""
        key = point_key(point)
        if key not in self._names:
            self.points = named_points([*self.points.values(), point])
            self._names[key] = next(reversed(self.points))
        return self._names[key]

    def rule(self, name: str) -> Stop:
        """Returns the rule that reports the evaluations of a run, and ends it if it is pruned."""
        trial, reported = self._open[name][0], set[int]()

        def stop(rows: Sequence[Row]) -> str | None:
            found = {row["round"]: number(row, self._choose_by) for row in rows if row["round"]}
            for index, value in found.items():
                if value is not None and index not in reported:
                    trial.report(value, index)
                    reported.add(index)
            if found.get(rows[-1]["round"]) is None or not trial.should_prune():
                return None
            self._pruned.add(name)
            return pruned(trial.number)

        return stop

    def tell(self, done: PointDone) -> None:
        """Tells Optuna how the run of a point has ended."""
        name, state = done.job.name, self._states.COMPLETE
        if done.value is None:
            state = self._states.FAIL
            self._refused[name] = done.error or f"it has no finite {self._choose_by}"
        elif name in self._pruned:
            state = self._states.PRUNED
        values = done.value if state == self._states.COMPLETE else None
        self._told[name] = {"state": state, "values": values}
        for trial in self._open.pop(name):
            self._tell(trial, name)

    @property
    def finished(self) -> dict[str, dict[str, Any]]:
        """Name -> point, of the runs that were not refused."""
        failed = {name for name, told in self._told.items() if told["state"] == self._states.FAIL}
        return {name: point for name, point in self.points.items() if name not in failed}

    def check(self, runs: Iterable[Run]) -> None:
        """Raises InputError if runs lack the metric, or the study optimises it the wrong way."""
        for run in runs:
            known = {name for row in run.metrics for name in fields(row)}
            check_known("metric", self._choose_by, known)
            lower = field_is_lower_better(run.metrics, self._choose_by)
            if lower != (self.study.direction.name == "MINIMIZE"):
                better = "lower" if lower else "higher"
                raise InputError(
                    f"The study would {self.study.direction.name.lower()} {self._choose_by}, of"
                    f" which {better} values are better. Give study=optuna.create_study("
                    f"direction={'minimize' if lower else 'maximize'!r})."
                )
