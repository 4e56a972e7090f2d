"""Several runs side by side: their rounds and evaluations become one program over replicas.

Every run is an ordinary ``simulate`` in a thread of its own. When all of them wait for a program,
the calls of the same program are stacked on a new axis and run as one, by ``vmap``. The frozen
weights and the examples are not stacked: all replicas share them. So on an accelerator a sweep
costs little more than one run, as long as one run leaves the device partly idle.
"""

import threading
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

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


class _Call(NamedTuple):
    """A call of a program that waits for the others."""

    program: "_ReplicaProgram"
    arguments: tuple
    answer: list[Any]
    """Empty until the result or an exception is there."""


class Replicas:
    """The runs of a group; :meth:`program` replaces the engine of each run's session.

    A thread enters the group with ``with replicas:`` for the time of its run.
    """

    def __init__(self, count: int):
        """Makes the group.

        Args:
          count: the number of runs side by side; a program with fewer calls repeats one of them,
            so that nothing is compiled again.
        """
        self._count = count
        self._changed = threading.Condition()
        self._members = 0
        self._waiting: list[_Call] = []
        self._cancelled = False
        self._known: list[Any] = []

    def __enter__(self) -> "Replicas":
        """Adds the calling thread."""
        with self._changed:
            self._members += 1
        return self

    def __exit__(self, *_: object) -> None:
        """Removes the calling thread; the others no longer wait for it."""
        with self._changed:
            self._members -= 1
            self._run_if_complete()

    def program(self, setup: Setup, columns: Mapping[str, Any], **form: Any) -> Program:
        """Returns a program whose calls join those of the other runs; see :class:`Program`."""
        with self._changed:
            frozen, shared = self._same(setup.frozen), self._same(dict(columns))
        setup = setup._replace(frozen=frozen)
        return _ReplicaProgram(self, self._count, setup, shared, **form)

    def run(self, program: "_ReplicaProgram", arguments: tuple) -> RoundResult:
        """Returns the result of a call, after all runs of the group have called a program."""
        call = _Call(program, arguments, [])
        with self._changed:
            self._waiting.append(call)
            self._run_if_complete()
            self._changed.wait_for(lambda: call.answer or self._cancelled)
            if not call.answer:
                raise KeyboardInterrupt("The other runs of the group were interrupted.")
        if isinstance(call.answer[0], BaseException):
            raise call.answer[0]
        return call.answer[0]

    def cancel(self) -> None:
        """Ends the runs that wait, at once; their last checkpoints stay."""
        with self._changed:
            self._cancelled = True
            self._changed.notify_all()

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

    def _run_if_complete(self) -> None:
        """Runs all waiting calls if every thread of the group waits."""
        if not self._waiting or len(self._waiting) < self._members:
            return
        groups: dict[Any, list[_Call]] = {}
        for call in self._waiting:
            groups.setdefault(call.program.group(call.arguments), []).append(call)
        self._waiting = []
        for calls in groups.values():
            results: list[Any]
            try:
                results = calls[0].program.stacked([call.arguments for call in calls])
            except BaseException as error:  # every thread must hear of it, or it waits for ever
                results = [error] * len(calls)
            for call, result in zip(calls, results, strict=True):
                call.answer.append(result)
        self._changed.notify_all()


class _ReplicaProgram(Program):
    """A program over a stack of replicas; a single call gives its arguments to the group."""

    def __init__(self, replicas: Replicas, count: int, *setup_and_columns: Any, **form: Any):
        super().__init__(*setup_and_columns, **form)
        self._replicas, self._count = replicas, count

    def __call__(self, state: State, plan: Plan, round_index: int) -> RoundResult:
        return self._replicas.run(self, self._arguments(state, plan, round_index))

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
