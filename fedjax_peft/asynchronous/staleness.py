"""Weights of stale uploads, and the way in which a server takes them."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array

from fedjax_peft.contracts.algorithm import Algorithm
from fedjax_peft.contracts.asynchronous import Asynchronous
from fedjax_peft.contracts.compatibility import check_compatible
from fedjax_peft.contracts.feature import Feature
from fedjax_peft.contracts.privacy import Federation, Wrapped
from fedjax_peft.contracts.types import PyTree
from fedjax_peft.contracts.upload import Stages, Upload

Staleness: TypeAlias = Literal["constant", "polynomial", "hinge"]
"""The weight of an upload by its staleness τ, the number of updates of the server since the client
fetched (Xie et al. 2019, Section 5.2):

* ``constant``: 1.
* ``polynomial``: (1 + τ)^-exponent. FedBuff uses the exponent 0.5.
* ``hinge``: 1 up to τ = ``grace``; then 1 / (1 + slope (τ - grace)).
"""


@dataclass(frozen=True)
class StalenessWeight:
    """The weight of an upload as a function of its staleness."""

    kind: Staleness
    exponent: float
    slope: float
    grace: int

    def __call__(self, staleness: Array) -> Array:
        """Returns the weight, float32, in (0, 1]."""
        tau = jnp.asarray(staleness, jnp.float32)
        match self.kind:
            case "constant":
                return jnp.ones_like(tau)
            case "polynomial":
                return (1.0 + tau) ** -self.exponent
        return 1.0 / (1.0 + self.slope * jnp.maximum(tau - self.grace, 0.0))


@dataclass(frozen=True)
class Change:
    """``template + rate s(τ) (upload - fetched)``: what the client learned, from the new start."""

    weight: StalenessWeight
    rate: float

    def __call__(self, upload: Upload) -> Upload:
        """Returns the upload as if its client had started from the present version."""
        return self._moved(upload, upload.client.source.template)

    def _moved(self, upload: Upload, start: PyTree) -> Upload:
        """Returns the upload with ``template + rate s(τ) (upload - start)``."""
        factor = self.rate * self.weight(upload.client.source.staleness)
        value = jax.tree.map(
            lambda u, s, t: (t + factor * (u - s)).astype(t.dtype),
            upload.value,
            start,
            upload.template,
        )
        return upload._replace(value=value)


@dataclass(frozen=True)
class Mixture(Change):
    """``(1 - a) template + a upload`` with a = rate s(τ): a step towards the client's model.

    It is the change from the present version, whatever the client fetched.
    """

    def __call__(self, upload: Upload) -> Upload:
        """Returns the upload, moved from the present version towards the client's model."""
        return self._moved(upload, upload.template)


@dataclass(frozen=True)
class Wrapper:
    """The function that gives an algorithm an asynchronous server."""

    name: str
    rebase: Change
    weights: Literal["size", "uniform"]

    def __call__(self, algorithm: Algorithm, federation: Federation) -> Wrapped:
        """Returns the algorithm with these weights, and what the server makes of stale uploads."""
        check_compatible(algorithm, {Feature.ASYNCHRONY: f"the asynchronous server {self.name!r}"})
        stages = Stages(received=(self.rebase,))
        return Wrapped(algorithm._replace(weights=self.weights), stages)


def server(
    name: str,
    rebase: Change,
    weights: Literal["size", "uniform"],
    *,
    concurrency: int | None,
    max_staleness: int | None,
    buffer_size: int | None = None,
    period: float | None = None,
) -> Asynchronous:
    """Returns an asynchronous server; the arguments are fields of :class:`Wrapper` and of it."""
    return Asynchronous(
        name,
        Wrapper(name, rebase, weights),
        buffer_size=buffer_size,
        period=period,
        concurrency=concurrency,
        max_staleness=max_staleness,
    )
