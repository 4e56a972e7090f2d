"""The client optimizers that a config file can name. In Python, any optax optimizer can be used."""

import optax

from fedjax_peft.contracts.arguments import Fraction, NotNegative
from fedjax_peft.contracts.part import part

__all__ = ["adam", "adamw", "sgd"]


@part
def adamw(
    learning_rate: NotNegative,
    *,
    weight_decay: float = 0.0,
    b1: Fraction = 0.9,
    b2: Fraction = 0.999,
    eps: NotNegative = 1e-8,
    clip_norm: NotNegative | None = None,
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
    return _clipped(
        optax.adamw(learning_rate, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay), clip_norm
    )


@part
def adam(
    learning_rate: NotNegative,
    *,
    b1: Fraction = 0.9,
    b2: Fraction = 0.999,
    eps: NotNegative = 1e-8,
    clip_norm: NotNegative | None = None,
) -> optax.GradientTransformation:
    """Adam. The arguments are those of :func:`adamw`."""
    return _clipped(optax.adam(learning_rate, b1=b1, b2=b2, eps=eps), clip_norm)


@part
def sgd(
    learning_rate: NotNegative,
    *,
    momentum: float | None = None,
    nesterov: bool = False,
    clip_norm: NotNegative | None = None,
) -> optax.GradientTransformation:
    """SGD, plain or with momentum. Further arguments are those of :func:`adamw`.

    Args:
      momentum: decay rate of the sum of earlier gradients; None or 0: plain SGD.
      nesterov: use Nesterov momentum.
    """
    return _clipped(optax.sgd(learning_rate, momentum=momentum, nesterov=nesterov), clip_norm)


def _clipped(
    optimizer: optax.GradientTransformation, norm: float | None
) -> optax.GradientTransformation:
    if norm is None:
        return optimizer
    return optax.chain(optax.clip_by_global_norm(norm), optimizer)
