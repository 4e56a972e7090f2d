"""Metrics of models on given examples, computed by the same loop over lanes as training."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
from jax import Array

from fedjax_peft.contracts import Task
from fedjax_peft.engine.calls import Call, Calling, alone
from fedjax_peft.engine.devices.distributed import agree
from fedjax_peft.engine.lengths import Lengths
from fedjax_peft.engine.plan import Cohort, Plan, batches, make_plan, most_slots, no_larger, window
from fedjax_peft.engine.program import Program
from fedjax_peft.engine.setup import Setup
from fedjax_peft.engine.state import State
from fedjax_peft.engine.work import Work
from fedjax_peft.support.errors import InputError


class Examples(Protocol):
    """The properties of a data set that the engine uses."""

    @property
    def columns(self) -> Mapping[str, np.ndarray]:
        """Arrays ``[examples, ...]`` by name."""

    def take(self, rows: np.ndarray) -> Any:
        """Returns the data set of the given rows, which ``Task.score`` reads."""

    def __len__(self) -> int:
        """Returns the number of examples."""


class Measured(NamedTuple):
    """The results of an :class:`Evaluator`."""

    clients: list[int]
    """For each member, the id of the client whose model was evaluated."""
    sums: dict[str, tuple[np.ndarray, np.ndarray]]
    """Metric -> (sums, counts), each with one value per member."""
    examples: list[np.ndarray]
    """Each member's examples, int32 ``[n]``, ascending."""
    predictions: list[dict[str, np.ndarray]]
    """Each member's model outputs for its examples, ``[n, ...]``; empty without a score."""


_PARTS = 8
"""The approximate number of parts of an evaluation with many quick steps."""
_PART_SECONDS = 2.0
"""The longest time that a part should take if its steps are slow."""


