"""The client optimizers that a config file can name. In Python, any optax optimizer can be used."""

from typing import Any

import optax

from fedjax_peft.contracts import Optimizer, PyTree
from fedjax_peft.contracts.arguments import Fraction, NotNegative
from fedjax_peft.contracts.part import part
from fedjax_peft.numerics.hyperparameters import maybe_nonzero
from fedjax_peft.numerics.schedules import Scheduled, scheduled
from fedjax_peft.support.errors import InputError

# `kept` is not in __all__, which lists the names that a config file can give: it has `keep`.
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
    keep: bool = False,
) -> Optimizer:
    """AdamW: Adam with decoupled weight decay.

    Args:
      learning_rate: the step size.
      weight_decay: each step shrinks the weights by the fraction ``learning_rate * weight_decay``.
      b1: decay rate of the mean of the gradients.
      b2: decay rate of the mean of the squared gradients.
      eps: a constant added to the denominator, so that it is not zero.
      clip_norm: the largest global norm of a gradient; larger gradients are scaled down to it.
        None: no clipping.
      keep: clients keep its state from round to round (:func:`kept`).
    """
    plain = optax.adamw(learning_rate, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay)
    return _clipped(plain, clip_norm, keep)


@part
def adam(
    learning_rate: NotNegative,
    *,
    b1: Fraction = 0.9,
    b2: Fraction = 0.999,
    eps: NotNegative = 1e-8,
    clip_norm: NotNegative | None = None,
    keep: bool = False,
) -> Optimizer:
    """Adam. The arguments are those of :func:`adamw`."""
    return _clipped(optax.adam(learning_rate, b1=b1, b2=b2, eps=eps), clip_norm, keep)


@part
def sgd(
    learning_rate: NotNegative,
    *,
    momentum: float | None = None,
    nesterov: bool = False,
    clip_norm: NotNegative | None = None,
    keep: bool = False,
) -> Optimizer:
    """SGD, plain or with momentum. Further arguments are those of :func:`adamw`.

    Args:
      momentum: decay rate of the sum of earlier gradients; None or 0: plain SGD.
      nesterov: use Nesterov momentum.

    Raises:
      InputError: ``nesterov`` without a momentum, which it would not change.
    """
    if nesterov and not maybe_nonzero(momentum):
        raise InputError("nesterov = True needs a momentum above 0, such as momentum = 0.9.")
    plain = optax.sgd(learning_rate, momentum=momentum, nesterov=nesterov)
    return _clipped(plain, clip_norm, keep)


def _clipped(optimizer: Optimizer, norm: float | None, keep: bool) -> Optimizer:
    if norm is not None:
        optimizer = optax.chain(optax.clip_by_global_norm(norm), optimizer)
    return kept(optimizer) if keep else optimizer


class Kept(Optimizer):
    """An optimizer whose states clients keep; made by :func:`kept`."""

    optimizer: Optimizer


@part
def kept(optimizer: Optimizer) -> Optimizer:
    """Returns an optimizer whose state each client keeps from round to round.

    Otherwise it starts anew in every round. A kept state suits clients that take part often.
    Aggregators that factor anew, such as ``fra``, are refused. Every client of the federation needs
    memory for its state (for Adam two numbers for each trained one). Give the result to a function
    of :mod:`fedjax_peft.algorithms`.

    Args:
      optimizer: any optax optimizer, as a whole: a chain is kept, not a part of it.
    """
    if isinstance(optimizer, Scheduled):
        return scheduled(kept(optimizer.optimizer), optimizer.schedule)

    def update(*arguments: Any, **options: Any) -> tuple[PyTree, PyTree]:
        raise InputError(
            "Clients keep the state of this optimizer, so only an algorithm's clients can step with"
            " it. Keep the whole optimizer and not a part of a chain. In an algorithm of your own,"
            " decorate the function that makes it with fedjax_peft.algorithms.checks.checked."
        )

    made = Kept(optimizer.init, update)
    made.optimizer = optimizer.optimizer if isinstance(optimizer, Kept) else optimizer
    return made
