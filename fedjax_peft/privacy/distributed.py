"""The distributed discrete Gaussian (Kairouz, Liu and Steinke 2021), with simulated secure sums.

The clients share the noise, and the server learns nothing but the sum of a round modulo m = 2^b:

    client:  x = min(1, C / ‖D_k‖) D_k            D_k as in ``central``, as one vector
             x ← s H S x / √d                     padded to d = 2^j; S: random signs; H: Hadamard
             x ← x rounded to integers at random, again and again until ‖x‖ ≤ Δ
             send (x + N_Z(0, σ²)) mod m          N_Z: discrete Gaussian, an integer
    server:  sum mod m, from [0, m) to [-m/2, m/2), then the inverse of S, H and s
    Δ²  =  min( c² + d/4 + √(2 log(1/β)) (c + √d/2),  (c + √d)² ),   c = s C,   β = e^(-1/2)

(Algorithms 1 and 2, with γ = 1/s.) The sum of integers is exact (int32, modulo 2^32, of which m is
a divisor). The signs are the same for all clients of a round and change from round to round; they
are public. The scale is that of the paper's section 4: m holds ±4 standard deviations of the sum,

    s = √(m² - 16 n) / (8 √(C² n²/d + n (zC)²/n'))      n clients in a round, n' of which must send

**Noise.** σ = z Δ / √n', and at least the value for which the divergence between a sum of discrete
Gaussians and one discrete Gaussian, τ d with τ = 10 Σ_{k<n} exp(-2π²σ² k/(k+1)), is below 1e-10. So
z is the noise multiplier relative to the sensitivity *after rounding*: few bits cost noise and
never privacy. Too few are refused: m must hold ±3 standard deviations of the noise of the sum, with
what rounding adds to it. Discrete Gaussians are drawn by rejection from discrete Laplace numbers
(Canonne, Kamath and Steinke 2020, Algorithm 3) with float32 uniforms, which makes probabilities
right to about 1e-7: right for a simulation; a deployment needs exact integer arithmetic and a
secret seed.

**Guarantee.** Neighbours are federations in which one client sends zeros instead (zero-out). A
round has the Rényi divergence α/(2z²) + 1e-10 at most (the paper's Proposition 14), composed over
the rounds in which one client can take part. The trust is that of secure aggregation: the server
learns the sum alone. Clients whose shares of the noise are missing weaken the noise, so a share of
``dropouts`` is allowed for. If more are missing, the sum is not released, and the round changes
nothing. Only chance (``failure_rate``) makes clients miss a round. A client whose upload is not
finite, that is late, or that has no examples or the weight 0 sends zeros with its noise: its
absence could depend on its data.

**Bytes.** b bits for each of the d padded entries. The keys and shares of a secure aggregation
protocol are not counted.

Kairouz, Liu and Steinke 2021, arXiv:2102.06387; Canonne, Kamath and Steinke 2020, arXiv:2004.00010.
"""

import math
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
from annotated_types import Ge, Le
from jax import Array
from jax.flatten_util import ravel_pytree

from fedjax_peft.contracts.aggregator import Aggregated, Aggregator, Integers, Total
from fedjax_peft.contracts.algorithm import Algorithm
from fedjax_peft.contracts.arguments import Fraction, Positive, Probability
from fedjax_peft.contracts.part import part
from fedjax_peft.contracts.privacy import Federation, Guarantee, Privacy
from fedjax_peft.contracts.server import RoundContext
from fedjax_peft.contracts.types import Key, PyTree
from fedjax_peft.numerics.hyperparameters import is_traced
from fedjax_peft.numerics.random import stream
from fedjax_peft.privacy import accounting, guarantees, statements
from fedjax_peft.privacy import lifted as lifting
from fedjax_peft.privacy.accounting import check_sizes_are_not_used
from fedjax_peft.privacy.local import clipped_and_dense
from fedjax_peft.privacy.mechanism import (
    clipping_metrics,
    protected,
    released,
    summing,
)
from fedjax_peft.support.errors import InputError

_DEVIATIONS = 4
"""Standard deviations of the sum that fit into half of the modulus."""
_FEWEST = 3
"""Standard deviations of the noise, with what rounding adds to it, that must fit. Sums that wrap
around lose a part of their mean: 5 % with 3, 97 % with 1."""
_MOST_BITS = 24
"""The largest b."""
_BETA = math.exp(-0.5)
"""β: a rounding is repeated with this probability at most."""
_SLACK = 1e-10
"""The divergence, at most, between a sum of discrete Gaussians and one discrete Gaussian."""
_TRIES = 64
"""Roundings at random, before a vector is rounded towards zero, which is never longer."""


