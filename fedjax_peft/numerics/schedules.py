"""Learning-rate schedules over rounds: functions of a round that return a factor.

A client's optimizer starts anew in every round, so a schedule that counts the optimizer's steps
starts anew too. These schedules count rounds. In round t, from 1, every step of the optimizer is
multiplied by the factor f(t), weight decay included:

    optimizer = fp.schedules.scheduled(optax.adamw(1e-3), fp.schedules.cosine(100, warmup=5))
    algorithm = fp.algorithms.fedavg(optimizer)

With W rounds of warm-up, T rounds in total, and the last factor c:

    warm-up      f(t) = t / (W + 1)                                              t ≤ W
    constant     f(t) = 1                                                        t > W, as below
    linear       f(t) = c + (1 - c) (1 - p)          p = min((t - 1 - W) / (T - W), 1)
    cosine       f(t) = c + (1 - c) (1 + cos(π p)) / 2
    exponential  f(t) = max(c, d^⌊(t - 1 - W) / e⌋)

So the first round after the warm-up has the full rate. The factor c would be reached in round
T + 1: no round is lost to a rate of 0. This is the convention of optax and of PyTorch. A schedule
of your own is any function of a round (an int32 scalar, traced) that returns a scalar.
"""

from collections.abc import Callable
from typing import Annotated, Any, TypeAlias

import jax
import jax.numpy as jnp
from annotated_types import Ge, Le
from jax import Array

from fedjax_peft.contracts import Optimizer, PyTree, RateSchedule
from fedjax_peft.contracts.arguments import Share
from fedjax_peft.contracts.part import part
from fedjax_peft.support.errors import InputError

# `Scheduled`, `at_round`, `scaled` and `scheduled` are not in __all__, which lists the names that a
# config file can give.
__all__ = ["constant", "cosine", "exponential", "linear"]

Rounds: TypeAlias = Annotated[int, Ge(1), Le(1_000_000)]  # as many as for `simulate`
Warmup: TypeAlias = Annotated[int, Ge(0), Le(1_000_000)]


@part
def constant(*, warmup: Warmup = 0) -> RateSchedule:
    """The full learning rate, after a warm-up.

    Args:
      warmup: the number of rounds in which the rate rises linearly, before it is whole.
    """
    return _after_warmup(jnp.ones_like, warmup)


@part
def linear(rounds: Rounds, *, warmup: Warmup = 0, final_factor: Share = 0.0) -> RateSchedule:
    """A linear fall of the learning rate, after a warm-up.

    Args:
      rounds: T, the number of rounds of the run, warm-up included; in a config the run's own by
        default. Later rounds have the factor ``final_factor``.
      warmup: the number of rounds in which the rate rises linearly, before it is whole.
      final_factor: the factor at the end; it would be reached in round T + 1.

    Raises:
      InputError: ``warmup`` is not shorter than ``rounds``.
    """
    _check_length(rounds, warmup)

    def fall(passed: Array) -> Array:
        progress = jnp.minimum(passed / (rounds - warmup), 1.0)
        return final_factor + (1 - final_factor) * (1 - progress)

    return _after_warmup(fall, warmup)


@part
def cosine(rounds: Rounds, *, warmup: Warmup = 0, final_factor: Share = 0.0) -> RateSchedule:
    """A fall of the learning rate along half a cosine, after a warm-up.

    Args:
      rounds: T, the number of rounds of the run, warm-up included; in a config the run's own by
        default. Later rounds have the factor ``final_factor``.
      warmup: the number of rounds in which the rate rises linearly, before it is whole.
      final_factor: the factor at the end; it would be reached in round T + 1.

    Raises:
      InputError: ``warmup`` is not shorter than ``rounds``.
    """
    _check_length(rounds, warmup)

    def fall(passed: Array) -> Array:
        progress = jnp.minimum(passed / (rounds - warmup), 1.0)
        return final_factor + (1 - final_factor) * (1 + jnp.cos(jnp.pi * progress)) / 2

    return _after_warmup(fall, warmup)


