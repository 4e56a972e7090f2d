"""Rounds as compiled programs: compile once, donate, evaluate with the same machinery."""

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from fedjax_peft.engine.lengths import Lengths
from fedjax_peft.engine.plan import Cohort, Plan, batches, make_plan, most_slots, window
from fedjax_peft.engine.round import RoundResult, build_round, evaluation, tuning
from fedjax_peft.engine.sharding import replicate, replicated, split_lanes
from fedjax_peft.engine.state import State
from fedjax_peft.random import stream
from fedjax_peft.typing import (
    Algorithm,
    ApplyFn,
    Diagnosis,
    Key,
    Params,
    Probe,
    Task,
    Transform,
)

__all__ = ["Evaluator", "Measured", "Program", "Setup", "Work"]


class Setup(NamedTuple):
    """What training and evaluation have in common."""

    algorithm: Algorithm
    apply: ApplyFn
    task: Task
    frozen: Params
    fixed: Params
    """Trainable leaves that never change."""
    clients: int
    """How many there are in all."""
    mesh: Any = None
    """Devices that share the lanes; None for one device."""
    rank_mask: Params | None = None
    """Which entries of a leaf each client has, bool ``[clients, ...]``; by default all."""
    diagnosis: Diagnosis | None = None
    """What to measure of the global model in every round."""
    probe: Probe | None = None
    """What to measure on test examples beside the task's metrics."""
    total_clients: int | None = None
    """How many clients have examples; by default all of them."""
    dtype: Any = np.float32
    """In which ``apply`` computes."""
    sampling_probability: float = 1.0
    """The share of all clients that a round samples, on average."""
    transform: Transform | None = None
    """Of uploads in training."""


Work = Literal["training", "tuning", "personal", "global"]
"""What the clients of a program do: train, tune what they keep, or measure their own models or the
global one."""


class Program:
    """A round program, compiled once for a model, an algorithm and the shapes of its arguments.

    Weights, data, seed and round are arguments of the program. It is kept beside ``setup.apply``
    and reused by later programs that differ in these only; it goes when the model goes. As under
    ``jax.jit``, the functions of algorithm, model and task must be pure.

    The state that it is called with is given up (donated).
    """

    def __init__(
        self,
        setup: Setup,
        columns: Mapping[str, np.ndarray],
        *,
        work: Work = "training",
        padded: tuple[int, ...] = (),
    ):
        """``padded`` are the padded lengths of the plans that it will run.

        A program that measures keeps the state (it is not donated), and its result is without it.
        """
        self._setup, self._work, self._padded = setup, work, padded
        inputs = (setup.frozen, setup.fixed, setup.rank_mask or {}, dict(columns))
        self._inputs = replicate(inputs, setup.mesh)
        self._compiled: Any = None
        self._clients_key: tuple[int, Key] | None = None
        self.compile_seconds = 0.0

    def __call__(self, state: State, plan: Plan, round_index: int) -> RoundResult:
        """Runs round ``round_index``; returns without waiting for the device."""
        arguments = self._arguments(state, plan, round_index)
        if self._compiled is None:
            self._compile(arguments)
        return self._compiled(*arguments)

    def compile(self, state: State, plan: Plan) -> None:
        """Makes the program ready for arguments of these shapes, and runs nothing."""
        self._compile(self._arguments(state, plan, 0))

    def known(self, state: State, plan: Plan) -> bool:
        """Returns whether a call with arguments of these shapes begins without compilation."""
        if self._compiled is not None:
            return True
        key = self._key(self._arguments(state, plan, 0))
        return key in _programs_of(self._setup.apply)

    def _arguments(self, state: State, plan: Plan, round_index: int) -> tuple:
        plan, index = replicate((plan, np.int32(round_index)), self._setup.mesh)
        if self._clients_key is None or self._clients_key[0] != state.seed:
            self._clients_key = (state.seed, stream(int(state.seed), "clients"))
        return (*self._inputs, state.on_device(), plan, self._clients_key[1], index)

    def _key(self, arguments: tuple) -> Hashable:
        """Returns all that the compiled program depends on."""
        s = self._setup
        training = self._work == "training"
        context = (s.total_clients, s.sampling_probability, s.transform)
        who = (s.clients, context if training else None)
        static = (s.algorithm, s.apply, s.task, *who, s.mesh, s.diagnosis, s.probe, s.dtype)
        leaves, structure = jax.tree.flatten(arguments)
        shapes = tuple((jax.typeof(x), getattr(x, "sharding", None)) for x in leaves)
        settings = tuple(getattr(jax.config, name) for name in _SETTINGS)
        key = (static, self._work, self._padded, structure, shapes, settings)
        try:
            hash(key)
        except TypeError:  # a part that cannot be hashed cannot be recognised later
            return object()
        return key

    def _compile(self, arguments: tuple) -> None:
        programs, key = _programs_of(self._setup.apply), self._key(arguments)
        kept = programs.pop(key, None)
        if kept is None:
            began = time.perf_counter()
            kept = self._function().lower(*arguments).compile()
            self.compile_seconds += time.perf_counter() - began
        self._compiled = programs[key] = kept  # the newest is last
        while len(programs) > _MOST:
            programs.popitem(last=False)

    def _function(self) -> Any:
        setup, mesh = self._setup, self._setup.mesh
        algorithm, measures = setup.algorithm, self._work in ("personal", "global")
        if self._work == "tuning":
            algorithm = tuning(algorithm)
        elif measures:
            personal = self._work == "personal"
            algorithm = evaluation(algorithm, personal=personal, probe=setup.probe)
        training = self._work == "training"
        round_ = build_round(
            algorithm,
            setup.apply,
            setup.task,
            setup.clients,
            split_lanes(mesh),
            setup.diagnosis if training else None,
            self._padded,
            setup.total_clients,
            setup.dtype,
            setup.sampling_probability,
            setup.transform if training else None,
        )

        def measure(*arguments: Any) -> RoundResult:
            nothing: Any = ()
            return round_(*arguments)._replace(state=nothing)

        return jax.jit(
            measure if measures else round_,
            donate_argnums=() if measures else (4,),
            # As the next round's inputs are, whatever the compiler would prefer.
            out_shardings=replicated(mesh),
        )

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


