"""The guarantee of a run, whose unit is a client or an example, and the noise for it.

The functions share their arguments:

* ``noise_multiplier``: the standard deviation of the noise, on the sum of a round or of a batch,
  divided by the clip norm.
* ``delta``: δ, between 0 and 1; ``epsilon``: ε, positive.
* ``federation``, ``rounds``: the facts about the run, and the number of rounds.
* ``accountant``: see :data:`fedjax_peft.privacy.accounting.Accountant`.
* ``neighbours``: of clients; by default those that suit the sampling
  (:func:`fedjax_peft.privacy.accounting.client_neighbours`).

All raise InputError for a number or a word that is not possible, for clients that are drawn by
their sizes, which are private, and for neighbours that do not suit the sampling.
"""

import math
from functools import partial
from typing import Any

from fedjax_peft.contracts import Federation, Guarantee
from fedjax_peft.contracts.arguments import FromZero, NotNegative, Probability, strict
from fedjax_peft.privacy.accounting import (
    Accountant,
    Epsilon,
    Neighbours,
    _calibrated,
    _dp_accounting,
    _repeated,
    _suitable,
    _without_replacement,
    epsilon,
    gaussian_event,
    noise_multiplier,
)
from fedjax_peft.support.errors import InputError


def participations(federation: Federation, rounds: int) -> int:
    """Returns how often one client takes part in ``rounds`` rounds at most.

    Only ``round_robin`` keeps a client away from the rounds until all others had their turn. With
    the other ways of sampling, the same client can be drawn in every round.
    """
    if federation.sampling == "round_robin":
        return -(-rounds * federation.per_round // federation.clients)
    return rounds


@strict
def client_event(
    noise_multiplier: NotNegative,
    federation: Federation,
    rounds: FromZero,
    neighbours: Neighbours | None = None,
) -> Any:
    """Returns the event of the rounds of a run whose server adds Gaussian noise to clipped sums.

    * ``poisson``: amplified by sampling.
    * ``uniform`` with the neighbours ``replace_one``: amplified by sampling without replacement
      (Wang, Balle and Kasiviswanathan 2019, theorem 27), for the sensitivity 2 C.
    * otherwise: no amplification; composed over the most rounds of one client.
    """
    dp = _dp_accounting()
    neighbours = _suitable(federation, neighbours)
    if federation.sampling == "poisson":
        return gaussian_event(noise_multiplier, rounds, federation.sampling_probability)
    sensitivity = 2.0 if neighbours == "replace_one" else 1.0
    event = dp.GaussianDpEvent(noise_multiplier / sensitivity)
    if _without_replacement(federation, neighbours):
        event = dp.SampledWithoutReplacementDpEvent(federation.clients, federation.per_round, event)
    return _repeated(event, participations(federation, rounds))


@strict
def client_epsilon(
    noise_multiplier: NotNegative,
    delta: Probability,
    federation: Federation,
    rounds: FromZero,
    *,
    accountant: Accountant = "rdp",
    neighbours: Neighbours | None = None,
) -> float:
    """Returns the ε of a run whose server adds Gaussian noise to clipped sums."""
    neighbours = _suitable(federation, neighbours)
    event = client_event(noise_multiplier, federation, rounds, neighbours)
    return epsilon(event, delta, accountant, neighbours)


def client_guarantee(
    noise_multiplier: NotNegative,
    delta: Probability,
    federation: Federation,
    rounds: FromZero,
    *,
    accountant: Accountant = "rdp",
    neighbours: Neighbours | None = None,
) -> Guarantee:
    """Returns the guarantee of a run whose server adds Gaussian noise to clipped sums."""
    found = client_epsilon(
        noise_multiplier, delta, federation, rounds, accountant=accountant, neighbours=neighbours
    )
    return Guarantee(found, delta)


@strict
def client_noise_multiplier(
    epsilon: Epsilon,
    delta: Probability,
    federation: Federation,
    rounds: FromZero,
    *,
    accountant: Accountant = "rdp",
    neighbours: Neighbours | None = None,
) -> float:
    """Returns the smallest noise multiplier with which a run is (ε, δ)-private."""
    neighbours = _suitable(federation, neighbours)
    make = partial(client_event, federation=federation, rounds=rounds, neighbours=neighbours)
    return _calibrated(make, epsilon, delta, accountant, neighbours)


@strict
def example_epsilon(
    noise_multiplier: NotNegative,
    delta: Probability,
    federation: Federation,
    rounds: FromZero,
    *,
    accountant: Accountant = "rdp",
) -> float:
    """Returns the ε of a run whose clients add Gaussian noise to clipped gradients of examples.

    Neighbours are data sets of which one has an empty example in the place of another's
    (``replace_special``). See :mod:`fedjax_peft.privacy.example` for what is composed.
    """
    z = noise_multiplier / math.sqrt(federation.gradients_per_step)
    found = [0.0]
    for count, share, left in _example_steps(federation, rounds, delta):
        if left <= 0:
            return math.inf
        event = gaussian_event(z, count, share)
        found.append(epsilon(event, left, accountant, "replace_special"))
    return max(found)


@strict
def example_noise_multiplier(
    epsilon: Epsilon,
    delta: Probability,
    federation: Federation,
    rounds: FromZero,
    *,
    accountant: Accountant = "rdp",
) -> float:
    """Returns the smallest noise multiplier with which examples are (ε, δ)-private in a run.

    Raises:
      InputError: also for a δ that is smaller than the probability that a Poisson-sampled batch is
        cut.
    """
    found = [0.0]
    for count, share, left in _example_steps(federation, rounds, delta):
        if left <= 0:
            raise InputError(
                f"delta = {delta:g} is not larger than the probability that one of {count:,}"
                " Poisson-sampled batches is cut: choose a larger delta."
            )
        settings: dict[str, Any] = {"accountant": accountant, "neighbours": "replace_special"}
        found.append(noise_multiplier(epsilon, left, count, share, **settings))
    return max(found) * math.sqrt(federation.gradients_per_step)


def _example_steps(
    federation: Federation, rounds: int, delta: float
) -> list[tuple[int, float | None, float]]:
    """Returns (steps, probability of an example in a step, δ that is left) of the worst clients."""
    turns = participations(federation, rounds)
    if federation.batch_sampling != "poisson":
        return [(turns * federation.most_passes, None, delta)]
    known = federation.workloads or ((federation.fewest_examples, federation.most_steps),)
    worst: list[tuple[int, int]] = []
    for examples, steps in sorted(known, key=lambda pair: (pair[0], -pair[1])):
        if not worst or steps > worst[-1][1]:  # larger probabilities come first
            worst.append((examples, steps))
    return [
        (
            turns * steps,
            min(1.0, federation.batch_size / examples),
            delta - turns * steps * federation.overflow_probability,
        )
        for examples, steps in worst
    ]
