"""The compiled program of a round.

It is compiled once and kept for later sessions; a call donates the state's arrays.
"""

import copy
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from fedjax_peft.contracts import Key
from fedjax_peft.engine.compilation import options_that_repeat, programs
from fedjax_peft.engine.local_work import branch, turn
from fedjax_peft.engine.places import state_shardings
from fedjax_peft.engine.plan import Plan
from fedjax_peft.engine.round import RoundOptions, RoundResult, build_round
from fedjax_peft.engine.setup import Setup, place_constants
from fedjax_peft.engine.state import State
from fedjax_peft.engine.work import Work, at_work
from fedjax_peft.numerics.random import stream


class Program:
    """A round program, compiled once for a model, an algorithm and the shapes of its arguments.

    Weights, data, seed and round are arguments of the compiled program. Later programs that differ
    only in these arguments reuse it. It is kept in
    :data:`fedjax_peft.engine.compilation.programs`, and freed together with the model. As under
    ``jax.jit``, the functions of algorithm, model and task must be pure.

    A call consumes the given state (its arrays are donated), unless the program only measures or
    keeps uploads.
    """

    def __init__(
        self,
        setup: Setup,
        columns: Mapping[str, np.ndarray],
        *,
        work: Work = "training",
        padded: tuple[int, ...] = (),
        gathered: bool = False,
    ):
        """Prepares the arguments that do not change; nothing is compiled yet.

        Args:
          gathered: whether states hold the rows of the plan's slots, not those of all clients.
        """
        self._setup, self._work, self._padded = setup, work, padded
        self._gathered = gathered
        self._inputs = place_constants(setup, columns)
        self._compiled: Any = None
        self._clients_key: tuple[int, Key] | None = None
        self._unique = object()
        self.compile_seconds = 0.0

    def __call__(self, state: State, plan: Plan, round_index: int) -> RoundResult:
        """Runs round ``round_index``; returns without waiting for the device."""
        arguments = self._arguments(state, plan, round_index)
        if self._compiled is None:
            self._compile(arguments)
        return self._compiled(*arguments)

    def compile(self, state: State, plan: Plan) -> None:
        """Compiles the program for arguments of these shapes, without running it."""
        self._compile(self._arguments(state, plan, 0))

    def lower(self, state: State, plan: Plan, devices: Sequence[Any] = ()) -> jax.stages.Lowered:
        """Returns the program, lowered for arguments of these shapes.

        The frozen leaves of the setup may be shapes (``jax.ShapeDtypeStruct``).

        Args:
          devices: as many as the layout has, which the program is only compiled for, of a topology
            of ``jax.experimental.topologies``; by default those of the layout.
        """
        arguments = self._arguments(state, plan, 0)
        if not devices:
            return self._function().lower(*arguments)
        layout = self._setup.layout.on(devices)

        def place(x: Any) -> jax.ShapeDtypeStruct:
            here: Any = SingleDeviceSharding(devices[0])
            if layout.mesh is not None:
                spec = getattr(getattr(x, "sharding", None), "spec", PartitionSpec())
                here = NamedSharding(layout.mesh, spec)
            return jax.ShapeDtypeStruct(jnp.shape(x), x.dtype, sharding=here)

        there = copy.copy(self)
        there._setup = self._setup._replace(layout=layout)
        return there._function().lower(*jax.tree.map(place, arguments))

    def use(self, columns: Mapping[str, Any]) -> None:
        """Replaces the examples, by others of the same shapes once the program is compiled."""
        placed = self._setup.layout.put_columns(dict(columns))
        self._inputs = self._inputs._replace(columns=placed)

    def known(self, state: State, plan: Plan) -> bool:
        """Returns whether a call with arguments of these shapes needs no compilation."""
        if self._compiled is not None:
            return True
        return programs.known(self._setup.apply, self._key(self._arguments(state, plan, 0)))

    def _arguments(self, state: State, plan: Plan, round_index: int) -> tuple:
        plan, index = self._setup.layout.put((plan, np.int32(round_index)))
        if self._clients_key is None or self._clients_key[0] != state.seed:
            self._clients_key = (state.seed, stream(int(state.seed), "clients"))
        if plan.fetched == ():  # everybody starts from the present version
            state = state._replace(history=())
        return (*self._inputs, state.on_device(), plan, self._clients_key[1], index)

    def _key(self, arguments: tuple) -> Hashable:
        """Returns a key of everything that the compiled program depends on, besides ``apply``."""
        s = self._setup
        training = self._work == "training"
        # What a maker makes is new each time, and equal makers make the same.
        made: tuple = s.maker or (s.algorithm, s.transform, s.stages)
        context = (s.total_clients, s.sampling_probability, made[1:])
        who = (s.clients, context if training else None)
        static = (made[0], s.task, *who, s.layout, s.splits, s.diagnosis, s.probe, s.dtype)
        leaves, structure = jax.tree.flatten(arguments)
        shapes = tuple((jax.typeof(x), getattr(x, "sharding", None)) for x in leaves)
        settings = tuple(getattr(jax.config, name) for name in _SETTINGS)
        key = (static, self._work, self._padded, self._gathered, structure, shapes, settings)
        try:
            hash(key)
        except TypeError:  # without a hash, only this program can find it again
            return self._unique
        return key

    def _compile(self, arguments: tuple) -> None:
        def compile_() -> Any:
            began = time.perf_counter()
            lowered = self._function().lower(*arguments)
            options = options_that_repeat(lowered, self._setup.layout.platform.name)
            compiled = lowered.compile(compiler_options=options)
            self.compile_seconds += time.perf_counter() - began
            return compiled

        self._compiled = programs.get(self._setup.apply, self._key(arguments), compile_)

    def _function(self) -> Any:
        measures = self._work in ("personal", "global", "local")
        return jax.jit(
            self._round(),
            donate_argnums=() if measures or self._work == "uploads" else (4,),
            # The same sharding as the next round's inputs, instead of the compiler's choice.
            out_shardings=self._out_shardings(),
        )

    def _round(self) -> Callable[..., RoundResult]:
        """Returns the function that is compiled; a program that measures returns no state."""
        setup = self._setup
        when = turn if setup.layout.platform.name == "gpu" else branch
        options = RoundOptions(self._padded, self._gathered, self._across(), when=when)
        measures = self._work in ("personal", "global", "local")

        def round_(*arguments: Any) -> RoundResult:
            made = at_work(setup.made(arguments[4].values), self._work)
            apply = setup.layout.forward(setup.apply, setup.splits)
            result = build_round(made._replace(apply=apply), options)(*arguments)
            nothing: Any = ()
            return result._replace(state=nothing) if measures else result

        return round_

    def _out_shardings(self) -> Any:
        """Returns the shardings of the results; each applies to all arrays of a part."""
        layout = self._setup.layout
        if layout.mesh is None:
            return None
        shardings: Any = dict.fromkeys(RoundResult._fields, layout.whole)
        state = state_shardings(layout, transforms=self._setup.transform is not None)
        shardings["state"] = () if self._work in ("personal", "global", "local") else state
        return RoundResult(**shardings)

    def _across(self) -> Callable[[Array], Array]:
        """Returns the function that takes a plan's value over all replicas; here there is one."""
        return lambda x: x

    @property
    def peak_bytes(self) -> int:
        """The bytes that the compiled program needs on a device, including its arguments."""
        return peak_bytes(self._compiled)


