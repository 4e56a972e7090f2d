"""What the rounds of a session share: the algorithm, the model, the task and the devices."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from fedjax_peft.contracts.algorithm import Algorithm
from fedjax_peft.contracts.client import Probe
from fedjax_peft.contracts.model import ApplyFn
from fedjax_peft.contracts.task import Task
from fedjax_peft.contracts.transform import Transform
from fedjax_peft.contracts.types import Diagnosis, Params, Splits
from fedjax_peft.contracts.upload import Stages
from fedjax_peft.engine.devices.layout import Layout
from fedjax_peft.numerics.hyperparameters import Makers, Values


class Setup(NamedTuple):
    """The inputs that training and evaluation share."""

    algorithm: Algorithm
    apply: ApplyFn
    task: Task
    frozen: Params
    fixed: Params
    """Trainable leaves that an algorithm never changes."""
    clients: int
    """The number of clients in the federation."""
    layout: Layout = Layout()
    """The devices, and where everything lives on them."""
    splits: Splits = ()
    """The axes on which several devices share the frozen leaves."""
    rank_mask: Params | None = None
    """For each leaf, the entries that each client has, bool ``[clients, ...]``; by default all."""
    diagnosis: Diagnosis | None = None
    """Additional measurements of the global model in every round."""
    probe: Probe | None = None
    """Additional measurements on test examples, next to the task's metrics."""
    total_clients: int | None = None
    """The number of clients that have something to send; by default all clients."""
    dtype: Any = np.float32
    """The dtype in which ``apply`` computes."""
    sampling_probability: float = 1.0
    """The share of all clients that a round samples, on average."""
    transform: Transform | None = None
    """The upload transform in training."""
    stages: Stages = Stages()
    """What else happens to uploads in training."""
    maker: Makers | None = None
    """Makes ``algorithm``, ``stages`` and ``transform``, from the run-time values of a state if
    it has some. Setups with equal makers share their programs."""

    def made(self, values: Values) -> "Setup":
        """Returns the setup with what the maker makes of these run-time values."""
        if self.maker is None or not values:
            return self
        algorithm, stages = self.maker.wrapped(values)
        transform = self.maker.transform(values)
        return self._replace(algorithm=algorithm, stages=stages, transform=transform)


class Constants(NamedTuple):
    """The arguments of a round program that do not change from round to round."""

    frozen: Params
    """The frozen leaves."""
    fixed: Params
    """The trainable leaves that never change. Entries that a client does not have are 0 for it."""
    rank_mask: Params
    """For each leaf, the entries that each client has, bool ``[clients, ...]``. In a trained leaf,
    the others keep the values that the client received."""
    columns: Params
    """The examples, ``[examples, ...]``."""


def place_constants(setup: Setup, columns: Mapping[str, Any]) -> Constants:
    """Returns the constants of a program, on the devices."""
    layout = setup.layout
    return Constants(
        layout.put_frozen(setup.frozen, setup.splits),
        layout.put(setup.fixed),
        layout.put_clients(setup.rank_mask or {}),
        layout.put_columns(dict(columns)),
    )
