"""DP-FTRL: client-level central privacy with noise that is correlated over rounds.

    server, round t:  S_t = Σ D_k + x_t,     x_t = (s w_t - Σ_{1≤j<b} c_j x_{t-j}) / c_0
    w_t ~ N(0, 1) independent,     s = z · clip · max ‖T u‖ over the rounds u of one client

The noises of all rounds are ``x = s T⁻¹ w`` for the lower triangular Toeplitz matrix T with the b
bands c_0 … c_{b-1}. A part of the noise of a round is taken back in later rounds, so that less
noise stays in the model, which is a sum over rounds (Kairouz et al. 2021; banded matrices:
Choquette-Choo et al. 2023, arXiv 2306.08153). The clients' changes are clipped to the norm of
:mod:`fedjax_peft.privacy.central`, in the aggregator's space. The coefficients are the best ones
for the mean squared error of all prefix sums, from ``jax_privacy``.

The guarantee does not need random sampling. It needs a bound of how often, and how far apart, one
client takes part. If S of N clients take turns (``round_robin``), a client takes part in every
(N/S)-th round. With at most N/S bands its contributions do not overlap, and the whole run is one
Gaussian mechanism with the noise multiplier z. With ``sampling="all"`` every client takes part in
every round; correlated noise is then allowed, with the larger s that this needs.

The server keeps the noises of the last b - 1 rounds in the aggregator's state: as many dense sums.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedjax_peft.contracts import Algorithm, Federation, Guarantee, Key, Privacy, PyTree
from fedjax_peft.contracts.arguments import Count, NotNegative, Positive, Probability
from fedjax_peft.contracts.part import part
from fedjax_peft.numerics.hyperparameters import maybe_nonzero
from fedjax_peft.privacy import lifted as lifting
from fedjax_peft.privacy.accounting import Accountant, epsilon, gaussian_event
from fedjax_peft.privacy.central import TRUSTED
from fedjax_peft.privacy.mechanism import Noise, private, protected, summing
from fedjax_peft.support.errors import InputError
from fedjax_peft.support.libraries import install


class Strategy(NamedTuple):
    """The Toeplitz matrix T of a run, and what one client can change."""

    bands: tuple[float, ...]
    """c_0, c_1, …"""
    sensitivity: float
    """The largest Euclidean norm of T u for u in {0, 1}ⁿ, the rounds in which a client takes part.
    """
    noises: tuple[float, ...]
    """The standard deviation of x_t / s in each round: the norms of the rows of T⁻¹."""


@part
def correlated(
    clip: Positive,
    noise_multiplier: NotNegative,
    *,
    rounds: Count,
    bands: Count | None = None,
    delta: Probability = 1e-5,
    accountant: Accountant = "rdp",
) -> Privacy:
    """DP-FTRL: client-level central privacy with correlated noise, for clients that take turns.

    It compares federations in which one client sends zeros instead (zero-out). Rows gain the
    fields of :func:`fedjax_peft.privacy.central`.

    Args:
      clip: C, the largest norm of what a client sends, in the aggregator's space.
      noise_multiplier: z, the noise multiplier of the whole run, not of a round.
      rounds: the number of rounds that the noise is made for. The guarantee is that of all of them
        from the first round on; after them there is none.
      bands: b; 1 is independent noise. By default the number of rounds between two turns of a
        client.
      delta: δ of the guarantee.
      accountant: as for :func:`fedjax_peft.privacy.central`.

    Raises:
      InputError: on use, as for ``central``, and for a sampling other than ``round_robin`` and
        ``all``, clients that do not take turns evenly, more bands than rounds between two turns, or
        a missing ``jax_privacy``.
    """

    def protect(algorithm: Algorithm, federation: Federation) -> Algorithm:
        separation = _separation(federation, bands)
        made = strategy(rounds, min(bands or separation, rounds), separation)
        noise = None
        if maybe_nonzero(noise_multiplier):
            noise = correlated_noise(made, clip * noise_multiplier * made.sensitivity)
        return protected(algorithm, private(summing(algorithm), clip, noise))

    def guarantee(federation: Federation, done: int) -> Guarantee:
        _separation(federation, bands)
        if done > rounds or (done and not noise_multiplier):
            return Guarantee(math.inf, delta)
        event = gaussian_event(noise_multiplier, min(done, 1))
        return Guarantee(epsilon(event, delta, accountant, "replace_special"), delta)

    def statement(federation: Federation) -> str:
        separation = _separation(federation, bands)
        turns = "every round" if separation == 1 else f"one of {separation} rounds at most"
        return (
            "Client-level differential privacy of everything that the server sends and of the final"
            f" model, for {rounds:,} rounds together, with noise that is correlated over rounds"
            " (DP-FTRL). It compares federations in which one client sends zeros instead"
            f" (zero-out). A client takes part in {turns}; nothing is amplified by sampling."
            f" {TRUSTED}"
        )

    return Privacy("correlated", "client", protect, guarantee, statement)


def _separation(federation: Federation, bands: int | None) -> int:
    """Returns the rounds from one turn of a client to its next one."""
    clients, drawn = federation.clients, federation.per_round
    if federation.sampling == "all":
        return 1
    if federation.sampling != "round_robin":
        raise InputError(
            "Correlated noise needs a bound of how often a client takes part, which"
            f" sampling={federation.sampling!r} does not give. Set sampling='round_robin', or use"
            " fp.privacy.central."
        )
    if clients % drawn:
        raise InputError(
            f"{drawn} of {clients} clients in a round do not take turns evenly: correlated noise"
            f" needs a number of clients per round that divides {clients}."
        )
    if bands is not None and bands > clients // drawn:
        raise InputError(
            f"bands = {bands} is more than the {clients // drawn} rounds from one turn of a client"
            f" to the next ({clients} clients, {drawn} in a round). Set bands to at most"
            f" {clients // drawn}."
        )
    return clients // drawn


@functools.lru_cache(maxsize=32)
def strategy(rounds: int, bands: int, separation: int) -> Strategy:
    """Returns the matrix T of a run."""
    try:
        from jax_privacy.matrix_factorization import toeplitz
    except ImportError:
        raise InputError(
            f"Correlated noise takes its coefficients from jax-privacy: {install('privacy')}."
        ) from None
    with jax.ensure_compile_time_eval():
        found = toeplitz.optimize_banded_toeplitz(rounds, bands) if bands > 1 else jnp.ones(1)
        # Rounding may make the last bands grow by an ulp; the sensitivity is for falling ones.
        coefficients = jnp.minimum.accumulate(jnp.maximum(found, 0))
        square = toeplitz.minsep_sensitivity_squared(coefficients, separation, None, rounds)
    c = np.asarray(coefficients, np.float64)
    inverse = np.zeros(rounds)  # the first column of T⁻¹, which is Toeplitz too
    for t in range(rounds):
        past = sum(c[j] * inverse[t - j] for j in range(1, min(len(c), t + 1)))
        inverse[t] = ((t == 0) - past) / c[0]
    noises = np.sqrt(np.cumsum(inverse**2))
    return Strategy(tuple(c.tolist()), math.sqrt(float(square)), tuple(noises.tolist()))


def correlated_noise(made: Strategy, scale: Any) -> Noise:
    """Returns the noise ``scale · T⁻¹ w``, for the rounds of a run in their order.

    Its state holds the noises of the last rounds, the newest first, ``[bands - 1, ...]``.

    Args:
      scale: s, the standard deviation of ``s w``.
    """
    first, *rest = made.bands
    noises = jnp.asarray(made.noises, jnp.float32)

    def add(total: PyTree, key: Key, state: PyTree, round_index: Array) -> tuple:
        zeros = jax.tree.map(jnp.zeros_like, total)
        fresh = lifting.with_noise(
            zeros, lambda own, shape: scale * jax.random.normal(own, shape), key
        )
        weights = jnp.asarray(rest, jnp.float32)

        def now(new: Array, past: Array) -> Array:
            return (new - jnp.tensordot(weights, past, axes=1, precision="highest")) / first

        drawn = jax.tree.map(now, fresh, state)
        kept = jax.tree.map(
            lambda x, past: jnp.concatenate([x[None], past])[: len(rest)], drawn, state
        )
        return jax.tree.map(jnp.add, total, drawn), kept

    def init(zeros: Any) -> PyTree:
        return jax.tree.map(lambda x: jnp.zeros((len(rest), *x.shape), jnp.float32), zeros())

    def std(round_index: Array) -> Array:
        return scale * jnp.take(noises, round_index - 1, mode="clip")

    return Noise(std, add, init)