@part
def exponential(
    decay: Share,
    *,
    every: Rounds = 1,
    warmup: Warmup = 0,
    final_factor: Share = 0.0,
) -> RateSchedule:
    """A learning rate that is multiplied by ``decay`` every few rounds, after a warm-up.

    Args:
      decay: d, the factor of each fall, such as 0.99.
      every: e, the number of rounds between two falls.
      warmup: the number of rounds in which the rate rises linearly, before it is whole.
      final_factor: the smallest factor.
    """

    def fall(passed: Array) -> Array:
        # Of whole numbers: XLA turns a division by a constant into a product, which rounds.
        falls = passed.astype(jnp.int32) // every
        return jnp.maximum(decay ** falls.astype(jnp.float32), final_factor)

    return _after_warmup(fall, warmup)


def _after_warmup(fall: Callable[[Array], Array], warmup: int) -> RateSchedule:
    """Returns the schedule that rises for ``warmup`` rounds and is ``fall(n)`` n rounds later."""

    def schedule(round_index: Array) -> Array:
        t = jnp.maximum(jnp.asarray(round_index, jnp.float32), 1.0)
        later = fall(jnp.maximum(t - 1 - warmup, 0.0))
        return jnp.where(t <= warmup, t / (warmup + 1), later)

    return schedule


# ------------------------------------------------------------------------------------- optimizers


class Scheduled(Optimizer):
    """An optimizer with a learning-rate schedule over rounds; made by :func:`scheduled`.

    Its state has the structure of the optimizer's own state.
    """

    optimizer: Optimizer
    """The optimizer at its full rate."""
    schedule: RateSchedule


@part
def scheduled(optimizer: Optimizer, schedule: RateSchedule) -> Optimizer:
    """Returns an optimizer whose steps in round t are multiplied by ``schedule(t)``.

    Give the result to a function of :mod:`fedjax_peft.algorithms`. There every learning rate of the
    clients follows the schedule: also SCAFFOLD's and pFedMe's ``learning_rate`` and APFL's
    ``alpha_rate``. The state of the optimizer is not changed by the schedule. Clients that tune
    their models before the last evaluation (FedRep) use the full rate.

    Args:
      optimizer: any optax optimizer, as a whole: a chain is scheduled, not a part of it.
      schedule: such as ``cosine(rounds=100)``, or a function of yours: round (int32 scalar, from 1)
        -> factor (scalar).

    Raises:
      InputError: an optimizer that has a schedule already.
    """
    if isinstance(optimizer, Scheduled):
        raise InputError("This optimizer has a schedule already: multiply the two schedules.")

    def update(*arguments: Any, **options: Any) -> tuple[PyTree, PyTree]:
        raise InputError(
            "This optimizer has a schedule over rounds, so its step depends on the round. Schedule"
            " the whole optimizer and not a part of a chain. In an algorithm of your own, decorate"
            " the function that makes it with fedjax_peft.algorithms.checks.checked, or step with"
            " fp.schedules.at_round(optimizer, context.round_index)."
        )

    made = Scheduled(optimizer.init, update)
    made.optimizer, made.schedule = optimizer, schedule
    return made


def at_round(optimizer: Optimizer, round_index: Array) -> Optimizer:
    """Returns the optimizer as it is in a round; one without a schedule is returned as it is."""
    if not isinstance(optimizer, Scheduled):
        return optimizer
    return scaled(optimizer.optimizer, optimizer.schedule(round_index))


def scaled(optimizer: Optimizer, factor: float | Array) -> Optimizer:
    """Returns an optimizer with the same state, whose steps are multiplied by ``factor``."""

    def update(gradient: PyTree, state: PyTree, params: PyTree = None, **extra: Any) -> tuple:
        steps, state = optimizer.update(gradient, state, params, **extra)
        return jax.tree.map(lambda x: (factor * x).astype(x.dtype), steps), state

    return Optimizer(optimizer.init, update)


def _check_length(rounds: int, warmup: int) -> None:
    if warmup >= rounds:
        raise InputError(
            f"warmup = {warmup} rounds leave none of the schedule's rounds = {rounds} at the full"
            " learning rate: choose a shorter warm-up."
        )
