"""The round plan: for each lane and time step, the client and the batch that run there.

Plans are numpy arrays, made on the host. Clients have unequal numbers of steps. They are not padded
to the largest client of the cohort. Instead each lane has a queue of clients, and clients are
assigned in order of length, longest first, each to the queue that is shortest so far.
"""

import heapq
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fedjax_peft.engine.lengths import Lengths


class Fetched(NamedTuple):
    """The versions of the server from which an asynchronous plan's clients start."""

    present: np.ndarray
    """int32 scalar: the present version's place in the history of broadcasts."""
    place: np.ndarray
    """int32 ``[S]``: the place of the version that each client fetched."""
    round_index: np.ndarray
    """int32 ``[S]``: the round that gives each client's random numbers."""
    staleness: np.ndarray
    """int32 ``[S]``: how often the server has been updated since then."""


class Plan(NamedTuple):
    """Arrays of fixed shape: T time steps (a capacity), L lanes, B examples, S cohort slots."""

    steps: np.ndarray
    """int32 scalar: number of time steps in use, at most T."""
    slot: np.ndarray
    """int32 ``[T, L]``: the cohort slot that runs; S if the lane is idle."""
    local: np.ndarray
    """int32 ``[T, L]``: the client's local step, from 0."""
    examples: np.ndarray
    """int32 ``[T, L, B]``: example indices; -1 pads."""
    client: np.ndarray
    """int32 ``[S]``: client id of a slot; -1 for a slot without work."""
    weight: np.ndarray
    """float32 ``[S]``: aggregation weight; 0 for a slot whose update is not in the sum."""
    length: np.ndarray
    """int32 ``[S]``: local steps of a slot."""
    bucket: np.ndarray
    """int32 ``[T]``: index of the padded length at which a time step is computed."""
    fetched: Fetched | tuple[()] = ()
    """The versions that clients start from; ``()``: all start from the present one."""
    silent: np.ndarray | tuple[()] = ()
    """bool ``[S]``: slots whose clients take part without any work of theirs, so that only their
    noise is summed (``Aggregator.randomise``). Each has one step without examples. ``()``: none."""

    @property
    def lanes(self) -> int:
        """The number of lanes."""
        return self.slot.shape[1]

    @property
    def useful(self) -> int:
        """The number of lane-steps that do work."""
        return int(self._worked.sum())

    @property
    def silent_slots(self) -> np.ndarray:
        """:attr:`silent`, bool ``[S]``, also where no slot is."""
        nobody = isinstance(self.silent, tuple)
        return np.zeros(len(self.client), bool) if nobody else np.asarray(self.silent)

    @property
    def _worked(self) -> np.ndarray:
        return np.where(self.silent_slots, 0, self.length)

    @property
    def client_steps(self) -> dict[int, int]:
        """Client id -> local steps, for the clients that take part."""
        pairs = zip(self.client.tolist(), self._worked.tolist(), strict=True)
        return {client: steps for client, steps in pairs if client >= 0}

    @property
    def slot_utilisation(self) -> float:
        """Useful lane-steps over all lane-steps."""
        return self.useful / max(int(self.steps) * self.lanes, 1)

    @property
    def padded_utilisation(self) -> float:
        """The slot utilisation if every client of the cohort were padded to the longest one."""
        busy = int((self.length > 0).sum())
        return self.useful / max(busy * int(self.length.max(initial=0)), 1)


class Cohort(NamedTuple):
    """The clients of a round, and the batches of each client."""

    client: Sequence[int]
    weight: Sequence[float]
    batches: Sequence[np.ndarray]
    """For each client int32 ``[steps, B]``; -1 pads. A client without steps does not take part."""


