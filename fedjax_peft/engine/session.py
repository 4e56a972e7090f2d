"""A session: an algorithm over a federation, prepared once, that runs round after round."""

from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_peft import tree
from fedjax_peft.engine.lanes import Lanes, check_lanes, choose_lanes
from fedjax_peft.engine.plan import Plan
from fedjax_peft.engine.program import Program, Setup
from fedjax_peft.engine.schedule import Schedule
from fedjax_peft.engine.sharding import replicate
from fedjax_peft.engine.state import RoundInfo, State
from fedjax_peft.engine.uploads import start_transform
from fedjax_peft.errors import InputError
from fedjax_peft.typing import Params

__all__ = ["Session"]


class Session:
    """Communication rounds of one algorithm over one federation.

    It holds what does not change from round to round: the frozen weights, the data, the schedule
    and the compiled programs. All that changes is in a :class:`State`, so that a loop over rounds
    is the caller's::

        state = session.init(seed=0)
        state, info = session.step(state)
    """

    def __init__(
        self,
        setup: Setup,
        leaves: tuple[Params, Params],
        schedule: Schedule,
        columns: Mapping[str, Any],
        *,
        lanes: Lanes = "auto",
        rounds: int = 100,
    ):
        """Prepares; the round program is compiled when the first round runs.

        Args:
          setup: the algorithm, the model, the task and the devices.
          leaves: the initial shared leaves and the initial private leaves.
          schedule: who takes part in which round; its seed is replaced by that of the state.
          columns: of the training data.
          lanes: clients that run side by side.
          rounds: the plans have room for the largest of so many rounds. A later round that needs
            more room compiles a larger program.

        Raises:
          InputError: lanes that do not fit the devices, or leaves that the aggregator or the server
            cannot combine.
        """
        check_lanes(lanes, setup.mesh)
        self.setup, self.rounds = setup, rounds
        self._leaves, self._schedule, self._lanes = leaves, schedule, lanes
        self._columns = replicate(dict(columns), setup.mesh)
        self._chosen: int | None = None
        self._fitted: dict[int, tuple[Schedule, int]] = {}
        self._programs: dict[Any, Program] = {}
        self._plans: dict[tuple, Plan] = {}
        algorithm = setup.algorithm
        server = jax.eval_shape(algorithm.server.init, leaves[0])
        # What the aggregator cannot combine is an error before anything is written or compiled.
        jax.eval_shape(
            lambda s: algorithm.aggregator.zero(algorithm.server.unchanged(s), 1), server
        )
        jax.eval_shape(lambda s: algorithm.server.merge_into_frozen(s, setup.frozen), server)

    def init(self, seed: int = 0) -> State:
        """Returns the state before the first round.

        Args:
          seed: of all that is random in the rounds: cohorts, failures, the order of examples,
            dropout. The initial leaves are the model's.
        """
        setup, (shared, private) = self.setup, self._leaves
        # Copies, because the round program consumes its state and the model's arrays must survive.
        server = jax.tree.map(jnp.copy, setup.algorithm.server.init(shared))
        kept = tree.broadcast(setup.algorithm.init_client_state(shared, private), setup.clients)
        transform = start_transform(setup.transform, setup.algorithm, server, setup.clients)
        state = replicate(State(server, kept, (), transform).on_device(), setup.mesh)
        return state._replace(round_index=0, seed=seed)

    def step(self, state: State, plan: Plan | None = None) -> tuple[State, RoundInfo]:
        """Runs the next round and returns the state after it, without waiting for the device.

        The given state is consumed: its arrays are reused for the new one. Use ``state.copy()`` to
        keep it.

        Args:
          state: from :meth:`init` or from the round before.
          plan: by default the one of :meth:`plan`.

        Raises:
          InputError: the state was consumed by an earlier call.
        """
        if any(x.is_deleted() for x in jax.tree.leaves(state) if isinstance(x, jax.Array)):
            raise InputError(
                "This state was consumed by an earlier step, which reused its memory. Go on from"
                " the state that step returned, or step from state.copy()."
            )
        round_index, seed = int(state.round_index) + 1, int(state.seed)
        plan = self.plan(round_index, seed) if plan is None else plan
        if not plan.useful:  # nobody takes part
            slots = len(plan.client)
            info = RoundInfo(round_index, plan, {}, jnp.ones(slots, bool), jnp.zeros(slots), {}, {})
            return state._replace(round_index=round_index), info
        result = self.program(plan, seed)(state, plan, round_index)
        new = result.state._replace(round_index=round_index, seed=seed)
        return new, RoundInfo(
            round_index,
            plan,
            result.sums,
            result.finite,
            result.norms,
            result.sent_leaves,
            result.aggregation,
        )

    def plan(self, round_index: int, seed: int = 0, without: Collection[int] = ()) -> Plan:
        """Returns who does what in a round: a pure function of the round and the seed.

        Args:
          round_index: from 1.
          seed: of the state.
          without: clients of the cohort that do not take part.
        """
        key = (round_index, seed, tuple(sorted(without)))
        if key not in self._plans:
            schedule, time_steps = self._fit(seed)
            made = schedule.plan(round_index, self.lanes(seed), time_steps, without)
            self._plans = {**dict([*self._plans.items()][-1:]), key: made}
        return self._plans[key]

    def schedule(self, seed: int = 0) -> Schedule:
        """Returns who takes part in which round, for a seed."""
        return self._fit(seed)[0]

    def set_lanes(self, lanes: Lanes) -> None:
        """Replaces the wanted number of lanes, before the first round."""
        self._lanes = lanes

    def known(self, state: State, plan: Plan) -> bool:
        """Returns whether a step with this plan begins without compilation."""
        return not plan.useful or self.program(plan, int(state.seed)).known(state, plan)

    @property
    def compile_seconds(self) -> float:
        """Seconds of compilation of round programs so far."""
        return sum(program.compile_seconds for program in self._programs.values())

    @property
    def peak_bytes(self) -> int:
        """What the largest compiled round program needs on a device, arguments included."""
        return max((program.peak_bytes for program in self._programs.values()), default=0)

    def lanes(self, seed: int = 0) -> int:
        """Returns how many clients run side by side; chosen at the first call."""
        if self._chosen is None:
            setup = self.setup
            shared, private = self._leaves
            weights = {**setup.frozen, **setup.fixed, **shared, **private}
            schedule = self._schedule._replace(seed=seed).for_rounds(self.rounds)

            def program(schedule: Schedule) -> Program:
                return Program(setup, self._columns, padded=schedule.padded)

            self._chosen = choose_lanes(
                *(self._lanes, schedule, self.rounds, lambda: self.init(seed)),
                *(program, setup.mesh, weights),
            )
        return self._chosen

    def _fit(self, seed: int) -> tuple[Schedule, int]:
        """Returns the schedule of a seed and the time steps that its plans have room for."""
        if seed not in self._fitted:
            lanes = self.lanes(seed)
            schedule = self._schedule._replace(seed=seed).for_rounds(self.rounds).for_lanes(lanes)
            self._fitted[seed] = (schedule, schedule.time_steps(self.rounds, lanes))
        return self._fitted[seed]

    def program(self, plan: Plan, seed: int = 0) -> Program:
        """Returns the program that runs plans of this shape."""
        padded = self._fit(seed)[0].padded
        key = (*(x.shape for x in jax.tree.leaves(plan)), padded)
        if key not in self._programs:
            self._programs[key] = Program(self.setup, self._columns, padded=padded)
        return self._programs[key]
