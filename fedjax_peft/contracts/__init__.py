"""The contracts of the library: the types of its data and its callables, one file a contract.

Implementations are plain functions and NamedTuples of functions; no base class is needed. The files
``dual_modes`` and ``instance_weights`` are no contracts: they are functions of leaves that
algorithms and the adapters of :mod:`fedjax_peft.peft` share, without an import of Flax.
"""

from typing import TYPE_CHECKING, Any

from fedjax_peft.contracts.aggregator import (
    Aggregated,
    Aggregator,
    Factors,
    Finish,
    Integers,
    Lift,
    Product,
    Refactor,
    Segmented,
    Stacked,
    Total,
    Weighted,
)
from fedjax_peft.contracts.algorithm import Algorithm, Roles, Traffic, Weights
from fedjax_peft.contracts.asynchronous import (
    Aggregation,
    Asynchronous,
    Availability,
    Job,
    Timeline,
)
from fedjax_peft.contracts.client import (
    ClientContext,
    ClientUpdate,
    Gradient,
    LossFn,
    Probe,
    Tuning,
    mean_gradient,
)
from fedjax_peft.contracts.compatibility import check_compatible, refusals
from fedjax_peft.contracts.feature import Feature
from fedjax_peft.contracts.model import ApplyFn, Outputs, Platform, Sampling, on_platform
from fedjax_peft.contracts.part import item as item
from fedjax_peft.contracts.privacy import Attack, Federation, Guarantee, Privacy, Wrapped
from fedjax_peft.contracts.server import RoundContext, ServerUpdate
from fedjax_peft.contracts.task import Task, loss_and_metrics
from fedjax_peft.contracts.transform import (
    Decoded,
    Encoded,
    Measurements,
    Transform,
    TransformClient,
    TransformServer,
    TransformWire,
    Wire,
)
from fedjax_peft.contracts.types import (
    Batch,
    Diagnosis,
    Key,
    Metrics,
    Params,
    PyTree,
    RateSchedule,
    Splits,
)
from fedjax_peft.contracts.upload import Participant, Source, Stage, Stages, Upload

__all__ = [
    "Aggregated",
    "Aggregation",
    "Aggregator",
    "Algorithm",
    "ApplyFn",
    "Asynchronous",
    "Attack",
    "Availability",
    "Batch",
    "ClientContext",
    "ClientUpdate",
    "Decoded",
    "Diagnosis",
    "Encoded",
    "Factors",
    "Feature",
    "Federation",
    "Finish",
    "Gradient",
    "Guarantee",
    "Integers",
    "Job",
    "Key",
    "Lift",
    "LossFn",
    "Measurements",
    "Metrics",
    "Optimizer",
    "Outputs",
    "Params",
    "Participant",
    "Platform",
    "Privacy",
    "Probe",
    "Product",
    "PyTree",
    "RateSchedule",
    "Refactor",
    "Roles",
    "RoundContext",
    "Sampling",
    "Segmented",
    "ServerUpdate",
    "Source",
    "Splits",
    "Stacked",
    "Stage",
    "Stages",
    "Task",
    "Timeline",
    "Total",
    "Traffic",
    "Transform",
    "TransformClient",
    "TransformServer",
    "TransformWire",
    "Tuning",
    "Upload",
    "Weighted",
    "Weights",
    "Wire",
    "Wrapped",
    "check_compatible",
    "loss_and_metrics",
    "mean_gradient",
    "on_platform",
    "refusals",
]

if TYPE_CHECKING:
    from optax import GradientTransformation as Optimizer


def __getattr__(name: str) -> Any:
    """Returns ``Optimizer``, optax's type of an optimizer; who reads data needs no optax."""
    if name != "Optimizer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import optax

    return optax.GradientTransformation
