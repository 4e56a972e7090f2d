"""Accounting of differential privacy: from noise to (ε, δ), and back.

The arithmetic is that of Google's ``dp-accounting`` (extra ``privacy``). This
file names the event of a run and asks the library for its ε. It runs on the host only.

Two accountants are offered. ``rdp`` composes Rényi divergences (Mironov 2017; Mironov, Talwar and
Zhang 2019 for Poisson sampling): it is fast, and its ε is an upper bound. ``pld`` composes
privacy-loss distributions (Koskela et al. 2020): it takes longer, and its ε is nearly exact.

A noise multiplier is the standard deviation of the noise divided by the clip norm C. What the sum
of a round can change by depends on the neighbours, the pairs of federations that the guarantee
compares:

* ``add_or_remove_one``: one client is there or not. The sum changes by at most C.
* ``replace_special``: one client sends zeros instead ("zero-out"). The sum changes by at most C.
  This relation is used where the number of clients, or of a cohort, is public and fixed.
* ``replace_one``: one client has other data. The sum changes by at most 2 C.
"""

import functools
import logging
import math
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Annotated, Any, Literal, TypeAlias

from annotated_types import Gt, Le

from fedjax_peft.contracts import Federation
from fedjax_peft.contracts.arguments import (
    FromZero,
    NotNegative,
    PositiveShare,
    Probability,
    strict,
)
from fedjax_peft.numerics.hyperparameters import remembered
from fedjax_peft.support.errors import InputError
from fedjax_peft.support.libraries import install, limit_blas_threads, log_level

Accountant: TypeAlias = Literal["rdp", "pld"]
"""How privacy losses are composed."""
Neighbours: TypeAlias = Literal["add_or_remove_one", "replace_special", "replace_one"]
"""The pairs of data sets that a guarantee compares."""

Epsilon: TypeAlias = Annotated[float, Gt(0), Le(math.inf)]


@strict
def gaussian_event(
    noise_multiplier: NotNegative,
    rounds: FromZero,
    sampling_probability: PositiveShare | None = None,
) -> Any:
    """Returns the event of ``rounds`` sums with Gaussian noise, a ``dp_accounting.DpEvent``.

    Args:
      noise_multiplier: the standard deviation of the noise divided by the sensitivity.
      rounds: the number of sums.
      sampling_probability: the probability with which a client (or an example) takes part in a
        sum, independently of all others (Poisson sampling). None: it takes part in every sum.

    Raises:
      InputError: ``dp-accounting`` is not installed.
    """
    dp = _dp_accounting()
    event = dp.GaussianDpEvent(float(noise_multiplier))
    if sampling_probability is not None:
        event = dp.PoissonSampledDpEvent(float(sampling_probability), event)
    return _repeated(event, rounds)


@strict
def concentrated_event(rho: float, xi: float, rounds: FromZero) -> Any:
    """Returns the event of ``rounds`` mechanisms of Rényi divergence at most ``xi + rho α``.

    Raises:
      InputError: as for :func:`gaussian_event`.
    """
    return _repeated(_dp_accounting().ZCDpEvent(rho, xi), rounds)


@strict
def epsilon(
    event: Any,
    delta: Probability,
    accountant: Accountant = "rdp",
    neighbours: Neighbours = "add_or_remove_one",
) -> float:
    """Returns the ε of an event at δ; ``inf`` without any guarantee.

    Args:
      event: a ``dp_accounting.DpEvent``. Its noise multipliers are relative to the sensitivity that
        the neighbours imply.
      delta: δ of the guarantee.
      accountant: see :data:`Accountant`.
      neighbours: see :data:`Neighbours`.

    Raises:
      InputError: the accountant does not know the event.
    """
    dp = _dp_accounting()
    one, count = _split(event)
    if isinstance(one, dp.NoOpDpEvent) or not count:
        return 0.0
    try:
        with log_level("absl", logging.ERROR):  # advice on the choice of orders
            if accountant == "rdp":
                orders, losses = _rdp(one, neighbours)
                found, _ = dp.rdp.compute_epsilon(orders, count * losses, delta)
            else:
                found = _pld_epsilon(one, count, delta, neighbours)
    except dp.UnsupportedEventError as error:
        raise InputError(
            f"The accountant {accountant!r} cannot account for this event with the neighbours"
            f" {neighbours!r}: {error}"
        ) from None
    return max(float(found), 0.0)


@strict
def noise_multiplier(
    epsilon: Epsilon,
    delta: Probability,
    rounds: FromZero,
    sampling_probability: PositiveShare | None = None,
    *,
    accountant: Accountant = "rdp",
    neighbours: Neighbours = "add_or_remove_one",
) -> float:
    """Returns the smallest noise multiplier with which ``rounds`` sums are (ε, δ)-private.

    The result is exact to a relative 1e-6, and its ε is never above the one that is asked for.

    Args:
      epsilon: ε of the guarantee.
      delta: δ of the guarantee.
      rounds: as for :func:`gaussian_event`.
      sampling_probability: likewise.
      accountant: see :data:`Accountant`.
      neighbours: see :data:`Neighbours`. The result is relative to the sensitivity that they imply.

    Raises:
      InputError: no noise is enough.
    """
    make = partial(gaussian_event, rounds=rounds, sampling_probability=sampling_probability)
    return _calibrated(make, epsilon, delta, accountant, neighbours)