@part
def distributed(
    clip: Positive,
    noise_multiplier: Positive,
    *,
    bits: Annotated[int, Ge(4), Le(_MOST_BITS)] = 16,
    delta: Probability = 1e-5,
    dropouts: Fraction = 0.0,
) -> Privacy:
    """Client-level privacy by noise that the clients share, under simulated secure aggregation.

    It is for rounds of a fixed number of clients. Rows gain the fields of ``central``.

    Args:
      clip: C, the largest norm of what a client sends, in the aggregator's space.
      noise_multiplier: z; the noise on the sum is z times its sensitivity after rounding.
      bits: b, for each entry of a message. The modulus of the sum is 2^b.
      delta: δ of the guarantee.
      dropouts: the share of a round's clients that may send nothing. The noise of the others is
        larger for it.

    Raises:
      InputError: on use, rounds of a random number of clients, too few bits for the noise of so
        many clients and entries, or an algorithm that ``central`` refuses too.
    """

    def protect(algorithm: Algorithm, federation: Federation) -> Algorithm:
        check_sizes_are_not_used(federation)
        if federation.sampling == "poisson":
            raise InputError(
                "The clients of a round share the noise of 'distributed', so their number must be"
                " known, and sampling='poisson' draws it. Use sampling='uniform'."
            )
        least = senders(dropouts, federation.per_round)
        shape = _Cohort(clip, noise_multiplier, bits, federation.per_round, least)
        return protected(algorithm, _shared_noise(summing(algorithm), shape))

    def guarantee(federation: Federation, rounds: int) -> Guarantee:
        turns = guarantees.participations(federation, rounds)
        event = accounting.concentrated_event(0.5 / noise_multiplier**2, _SLACK, turns)
        return Guarantee(accounting.epsilon(event, delta, "rdp", "replace_special"), delta)

    def statement(federation: Federation) -> str:
        return (
            "Client-level differential privacy of the sums of the rounds and of the final model. It"
            " compares federations in which one client sends zeros instead (zero-out). Secure"
            " aggregation is trusted to show the server nothing but the sum, and at least"
            f" {1 - dropouts:.0%} of a round's clients to add their noise."
            f" {statements.turns_in_words(federation)}"
        )

    return Privacy("distributed", "client", protect, guarantee, statement)


def senders(dropouts: float, clients: int) -> int:
    """Returns how many of a round's clients must send if a share of them may be missing."""
    # The product may lie above a whole number by rounding: 0.3 of 10 clients are 3, and not 4.
    return max(math.ceil((1 - dropouts) * clients - 1e-9), 1)


class _Cohort(NamedTuple):
    """The settings of a round."""

    clip: Any
    noise_multiplier: Any
    bits: int
    clients: int
    """n."""
    least: int
    """n'."""


class Grid(NamedTuple):
    """The integers that a vector is rounded to."""

    scale: Array
    """s, integers for a unit."""
    longest: Array
    """Δ, the largest norm after rounding, in integers."""
    deviation: Array
    """σ, the standard deviation of a client's noise, in integers."""


def grid(
    clip: Any, noise_multiplier: Any, bits: int, clients: int, least: int, entries: int
) -> Grid:
    """Returns the grid for a vector of ``entries`` padded entries; see the head of this file.

    Raises:
      InputError: the noise of the sum does not fit into ``bits``. Of run-time values, which are not
        known inside a program, the smallest noise must fit.
    """
    cohort = _Cohort(clip, noise_multiplier, bits, clients, least)
    found = _grid(cohort, entries)
    if found is None:
        more = range(bits + 1, _MOST_BITS + 1)
        enough = [b for b in more if _grid(cohort._replace(bits=b), entries) is not None]
        advice = f"use bits = {enough[0]} or more" if enough else "use a smaller noise_multiplier"
        raise InputError(
            f"bits = {bits} of distributed are too few for the noise of {clients} clients on"
            f" {entries:,} entries, which would wrap around the modulus: {advice}."
        )
    return found


def _grid(cohort: _Cohort, entries: int) -> Grid | None:
    """Returns the grid of a cohort, None if the noise of the sum does not fit into the modulus."""
    clip, noise_multiplier, bits, n, least = cohort
    d = entries
    smallest = math.sqrt(math.log(10 * max(n, 2) * d / _SLACK)) / math.pi
    room = 2**bits / (2 * _DEVIATIONS)
    if room < 2 * math.sqrt(n) * smallest:
        return None
    with jax.ensure_compile_time_eval():  # known numbers stay known inside a program
        spread = jnp.sqrt(clip**2 * n**2 / d + n * (noise_multiplier * clip) ** 2 / least)
        scale = math.sqrt(room**2 - n / 4) / spread
        c = clip * scale
        square = c**2 + d / 4 + math.sqrt(2 * math.log(1 / _BETA)) * (c + math.sqrt(d) / 2)
        longest = jnp.minimum(jnp.sqrt(square), c + math.sqrt(d))
        deviation = jnp.maximum(noise_multiplier * longest / math.sqrt(least), smallest)
    fits = is_traced(deviation) or 2**bits / 2 >= _FEWEST * math.sqrt(n) * float(deviation)
    return Grid(scale, longest, deviation) if fits else None


