"""Rounds as compiled programs: compile once, donate, evaluate with the same machinery."""

import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_peft.engine.lengths import Lengths
from fedjax_peft.engine.plan import Cohort, Plan, batches, make_plan
from fedjax_peft.engine.round import Diagnosis, Probe, RoundResult, build_round, evaluation
from fedjax_peft.engine.sharding import replicate, replicated, split_lanes
from fedjax_peft.typing import Algorithm, ApplyFn, Key, Params, PyTree, Task

__all__ = ["Evaluator", "Measured", "Program", "Setup"]


class Setup(NamedTuple):
    """What training and evaluation have in common."""

    algorithm: Algorithm
    apply: ApplyFn
    task: Task
    frozen: Params
    fixed: Params
    """Trainable leaves that never change."""
    key: Key
    """Of the clients' random streams."""
    clients: int
    """How many there are in all."""
    mesh: Any = None
    """Devices that share the lanes; None for one device."""
    owned: Params | None = None
    """Which entries of a leaf each client has, bool ``[clients, ...]``; by default all."""
    diagnosis: Diagnosis | None = None
    """What to measure of the global model in every round."""
    probe: Probe | None = None
    """What to measure on test examples beside the task's metrics."""
    participants: int | None = None
    """How many clients have examples; by default all of them."""


class Program:
    """A round program, compiled at its first call and never again.

    The server state and the private store that it is called with are given up (donated).
    """

    def __init__(
        self,
        setup: Setup,
        columns: Mapping[str, np.ndarray],
        *,
        measures_only: bool = False,
        padded: tuple[int, ...] = (),
    ):
        """``padded`` are the padded lengths of the plans that it will run. With ``measures_only``
        the state is kept, not donated, and the result is without it.
        """
        mesh = setup.mesh
        round_ = build_round(
            setup.algorithm,
            setup.apply,
            setup.task,
            setup.clients,
            split_lanes(mesh),
            None if measures_only else setup.diagnosis,
            padded,
            setup.participants,
        )

        def measure(*arguments: Any) -> RoundResult:
            return round_(*arguments)._replace(server=(), private=())

        self._function = jax.jit(
            measure if measures_only else round_,
            donate_argnums=() if measures_only else (4, 5),
            # As the next round's inputs are, whatever the compiler would prefer.
            out_shardings=replicated(mesh),
        )
        self._mesh = mesh
        inputs = (setup.frozen, setup.fixed, setup.owned or {}, dict(columns))
        self._inputs = replicate(inputs, mesh)
        self._key = setup.key
        self._compiled: Any = None
        self.compile_seconds = 0.0

    def __call__(self, server: PyTree, store: PyTree, plan: Plan, number: int) -> RoundResult:
        """Runs round ``number``; returns without waiting for the device."""
        arguments = self._arguments(server, store, plan, number)
        if self._compiled is None:
            self._compile(arguments)
        return self._compiled(*arguments)

    def compile(self, server: PyTree, store: PyTree, plan: Plan) -> None:
        """Compiles for arguments of these shapes, and runs nothing."""
        self._compile(self._arguments(server, store, plan, 0))

    def _arguments(self, server: PyTree, store: PyTree, plan: Plan, number: int) -> tuple:
        plan, index = replicate((plan, np.int32(number)), self._mesh)
        return (*self._inputs, server, store, plan, self._key, index)

    def _compile(self, arguments: tuple) -> None:
        began = time.perf_counter()
        self._compiled = self._function.lower(*arguments).compile()
        self.compile_seconds = time.perf_counter() - began

    @property
    def compiled(self) -> bool:
        """Whether a call can begin without compilation."""
        return self._compiled is not None

    @property
    def peak_bytes(self) -> int:
        """What the compiled program needs on a device, arguments included."""
        analysis = self._compiled.memory_analysis()
        if analysis is None:
            return 0
        return (
            analysis.temp_size_in_bytes
            + analysis.argument_size_in_bytes
            + analysis.output_size_in_bytes
            - analysis.alias_size_in_bytes
        )


class Measured(NamedTuple):
    """What an :class:`Evaluator` returns."""

    clients: list[int]
    """Whose model every member is."""
    sums: dict[str, tuple[np.ndarray, np.ndarray]]
    """Metric -> (sums, counts), one of each for every member."""
    examples: list[np.ndarray]
    """Every member's examples, int32 ``[n]``, ascending."""
    predictions: list[dict[str, np.ndarray]]
    """What every member's model says of these, ``[n, ...]``; empty if the task has no score."""


class Evaluator:
    """Metrics of clients' models on given examples; the global model is a client like any other."""

    def __init__(
        self,
        setup: Setup,
        columns: Mapping[str, np.ndarray],
        *,
        members: Sequence[tuple[int, np.ndarray]],
        batch_size: int,
        personal: bool,
        tokens: Lengths | None = None,
    ):
        """``members`` are (client id, its examples); an id may occur more than once.

        With ``personal`` each has its client's model, else all have the global one. Of texts, whose
        ``tokens`` are given, those alike in length go together.
        """
        devices = 1 if setup.mesh is None else setup.mesh.size
        if tokens is not None:
            members = [
                (c, rows[np.argsort(tokens.examples[rows], kind="stable")]) for c, rows in members
            ]
            tokens = tokens.fitted(1)
        work = [batches(indices, batch_size) for _, indices in members]
        cohort = Cohort([c for c, _ in members], [1.0] * len(members), work)
        self._plan = make_plan(
            cohort,
            devices,
            time_steps=sum(len(w) for w in work),
            slots=len(members),
            batch_size=batch_size,
            tokens=tokens,
        )
        measured = evaluation(setup.algorithm, personal=personal, probe=setup.probe)
        measuring = setup._replace(algorithm=measured)
        padded = () if tokens is None else tokens.padded
        self._program = Program(measuring, columns, measures_only=True, padded=padded)

    def __call__(self, server: PyTree, store: PyTree) -> Measured:
        """Returns metrics and predictions.

        ``store`` is what the clients keep; the global model does without it: ``()``.
        """
        result = self._program(server, store, self._plan, 0)
        sums, said = jax.device_get((result.sums, result.predictions))
        examples, predictions = [], []
        for member in range(len(self._plan.client)):
            place = (self._plan.slot == member)[..., None] & (self._plan.examples >= 0)
            rows = self._plan.examples[place]
            order = np.argsort(rows, kind="stable")
            examples.append(rows[order])
            predictions.append({name: x[place][order] for name, x in said.items()})
        return Measured(self._plan.client.tolist(), sums, examples, predictions)

    @property
    def compiled(self) -> bool:
        """Whether a call can begin without compilation."""
        return self._program.compiled

    @property
    def examples(self) -> int:
        """How many examples are evaluated; one counts once for every member that it belongs to."""
        return int((self._plan.examples >= 0).sum())

    @property
    def compile_seconds(self) -> float:
        """Seconds of compilation so far."""
        return self._program.compile_seconds
