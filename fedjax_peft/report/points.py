"""The points of a sweep: values of the arguments of a run, and what shares models and programs."""

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_peft.contracts import Algorithm
from fedjax_peft.contracts.part import Call, below, call_of, tagged
from fedjax_peft.data.dataset import Clients
from fedjax_peft.engine.devices.distributed import processes
from fedjax_peft.models.base import Forward, Model
from fedjax_peft.numerics.hyperparameters import Maker, Values
from fedjax_peft.simulation.arguments import Given
from fedjax_peft.simulation.description import describe
from fedjax_peft.simulation.points import Job
from fedjax_peft.simulation.records import Evaluation, Records
from fedjax_peft.simulation.simulate import arguments
from fedjax_peft.simulation.stopping import Stop, any_of
from fedjax_peft.support.display import show
from fedjax_peft.support.errors import InputError, nearest
from fedjax_peft.support.nested import Watched

Point = Mapping[str, Any]
"""Name -> value of one run, such as ``{"seed": 0, "learning_rate": 1e-3}``."""


class Points:
    """Makes the jobs of points, which share models, clients and compiled programs."""

    def __init__(
        self,
        model: Model | Callable[[Point], Model],
        algorithm: Algorithm | Callable[[Values], Algorithm],
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

    def constants_of(self, point: Point) -> dict[str, Any]:
        """Returns the values of a point that are compiled into its program."""
        runtime = {n for n, x in point.items() if _is_runtime(n, x) and n not in self._constants}
        return {n: x for n, x in point.items() if n not in runtime and n != "seed"}

    def _given_for(self, point: Point, **others: Any) -> Given:
        """Returns the arguments of the run of a point."""
        fixed = self.constants_of(point)
        numbers = {n: x for n, x in point.items() if n not in fixed and n != "seed"}
        built, own = self.model(point), self._clients(point)
        options = {"seed": 0, **self._options, **others}
        options["seed"] = point.get("seed", options["seed"])
        options["records"] = replace(options["records"], config={"point": recorded(point)})
        options |= {n: _made(n, x, point, fixed) for n, x in self._functions.items()}
        return arguments(built, options.pop("algorithm"), own, values=numbers, **options)

    def model(self, point: Point) -> Model:
        """Returns the model of a point, with the first forward pass that equals its own.

        Models that a seed has given other initial values then share their programs.
        """
        built = self._model(point)
        if not isinstance(built, Model):
            return built  # the run refuses it, as that of ``simulate`` does
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


def _is_runtime(name: str, value: Any) -> bool:
    """Returns whether a point's value becomes a run-time value of the program."""
    return name != "seed" and isinstance(value, float) and value != 0


def point_key(values: Point) -> str:
    """Returns a text that is equal for equal values, arrays and lists included."""
    return json.dumps(describe(dict(values)), sort_keys=True)


def recorded(value: Any) -> Any:
    """Returns a value of a point as TOML can hold it; large arrays and objects as descriptions."""
    if hasattr(value, "tolist") and value.size <= _SHOWN:
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(name): recorded(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return ["None" if item is None else recorded(item) for item in value]
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
