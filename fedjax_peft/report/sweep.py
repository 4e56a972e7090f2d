"""``sweep``: a simulation for several seeds and settings, compiled as few times as possible.

It stands here, above the simulation, because its result is a study.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import tomli_w

from fedjax_peft.contracts import Algorithm
from fedjax_peft.data.dataset import Clients
from fedjax_peft.models.base import Model
from fedjax_peft.numerics.hyperparameters import Values
from fedjax_peft.report import executors
from fedjax_peft.report.points import Point, Points, point_key, recorded
from fedjax_peft.report.records import RunRecord
from fedjax_peft.report.study import SWEEP, Cell, Study, make_study, read_sweep, summarise
from fedjax_peft.report.table_files import TextTable
from fedjax_peft.simulation.points import PointDone, Results, run_points
from fedjax_peft.simulation.rows import read_metrics
from fedjax_peft.simulation.run import Run
from fedjax_peft.simulation.score_names import Score
from fedjax_peft.simulation.sharing import Share
from fedjax_peft.simulation.storage.lock import RunLock
from fedjax_peft.support.display import counted
from fedjax_peft.support.errors import InputError, nearest
from fedjax_peft.support.files import folder_names, replace_file
from fedjax_peft.support.nested import flatten


def grid(
    dotted: Mapping[str, Iterable[Any]] = MappingProxyType({}), **values: Iterable[Any]
) -> list[dict[str, Any]]:
    """Returns every combination of the values, such as ``grid(seed=range(5), rank=[4, 8])``.

    Seeds change least often, so an interrupted sweep has already compared all settings.

    Args:
      dotted: names with dots, such as ``{"algorithm.optimizer.learning_rate": [1e-3, 3e-3]}``.

    Raises:
      InputError: a name has no values.
    """
    lists = {name: list(given) for name, given in {**dotted, **values}.items()}
    for name, given in lists.items():
        if not given:
            raise InputError(f"grid has no values for {name!r}.")
    order = sorted(lists, key=lambda name: name != "seed")
    return [
        {name: dict(zip(order, chosen, strict=True))[name] for name in lists}
        for chosen in itertools.product(*(lists[name] for name in order))
    ]


class Sweep(NamedTuple):
    """The results of :func:`sweep`."""

    study: Study
    """The finished runs, grouped into settings; what ``fedjax-peft report`` shows."""
    runs: dict[str, Run]
    """Name of a point -> its run, without the points that an earlier call had finished."""
    points: dict[str, dict[str, Any]]
    """Name of a point -> its values."""

    def __repr__(self) -> str:
        settings = counted(len(self.study.cells), "setting")
        return f"Sweep({counted(len(self.points), 'point')}, {settings}; .table() and .best())"

    def best(self, metric: str | None = None) -> Cell:
        """Returns the setting with the best mean over seeds: ``cell.settings``, ``cell.runs``.

        Args:
          metric: a field of the rows, such as ``validation_accuracy``; by default ``choose_by`` of
            the sweep, or else the task's metric on validation data.

        Raises:
          InputError: no run has recorded the metric, or no setting has finished for all seeds.
        """
        chosen = self.study.chosen(metric)
        if not chosen:
            raise InputError("No setting of the sweep has finished for all seeds.")
        return next(iter(chosen.values()))

    def table(self, *metrics: str) -> TextTable:
        """Returns a table of all settings: mean ± standard deviation over seeds of each metric.

        Fractions, such as accuracies, are in percent.

        Args:
          *metrics: fields of the rows; by default the task's metric on validation and test data,
            and over the clients' own tests the mean of the worst tenth and the standard deviation.

        Raises:
          InputError: no run has recorded a metric.
        """
        from fedjax_peft.report.wording import is_share

        score = self.study.headline
        usual = [Score(split, score).name for split in ("validation", "test")]
        usual += [Score("client", score, kind).name for kind in ("worst_tenth", "std")]
        known = self.study.metrics
        shown = [self.study.require(m) for m in metrics] or [m for m in usual if m in known]
        rows = [
            [cell.label or cell.name, str(len(cell.runs))]
            + [summarise(cell.values(one)).score_text(is_share(one)) for one in shown]
            for cell in self.study.cells
        ]
        heads = [f"{metric} (%)" if is_share(metric) else metric for metric in shown]
        return TextTable("", ["setting", "seeds", *heads], rows, list(self.study.notes))


def sweep(
    model: Model | Callable[[Point], Model],
    algorithm: Algorithm | Callable[[Values], Algorithm],
    clients: Clients | Callable[[Point], Clients],
    *,
    points: Sequence[Point],
    out: str | Path | None = None,
    choose_by: str | None = None,
    early_stop: bool = False,
    replicas: int | Literal["auto"] = "auto",
    transforms: Any = None,
    privacy: Any = None,
    attack: Any = None,
    on_point: Callable[[PointDone], None] = lambda done: None,
    executor: Any = None,
    jobs: int | None = None,
    **options: Any,
) -> Sweep:
    """Runs ``simulate`` for every point, and compiles one program for all numbers and seeds.

    A value of a point is used in one of three ways:

    * ``seed`` is the seed of the run; without it, that of ``options``.
    * A float other than 0 is a run-time value of the compiled program.
    * Anything else (a rank, a name, an int, 0.0) is a constant; each combination is compiled.

    The results of a point are those of a single run with its values, up to float32 rounding.

    Args:
      model: the model, or a function of the point, such as
        ``lambda p: fp.attach(plain, fp.lora(rank=p["rank"]), seed=p["seed"])``. The function is
        called again only for points that differ in values that it reads.
      algorithm: of all points; a value such as ``{"algorithm.optimizer.learning_rate": 1e-3}``
        takes the place of an argument of the call that made it (``fp.call_of``). Or a function of
        a point's values, such as
        ``lambda p: fp.algorithms.fedprox(optax.adamw(p["learning_rate"]), mu=p["mu"])``.
      clients: the clients, or a function of the point.
      points: such as ``grid(seed=range(5), learning_rate=[1e-3, 3e-3])``.
      out: a directory for the runs, one directory each. Points whose runs have finished there are
        skipped, and interrupted runs continue; both must be runs of this call.
      choose_by: the metric of the rows by which ``Sweep.best`` chooses, such as
        ``validation_accuracy``.
      early_stop: end a run whose best value of ``choose_by`` is worse than the median of the
        finished runs (:func:`fedjax_peft.simulation.stopping.median_rule`).
      replicas: the number of points that run side by side, as one program over replicas. ``auto``
        is 8 on an accelerator and 1 on a CPU. Results differ by float32 rounding only.
      transforms: as for ``simulate``; values such as ``{"transforms.share": 0.1}`` are for the
        call of a single one. Or a function of a point's values.
      privacy: likewise.
      attack: likewise.
      on_point: called after every point.
      executor: runs the points in other processes that see ``out``: anything with
        ``submit(function, *arguments)`` that returns a future, such as those of
        ``concurrent.futures``, submitit and Dask, or :func:`fedjax_peft.report.executors.ray`. The
        results are those of ``out``, and ``Sweep.runs`` is empty.
      jobs: the largest number of jobs of the executor; by default one for each program. Points of
        one program are in one job, as long as there are no more jobs than programs.
      **options: of ``simulate``, the same for all points, such as ``rounds`` and ``test``.

    Raises:
      InputError: points repeat each other or have different names; runs failed (the others are
        complete); or as ``simulate``.
    """
    functions = {"transforms": transforms, "privacy": privacy, "attack": attack}
    path, named = None if out is None else Path(out), named_points(points)
    given = (model, algorithm, clients, functions, options)
    asked = _Asked(given, named, choose_by, early_stop, replicas)
    write_table(path, named, choose_by, rounds=options.get("rounds", 0))
    if executor is None:
        runs = asked.run(list(named), path, on_point=on_point)
        return collect(path, named, runs, choose_by)
    if path is None:
        raise InputError("An executor's jobs leave their runs in a directory: give out=...")
    asked.submit(executor, jobs, path, on_point)
    return collect(path, named, {}, choose_by)


class _Asked(NamedTuple):
    """What a sweep was asked for; the jobs of an executor get it."""

    given: tuple[Any, ...]
    """The arguments of :class:`Points`."""
    named: Mapping[str, Point]
    choose_by: str | None
    early_stop: bool
    replicas: int | Literal["auto"]

    def run(
        self,
        names: Sequence[str],
        out: Path | None,
        on_point: Callable[[PointDone], None] | None = None,
    ) -> dict[str, Run]:
        """Runs some points: all of them for the caller of ``sweep``, or those of one of its jobs.

        Args:
          on_point: of ``sweep``; a job has none.
        """
        made, share = Points(*self.given), Share(wait=False) if on_point is None else None
        return run_points(
            [made.job(name, self.named[name]) for name in names],
            out=out,
            metric=self.choose_by,
            early_stop=self.early_stop,
            replicas=self.replicas,
            share=share,
            keep=share is None,
            on_point=on_point or (lambda done: None),
        )

    def submit(
        self, executor: Any, jobs: int | None, out: Path, on_point: Callable[[PointDone], None]
    ) -> None:
        """Runs all points as jobs of an executor."""
        made, groups = Points(*self.given), dict[str, list[str]]()
        every = {name: made.job(name, point) for name, point in self.named.items()}
        results = Results(list(every.values()), out, self.choose_by, on_point=on_point)
        for job in results.missing():
            constants = point_key(made.constants_of(self.named[job.name]))
            groups.setdefault(constants, []).append(job.name)
        together = 1 if self.replicas == "auto" else self.replicas
        parts = executors.parts_of(groups, jobs, together)

        def ended(name: str, error: str | None) -> bool:
            return results.ended_elsewhere(every[name], error)

        executors.run(executor, self, parts, out, ended)
        results.check()


def write_table(
    out: Path | None,
    points: Mapping[str, Point],
    choose_by: str | None,
    *,
    rounds: int,
    locked: bool = False,
) -> None:
    """Writes ``sweep.toml``, by which a directory is that of a sweep; nothing without one.

    Points of earlier calls stay in it.

    Args:
      points: name -> point.
      rounds: of each point.
      locked: whether this process has the lock of the directory.
    """
    if out is None:
        return
    out.mkdir(parents=True, exist_ok=True)
    with contextlib.nullcontext() if locked else RunLock.take(out, wait=_WAIT):
        before = read_sweep(out / SWEEP)
        table = {
            "keys": list(dict.fromkeys([*before["keys"], *_keys(points.values())])),
            **({"choose_by": choose_by} if choose_by else {}),
            "points": {**before.get("points", {}), **dict.fromkeys(points, rounds)},
        }
        replace_file(out / SWEEP, tomli_w.dumps(table).encode())


_WAIT = 60.0
"""Seconds to wait for another process that writes the table."""


def _keys(points: Iterable[Point]) -> list[str]:
    """Returns the dotted keys of the values of points, as their runs record them."""
    return list(dict.fromkeys(k for point in points for k in flatten({"point": recorded(point)})))


def collect(
    out: Path | None,
    named: dict[str, dict[str, Any]],
    runs: dict[str, Run],
    choose_by: str | None,
) -> Sweep:
    """Returns the results of the points of a sweep, some of which earlier calls may have run."""
    folder, done = out or Path(), []
    for name, point in named.items():
        file = folder / name / "metrics.jsonl"
        rows = runs[name].metrics if name in runs else read_metrics(file)
        done.append(RunRecord("sweep", folder / name, {"point": recorded(point)}, {}, rows))
    keys = _keys(named.values())
    in_order = {name: runs[name] for name in named if name in runs}  # not as they ended
    return Sweep(make_study(done, keys=keys, choose_by=choose_by), in_order, named)


def named_points(points: Sequence[Point]) -> dict[str, dict[str, Any]]:
    """Returns name -> point; names show the values.

    Raises:
      InputError: there are no points, two are equal, or they have different names of values.
    """
    if not points:
        raise InputError("The sweep has no points. Make some: fp.grid(seed=range(3)).")
    texts: dict[str, str] = {}
    for point in points:
        for name in [*point, *points[0]]:
            if name not in point or name not in points[0]:
                raise InputError(
                    f"The points have different names: {name!r} is not in all of them."
                    f" {nearest(name, points[0])}"
                )
        text = ",".join(f"{name}={value}" for name, value in point.items())
        if point_key(point) in texts:
            raise InputError(f"The point {text} occurs twice.")
        texts[point_key(point)] = text
    return dict(zip(folder_names(texts).values(), map(dict, points), strict=True))
