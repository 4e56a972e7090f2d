"""``sweep``: a simulation for several seeds and settings, compiled as few times as possible.

It stands here, above the simulation, because its result is a study.
"""

import copy
import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import numpy as np
import tomli_w

from fedjax_peft.contracts import Algorithm
from fedjax_peft.contracts.part import Call, below, call_of, tagged
from fedjax_peft.data.dataset import Clients
from fedjax_peft.engine.devices.distributed import processes
from fedjax_peft.models.base import Forward, Model
from fedjax_peft.numerics.hyperparameters import Maker, Values
from fedjax_peft.report.records import RunRecord
from fedjax_peft.report.study import Cell, Study, make_study, summarise
from fedjax_peft.report.table_files import TextTable
from fedjax_peft.simulation.arguments import Given
from fedjax_peft.simulation.description import describe
from fedjax_peft.simulation.points import Job, PointDone, run_points
from fedjax_peft.simulation.records import Evaluation, Records
from fedjax_peft.simulation.rows import read_metrics
from fedjax_peft.simulation.run import Run
from fedjax_peft.simulation.simulate import arguments
from fedjax_peft.simulation.stopping import Stop, any_of
from fedjax_peft.support.display import show
from fedjax_peft.support.errors import InputError, nearest
from fedjax_peft.support.files import folder_names, replace_file
from fedjax_peft.support.nested import Watched, flatten

