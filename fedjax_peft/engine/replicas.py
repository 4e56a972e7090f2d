"""Several runs side by side: their rounds and evaluations become one program over replicas.

Every run is a generator (:mod:`fedjax_peft.engine.calls`). When all of them wait for a program, the
calls of the same program are stacked on a new axis and run as one, by ``vmap``. The frozen weights
and the examples are not stacked: all replicas share them. So on an accelerator a sweep costs little
more than one run, as long as one run leaves the device partly idle.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array

from fedjax_peft.engine.calls import Call, Calling
from fedjax_peft.engine.places import place_state
from fedjax_peft.engine.plan import Plan
from fedjax_peft.engine.program import Program
from fedjax_peft.engine.round import RoundResult
from fedjax_peft.engine.setup import Setup
from fedjax_peft.engine.state import State

AXIS = "replicas"
"""The name of the axis over replicas inside a program."""
_SHARED = (0, 3)
"""The arguments of a program that all replicas share: the frozen weights and the examples."""


_Waiting: TypeAlias = tuple[Calling[Any], Call]
"""A generator with the call whose result it waits for."""


class Replicas:
    """The runs of a group; :meth:`program` replaces the engine of each run's session."""

    def __init__(self, count: int):
        """Makes the group.

        Args:
          count: the number of runs side by side; a program with fewer calls repeats one of them,
            so that nothing is compiled again.
        """
        self._count = count
        self._known: list[Any] = []

    def program(self, setup: Setup, columns: Mapping[str, Any], **form: Any) -> Program:
        """Returns a program whose calls can be stacked; see :class:`Program`."""
        frozen, shared = self._same(setup.frozen), self._same(dict(columns))
        return _ReplicaProgram(self._count, setup._replace(frozen=frozen), shared, **form)

    def run(
        self, works: Iterable[Calling[Any]], between: Callable[[], None] = lambda: None
    ) -> None:
        """Runs generators side by side; when one ends, the next begins.

        Args:
          between: called before each group of calls. If it or a generator raises, all are closed.
        """
        left, begun, waiting = iter(works), list[Calling[Any]](), list[_Waiting]()
        try:
            while True:
                while len(waiting) < self._count and (work := next(left, None)) is not None:
                    begun.append(work)
                    waiting += _advanced(work, None)
                if not waiting:
                    return
                between()
                answers = _answers([call for _, call in waiting])
                pairs = zip(waiting, answers, strict=True)
                waiting = [one for (work, _), x in pairs for one in _advanced(work, x)]
        finally:
            for work in begun:
                work.close()

    def _same(self, leaves: Any) -> Any:
        """Returns the first known tree with equal arrays, so that replicas can share it."""
        for known in self._known:
            if known.keys() == leaves.keys() and all(
                known[n] is x
                or (
                    known[n].shape == x.shape
                    and known[n].dtype == x.dtype
                    and bool(jnp.array_equal(known[n], x))
                )
                for n, x in leaves.items()
            ):
                return known
        self._known.append(leaves)
        return leaves


def _advanced(work: Calling[Any], answer: Any) -> list[_Waiting]:
    """Returns the generator with its next call after an answer; [] if it has ended."""
    try:
        raised = isinstance(answer, BaseException)
        return [(work, work.throw(answer) if raised else work.send(answer))]
    except StopIteration:
        return []


def _answers(calls: Sequence[Call]) -> list[Any]:
    """Returns the result of each call, or what its program has raised."""
    groups: dict[Any, list[int]] = {}
    arguments = [call.program.arguments_of(call) for call in calls]
    for place, call in enumerate(calls):
        groups.setdefault(call.program.group(arguments[place]), []).append(place)
    answers: dict[int, Any] = {}
    for places in groups.values():
        try:
            found = calls[places[0]].program.stacked([arguments[place] for place in places])
        except BaseException as error:  # each of these runs ends with it
            found = [error] * len(places)
        answers |= dict(zip(places, found, strict=True))
    return [answers[place] for place in range(len(calls))]


class _ReplicaProgram(Program):
    """A program over a stack of replicas."""

    def __init__(self, count: int, *setup_and_columns: Any, **form: Any):
        super().__init__(*setup_and_columns, **form)
        self._count = count

    def __call__(self, state: State, plan: Plan, round_index: int) -> RoundResult:
        return self.stacked([self._arguments(state, plan, round_index)])[0]

    def arguments_of(self, call: Call) -> tuple:
        """Returns the arguments of the compiled program, without the axis over replicas."""
        return self._arguments(call.state, call.plan, call.round_index)

    def compile(self, state: State, plan: Plan) -> None:
        self._compile(self._stack([self._arguments(state, plan, 0)]))

    def known(self, state: State, plan: Plan) -> bool:
        return True  # another run may compile it

    def group(self, arguments: tuple) -> Any:
        """Returns a key that is equal for calls that can run as one."""
        shared = tuple(id(x) for i in _SHARED for x in jax.tree.leaves(arguments[i]))
        return id(self._setup.apply), self._key(arguments), shared

    def stacked(self, calls: list[tuple]) -> list[RoundResult]:
        """Returns the results of several calls, which run as one."""
        found: list[RoundResult] = []
        for first in range(0, len(calls), self._count):
            part = calls[first : first + self._count]
            arguments = self._stack(part)
            self._compile(arguments)
            result = self._compiled(*arguments)
            found += [self._one(result, i) for i in range(len(part))]
        return found

    def _one(self, stacked: RoundResult, index: int) -> RoundResult:
        """Returns one replica's result, with its state where the next call takes it."""
        result = jax.tree.map(lambda x: x[index], stacked)
        if not isinstance(result.state, State):
            return result
        return result._replace(state=place_state(self._setup.layout, result.state))

    def _out_shardings(self) -> Any:
        stacked = self._setup.layout.stacked
        return jax.tree.map(stacked, super()._out_shardings())

    def _stack(self, calls: list[tuple]) -> tuple:
        """Returns the arguments of all replicas; the last call is repeated if there are fewer."""
        calls = calls + [calls[-1]] * (self._count - len(calls))
        return tuple(
            calls[0][i]
            if i in _SHARED
            else jax.tree.map(lambda *xs: jnp.stack(xs), *(one[i] for one in calls))
            for i in range(len(calls[0]))
        )

    def _round(self) -> Callable[..., RoundResult]:
        axes = tuple(None if i in _SHARED else 0 for i in range(8))
        return jax.vmap(super()._round(), in_axes=axes, axis_name=AXIS)

    def _across(self) -> Callable[[Array], Array]:
        # The largest value over all replicas is not batched, so that conditions stay conditions.
        return lambda x: jax.lax.pmax(x, AXIS)