_MOST = 16
"""Compiled programs that are kept for a model: each holds memory and, on a CPU, memory maps."""
_SETTINGS = (
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_enable_x64",
    "jax_numpy_dtype_promotion",
    "jax_threefry_partitionable",
    "jax_debug_nans",
)
"""Settings of JAX that change what a function compiles to."""


def _programs_of(apply: ApplyFn) -> OrderedDict[Hashable, Any]:
    """Returns the programs that were compiled for a model, the newest last.

    They are an attribute of its ``apply``, so that they are released with the model.
    """
    try:
        return vars(apply).setdefault("_programs", OrderedDict())
    except (TypeError, AttributeError):  # an object without attributes: nothing is kept
        return OrderedDict()


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


_PARTS = 8
"""Into about how many parts an evaluation of many quick steps is cut."""
_PART_SECONDS = 2.0
"""How long a part should take at most, where its steps are slow."""


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
        steps = int(self._plan.steps)
        # A part is a call of the program. The parts are for signs of life: metrics are added up
        # step by step whatever the parts are.
        self._capacity = max(-(-steps // _PARTS), min(steps, _PARTS))
        self._slots = most_slots(self._plan, self._capacity)
        self._part_steps = 1
        padded = () if tokens is None else tokens.padded
        own: Work = "personal" if personal else "global"
        self._program = Program(setup, columns, work=own, padded=padded)

    def __call__(
        self,
        state: State,
        on_part: Callable[[int], None] = lambda done: None,
    ) -> Measured:
        """Returns metrics and predictions.

        Args:
          state: what the models are of; it is not given up.
          on_part: called after every part with the number of examples that are done.
        """
        plan, parts, start = self._plan, [], 0
        before = self._program.compile_seconds
        while start < int(plan.steps):
            part = self._part(start)
            began = time.perf_counter()
            result = self._program(state, part, 0)
            steps = int(part.steps)
            predictions, structure = jax.tree.flatten(jax.device_get(result.predictions))
            parts.append(jax.tree.unflatten(structure, [x[:steps] for x in predictions]))
            compiled, before = self._program.compile_seconds - before, self._program.compile_seconds
            seconds = (time.perf_counter() - began - compiled) / steps
            self._part_steps = max(1, min(int(_PART_SECONDS / max(seconds, 1e-9)), self._capacity))
            start += steps
            on_part(int((plan.examples[:start] >= 0).sum()))
        found = jax.tree.map(lambda *xs: np.concatenate(xs).reshape(-1, *xs[0].shape[2:]), *parts)
        return self._by_member(found["metrics"], found["predictions"])

    def _part(self, start: int) -> Plan:
        return window(
            self._plan, start, self._part_steps, time_steps=self._capacity, slots=self._slots
        )

    def _by_member(
        self, metrics: Mapping[str, Any], predictions: Mapping[str, np.ndarray]
    ) -> Measured:
        """Returns the measurements of every step, ``[steps * lanes, ...]``, by member."""
        plan, used = self._plan, int(self._plan.steps)
        slot = plan.slot[:used].reshape(-1)
        batch = plan.examples[:used].reshape(-1, plan.examples.shape[-1])
        steps = np.argsort(slot, kind="stable")
        ends = np.searchsorted(slot[steps], np.arange(len(plan.client) + 1))
        examples, by_member = [], []
        for first, last in pairwise(ends):
            own = steps[first:last]
            real = batch[own] >= 0
            order = np.argsort(batch[own][real], kind="stable")
            examples.append(batch[own][real][order])
            by_member.append({name: x[own][real][order] for name, x in predictions.items()})

        def total(x: np.ndarray) -> np.ndarray:
            sums = np.zeros(len(plan.client) + 1, np.float32)
            np.add.at(sums, slot, x)  # in the order of the steps, as a device would add them
            return sums[:-1]

        sums = {name: (total(x), total(n)) for name, (x, n) in metrics.items()}
        return Measured(plan.client.tolist(), sums, examples, by_member)

    def known(self, state: State) -> bool:
        """Returns whether a call begins without compilation."""
        return self._program.known(state, self._part(0))

    @property
    def examples(self) -> int:
        """How many examples are evaluated; one counts once for every member that it belongs to."""
        return int((self._plan.examples >= 0).sum())

    @property
    def compile_seconds(self) -> float:
        """Seconds of compilation so far."""
        return self._program.compile_seconds
