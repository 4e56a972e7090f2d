"""The client optimizers that a config file can name. In Python, any optax optimizer can be used."""

import math

import optax

from fedjax_peft.contracts.part import part
from fedjax_peft.numerics.hyperparameters import is_traced
from fedjax_peft.support.errors import InputError

__all__ = ["adam", "adamw", "sgd"]


@part
def adamw(
    learning_rate: float,
    *,
    weight_decay: float = 0.0,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    clip_norm: float | None = None,
) -> optax.GradientTransformation:
    """AdamW: Adam with decoupled weight decay.

    Args:
      learning_rate: the step size.
      weight_decay: each step shrinks the weights by the fraction ``learning_rate * weight_decay``.
      b1: decay rate of the mean of the gradients.
      b2: decay rate of the mean of the squared gradients.
      eps: a constant added to the denominator, so that it is not zero.
      clip_norm: the largest global norm of a gradient; larger gradients are scaled down to it.
        None: no clipping.
    """
    _check(learning_rate, clip_norm)
    return _clipped(
        optax.adamw(learning_rate, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay), clip_norm
    )


@part
def adam(
    learning_rate: float,
    *,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    clip_norm: float | None = None,
) -> optax.GradientTransformation:
    """Adam. The arguments are those of :func:`adamw`."""
    _check(learning_rate, clip_norm)
    return _clipped(optax.adam(learning_rate, b1=b1, b2=b2, eps=eps), clip_norm)


@part
def sgd(
    learning_rate: float,
    *,
    momentum: float | None = None,
    nesterov: bool = False,
    clip_norm: float | None = None,
) -> optax.GradientTransformation:
    """SGD, plain or with momentum. Further arguments are those of :func:`adamw`.

    Args:
      momentum: decay rate of the sum of earlier gradients; None or 0: plain SGD.
      nesterov: use Nesterov momentum.
    """
    _check(learning_rate, clip_norm)
    return _clipped(optax.sgd(learning_rate, momentum=momentum, nesterov=nesterov), clip_norm)


def _check(learning_rate: float, clip_norm: float | None) -> None:
    for name, value in {"learning_rate": learning_rate, "clip_norm": clip_norm}.items():
        if value is not None and not is_traced(value) and not 0 <= value < math.inf:
            raise InputError(f"{name} = {value} must be a finite number that is not negative.")


def _clipped(
    optimizer: optax.GradientTransformation, norm: float | None
) -> optax.GradientTransformation:
    if norm is None:
        return optimizer
    return optax.chain(optax.clip_by_global_norm(norm), optimizer)