def client_neighbours(federation: Federation) -> Neighbours:
    """Returns the neighbours that suit the way in which clients are drawn.

    With Poisson sampling, the server does not need to know how many clients there are. The other
    ways draw from a fixed list, so that a client can only be replaced.
    """
    return "add_or_remove_one" if federation.sampling == "poisson" else "replace_special"


def _without_replacement(federation: Federation, neighbours: Neighbours) -> bool:
    """Returns whether the bound of sampling without replacement is used."""
    fewer = federation.per_round < federation.clients
    return federation.sampling == "uniform" and neighbours == "replace_one" and fewer


def check_sizes_are_not_used(federation: Federation, instead: str = "uniform") -> None:
    """Raises InputError where a client's number of examples, which is private, decides a draw."""
    if federation.sampling == "size":
        raise InputError(
            "With sampling='size', the number of examples of a client, which is private, decides"
            f" who is drawn, so that there is no guarantee. Use sampling={instead!r}."
        )


def _suitable(federation: Federation, neighbours: Neighbours | None) -> Neighbours:
    """Returns the neighbours, checked against the way in which clients are drawn."""
    check_sizes_are_not_used(federation, "poisson")
    usual = client_neighbours(federation)
    if neighbours is None:
        return usual
    other = "add_or_remove_one" if federation.sampling == "poisson" else "replace_one"
    if neighbours not in ("replace_special", other):
        raise InputError(
            f"The neighbours {neighbours!r} do not suit sampling={federation.sampling!r}: use"
            f" {usual!r}."
        )
    return neighbours


def _repeated(event: Any, count: int) -> Any:
    """Returns the event, composed ``count`` times."""
    dp = _dp_accounting()
    return dp.SelfComposedDpEvent(event, count) if count else dp.NoOpDpEvent()


def _split(event: Any) -> tuple[Any, int]:
    """Returns an event as another one and how often that is composed."""
    if isinstance(event, _dp_accounting().SelfComposedDpEvent):
        return event.event, event.count
    return event, 1


@partial(remembered, maxsize=1024)
def _rdp(event: Any, neighbours: Neighbours) -> tuple[Any, Any]:
    """Returns the orders and the Rényi divergences of an event; they add up over rounds."""
    accountant = _dp_accounting().rdp.RdpAccountant(neighboring_relation=_relation(neighbours))
    accountant.compose(event)
    return accountant.orders, accountant.rdp


@partial(remembered, maxsize=1024)
def _pld_epsilon(event: Any, count: int, delta: float, neighbours: Neighbours) -> float:
    """Returns the ε of an event that is composed ``count`` times."""
    accountant = _pld_accountant(neighbours, event)
    return float(accountant.compose(event, count).get_epsilon(delta))


def _pld_accountant(neighbours: Neighbours, event: Any) -> Any:
    """Returns a new accountant whose noise multipliers are relative to the whole sensitivity."""
    dp = _dp_accounting()
    if neighbours == "replace_one" and isinstance(event, dp.GaussianDpEvent):
        # dp-accounting's PLD doubles the sensitivity of this relation, unlike its RDP.
        neighbours = "replace_special"
    return dp.pld.PLDAccountant(_relation(neighbours))


def _relation(neighbours: Neighbours) -> Any:
    return _dp_accounting().NeighboringRelation[neighbours.upper()]


def _calibrated(
    make: Callable[[float], Any],
    target: float,
    delta: float,
    accountant: Accountant,
    neighbours: Neighbours,
) -> float:
    """Returns the smallest noise multiplier whose event has at most the target's ε."""
    if math.isinf(target):
        return 0.0
    start, factor = 1.0, 2.0
    if accountant == "pld":  # it takes longer, and its answer lies a little below that of RDP
        start, factor = _calibrated(make, target, delta, "rdp", neighbours), 1.15
    return smallest_noise(
        lambda z: epsilon(make(z), delta, accountant, neighbours),
        target,
        start=start,
        factor=factor,
    )


@strict
def smallest_noise(
    epsilon_of: Callable[[float], float],
    epsilon: Epsilon,
    *,
    start: float = 1.0,
    factor: float = 2.0,
) -> float:
    """Returns the smallest noise multiplier with at most an ε, to a relative 1e-6.

    Args:
      epsilon_of: noise multiplier -> ε, which falls with it.
      epsilon: ε. That of the result is not above it. ``inf`` needs no noise.
    """
    limit_blas_threads()
    from scipy.optimize import brentq

    if math.isinf(epsilon):
        return 0.0
    low = high = start if start > 0 else 1.0
    while epsilon_of(high) > epsilon:
        low, high = high, factor * high
        if high > 2.0**40:
            raise InputError(f"No noise is enough for epsilon={epsilon:g}.")
    while low == high or epsilon_of(low) <= epsilon:
        low, high = low / factor, low
        if low < 2.0**-40:
            return 0.0  # nothing is released, or no noise is needed

    def gap(z: float) -> float:
        return min(epsilon_of(z), 2 * epsilon + 1e3) - epsilon  # a tiny noise has an infinite ε

    tolerance = 0.25e-6 * low
    root = float(brentq(gap, low, high, xtol=tolerance, rtol=1e-12))
    return next(z for z in (root, root + tolerance, root + 2 * tolerance, high) if gap(z) <= 0)


@functools.cache
def _dp_accounting() -> ModuleType:
    """Returns Google's library."""
    limit_blas_threads()  # it loads scipy
    try:
        import dp_accounting
    except ImportError:
        raise InputError(
            f"Accounting of differential privacy uses dp-accounting: {install('privacy')}."
        ) from None
    return dp_accounting
