"""``sweep``: a simulation for several seeds and settings, compiled as few times as possible."""

import itertools
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import tomli_w

from fedjax_peft.data.dataset import Clients
from fedjax_peft.distributed import processes
from fedjax_peft.errors import InputError, nearest
from fedjax_peft.files import replace_file
from fedjax_peft.hyperparameters import Values
from fedjax_peft.models.base import Model
from fedjax_peft.report.records import RunRecord
from fedjax_peft.report.study import Cell, Study, make_study, summarise
from fedjax_peft.report.table_files import TextTable
from fedjax_peft.rows import read_metrics
from fedjax_peft.simulation.points import Job, PointDone, run_points
from fedjax_peft.simulation.run import Run
from fedjax_peft.simulation.simulate import simulate
from fedjax_peft.simulation.stopping import Stop
from fedjax_peft.typing import Algorithm

__all__ = ["Sweep", "grid", "sweep"]

Point = Mapping[str, Any]
"""Name -> value of one run, such as ``{"seed": 0, "learning_rate": 1e-3}``."""


def grid(**values: Iterable[Any]) -> list[dict[str, Any]]:
    """Returns every combination of the values, such as ``grid(seed=range(5), rank=[4, 8])``.

    Seeds change least often: a sweep that is interrupted has then compared all settings.

    Raises:
      InputError: a name has no values.
    """
    lists = {name: list(given) for name, given in values.items()}
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
        from fedjax_peft.report.methods import mean_text
        from fedjax_peft.report.plots import is_share

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
    algorithm: Callable[[Values], Algorithm],
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

    * ``seed`` is the seed of the run.
    * A float other than 0 is a run-time value of the compiled program.
    * Anything else (a rank, a name, an int, 0.0) is a constant; each combination is compiled.

    The results of a point are those of a single run with its values, up to float32 rounding.

    Args:
      algorithm: a function of a point's values, such as
        ``lambda p: fp.algorithms.fedprox(optax.adamw(p["learning_rate"]), mu=p["mu"])``.
      model: the model, or a function of the point, such as
        ``lambda p: fp.attach(plain, fp.lora(rank=p["rank"]), seed=p["seed"])``. The function is
        called again only for points that differ in values that it reads.
      clients: the clients, or a function of the point.
      points: such as ``grid(seed=range(5), learning_rate=[1e-3, 3e-3])``.
      out: a directory for the runs, one directory each. Points whose runs have finished there are
        skipped, and interrupted runs continue.
      choose_by: the metric of the rows by which ``Sweep.best`` chooses, such as
        ``validation_accuracy``.
      early_stop: end a run whose best value of ``choose_by`` is worse than the median of the
        finished runs (:func:`fedjax_peft.simulation.stopping.median_rule`).
      replicas: the number of points that run side by side, as one program over replicas. ``auto``
        is 8 on an accelerator and 1 on a CPU. Results differ by float32 rounding only.
      transforms: as for ``simulate``, or a function of a point's values.
      privacy: likewise.
      attack: likewise.
      on_point: called after every point.
      **options: of ``simulate``, the same for all points, such as ``rounds`` and ``test``.

    Raises:
      InputError: points repeat each other or have different names; runs failed (the others are
        complete); or as ``simulate``.
    """
    if processes() > 1:
        raise InputError("A sweep runs in one process: several processes share one run at a time.")
    named = _names(points)
    make_model, make_clients = _Shared(model), _Shared(clients)
    forward: dict[Any, Any] = {}
    lock = threading.Lock()

    def run_of(name: str, point: Point) -> Job:
        def run(path: Path | None, resume: bool, stop: Stop | None, engine: Any) -> Run:
            engines = {} if engine is None else {"engine": engine}
            numbers = {n: x for n, x in point.items() if _is_runtime(n, x)}
            constants = tuple((n, x) for n, x in sorted(point.items()) if n not in numbers)
            with lock:  # points side by side are threads
                built, read = make_model(point)
                key = tuple((n, point[n]) for n in sorted(read) if n != "seed")
                built = built.replace(apply=forward.setdefault(key, built.apply))
                own = make_clients(point)[0]
            fixed = tuple((n, x) for n, x in constants if n != "seed")
            return simulate(
                built,
                _Made(algorithm, fixed),
                own,
                transforms=_made(transforms, fixed),
                privacy=_made(privacy, fixed),
                attack=_made(attack, fixed),
                values=numbers,
                seed=point.get("seed", 0),
                out=path,
                resume=resume,
                stop=stop,
                config={"point": dict(point)},
                **{"progress": False, **options, **engines},
            )

        return Job(name, options.get("rounds", 0), run)

    path = None if out is None else Path(out)
    keys = [f"point.{name}" for name in points[0]]
    if path is not None:
        path.mkdir(parents=True, exist_ok=True)
        table = {"keys": keys} | ({"choose_by": choose_by} if choose_by else {})
        replace_file(path / "sweep.toml", tomli_w.dumps(table).encode())
    jobs = [run_of(name, point) for name, point in named.items()]
    runs = run_points(
        jobs,
        out=path,
        metric=choose_by,
        early_stop=early_stop,
        replicas=replicas,
        on_point=on_point,
    )
    records = []
    for name, point in named.items():
        folder = Path(name) if path is None else path / name
        rows = runs[name].metrics if name in runs else read_metrics(folder / "metrics.jsonl")
        records.append(RunRecord("sweep", folder, {"point": dict(point)}, {}, rows))
    return Sweep(make_study(records, keys=keys, choose_by=choose_by), runs, named)


def _is_runtime(name: str, value: Any) -> bool:
    """Returns whether a point's value becomes a run-time value of the program."""
    return name != "seed" and isinstance(value, float) and value != 0


