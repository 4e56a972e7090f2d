"""Client-level central differential privacy: clip what a client sends, add noise to the sum.

    client:  D_k = lift(upload_k) - lift(what it would send had it learned nothing)
             D_k ← D_k · min(1, C / ‖D_k‖)              ‖·‖ over everything that is summed, together
    server:  S = Σ D_k + N(0, (z C)²)                       on every entry of the sum, once a round
             update = finish(lift(nothing learned) + S / (q N))

This is DP-FedAvg (McMahan et al. 2018) in the space in which an aggregator sums: leaves for the
mean, dense products for FRA-LoRA and FlexLoRA, products for server optimizers on products. So noise
enters linearly. What follows (the truncation of FRA, a server optimizer) is post-processing.

All clients have the weight 1, and the denominator q N (the sampling probability times the number of
clients that have examples) does not depend on who took part. One client then moves the sum by at
most C. A client that drops out, or whose upload is not finite, contributes 0. A round without
clients releases noise like any other. The server knows nothing about the clients of a round but the
sum: training metrics, numbers of participants and measurements of the aggregation are withheld.

Not noised, and not changed, are entries that no client can send in a round: factors that rest
(RoLoRA), directions that no client owns (``client_ranks``).

The noise is float32 and from a seeded generator. That is right for a simulation. A deployment needs
a secret seed and noise that is safe against attacks on floating-point numbers.
"""

from fedjax_peft.contracts import Algorithm, Federation, Guarantee, Privacy
from fedjax_peft.contracts.arguments import NotNegative, Positive, Probability
from fedjax_peft.contracts.part import part
from fedjax_peft.numerics.hyperparameters import maybe_nonzero
from fedjax_peft.privacy.accounting import Accountant, Neighbours
from fedjax_peft.privacy.guarantees import client_guarantee
from fedjax_peft.privacy.mechanism import gaussian, private, protected, summing
from fedjax_peft.privacy.statements import composition_in_words

TRUSTED = "The server is trusted: it sees the uploads before the noise."
"""A sentence of the statements of central mechanisms."""


@part
def central(
    clip: Positive,
    noise_multiplier: NotNegative,
    *,
    delta: Probability = 1e-5,
    accountant: Accountant = "rdp",
    neighbours: Neighbours | None = None,
) -> Privacy:
    """Client-level central differential privacy, for every aggregator that sums.

    The uploads of all clients have the same weight, whatever the algorithm's ``weights``. Rows gain
    ``privacy_noise_std``, the standard deviation of the noise on the mean. They also gain two
    diagnostics of the simulation that a real server would not see: ``privacy_median_norm``, the
    median norm of uploads before clipping, and ``privacy_clip_share``, the share of clients that
    were clipped. An aggregator that truncates products adds ``snr``, see
    :func:`fedjax_peft.privacy.mechanism.signal_to_noise`.

    With ``sampling="poisson"`` the guarantee uses the amplification by sampling; with any other
    sampling see :func:`fedjax_peft.privacy.guarantees.client_event`.

    Args:
      clip: C, the largest norm of what a client sends, in the aggregator's space.
      noise_multiplier: z; the noise on the sum has the standard deviation z C. 0 only clips.
      delta: δ of the guarantee.
      accountant: ``rdp``, or ``pld``, which is slower and nearly exact.
      neighbours: the federations that the guarantee compares; by default those that suit the
        sampling (:func:`fedjax_peft.privacy.accounting.client_neighbours`).

    Raises:
      InputError: on use, an algorithm whose server passes uploads on, needs the clients' training
        metrics, or does not sum uploads.
    """

    def protect(algorithm: Algorithm, federation: Federation) -> Algorithm:
        noise = gaussian(clip * noise_multiplier) if maybe_nonzero(noise_multiplier) else None
        return protected(algorithm, private(summing(algorithm), clip, noise))

    def guarantee(federation: Federation, rounds: int) -> Guarantee:
        numbers = (noise_multiplier, delta, federation, rounds)
        return client_guarantee(*numbers, accountant=accountant, neighbours=neighbours)

    def statement(federation: Federation) -> str:
        return (
            "Client-level differential privacy of everything that the server sends and of the"
            f" final model. {composition_in_words(federation, neighbours)} {TRUSTED}"
        )

    return Privacy("central", "client", protect, guarantee, statement)