class _Shapes(NamedTuple):
    """What the compiled program of an evaluation depends on, besides the models."""

    columns: Mapping[str, tuple[tuple[int, ...], Any]]
    """Column name -> shape and dtype."""
    batch_size: int
    padded: tuple[int, ...]
    """The padded lengths of texts."""
    time_steps: int
    """The largest number of time steps in a part."""
    slots: int
    """The largest number of members in a part."""

    def fit(self, columns: Mapping[str, Any], tokens: Lengths | None) -> bool:
        """Returns whether examples fit into these shapes, perhaps with unused rows after them."""
        if columns.keys() != self.columns.keys():
            return False
        for name, x in columns.items():
            (rows, *rest), dtype = self.columns[name]
            # Examples that are on the device are not copied to add rows.
            fits = len(x) == rows if isinstance(x, Array) else len(x) <= rows
            if not fits or (*x.shape[1:],) != (*rest,) or x.dtype != dtype:
                return False
        return tokens is None or int(tokens.examples.max(initial=0)) <= max(self.padded, default=0)

    def filled(self, columns: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns the columns with rows of zeros after them, which no plan reads."""
        missing = {name: shape[0] - len(columns[name]) for name, (shape, _) in self.columns.items()}
        return {
            name: np.pad(x, [(0, missing[name])] + [(0, 0)] * (x.ndim - 1)) if missing[name] else x
            for name, x in columns.items()
        }


class Examined(NamedTuple):
    """What is evaluated on which examples."""

    columns: Mapping[str, np.ndarray]
    """The examples."""
    members: Sequence[tuple[int, np.ndarray]]
    """(client id, its examples); an id may occur more than once."""
    batch_size: int
    """Examples in a step; reduced if no member has so many examples."""
    tokens: Lengths | None = None
    """The lengths of texts; texts of similar length share a batch."""


def members_of(
    examples: int, clients: Sequence[int] | None, everyone: range
) -> list[tuple[int, np.ndarray]]:
    """Returns the members that evaluate clients' own models on all of the examples.

    Args:
      clients: the clients that are asked for; None: all.
      everyone: the ids of all clients.

    Raises:
      InputError: no client is named, or one does not exist.
    """
    if clients is not None and not clients:
        raise InputError("No client is named in clients. Leave it out to evaluate all.")
    for client in clients or ():
        if client not in everyone:
            raise InputError(f"There is no client {client}: the last is {everyone[-1]}.")
    rows = np.arange(examples, dtype=np.int32)
    return [(client, rows) for client in (everyone if clients is None else clients)]


class Evaluator:
    """Metrics of clients' models on given examples; the global model is a client like any other."""

    def __init__(
        self,
        setup: Setup,
        examined: Examined,
        *,
        work: Work,
        make: Callable[..., Any] = Program,
        template: "Evaluator | None" = None,
        room: int | None = None,
    ):
        """Plans the evaluation; nothing is compiled yet.

        Args:
          work: ``personal`` evaluates the model of each member's client, ``global`` the global
            model, ``local`` the models before an aggregation.
          make: makes the program, as :class:`fedjax_peft.engine.program.Program` does.
          template: another evaluator of global or of personal models. If the examples fit into the
            shapes of its program, they take these shapes, and nothing is compiled a second time.
          room: the largest number of members in a part, if a single step has no more.
        """
        columns, members, batch_size, tokens = examined
        known = None if template is None else template._shapes
        shapes = known if known is not None and known.fit(columns, tokens) else None
        if shapes is None:
            batch_size = no_larger(batch_size, max((len(rows) for _, rows in members), default=0))
            tokens = None if tokens is None else tokens.fitted(1)
        else:
            batch_size, columns = shapes.batch_size, shapes.filled(columns)
            tokens = None if tokens is None else tokens._replace(padded=shapes.padded)
        plan = self.plan = _plan(members, batch_size, tokens, setup.layout.lane_devices)
        if shapes is None:
            # Each part is one call of the program. Parts only serve the progress display: metrics
            # are added up step by step, so the results do not depend on them.
            capacity = max(-(-int(plan.steps) // _PARTS), min(int(plan.steps), _PARTS))
            while room is not None and capacity > 1 and most_slots(plan, capacity) > room:
                capacity //= 2
            sizes = {name: (x.shape, x.dtype) for name, x in columns.items()}
            padded = () if tokens is None else tokens.padded
            # Other members may be in one step together, as many as there are lanes.
            slots = max(most_slots(plan, capacity), setup.layout.lane_devices)
            shapes = _Shapes(sizes, batch_size, padded, capacity, slots)
        self._shapes: _Shapes = shapes
        self._part_steps, self._longest = 1, shapes.time_steps
        while most_slots(plan, self._longest) > shapes.slots and self._longest > 1:
            self._longest //= 2
        self.setup, self.columns, self.work, self.padded = setup, columns, work, shapes.padded
        self._program = make(setup, columns, work=work, padded=shapes.padded)

    def __call__(
        self, state: State, on_part: Callable[[int], None] = lambda done: None
    ) -> Measured:
        """Returns metrics and predictions.

        Args:
          on_part: called after every part with the number of examples evaluated so far.
        """
        return alone(self.measuring(state, on_part))

    def measuring(
        self, state: State, on_part: Callable[[int], None] = lambda done: None
    ) -> Calling[Measured]:
        """Does what a call does, in step with other work (:mod:`fedjax_peft.engine.calls`)."""
        plan, parts, start = self.plan, [], 0
        before = self._program.compile_seconds
        while start < int(plan.steps):
            part = self._part(start)
            began = time.perf_counter()
            result = yield Call(self._program, state, part, 0)
            steps = int(part.steps)
            predictions, structure = jax.tree.flatten(jax.device_get(result.predictions))
            parts.append(jax.tree.unflatten(structure, [x[:steps] for x in predictions]))
            compiled, before = self._program.compile_seconds - before, self._program.compile_seconds
            seconds = agree((time.perf_counter() - began - compiled) / steps)
            self._part_steps = max(1, min(int(_PART_SECONDS / max(seconds, 1e-9)), self._longest))
            start += steps
            on_part(int((plan.examples[:start] >= 0).sum()))
        found = jax.tree.map(lambda *xs: np.concatenate(xs).reshape(-1, *xs[0].shape[2:]), *parts)
        return self._by_member(found["metrics"], found["predictions"])

    def _part(self, start: int) -> Plan:
        capacity, slots = self._shapes.time_steps, self._shapes.slots
        return window(self.plan, start, self._part_steps, time_steps=capacity, slots=slots)

    def _by_member(
        self, metrics: Mapping[str, Any], predictions: Mapping[str, np.ndarray]
    ) -> Measured:
        """Returns the measurements of all steps, ``[steps * lanes, ...]``, grouped by member."""
        plan, used = self.plan, int(self.plan.steps)
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
        """Returns whether a call needs no compilation."""
        return self._program.known(state, self._part(0))

    @property
    def examples(self) -> int:
        """The number of evaluated examples; an example counts once for each of its members."""
        return int((self.plan.examples >= 0).sum())

    @property
    def compile_seconds(self) -> float:
        """Seconds of compilation so far."""
        return self._program.compile_seconds


def _plan(
    members: Sequence[tuple[int, np.ndarray]], batch_size: int, tokens: Lengths | None, devices: int
) -> Plan:
    """Returns the plan of a whole evaluation; texts of similar length share a batch."""
    if tokens is not None:
        members = [
            (c, rows[np.argsort(tokens.examples[rows], kind="stable")]) for c, rows in members
        ]
    work = [batches(indices, batch_size) for _, indices in members]
    cohort = Cohort([c for c, _ in members], [1.0] * len(members), work)
    return make_plan(
        cohort,
        devices,
        time_steps=sum(len(w) for w in work),
        slots=len(members),
        batch_size=batch_size,
        tokens=tokens,
    )


def joined(measured: Measured) -> Measured:
    """Returns the measurements of several members, combined into those of one member."""
    rows = np.concatenate(measured.examples)
    order = np.argsort(rows, kind="stable")
    names = measured.predictions[0]
    predictions = {n: np.concatenate([p[n] for p in measured.predictions])[order] for n in names}
    sums = {
        n: (total.sum(keepdims=True), count.sum(keepdims=True))
        for n, (total, count) in measured.sums.items()
    }
    return Measured(measured.clients[:1], sums, [rows[order]], [predictions])


def repeated(measured: Measured, clients: list[int]) -> Measured:
    """Returns the measurements of one member as those of several clients with equal models."""
    n = len(clients)
    sums = {k: (np.repeat(x, n), np.repeat(count, n)) for k, (x, count) in measured.sums.items()}
    return Measured(clients, sums, measured.examples * n, measured.predictions * n)


def figures(measured: Measured, member: int, task: Task, data: Examples) -> dict[str, float]:
    """Returns all metrics of one member: means over its examples, and the task's score."""
    means = {
        name: float(total[member] / count[member]) if count[member] else math.nan
        for name, (total, count) in measured.sums.items()
    }
    if task.score is None:
        return means
    own = data.take(measured.examples[member])
    return means | task.score(means, measured.predictions[member], own)


def mean_figures(measured: Measured, task: Task, data: Examples) -> dict[str, float]:
    """Returns the means of :func:`figures` over all members."""
    found = [figures(measured, i, task, data) for i in range(len(measured.examples))]
    return {name: float(np.mean([one[name] for one in found])) for name in found[0]}
