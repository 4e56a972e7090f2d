"""The memory that a run needs on its device: by arithmetic, without allocating the model.

What a compiled round holds::

    frozen weights + dequantised kernels at work
    + server's state and the sum of the uploads + clients' state + training data
    + lanes · (adapters, gradient and optimizer state + activations)

All terms but the kernels and the activations follow from shapes. For these two, the loss of one
batch and its gradient are traced with shapes in the place of arrays. The forward pass hands
*residuals* to the backward pass: the arrays that depend on the examples or on trained leaves, each
counted once. To them comes room for the arrays of the layer that is at work. So everything that
decides the size (family, head, length, dtype, ``remat``, the chunks of the loss) is counted as the
program has it. An array that ``jax.vmap`` over lanes leaves without an axis of lanes, such as a
dequantised kernel, is counted once for all lanes.

The compilers of a CPU, a GPU and a TPU store different arrays, and pad them differently:
:mod:`fedjax_peft.simulation.planning.storage` has their rules. The compiler may still fuse more or
less than is counted here. :func:`compiled_bytes` compiles a round for the present device, again
without the frozen weights, and asks it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_peft.contracts import Algorithm, ClientContext, Params, Platform, Task
from fedjax_peft.data.dataset import Clients, Dataset
from fedjax_peft.engine.lanes import Lanes
from fedjax_peft.engine.lengths import token_columns
from fedjax_peft.engine.program import peak_bytes
from fedjax_peft.engine.schedule import Schedule
from fedjax_peft.engine.session import Session
from fedjax_peft.models.base import Model
from fedjax_peft.numerics import summation, tree
from fedjax_peft.numerics.roles import assign_roles
from fedjax_peft.simulation.planning.activations import Activations, activations
from fedjax_peft.simulation.records import Placement
from fedjax_peft.simulation.session import session
from fedjax_peft.support.errors import InputError
from fedjax_peft.support.memory import available, gigabytes


class MemoryPlan(NamedTuple):
    """Bytes on the device."""

    frozen: int
    """The frozen weights, as a run holds them."""
    server: int
    """The server's state, and a new one."""
    uploads: int
    """The sum of the uploads. Aggregators that measure the aggregation error of LoRA also hold the
    factors of all uploads, or a dense float32 matrix for each adapted layer where that is
    smaller."""
    clients: int
    """The state that all clients keep between rounds."""
    columns: int
    """The training examples."""
    lane: int
    """One lane's trained leaves with their gradients and its optimizer state."""
    activations: Activations
    """Of one lane."""

    @property
    def fixed(self) -> int:
        """The part that does not depend on the number of lanes."""
        parts = (self.frozen, self.server, self.uploads, self.clients, self.columns)
        return sum(parts) + self.activations.kernels

    @property
    def per_lane(self) -> int:
        """The part of one lane."""
        return self.lane + self.activations.total

    def total(self, lanes: int) -> int:
        """Returns the bytes with this number of lanes."""
        return self.fixed + lanes * self.per_lane

    def most_lanes(self, memory: float) -> int:
        """Returns the largest number of lanes that fits into ``memory`` bytes; 0 if none does."""
        return max(int((memory - self.fixed) // max(self.per_lane, 1)), 0)


def plan_memory(
    model: Model,
    algorithm: Algorithm,
    task: Task,
    batch: Mapping[str, Any],
    *,
    clients: int = 1,
    cohort: int = 1,
    examples: int = 0,
    platform: Platform = Platform(),
) -> MemoryPlan:
    """Returns the memory of a run, from shapes alone.

    Args:
      model: arrays or shapes, with a PEFT method.
      batch: columns of one client's batch, arrays or shapes.
      clients: in the federation.
      cohort: clients in a round; some aggregators need all uploads at once.
      examples: in the training data.
      platform: whose compiler stores the activations.
    """
    names = assign_roles(model.kinds, algorithm.roles)
    shared, private = (tree.select(model.trainable, names[r]) for r in ("shared", "private"))
    fixed = tree.select(model.trainable, names["fixed"])

    def states(frozen: Params, shared: Params, private: Params, fixed: Params, key: Any) -> Any:
        context = ClientContext(partial(model.apply, frozen), task, fixed, jnp.int32(1))
        server, own = algorithm.server.init(shared), algorithm.init_client_state(shared, private)
        local = algorithm.client(context).init(algorithm.server.broadcast(server), own, key)
        template = algorithm.server.unchanged(server)
        total = summation.empty(algorithm.aggregator, template, fixed, cohort)
        return server, total, own, local

    key = jax.eval_shape(lambda: jax.random.key(0))
    server, total, own, local = jax.eval_shape(
        states, *tree.shapes((model.frozen, shared, private, fixed, key))
    )
    rows = {name: x for name, x in batch.items() if name != "mask"}
    return MemoryPlan(
        frozen=tree.nbytes(model.frozen),
        server=2 * tree.nbytes(server),
        uploads=tree.nbytes(total),
        clients=clients * tree.nbytes(own),
        columns=examples * sum(tree.nbytes(x) // x.shape[0] for x in rows.values()),
        lane=tree.nbytes(local) + 2 * tree.nbytes((shared, private)),
        activations=activations(model, algorithm, task, batch, platform=platform),
    )


def example_batch(
    head: str,
    *,
    batch_size: int,
    length: int = 0,
    image: Sequence[int] | None = None,
    texts: int = 1,
) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes of a batch for a head; the columns are those that its task reads.

    Args:
      image: channels, height and width of an image; None: examples are texts.
      texts: how many texts of this length a row has; those of a preference are two.
    """
    whole, truth = jnp.int32, jnp.bool_
    columns: dict[str, tuple[tuple[int, ...], Any]] = {
        "input_ids": ((length,), whole),
        "attention_mask": ((length,), truth),
    }
    if image is not None:
        columns = {"pixel_values": (tuple(image), jnp.uint8)}
    match head:
        case "causal_lm":
            columns |= {"loss_mask": ((length,), truth), "is_answer": ((), truth)}
            if texts > 1:
                columns = {name: ((texts * length,), kind) for name, (_, kind) in columns.items()}
                columns |= dict.fromkeys(
                    ("segment_ids", "position_ids"), ((texts * length,), whole)
                )
                columns |= {"preferred": ((texts,), truth), "reference": ((texts,), jnp.float32)}
                columns |= {"prompt_ids": ((length,), whole)}
        case "token_classification":
            columns |= {"labels": ((length,), whole)}
        case "span_classification":
            columns |= {"start_positions": ((), whole), "end_positions": ((), whole)}
            columns |= {"context": ((length,), truth)}
        case _:
            columns |= {"labels": ((), whole)}
    shapes = {n: jax.ShapeDtypeStruct((batch_size, *s), d) for n, (s, d) in columns.items()}
    return shapes | {"mask": jax.ShapeDtypeStruct((batch_size,), jnp.bool_)}


_SUSPECT = 0.01
"""A step's activations are computed if one array of hidden states takes this share of the memory.
They are some dozens of such arrays, and computing them takes as long as tracing a step."""


_WIDTHS = ("hidden_size", "n_embd", "dim")
"""Keys under which a ``config.json`` may have the width of the hidden states."""


def check_step_memory(session: Session, model: Model, schedule: Schedule, lanes: Lanes) -> None:
    """Raises InputError if the activations of a local step cannot fit into the device's memory.

    The message names the largest batch that fits.

    Args:
      lanes: as for ``simulate``; with ``auto`` there may be only one.
    """
    stats = jax.local_devices()[0].memory_stats() or {}
    free = stats.get("bytes_limit") or available()  # of an accelerator, or of main memory
    size, layout = schedule.room, session.setup.layout
    if layout.model_devices > 1:  # they share the activations too
        return
    side = -(-lanes // layout.lane_devices) if isinstance(lanes, int) else 1
    padded = schedule.for_lanes(1).padded
    length = padded[-1] if padded else 1
    width = max((model.config.get(key) or 0 for key in _WIDTHS), default=0)
    if free is None or 4 * side * size * length * width < _SUSPECT * free:
        return
    cut = token_columns(session.columns)
    batch = {
        name: jax.ShapeDtypeStruct(
            (size, *((length, *x.shape[2:]) if name in cut else x.shape[1:])), x.dtype
        )
        for name, x in session.columns.items()
    }
    batch["mask"] = jax.ShapeDtypeStruct((size,), jnp.bool_)
    model = model.replace(apply=session.setup.apply, frozen=session.setup.frozen)
    setup = session.setup
    needed = activations(model, setup.algorithm, setup.task, batch, platform=layout.platform)
    one = side * needed.total / size
    if needed.kernels + size * one <= free:
        return
    most = int((free - needed.kernels) // one)
    fits = f"batch_size = {most} fits." if most > 0 else "Not even batch_size = 1 fits."
    raise InputError(
        f"A local step with batch_size = {size}, {length} tokens per example and"
        f" {side} {'lane' if side == 1 else 'lanes'} needs about"
        f" {gigabytes(needed.kernels + size * one)} of memory, and {gigabytes(free)} are available."
        f' {fits} model.remat = "blocks", fewer lanes and shorter texts need less too.'
    )


def compiled_bytes(parts: Any, lanes: int) -> int:
    """Returns the bytes that a compiled round needs on the present device, arguments included.

    Args:
      parts: model, algorithm, task and batch, as :func:`lowered_round` takes them.
    """
    model, algorithm, task, batch = parts
    placement = Placement(lanes=lanes)
    return peak_bytes(lowered_round(model, algorithm, task, batch, placement).compile())


def lowered_round(
    model: Model,
    algorithm: Algorithm,
    task: Task,
    batch: Mapping[str, jax.ShapeDtypeStruct],
    placement: Placement,
    devices: Sequence[Any] = (),
) -> jax.stages.Lowered:
    """Returns a round of one step of each of ``placement.lanes`` clients, lowered.

    Nothing is allocated but adapters and ``lanes`` batches.

    Args:
      model: as for :func:`plan_memory`, with shapes in the place of the frozen arrays.
      placement: the lanes, and how several devices share them and the model.
      devices: as for :meth:`fedjax_peft.engine.program.Program.lower`.
    """
    size, lanes = batch["mask"].shape[0], placement.lanes
    assert isinstance(lanes, int)
    columns = {
        name: np.ones((lanes * size, *x.shape[1:]), x.dtype)
        for name, x in batch.items()
        if name != "mask"
    }
    start = {name: jnp.zeros(x.shape, x.dtype) for name, x in model.trainable.items()}
    data = Dataset(columns, ("0", "1"))
    clients = Clients(data, tuple(np.arange(i * size, (i + 1) * size) for i in range(lanes)))
    made = session(
        model.replace(trainable=start),
        algorithm._replace(check=lambda kinds, clients: None),  # there are only as many as lanes
        clients,
        batch_size=size,
        local_steps=1,
        task=task,
        placement=replace(placement, devices=len(devices) or None, length_buckets=1),
    )
    return made.program(made.plan(1)).lower(made.init(), made.plan(1), devices)