def _shared_noise(base: Aggregator, cohort: _Cohort) -> Aggregator:
    """Returns the aggregator of clipped changes that are summed as noisy integers."""
    modulus = 2**cohort.bits

    def randomise(lifted: PyTree, key: Key, round_index: Array) -> PyTree:
        vector = ravel_pytree(lifted["sum"])[0]
        padded = jnp.pad(vector, (0, _padded(vector.size) - vector.size))
        own = grid(*cohort, padded.size)
        turned = hadamard(padded * _signs(round_index, padded.size)) * own.scale
        whole = rounded(turned, own.longest, stream(key, "rounding"))
        noise = discrete_gaussian(stream(key, "noise"), own.deviation, padded.shape)
        return {**lifted, "sum": Integers(jnp.mod(whole + noise, modulus))}

    def finish(total: Total, template: PyTree, context: RoundContext, state: PyTree) -> Aggregated:
        start, back = ravel_pytree(lifting.dense(base.lift(template, template, context.fixed)))
        entries = _padded(start.size)
        own = grid(*cohort, entries)
        summed = jnp.mod(total.value["sum"].value, modulus)
        summed = jnp.where(summed >= modulus // 2, summed - modulus, summed)
        turned = hadamard(summed.astype(jnp.float32) / own.scale)
        vector = (turned * _signs(context.round_index, entries))[: start.size]
        enough = jnp.sum(total.weights > 0) >= cohort.least
        noisy = back(jnp.where(enough, vector, 0.0))
        result = released(base, noisy, len(total.weights), template, context, state)
        measured = clipping_metrics(total.value["norm"].value, total.weights, cohort.clip)
        noise = own.deviation / own.scale * math.sqrt(cohort.clients)
        measured["privacy_noise_std"] = jnp.float32(noise) / context.participants
        return result._replace(metrics=result.metrics | measured)

    def wire_bytes(lifted: PyTree) -> int:
        return -(-cohort.bits * lifted["sum"].value.size // 8)

    return clipped_and_dense(base, cohort.clip)._replace(
        finish=finish, randomise=randomise, wire_bytes=wire_bytes, every_round=True
    )


def _padded(size: int) -> int:
    return 1 << max(size - 1, 0).bit_length()


def _signs(round_index: Array, size: int) -> Array:
    """Returns the random signs of a round, which are public, float32 ``[size]``."""
    key = jax.random.fold_in(stream(0, "public rotation"), round_index)
    return jax.random.rademacher(key, (size,), jnp.float32)


def hadamard(x: Array) -> Array:
    """Returns ``H x / √d``, the Walsh-Hadamard transform of ``[d]``, d a power of 2.

    It is its own inverse, and keeps the Euclidean norm.
    """
    size, width = x.size, 1
    while width < size:
        pairs = x.reshape(-1, 2, width)
        x = jnp.stack([pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]], axis=1).reshape(-1)
        width *= 2
    return x / math.sqrt(size)


def rounded(x: Array, longest: Array | float, key: Key) -> Array:
    """Returns a vector rounded up or down at random, int32, no longer than ``longest``.

    Roundings that are longer are drawn again (conditional stochastic rounding).
    """
    limit = longest**2 * (1 - 1e-5)  # the sum of squares is float32

    def draw(attempt: Array) -> Array:
        return jnp.floor(x + jax.random.uniform(jax.random.fold_in(key, attempt), x.shape))

    def again(carry: tuple[Array, Array]) -> Array:
        attempt, drawn = carry
        return (attempt < _TRIES) & (jnp.sum(drawn**2) > limit)

    zero = jnp.zeros((), jnp.int32)
    _, drawn = jax.lax.while_loop(again, lambda c: (c[0] + 1, draw(c[0] + 1)), (zero, draw(zero)))
    drawn = jnp.where(jnp.sum(drawn**2) > limit, jnp.trunc(x), drawn)
    return drawn.astype(jnp.int32)


def discrete_gaussian(key: Key, deviation: Array | float, shape: tuple[int, ...]) -> Array:
    """Returns independent integers, int32, with probabilities ∝ exp(-k² / (2 σ²)).

    Rejection from discrete Laplace numbers (Canonne, Kamath and Steinke 2020, Algorithm 3).
    """
    width = jnp.floor(deviation) + 1.0

    def attempt(number: Array) -> tuple[Array, Array]:
        keys = jax.random.split(jax.random.fold_in(key, number), 4)
        size = jnp.floor(width * jax.random.exponential(keys[0], shape))  # geometric
        negative = jax.random.bernoulli(keys[1], 0.5, shape)
        # The exponential has no memory. A second one refines the tail of the float32 numbers.
        first, second = (jax.random.exponential(k, shape) for k in keys[2:])
        threshold = jnp.where(first < 8.0, first, 8.0 + second)
        accepted = threshold > (size - deviation**2 / width) ** 2 / (2 * deviation**2)
        # Zero has one sign only.
        return jnp.where(negative, -size, size), accepted & ~(negative & (size == 0))

    def step(carry: tuple) -> tuple:
        number, values, found = carry
        new, accepted = attempt(number)
        return number + 1, jnp.where(found, values, new), found | accepted

    start = (jnp.zeros((), jnp.int32), jnp.zeros(shape), jnp.zeros(shape, bool))
    _, values, _ = jax.lax.while_loop(lambda carry: ~jnp.all(carry[2]), step, start)
    return values.astype(jnp.int32)
