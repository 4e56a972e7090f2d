"""The arguments of ``session`` and ``simulate``, as the parts of the simulation hand them on."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from fedjax_peft.contracts import Algorithm, Asynchronous, Attack, Privacy, Task, Transform
from fedjax_peft.data.dataset import Clients, Dataset
from fedjax_peft.engine.schedule import BatchSampling, Range, Sampling
from fedjax_peft.models.base import Model
from fedjax_peft.numerics.hyperparameters import Values, parametrised
from fedjax_peft.simulation.records import Diagnostic, Evaluation, Placement, Records, System

Transforms: TypeAlias = Transform | Sequence[Transform] | None
"""One upload transform, or several in the order in which a client applies them."""


@dataclass(frozen=True)
class OfSession:
    """The arguments of ``session``, which explains them."""

    model: Model
    algorithm: Algorithm | Callable[[Values], Algorithm]
    clients: Clients
    rounds: int
    clients_per_round: int | None
    sampling: Sampling
    batch_size: int
    batch_sampling: BatchSampling
    epochs: Range
    local_steps: Range | None
    task: Task | None
    transforms: Transforms | Callable[[Values], Transforms]
    privacy: Privacy | Callable[[Values], Privacy] | None
    attack: Attack | Callable[[Values], Attack] | None
    asynchronous: Asynchronous | None
    values: Values | None
    system: System
    placement: Placement
    diagnostics: Sequence[Diagnostic]

    def made(self, name: str, values: Values | None = None) -> Any:
        """Returns a part, made with the run-time values if it is a function of them.

        Args:
          name: ``algorithm``, ``transforms``, ``privacy`` or ``attack``.
          values: by default those of the session.
        """
        chosen = None if self.values is None else {**self.values, **(values or {})}
        return parametrised(getattr(self, name), chosen)[0]


@dataclass(frozen=True)
class Given(OfSession):
    """The arguments of ``simulate``, which explains them; ``diagnostics`` are of ``evaluation``."""

    test: Dataset | None
    validation: Dataset | None
    seed: int
    evaluation: Evaluation
    records: Records
    out: str | Path | None
    resume: bool

    @property
    def tested(self) -> dict[str, Any]:
        """Everything that the run is evaluated on, by name."""
        own = ("client_test", "client_validation")
        data = {"test": self.test, "validation": self.validation}
        data |= {name: getattr(self.evaluation, name) for name in own}
        return {name: one for name, one in data.items() if one is not None}

    def notes(self) -> list[str]:
        """Returns the sentences on what was done to the data, each once."""
        data = [self.clients, *self.tested.values()]
        notes = (note for one in data for note in getattr(one, "data", one).notes)
        return list(dict.fromkeys(notes))