Point = Mapping[str, Any]
"""Name -> value of one run, such as ``{"seed": 0, "learning_rate": 1e-3}``."""


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
          *metrics: fields of the rows; by default the task's metric on validation and test data.

        Raises:
          InputError: no run has recorded a metric.
        """
        from fedjax_peft.report.columns import mean_text
        from fedjax_peft.report.wording import is_share

        score = self.study.headline
        usual = [f"{part}_{score}" for part in ("validation", "test")]
        known = self.study.metrics
        shown = [self.study.require(m) for m in metrics] or [m for m in usual if m in known]
        rows = [
            [cell.label or cell.name, str(len(cell.runs))]
            + [mean_text(metric, summarise(cell.values(metric))) for metric in shown]
            for cell in self.study.cells
        ]
        heads = [f"{metric} (%)" if is_share(metric) else metric for metric in shown]
        return TextTable("", ["setting", "seeds", *heads], rows, list(self.study.notes))


def sweep(
    algorithm: Algorithm | Callable[[Values], Algorithm],
    model: Model | Callable[[Point], Model],
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
    **options: Any,
) -> Sweep:
    """Runs ``simulate`` for every point, and compiles one program for all numbers and seeds.

    A value of a point is used in one of three ways:

    * ``seed`` is the seed of the run; without it, that of ``options``.
    * A float other than 0 is a run-time value of the compiled program.
    * Anything else (a rank, a name, an int, 0.0) is a constant; each combination is compiled.

    The results of a point are those of a single run with its values, up to float32 rounding.

    Args:
      algorithm: of all points; a value such as ``{"algorithm.optimizer.learning_rate": 1e-3}``
        takes the place of an argument of the call that made it (``fp.call_of``). Or a function of
        a point's values, such as
        ``lambda p: fp.algorithms.fedprox(optax.adamw(p["learning_rate"]), mu=p["mu"])``.
      model: the model, or a function of the point, such as
        ``lambda p: fp.attach(plain, fp.lora(rank=p["rank"]), seed=p["seed"])``. The function is
        called again only for points that differ in values that it reads.
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
      **options: of ``simulate``, the same for all points, such as ``rounds`` and ``test``.

    Raises:
      InputError: points repeat each other or have different names; runs failed (the others are
        complete); or as ``simulate``.
    """
    functions = {"transforms": transforms, "privacy": privacy, "attack": attack}
    made = Points(algorithm, model, clients, functions, options)
    path, named = None if out is None else Path(out), named_points(points)
    write_table(path, named.values(), choose_by)
    runs = run_points(
        [made.job(name, point) for name, point in named.items()],
        out=path,
        metric=choose_by,
        early_stop=early_stop,
        replicas=replicas,
        on_point=on_point,
    )
    return collect(path, named, runs, choose_by)


class Points:
    """Makes the jobs of points, which share models, clients and compiled programs."""

    def __init__(
        self,
        algorithm: Algorithm | Callable[[Values], Algorithm],
        model: Model | Callable[[Point], Model],
        clients: Clients | Callable[[Point], Clients],
        functions: Mapping[str, Any],
        options: Mapping[str, Any],
    ):
        """The arguments are those of :func:`sweep`.

        Args:
          functions: ``transforms``, ``privacy`` and ``attack``.
          options: of ``simulate``, the same for all points.

        Raises:
          InputError: there are several processes.
        """
        if processes() > 1:
            raise InputError(
                "A sweep runs in one process: several processes share one run at a time."
            )
        self._functions = {"algorithm": algorithm, **functions}
        self._given = (model, clients)
        made = {name: call_of(one) for name, one in self._functions.items()}
        self._constants = {x for name, call in made.items() if call for x in call.constants(name)}
        self._model, self._clients = _Shared(model), _Shared(clients)
        self._options = {"records": Records(progress=False), **options}
        self._forward: list[tuple[Any, Any]] = []

    def job(self, name: str, point: Point) -> Job:
        """Returns the job of a point."""
        _check_used(point, self._functions, self._given)
        evaluation = self._options.get("evaluation", Evaluation())

        def given(path: Path | None, resume: bool, stop: Stop | None) -> Given:
            ends = replace(evaluation, stop=any_of(evaluation.stop, stop))
            return self._given_for(point, out=path, resume=resume, evaluation=ends)

        return Job(name, self._options.get("rounds", 0), given)

    def _given_for(self, point: Point, **others: Any) -> Given:
        """Returns the arguments of the run of a point."""
        numbers = {n: x for n, x in point.items() if _is_runtime(n, x) and n not in self._constants}
        fixed = {n: x for n, x in point.items() if n not in numbers and n != "seed"}
        built, own = self.model(point), self._clients(point)
        options = {"seed": 0, **self._options, **others}
        options["seed"] = point.get("seed", options["seed"])
        options["records"] = replace(options["records"], config={"point": _recorded(point)})
        options |= {n: _made(n, x, point, fixed) for n, x in self._functions.items()}
        return arguments(built, options.pop("algorithm"), own, values=numbers, **options)

    def model(self, point: Point) -> Model:
        """Returns the model of a point, with the first forward pass that equals its own.

        Models that a seed has given other initial values then share their programs.
        """
        built = self._model(point)
        own = built.graph, built.forward, built.dtype
        bound = isinstance(built.apply, Forward)  # the graph then says what it does
        for known, apply in self._forward:
            if apply is built.apply:
                return built
            if bound and known == own:
                call, made = call_of(built), built.replace(apply=apply)
                return made if call is None else tagged(made, call)
        self._forward.append((own if bound else None, built.apply))
        return built


def write_table(out: Path | None, points: Iterable[Point], choose_by: str | None) -> None:
    """Writes ``sweep.toml``, by which a directory is that of a sweep; nothing without one."""
    if out is None:
        return
    out.mkdir(parents=True, exist_ok=True)
    table = {"keys": _keys(points)} | ({"choose_by": choose_by} if choose_by else {})
    replace_file(out / "sweep.toml", tomli_w.dumps(table).encode())


def _keys(points: Iterable[Point]) -> list[str]:
    """Returns the dotted keys of the values of points, as their runs record them."""
    return list(dict.fromkeys(k for point in points for k in flatten({"point": _recorded(point)})))


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
        done.append(RunRecord("sweep", folder / name, {"point": _recorded(point)}, {}, rows))
    keys = _keys(named.values())
    in_order = {name: runs[name] for name in named if name in runs}  # not as they ended
    return Sweep(make_study(done, keys=keys, choose_by=choose_by), in_order, named)


def _is_runtime(name: str, value: Any) -> bool:
    """Returns whether a point's value becomes a run-time value of the program."""
    return name != "seed" and isinstance(value, float) and value != 0


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


