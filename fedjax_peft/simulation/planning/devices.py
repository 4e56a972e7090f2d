"""Whether a run fits an accelerator, and how fast its rounds can be at best: ``fp.devices``."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_peft import contracts as c
from fedjax_peft import tasks
from fedjax_peft.data.dataset import Clients
from fedjax_peft.engine.compilation import options_that_repeat
from fedjax_peft.models.base import Model
from fedjax_peft.numerics import tree
from fedjax_peft.simulation import checks
from fedjax_peft.simulation.planning.compiled_step import CompiledStep, compile_step, target_devices
from fedjax_peft.simulation.planning.memory_plan import MemoryPlan, lowered_round, plan_memory
from fedjax_peft.simulation.planning.step_cost import StepCost, step_cost
from fedjax_peft.simulation.records import Placement
from fedjax_peft.support.accelerators import USABLE, Device, find_device
from fedjax_peft.support.display import counted
from fedjax_peft.support.memory import in_bytes

__all__ = ["DevicePlan", "plan"]


class DevicePlan(NamedTuple):
    """A run on an accelerator; it prints as a table."""

    device: Device
    memory: MemoryPlan
    cost: StepCost
    """Of a step, by arithmetic."""
    lanes: int
    dtype: str
    """In which the model computes."""
    batch_size: int
    steps: int | None = None
    """Time steps of a round, all lanes together; None: not known."""
    compiled: CompiledStep | None = None
    """What the device's compiler made of the round; None: it was not asked."""

    @property
    def needed(self) -> int:
        """Bytes of a round: the compiler's, or else by arithmetic."""
        return self.memory.total(self.lanes) if self.compiled is None else self.compiled.memory

    @property
    def fits(self) -> bool:
        """Whether nine tenths of the device's memory suffice."""
        return self.needed <= USABLE * self.device.memory

    @property
    def most_lanes(self) -> int:
        """The most lanes that fit, by arithmetic."""
        return self.memory.most_lanes(USABLE * self.device.memory)

    @property
    def flops(self) -> int:
        """Operations of a step of all lanes."""
        return self.lanes * self.cost.flops

    @property
    def nbytes(self) -> int:
        """Bytes that a step of all lanes moves: the compiler's, or else the least possible."""
        return self.cost.nbytes(self.lanes) if self.compiled is None else self.compiled.nbytes

    @property
    def limits(self) -> dict[str, float]:
        """What limits a step -> the seconds that it takes at least."""
        return {
            "arithmetic": self.flops / self.device.rates[self.dtype],
            "memory traffic": self.nbytes / self.device.bandwidth,
        }

    @property
    def seconds(self) -> float:
        """The least seconds of a step: the larger of the two limits."""
        return max(self.limits.values())

    def __str__(self) -> str:
        """Returns the table."""
        return "\n".join(self.lines())

    def lines(self) -> Iterator[str]:
        """Yields the lines of the table."""
        device, one = self.device, counted(self.lanes, "lane")
        usable = f"{in_bytes(USABLE * device.memory)} of {in_bytes(device.memory)}"
        yield f"{device.title}, {one} x {counted(self.batch_size, 'example')}, {self.dtype}"
        rows = {"memory of a round": f"{in_bytes(self.needed)}, {self._verdict(usable)}"}
        if self.compiled is not None:
            rows["  by arithmetic"] = in_bytes(self.memory.total(self.lanes))
            rows["  temporary"] = in_bytes(self.compiled.temporary)
        rows["most lanes that fit"] = f"{self.most_lanes:,}, by arithmetic"
        rows["operations of a step"] = _in_flops(self.flops)
        least = "" if self.compiled is not None else "at least "
        rows["bytes that a step moves"] = least + in_bytes(self.nbytes)
        rows |= {} if self.compiled is None else self._rows_of(self.compiled)
        for limit, seconds in self.limits.items():
            rows[f"seconds for {limit}"] = f"{seconds:.3g}"
        binds = max(self.limits, key=lambda limit: self.limits[limit])
        rate = self.lanes * self.batch_size / self.seconds
        rows["a step takes at least"] = f"{self.seconds:.3g} s ({binds}): {rate:,.0f} examples/s"
        if self.steps is not None:
            total = self.steps * self.seconds
            rows["a round takes at least"] = f"{total:.3g} s, {counted(self.steps, 'time step')}"
        width = max(map(len, rows))
        yield from (f"  {name:{width}}  {text}" for name, text in rows.items())

    def _verdict(self, usable: str) -> str:
        if self.fits:
            return f"fits into {usable}"
        missing = self.needed - USABLE * self.device.memory
        return f"does not fit into {usable}: {in_bytes(missing)} too much"

    def _rows_of(self, compiled: CompiledStep) -> dict[str, str]:
        calls = ", ".join(f"{count} x {name}" for name, count in compiled.calls.items())
        rows = {"kernels of a step": f"{compiled.kernels:,}", "  library kernels": calls or "none"}
        if compiled.program:
            rows["size of the program"] = in_bytes(compiled.program)
        return rows | {"time to compile here": f"{compiled.seconds:.0f} s"}


