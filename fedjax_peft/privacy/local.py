"""Client-level local differential privacy: every client clips its change and adds noise itself.

    client:  D_k = lift(upload_k) - lift(what it would send had it learned nothing)
             D_k ← D_k · min(1, C / ‖D_k‖) + N(0, (z C)²)      on every entry
    server:  update = finish(lift(nothing learned) + mean of D_k)

Nobody has to be trusted: what leaves a client is private, whoever reads it. The price is the noise.
The mean of n clients has noise of the standard deviation z C / √n, where central noise
(:func:`fedjax_peft.privacy.central`) of the same z has z C / n.

Neighbours: the client has any other data (replace one). What it sends before the noise then changes
by at most 2 C. Who takes part is not hidden, so sampling amplifies nothing: the rounds in which one
client can take part are composed. What a client cannot send for reasons that lie in its data must
not show either. A client whose upload is not finite, that is late, or that has no examples or the
weight 0 sends D_k = 0 with its noise, and counts in n.

Clipping and noise act in the space in which the aggregator sums (as in ``central``). Where that is
the space of products A·B (FRA), a client's noise fills the whole matrix. The matrix is then formed
for every lane, and it is what the client sends: 4 bytes for each entry.
"""

import jax
import jax.numpy as jnp
from jax import Array

from fedjax_peft.contracts.aggregator import Aggregated, Aggregator, Total
from fedjax_peft.contracts.algorithm import Algorithm
from fedjax_peft.contracts.arguments import NotNegative, Positive, Probability
from fedjax_peft.contracts.part import part
from fedjax_peft.contracts.privacy import Federation, Guarantee, Privacy
from fedjax_peft.contracts.server import RoundContext
from fedjax_peft.contracts.types import Key, Params, PyTree
from fedjax_peft.numerics import tree
from fedjax_peft.numerics.hyperparameters import maybe_nonzero
from fedjax_peft.privacy import accounting, guarantees, statements
from fedjax_peft.privacy import lifted as lifting
from fedjax_peft.privacy.accounting import Accountant, check_sizes_are_not_used
from fedjax_peft.privacy.mechanism import (
    clipping_metrics,
    private,
    protected,
    released,
    summing,
)


@part
def local(
    clip: Positive,
    noise_multiplier: NotNegative,
    *,
    delta: Probability = 1e-5,
    accountant: Accountant = "rdp",
) -> Privacy:
    """Client-level local differential privacy, for every aggregator that sums.

    All clients have the same weight. Rows gain the fields of ``central``.

    Args:
      clip: C, the largest norm of what a client sends, in the aggregator's space.
      noise_multiplier: z; the noise of a client has the standard deviation z C.
      delta: δ of the guarantee.
      accountant: ``rdp``, or ``pld``, which is slower and nearly exact.

    Raises:
      InputError: on use, clients that are drawn by their sizes, or an algorithm that ``central``
        refuses too.
    """

    def protect(algorithm: Algorithm, federation: Federation) -> Algorithm:
        check_sizes_are_not_used(federation)
        return protected(algorithm, _noised(summing(algorithm), clip, noise_multiplier))

    def guarantee(federation: Federation, rounds: int) -> Guarantee:
        turns = guarantees.participations(federation, rounds)
        event = accounting.gaussian_event(noise_multiplier / 2, turns)
        return Guarantee(accounting.epsilon(event, delta, accountant, "replace_one"), delta)

    def statement(federation: Federation) -> str:
        return (
            "Client-level local differential privacy of all that a client sends. It compares"
            " federations in which one client has other data (replace one). Nobody is trusted."
            f" {statements.turns_in_words(federation)}"
        )

    return Privacy("local", "client", protect, guarantee, statement)


def clipped_and_dense(base: Aggregator, clip: float | Array) -> Aggregator:
    """Returns the aggregator of clipped changes, lifted to ``{"sum": arrays, "norm": Stacked}``.

    It has no ``finish`` of its own yet.
    """
    clipping = private(base, clip, None)

    def lift(upload: PyTree, template: PyTree, fixed: Params) -> PyTree:
        lifted = clipping.lift(upload, template, fixed)
        return {**lifted, "sum": lifting.dense(lifted["sum"])}

    return clipping._replace(lift=lift, every_round=False)


def _noised(base: Aggregator, clip: float | Array, noise_multiplier: float | Array) -> Aggregator:
    """Returns the aggregator of clipped changes to which their clients add noise."""
    noise_std = clip * noise_multiplier

    def randomise(lifted: PyTree, key: Key, round_index: Array) -> PyTree:
        if not maybe_nonzero(noise_multiplier):
            return lifted

        def draw(key: Key, shape: tuple[int, ...]) -> Array:
            return noise_std * jax.random.normal(key, shape)

        return {**lifted, "sum": lifting.with_noise(lifted["sum"], draw, key)}

    def finish(total: Total, template: PyTree, context: RoundContext, state: PyTree) -> Aggregated:
        noisy = total.value["sum"]
        result = released(base, noisy, len(total.weights), template, context, state)
        measured = clipping_metrics(total.value["norm"].value, total.weights, clip)
        some = jnp.maximum(context.participants, 1.0)
        measured["privacy_noise_std"] = jnp.float32(noise_std) / jnp.sqrt(some)
        return result._replace(metrics=result.metrics | measured)

    return clipped_and_dense(base, clip)._replace(
        finish=finish, randomise=randomise, wire_bytes=lambda lifted: 4 * tree.size(lifted["sum"])
    )