def steps_of(examples: int, batch_size: int, epochs: int, local_steps: int | None) -> int:
    """Returns the number of local steps of a client that has ``examples`` examples."""
    if examples == 0:
        return 0
    return epochs * -(-examples // batch_size) if local_steps is None else local_steps


def no_larger(batch_size: int, rows: int) -> int:
    """Returns a batch size that is reduced if nobody has enough examples to fill a batch.

    Every step computes a whole batch, so a mostly empty batch wastes time and memory. A size up to
    64 stays as given, because another size rounds the sums differently.
    """
    return min(batch_size, max(64, 1 << max(rows - 1, 0).bit_length()))


def batches(
    indices: np.ndarray,
    batch_size: int,
    *,
    epochs: int = 1,
    local_steps: int | None = None,
    rng: np.random.Generator | None = None,
) -> np.ndarray:
    """Returns a client's batches, int32 ``[steps, batch_size]``; -1 pads an epoch's last batch.

    Args:
      local_steps: number of batches; replaces ``epochs``. Passes are repeated until it is reached.
      rng: shuffles each epoch; None keeps the order.
    """
    per_epoch = -(-len(indices) // batch_size)
    steps = steps_of(len(indices), batch_size, epochs, local_steps)
    passes = -(-steps // per_epoch) if steps else 0
    rows = np.full((passes, per_epoch * batch_size), -1, np.int32)
    for row in rows:
        row[: len(indices)] = indices if rng is None else rng.permutation(indices)
    return rows.reshape(-1, batch_size)[:steps]


def poisson_batches(
    indices: np.ndarray, batch_size: int, width: int, *, steps: int, rng: np.random.Generator
) -> np.ndarray:
    """Returns a client's batches, into which every example is drawn independently.

    Args:
      batch_size: examples in a batch on average; all examples if there are fewer.
      width: examples that fit into a batch. Of a larger draw, a random part is used.

    Returns:
      int32 ``[steps, width]``; -1 pads. A batch may be empty.
    """
    rows = np.full((steps, width), -1, np.int32)
    for row in rows:
        drawn = indices[rng.random(len(indices)) < batch_size / len(indices)]
        if len(drawn) > width:
            drawn = rng.permutation(drawn)[:width]
        row[: len(drawn)] = drawn
    return rows


def pack(lengths: Sequence[int], lanes: int) -> list[list[int]]:
    """Returns the jobs of every lane, in the order in which they run.

    Jobs are assigned longest first, each to the lane with the least work so far.
    """
    queues: list[list[int]] = [[] for _ in range(lanes)]
    heap = [(0, lane) for lane in range(lanes)]
    for job in sorted(range(len(lengths)), key=lambda j: (-lengths[j], j)):
        if lengths[job]:
            load, lane = heapq.heappop(heap)
            queues[lane].append(job)
            heapq.heappush(heap, (load + lengths[job], lane))
    return queues


def make_plan(
    cohort: Cohort,
    lanes: int,
    *,
    time_steps: int,
    slots: int,
    batch_size: int,
    tokens: Lengths | None = None,
    all_send: bool = False,
) -> Plan:
    """Returns the plan of a round.

    Args:
      time_steps: the plan's capacity T; the same in every round, so that nothing recompiles.
      all_send: clients without steps take part too (``Plan.silent``).

    Raises:
      ValueError: a capacity is too small (a bug of the caller).
    """
    lengths = [max(len(b), int(all_send)) for b in cohort.batches]
    queues = pack(lengths, lanes)
    used = max(sum(lengths[j] for j in queue) for queue in queues)
    if used > time_steps or len(lengths) > slots:
        raise ValueError(f"plan of {used} steps, {len(lengths)} clients > {time_steps}, {slots}")
    slot = np.full((time_steps, lanes), slots, np.int32)
    local = np.zeros((time_steps, lanes), np.int32)
    examples = np.full((time_steps, lanes, batch_size), -1, np.int32)
    for lane, queue in enumerate(queues):
        t = 0
        for job in queue:
            rows = slice(t, t + lengths[job])
            slot[rows, lane] = job
            local[rows, lane] = np.arange(lengths[job])
            if len(cohort.batches[job]):
                examples[rows, lane] = cohort.batches[job]
            t += lengths[job]
    client = np.full(slots, -1, np.int32)
    weight = np.zeros(slots, np.float32)
    length = np.zeros(slots, np.int32)
    n = len(lengths)
    length[:n] = lengths
    client[:n] = np.where(length[:n] > 0, cohort.client, -1)
    weight[:n] = np.where(length[:n] > 0, cohort.weight, 0)
    bucket = np.zeros(time_steps, np.int32) if tokens is None else tokens.bucket(examples)
    plan = Plan(np.array(used, np.int32), slot, local, examples, client, weight, length, bucket)
    if not all_send:
        return plan
    silent = np.array([not len(b) for b in cohort.batches], bool)
    return plan._replace(silent=np.pad(silent, (0, slots - n)))


def most_slots(plan: Plan, steps: int) -> int:
    """Returns the largest number of slots that run in any ``steps`` consecutive time steps."""
    used = int(plan.steps)
    slot = plan.slot[:used]
    live = slot < len(plan.client)
    before = np.pad(slot[:-1], ((1, 0), (0, 0)), constant_values=-1)
    begun = np.cumsum((live & (slot != before)).sum(axis=1))  # slots that have begun up to t
    last = np.minimum(np.arange(used) + steps, used) - 1
    return max(int((begun[last] - begun + live.sum(axis=1)).max(initial=0)), 1)


def window(plan: Plan, start: int, steps: int, *, time_steps: int, slots: int) -> Plan:
    """Returns a part of a plan as a new plan, for steps that do not depend on earlier steps.

    Args:
      slots: the part's capacity S, at least :func:`most_slots`.
    """
    rows = slice(start, min(start + steps, int(plan.steps)))
    used, lanes = rows.stop - rows.start, plan.lanes
    live = plan.slot[rows] < len(plan.client)
    chosen = np.unique(plan.slot[rows][live])
    slot = np.full((time_steps, lanes), slots, np.int32)
    slot[:used][live] = np.searchsorted(chosen, plan.slot[rows][live])
    # The local steps of every client count from 0 again in the part.
    first = np.full(len(plan.client), np.iinfo(np.int32).max, np.int32)
    np.minimum.at(first, plan.slot[rows][live], plan.local[rows][live])
    local = np.zeros((time_steps, lanes), np.int32)
    local[:used][live] = plan.local[rows][live] - first[plan.slot[rows][live]]
    examples = np.full((time_steps, *plan.examples.shape[1:]), -1, np.int32)
    examples[:used] = plan.examples[rows]
    client, weight = np.full(slots, -1, np.int32), np.zeros(slots, np.float32)
    client[: len(chosen)], weight[: len(chosen)] = plan.client[chosen], plan.weight[chosen]
    length = np.bincount(slot[slot < slots], minlength=slots).astype(np.int32)
    bucket = np.zeros(time_steps, np.int32)
    bucket[:used] = plan.bucket[rows]
    return Plan(np.array(used, np.int32), slot, local, examples, client, weight, length, bucket)