def _names(points: Sequence[Point]) -> dict[str, dict[str, Any]]:
    """Returns name -> point; names show the values.

    Raises:
      InputError: there are no points, two are equal, or they have different names of values.
    """
    if not points:
        raise InputError("The sweep has no points. Make some: fp.grid(seed=range(3)).")
    named: dict[str, dict[str, Any]] = {}
    for point in points:
        for name in [*point, *points[0]]:
            if name not in point or name not in points[0]:
                raise InputError(
                    f"The points have different names: {name!r} is not in all of them."
                    f" {nearest(name, points[0])}"
                )
        text = ",".join(f"{name}={value}" for name, value in point.items())
        if text in named:
            raise InputError(f"The point {text} occurs twice.")
        named[text] = dict(point)
    return named


@dataclass(frozen=True)
class _Made:
    """A function of the run-time values; equal functions with equal constants are equal."""

    function: Callable[[Values], Any]
    constants: tuple[tuple[str, Any], ...]

    def __call__(self, values: Values) -> Any:
        return self.function({**dict(self.constants), **values})


def _made(given: Any, fixed: tuple[tuple[str, Any], ...]) -> Any:
    """Returns an object as it is, and a function of a point as one of the run-time values."""
    return _Made(given, fixed) if callable(given) else given


class _Shared:
    """An object, or a function of a point that is called once for all points it cannot tell apart.

    A call returns the object and the names that the function read.
    """

    def __init__(self, made: Any):
        self._made = made
        self._known: list[tuple[dict[str, Any], Any]] = []

    def __call__(self, point: Point) -> tuple[Any, set[str]]:
        """Returns the object for a point, and the names of the values that it depends on."""
        if not callable(self._made) or isinstance(self._made, Model | Clients):
            return self._made, set()
        for read, made in self._known:
            if all(point[name] == value for name, value in read.items()):
                return made, set(read)
        reads = _Reads(point)
        made = self._made(reads)
        self._known = [*self._known[-3:], (reads.read, made)]  # models and data are large
        return made, set(reads.read)


class _Reads(dict[str, Any]):
    """A point that remembers which of its values were read."""

    def __init__(self, point: Point):
        super().__init__(point)
        self.read: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        """Returns a value."""
        self.read[name] = super().__getitem__(name)
        return self.read[name]

    def get(self, name: str, default: Any = None) -> Any:
        """Returns a value, or the default."""
        return self[name] if name in self else default  # noqa: SIM401  (get would not note it)