def point_key(values: Point) -> str:
    """Returns a text that is equal for equal values, arrays and lists included."""
    return json.dumps(describe(dict(values)), sort_keys=True)


def _recorded(value: Any) -> Any:
    """Returns a value of a point as TOML can hold it; large arrays and objects as descriptions."""
    if hasattr(value, "tolist") and value.size <= _SHOWN:
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(name): _recorded(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return ["None" if item is None else _recorded(item) for item in value]
    plain = isinstance(value, bool | int | float | str | None)
    return value if plain else describe(value)


_SHOWN = 64
"""The largest number of elements of an array that a run's config records."""


def _owned(value: Any) -> Any:
    """Returns a value of a point that a function may change: a copy of what can be changed."""
    return copy.deepcopy(value) if isinstance(value, list | dict | set | np.ndarray) else value


@dataclass(frozen=True)
class _Made:
    """A function of the run-time values; equal functions with equal constants are equal."""

    function: Callable[[Values], Any]
    key: str
    constants: Point = field(compare=False)

    def __call__(self, values: Values) -> Any:
        constants = {name: _owned(value) for name, value in self.constants.items()}
        return self.function({**constants, **values})


def _built(values: Values, name: str, call: Call) -> Any:
    """Returns the part of a call with the values under its name."""
    return call.build(_inside(name, values), name)


def _inside(name: str, values: Values) -> dict[str, Any]:
    """Returns the values for arguments of a part, by their names in it."""
    return {key: value for key, value in below(name, values) if key}


def _made(name: str, given: Any, point: Point, fixed: Point) -> Any:
    """Returns an argument of ``simulate`` for a point: an object, or a function of the values.

    Raises:
      InputError: a value is for a part that does not know its call.
    """
    if callable(given):
        return _Made(given, point_key(fixed), fixed)
    if not _inside(name, point):
        return given
    if (call := call_of(given)) is None:
        raise InputError(
            f"The point has values for {name}, which is {show(given)}: it does not know the call"
            " that made it. Give a part as its function returned it, or a function of the point:"
            f" {name} = lambda p: ..."
        )
    return Maker(_built, (name, call_of(_built(fixed, name, call))))


def _check_used(point: Point, functions: Mapping[str, Any], others: Sequence[Any]) -> None:
    """Raises InputError for a value that no part takes, where there is no function of the point."""
    if any(callable(x) and not isinstance(x, Model) for x in (*functions.values(), *others)):
        return
    known = {f"{n}.{k}" for n, x in functions.items() if (c := call_of(x)) for k in c.flat() if k}
    for key in point:
        if key != "seed" and key.partition(".")[0] not in functions:
            raise InputError(f"The points have values for {key!r}. {nearest(key, sorted(known))}")


class _Shared:
    """An object, or a function that is called once for all points that it cannot tell apart."""

    def __init__(self, made: Any):
        self._made = made
        self._known: list[tuple[dict[str, str], Any]] = []

    def __call__(self, point: Point) -> Any:
        if not callable(self._made) or isinstance(self._made, Model | Clients):
            return self._made
        for read, made in self._known:
            if all(point_key({name: point[name]}) == text for name, text in read.items()):
                return made
        reads = _Reads(point)
        made = self._made(reads)
        reads.close()
        read = {name: point_key({name: point[name]}) for name in sorted(reads.read)}
        self._known = [*self._known[-3:], (read, made)]  # models and data are large
        return made


class _Reads(Watched):
    """A point that notes which of its values are read, and gives copies of them."""

    _closed = False

    def close(self) -> None:
        """Ends the notes: values that nobody has read cannot be read any more."""
        self._closed = True

    def __getitem__(self, name: str) -> Any:
        """Returns a value.

        Raises:
          InputError: the function that was given the point has returned without reading it.
        """
        if self._closed and name in self and name not in self.read:
            raise InputError(
                f"A function of a sweep's point reads {name!r} after it has returned, when its"
                f" result may already serve other points. Read it before: value = p[{name!r}]."
            )
        return _owned(super().__getitem__(name))
