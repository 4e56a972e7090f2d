"""A session: one algorithm on one federation. It is prepared once and run round by round."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedjax_peft.contracts import Params
from fedjax_peft.engine.calls import Call, Calling, alone
from fedjax_peft.engine.computation import Computation
from fedjax_peft.engine.devices.distributed import whole
from fedjax_peft.engine.evaluator import (
    Evaluator,
    Examined,
    Examples,
    joined,
    mean_figures,
    members_of,
)
from fedjax_peft.engine.gathered import gathering
from fedjax_peft.engine.history import grown, places_of, start_history
from fedjax_peft.engine.initial import check_shapes, initial_state, without_clients
from fedjax_peft.engine.lanes import Lanes, choose_lanes
from fedjax_peft.engine.lengths import Lengths
from fedjax_peft.engine.places import map_client_rows, place_state
from fedjax_peft.engine.plan import Plan
from fedjax_peft.engine.planner import Planner
from fedjax_peft.engine.schedule import Schedule
from fedjax_peft.engine.setup import Setup, place_constants
from fedjax_peft.engine.state import RoundInfo, State
from fedjax_peft.engine.stores.client_records import ClientRow
from fedjax_peft.engine.stores.client_store import ClientPlace, StoredClients, room_for
from fedjax_peft.engine.stores.store_files import store_in
from fedjax_peft.engine.streaming import ExamplesPlace, streaming
from fedjax_peft.engine.work import Work, check_local_models
from fedjax_peft.numerics import tree
from fedjax_peft.numerics.hyperparameters import Values, as_arrays
from fedjax_peft.support.errors import InputError, check_known

_PLAIN = Computation()
_EVALUATORS = 8  # that a session keeps, the last ones, with their data: ids stay unique


class Session:
    """Communication rounds of one algorithm on one federation; made by ``fp.session``.

    A session holds everything that does not change from round to round: the frozen weights, the
    data, the schedule of the clients, and the compiled programs. Everything that changes is in a
    :class:`State`. The caller writes the loop over the rounds::

        state = session.init(seed=0)
        for _ in range(100):
            state, info = session.step(state)
        scores = session.evaluate(state, test)
    """

    def __init__(
        self,
        setup: Setup,
        leaves: tuple[Params, Params],
        schedule: Schedule,
        columns: Mapping[str, Any],
        computation: Computation = _PLAIN,
        *,
        values: Values | None = None,
        salt: Callable[[Values], np.ndarray] | None = None,
    ):
        """Prepares the rounds; the program is compiled when the first round runs.

        Args:
          setup: the algorithm, the model, the task and the devices.
          leaves: the initial shared leaves, and the initial private leaves of every client.
          schedule: the clients of each round; its seed is replaced by the state's seed.
          columns: the columns of the training data.
          computation: how the rounds are computed.
          values: the run-time values of the states that :meth:`init` returns.
          salt: run-time values -> ``State.salt``; None: there is no noise to tell apart.

        Raises:
          InputError: an unknown engine or place, lanes that do not fit the devices, or leaves that
            the aggregator or the server cannot combine.
        """
        computation.check(setup.layout)
        on_device = computation.examples == "device"
        self._given_columns, self._complete = columns, computation.complete
        columns = self._complete(columns)
        frozen, fixed, rank_mask, placed = place_constants(setup, columns if on_device else {})
        self.columns: Mapping[str, Any] = placed if on_device else columns
        self.setup = setup._replace(frozen=frozen, fixed=fixed, rank_mask=rank_mask)
        self._leaves, self._schedule = leaves, schedule
        self._wanted_lanes, self._rounds = computation.lanes, computation.rounds
        self._make = self._make_plain = computation.make
        self.client_place: ClientPlace = computation.client_state
        self.examples_place: ExamplesPlace = computation.examples
        self._values, self.read = dict(values or {}), computation.read
        # The salt of a state that begins with these run-time values.
        self.salt: Callable[[Values], Any] = lambda v: () if salt is None else jnp.asarray(salt(v))
        self._lanes: int | None = None
        self._planner = Planner(schedule, self._rounds, setup.layout, self.lanes)
        self._programs: dict[Any, Any] = {}
        self._evaluators: dict[tuple, tuple[Examples, Examples, Evaluator]] = {}
        self._train_with: Callable[..., Any] = self._make if on_device else streaming(self._make)
        check_shapes(self.setup, leaves[0])
        self._store = store_in(self.client_place, lambda: self._start({})[1], self.setup.clients)
        if self._store is not None:
            self._make, self._train_with = gathering(self._make), gathering(self._train_with)

    @property
    def personal(self) -> bool:
        """Whether each client predicts with its own model."""
        return self.setup.algorithm.personal or bool(self._leaves[1])

    @property
    def has_global_model(self) -> bool:
        """Whether there is one model for the whole federation, because no leaf is private."""
        return not self._leaves[1]

    @property
    def leaves(self) -> tuple[Params, Params]:
        """The initial shared leaves, and the initial private leaves of every client."""
        return self._leaves

    @property
    def values(self) -> Values:
        """The run-time values of the states that :meth:`init` returns, as numbers."""
        return self._values

    @property
    def compile_seconds(self) -> float:
        """The total compilation time of round programs so far, in seconds."""
        return sum(program.compile_seconds for program in self._programs.values())

    @property
    def peak_bytes(self) -> int:
        """The memory of the largest round program on a device, arguments included, in bytes."""
        return max((program.peak_bytes for program in self._programs.values()), default=0)

    def init(self, seed: int = 0, values: Values | None = None) -> State:
        """Returns the state before the first round.

        Args:
          seed: the seed of all random numbers in the rounds: cohorts, failures, the order of
            examples, dropout. It does not affect the initial leaves, which come from the model.
          values: run-time values that replace some of the session's; nothing is compiled again.

        Raises:
          InputError: a value that the session does not have, or that the algorithm refuses.
        """
        for name in values or {}:
            check_known("run-time value", name, self._values)
        chosen = {**self._values, **(values or {})}
        if self._store is None:
            state = initial_state(self.setup.made(chosen), self._leaves, as_arrays(chosen))
        else:
            state, row = self._start(chosen)
            state = state._replace(client_state=self._store.start(row), values=as_arrays(chosen))
        state = state._replace(history=self.history(state, seed), salt=self.salt(chosen))
        return self.placed(state)._replace(round_index=0, seed=seed)

    def history(self, state: State, seed: int) -> Any:
        """Returns the room for versions of the server that the rounds of a seed need."""
        setup, places = self.setup, self.schedule(seed).places(self._rounds)
        if not places:
            return ()
        parts = (setup.algorithm.server, setup.transform, state.server, state.transform_state)
        return start_history(places, *parts)

    def _start(self, values: Values) -> tuple[State, ClientRow]:
        """Returns the state before the first round without clients, and what one client keeps."""
        return without_clients(self.setup.made(values), self._leaves)

    def step(self, state: State, plan: Plan | None = None) -> tuple[State, RoundInfo]:
        """Runs the next round; returns the state after it and information about the round.

        The call returns before the device has finished, so the next plan can be made meanwhile.
        The given state is consumed: its memory is reused. To keep a state, pass ``state.copy()``.

        Args:
          state: from :meth:`init` or from the previous step.
          plan: the plan of the round; by default the result of :meth:`plan`.

        Raises:
          InputError: the state was consumed by an earlier step.
        """
        return alone(self.stepping(state, plan))

    def stepping(self, state: State, plan: Plan | None = None) -> Calling[tuple[State, RoundInfo]]:
        """Does what :meth:`step` does, in step with other work; see ``engine/calls.py``."""
        state.check_alive()
        round_index, seed = int(state.round_index) + 1, int(state.seed)
        own, plan = plan is not None, plan or self.plan(round_index, seed)
        if not self._runs(plan):  # nobody takes part, and nothing changes
            return state._replace(round_index=round_index), RoundInfo.of_nobody(round_index, plan)
        state = state._replace(history=grown(state.history, plan.fetched))
        places = places_of(state.history)
        result = yield Call(self.program(plan, seed, places=places), state, plan, round_index)
        self._prefetch(result.state.client_state, round_index + 1, seed, own)
        measured = {name: getattr(result, name) for name in RoundInfo._fields[2:]}
        info = RoundInfo(round_index, result.plan or plan, **measured)
        return result.state._replace(round_index=round_index, seed=seed), info

    def _prefetch(self, clients: Any, round_index: int, seed: int, own: bool) -> None:
        """Plans the next round and reads what its clients keep, while the device computes."""
        stored = isinstance(clients, StoredClients)
        if self._schedule.intermittent or (own and not stored):
            return  # the next cohort depends on who will be available, or on the caller
        if round_index <= self._planner.capacity(seed).rounds:
            cohort = self.plan(round_index, seed).client
            if stored:
                clients.prefetch(cohort, self.setup.layout.put_clients)

    def evaluate(
        self,
        state: State,
        data: Examples,
        *,
        clients: Sequence[int] | None = None,
        batch_size: int = 64,
    ) -> dict[str, float]:
        """Returns the task's metrics on a data set, by name, such as ``accuracy`` and ``loss``.

        The metrics are those of the global model. If clients have personal models, the metrics are
        means over the clients' models, each evaluated on all of the data.

        Args:
          state: holds the models; it is not consumed.
          data: the examples, such as a :class:`fedjax_peft.data.Dataset`.
          clients: ids of the clients whose models are evaluated; by default all clients. If it is
            given, personal models are evaluated even when there is a global model.
          batch_size: examples in a step.
        """
        state.check_alive()
        personal = clients is not None or self.personal
        members = self.global_members(len(data))
        if personal:
            members = members_of(len(data), clients, range(self.setup.clients))
        key = (id(data), batch_size, personal, tuple(client for client, _ in members))
        if key not in self._evaluators:
            known = self.read(data)
            evaluator = self.evaluator(known.columns, members, batch_size, personal=personal)
            last = list(self._evaluators.items())[1 - _EVALUATORS :]
            self._evaluators = {**dict(last), key: (data, known, evaluator)}
        _, known, evaluator = self._evaluators[key]
        made = evaluator(state)
        return mean_figures(made if personal else joined(made), self.setup.task, known)

    def evaluator(
        self,
        columns: Mapping[str, Any],
        members: Sequence[tuple[int, np.ndarray]],
        batch_size: int,
        *,
        personal: bool,
        cohort: np.ndarray | None = None,
        template: Evaluator | None = None,
    ) -> Evaluator:
        """Returns an :class:`Evaluator`; its docstring explains the arguments.

        With a ``cohort``, the client ids of a plan's slots, members are slots, and the evaluator
        takes the state of :meth:`training_locally`.
        """
        known, tokens = columns is self._given_columns, self._schedule.tokens
        setup = self.setup
        work: Work = "personal" if personal else "global"
        if not personal:  # every client has all entries of the global model
            setup = setup._replace(rank_mask=None)
        if cohort is not None:
            masks, work = tree.take(setup.rank_mask or {}, cohort), "local"
            setup = setup._replace(rank_mask=masks, clients=len(cohort))
        lengths = None if tokens is None else Lengths.of(columns, tokens.most)
        return Evaluator(
            setup,
            Examined(
                self.columns if known else self._complete(columns), members, batch_size, lengths
            ),
            work=work,
            make=self._make if cohort is None else self._make_plain,
            template=template,
            room=None if cohort is not None else self._room,
        )

    @property
    def _room(self) -> int | None:
        """The number of clients that are on the device at the same time outside of rounds."""
        return None if self._store is None else room_for(self._store.packing.nbytes)

    def global_members(self, examples: int) -> list[tuple[int, np.ndarray]]:
        """Returns the members that evaluate the global model: rows for every lane device."""
        if not examples:
            raise InputError("There are no examples to evaluate: the data set is empty.")
        rows = np.arange(examples, dtype=np.int32)
        return [(0, part) for part in np.array_split(rows, self.setup.layout.lane_devices)]

    def tune(self, state: State) -> State:
        """Returns the result of :meth:`tuning`."""
        return alone(self.tuning(state))

    def tuning(self, state: State) -> Calling[State]:
        """Returns the state after every client has trained as ``Algorithm.tuning`` says.

        Nothing is sent, and the server stays as it is. The given state is not consumed. The random
        numbers are those of the next round.
        """
        tuning, seed = self.setup.algorithm.tuning, int(state.seed)
        if tuning is None:
            raise InputError(f"The algorithm {self.setup.algorithm.name!r} tunes no models.")
        clients, lanes = self.setup.clients, self.lanes(seed)
        room = self._room
        together = clients if room is None else self.setup.layout.rows(min(clients, room))
        everyone = self._planner.capacity(seed).schedule.of_everyone(tuning.epochs, together)
        program = self._train_with(self.setup, self.columns, work="tuning", padded=everyone.padded)
        size, tuned = everyone.time_steps_of_part(lanes), state.copy()
        for first in range(0, clients, together):
            part = range(first, min(first + together, clients))
            plan = everyone.plan(int(state.round_index) + 1, lanes, size, members=part)
            result = yield Call(program, tuned, plan, int(state.round_index) + 1)
            tuned = result.state._replace(seed=seed)
        return state._replace(client_state=tuned.client_state)

    def training_locally(self, state: State, plan: Plan) -> Calling[tuple[State, Array]]:
        """Returns the clients' models after the local work of the next round, not aggregated.

        The local work is that of :meth:`step` with the same arguments. It is done by a program of
        its own, so the round itself is not affected. The given state is not consumed.

        Returns:
          A state for an :meth:`evaluator` with a ``cohort``: its client state holds upload and
          client state of each slot, ``[slots, ...]``. And bool ``[slots]``: False for a client
          whose upload was not finite, whose model is not valid.

        Raises:
          InputError: these models are not known, see :func:`check_local_models`.
        """
        state.check_alive()
        check_local_models(self.setup, state.server)
        state = state._replace(history=grown(state.history, plan.fetched))
        program = self.program(plan, int(state.seed), "uploads", places_of(state.history))
        result = yield Call(program, state, plan, int(state.round_index) + 1)
        own = result.state.client_state
        if self._store is None:
            own = tree.take(own, plan.client)
        models = self.setup.layout.put_clients((result.state.server, own))
        return state._replace(client_state=models), result.finite

    def plan(
        self,
        round_index: int,
        seed: int = 0,
        without: Collection[int] = (),
        limits: Mapping[int, int] | None = None,
        among: np.ndarray | None = None,
    ) -> Plan:
        """Returns the plan of a round, a pure function of the arguments.

        The last two plans are cached, so one made while the device computes is ready at once.

        Args:
          round_index: the round, from 1.
          seed: the state's seed.
          without: clients of the cohort that do not take part.
          limits: client id -> the largest number of its local steps; by default all its work.
          among: the clients that are available; by default all.
        """
        return self._planner.plan(round_index, seed, without, limits, among)

    def schedule(self, seed: int = 0) -> Schedule:
        """Returns the schedule of the clients for a seed."""
        return self._planner.schedule(seed)

    def padding_share(self, plan: Plan, seed: int = 0) -> float | None:
        """Returns the share of padding in a plan's tokens; None if the examples are not texts."""
        return self._planner.capacity(int(seed)).schedule.padding_share(plan)

    def lanes(self, seed: int = 0) -> int:
        """Returns the number of clients that run side by side; chosen at the first call."""
        if self._lanes is None:
            shared, private = self._leaves
            self._lanes = choose_lanes(
                self._wanted_lanes,
                self._schedule._replace(seed=seed).for_rounds(self._rounds),
                self._rounds,
                lambda: self.init(seed),
                lambda schedule: self._train_with(self.setup, self.columns, padded=schedule.padded),
                self.setup.layout,
                {**self.setup.frozen, **self.setup.fixed, **shared, **private},
            )
        return self._lanes

    def request_lanes(self, lanes: Lanes) -> None:
        """Replaces the requested number of lanes; call it before the first round is planned.

        A number is rounded up to one that the devices can share equally.
        """
        self._wanted_lanes = lanes if lanes == "auto" else self.setup.layout.lanes(lanes)

    def placed(self, state: State) -> State:
        """Returns a state with its arrays on the devices, as :meth:`init` does.

        Args:
          state: its arrays may be on the host; the reverse of :meth:`trimmed`.
        """
        arrays = place_state(self.setup.layout, state.on_device())
        return arrays._replace(round_index=state.round_index, seed=state.seed)

    def trimmed(self, state: State) -> State:
        """Returns a state whose arrays ``[clients, ...]`` have one row for each client.

        Several devices share such arrays in equal parts, so they may have unused rows at the end.
        Arrays with unused rows are returned without them, on the host.
        """
        clients = self.setup.clients
        if self.setup.layout.rows(clients) == clients:
            return state
        return map_client_rows(lambda x: np.asarray(whole(x))[:clients], state)

    def known(self, state: State, plan: Plan) -> bool:
        """Returns whether a step with this plan needs no compilation."""
        if not self._runs(plan):
            return True
        state = state._replace(history=grown(state.history, plan.fetched))
        program = self.program(plan, int(state.seed), places=places_of(state.history))
        return program.known(state, plan)

    def program(self, plan: Plan, seed: int = 0, work: Work = "training", places: int = 0) -> Any:
        """Returns the program for plans of this shape, which trains or keeps the uploads.

        Args:
          plan: a plan.
          seed: the state's seed.
          work: what the clients do.
          places: the room of the state's history of versions.
        """
        padded = self.padded(seed)
        key = (*(x.shape for x in jax.tree.leaves(plan)), padded, work, places)
        if key not in self._programs:
            self._programs[key] = self._train_with(
                self.setup, self.columns, work=work, padded=padded
            )
        return self._programs[key]

    def padded(self, seed: int = 0) -> tuple[int, ...]:
        """Returns the padded lengths of the plans of a seed; empty if there are no tokens."""
        return self._planner.capacity(seed).schedule.padded

    def _runs(self, plan: Plan) -> bool:
        """Returns whether a round with this plan changes anything."""
        return bool(plan.client_steps) or self.setup.algorithm.aggregator.every_round