def plan(
    model: Model,
    algorithm: c.Algorithm,
    clients: Clients,
    device: str,
    *,
    clients_per_round: int | None = None,
    batch_size: int = 16,
    local_steps: int = 1,
    lanes: int = 1,
    task: c.Task | None = None,
    compiled: bool = False,
) -> DevicePlan:
    """Returns whether rounds fit an accelerator, and how long they take at least.

    The accelerator need not be there. Nothing is trained, and the arrays of the model are not used.

    Args:
      model: with a PEFT method, as for :func:`fedjax_peft.simulate` like the arguments that are not
        named here.
      device: such as ``h100`` or ``v5e``; ``fedjax-peft list devices`` has all names.
      local_steps: local steps of each client in a round.
      lanes: clients side by side.
      compiled: ask the device's compiler, too. The extra ``compile-gpu`` or ``compile-tpu``
        installs it; start Python with ``JAX_PLATFORMS=cpu``.

    Raises:
      InputError: an unknown device, a number that makes no sense, or the device's compiler is not
        installed.
    """
    counts = {"batch_size": batch_size, "local_steps": local_steps, "lanes": lanes}
    chosen = {} if clients_per_round is None else {"clients_per_round": clients_per_round}
    checks.check_counts({**counts, **chosen}, {})
    cohort = checks.clients_a_round(clients, clients_per_round, "uniform")
    target, task = find_device(device), task or tasks.for_data(clients.data)
    batch = {
        name: jax.ShapeDtypeStruct((batch_size, *x.shape[1:]), x.dtype)
        for name, x in clients.data.columns.items()
    }
    batch["mask"] = jax.ShapeDtypeStruct((batch_size,), jnp.bool_)
    shapes = model.replace(frozen=tree.shapes(model.frozen))
    model = planned_on(target, shapes.replace(frozen=shapes.compute_frozen()))
    sizes = {"clients": len(clients), "cohort": cohort, "examples": len(clients.data)}
    planned = plan_memory(model, algorithm, task, batch, **sizes, platform=target_platform(target))
    made = plan_on(target, (model, algorithm, task, batch), planned, lanes)
    made = made._replace(steps=-(-cohort // lanes) * local_steps)
    return asked(made, (model, algorithm, task, batch)) if compiled else made


def planned_on(device: Device, model: Model) -> Model:
    """Returns a model whose arrays are counted as the device's programs have them."""
    return model.replace(apply=c.on_platform(model.apply, target_platform(device)))


def target_platform(device: Device) -> c.Platform:
    """Returns the platform of a device that need not be there."""
    return c.Platform(device.platform, device.capability, only_planned=True)


def plan_on(device: Device, parts: Any, memory: MemoryPlan, lanes: int) -> DevicePlan:
    """Returns the plan of a run by arithmetic.

    Args:
      parts: model, algorithm, task and batch, as :func:`plan_memory` takes them.
    """
    model, algorithm, task, batch = parts
    cost = step_cost(model, algorithm, task, batch, memory)
    dtype = np.dtype(model.dtype).name
    return DevicePlan(device, memory, cost, lanes, dtype, batch["mask"].shape[0])


def asked(planned: DevicePlan, parts: Any) -> DevicePlan:
    """Returns the plan with what the device's compiler makes of the round."""
    model, algorithm, task, batch = parts
    devices = target_devices(planned.device)
    placement = Placement(lanes=planned.lanes)
    lowered = lowered_round(model, algorithm, task, batch, placement, devices)
    options = options_that_repeat(lowered, planned.device.platform)
    return planned._replace(compiled=compile_step(lowered, options))


def _in_flops(count: float) -> str:
    unit, power = ("TFLOP", 1e12) if count >= 1e12 else ("GFLOP", 1e9)
    return f"{count / power:,.2f} {unit}"