def peak_bytes(compiled: Any) -> int:
    """Returns the bytes that a compiled program needs, its arguments included."""
    analysis = compiled.memory_analysis()
    if analysis is None:
        return 0
    total: int = (
        analysis.temp_size_in_bytes
        + analysis.argument_size_in_bytes
        + analysis.output_size_in_bytes
        - analysis.alias_size_in_bytes
    )
    return total


class OuterProgram:
    """A program around another one, which it gives other arguments."""

    def __init__(self, program: Any):
        """Takes the program inside."""
        self._program, self._known = program, False

    def compile(self, state: State, plan: Plan) -> None:
        """Compiles the program for arguments of these shapes, without running it."""
        self._program.compile(*self._shaped(state, plan))

    def known(self, state: State, plan: Plan) -> bool:
        """Returns whether a call with arguments of these shapes needs no compilation."""
        # What is known stays known, so that rounds do not make arguments only to ask.
        self._known = self._known or self._program.known(*self._shaped(state, plan))
        return self._known

    def _shaped(self, state: State, plan: Plan) -> tuple[State, Plan]:
        """Returns a state and a plan as the program inside takes them, of the right shapes."""
        raise NotImplementedError

    @property
    def compile_seconds(self) -> float:
        """Seconds of compilation so far."""
        return self._program.compile_seconds

    @property
    def peak_bytes(self) -> int:
        """The bytes that the compiled program needs on a device, including its arguments."""
        return self._program.peak_bytes


_SETTINGS = (
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_enable_x64",
    "jax_numpy_dtype_promotion",
    "jax_threefry_partitionable",
    "jax_debug_nans",
)
"""JAX settings that change the compiled program of a function."""
