"""Which features of a run an algorithm cannot be combined with, and why."""

from collections.abc import Mapping

from fedjax_peft.contracts.algorithm import Algorithm
from fedjax_peft.contracts.feature import Feature
from fedjax_peft.support.errors import InputError


def check_compatible(algorithm: Algorithm, features: Mapping[Feature, str]) -> None:
    """Raises InputError for a feature that an algorithm cannot be combined with.

    Args:
      algorithm: the algorithm of the run.
      features: feature -> what the run has of it, for the message, such as ``"the upload transform
        'sign'"``.
    """
    reasons = refusals(algorithm)
    for feature, what in features.items():
        if feature in reasons:
            name = algorithm.name
            raise InputError(f"{name!r} cannot be combined with {what}. {reasons[feature]}")


def refusals(algorithm: Algorithm) -> dict[Feature, str]:
    """Returns the features that an algorithm cannot be combined with, and why.

    The reasons of ``Algorithm.incompatible`` come before those that follow from its parts.
    """
    found = dict(algorithm.incompatible)
    for feature, reason in _implied(algorithm):
        found.setdefault(feature, reason)
    return found


def _implied(algorithm: Algorithm) -> list[tuple[Feature, str]]:
    """Returns the reasons that follow from the parts of an algorithm, the first ones first."""
    aggregator, server, traffic = algorithm.aggregator, algorithm.server, algorithm.traffic
    reasons: list[tuple[bool, Feature, str]] = [
        (
            not algorithm.roles.shared,
            Feature.ATTACKS,
            "Its clients send nothing. Attack an algorithm that shares leaves, such as 'fedavg'.",
        ),
        (
            traffic.relayed_leaves is not None,
            Feature.CLIENT_PRIVACY,
            "Its server passes the factors of every client on to all clients, where they are seen"
            " without noise: noise on a sum protects nobody. Use 'fedavg' with the aggregator"
            " 'fra', which averages the same products and sends factors of their sum.",
        ),
        (
            aggregator.needs_all_uploads,
            Feature.CLIENT_PRIVACY,
            f"Its aggregator {aggregator.name!r} looks at the uploads one by one, and noise is"
            " added to a sum. Use an aggregator that sums: 'mean', 'fra' or 'flexlora'.",
        ),
        (
            traffic.relayed_leaves is not None,
            Feature.ASYNCHRONY,
            f"Its server passes on every upload to all clients, round by round. {_WAITS}",
        ),
        (
            server.frozen_delta is not None,
            Feature.ASYNCHRONY,
            "Its server adds what it learned to the frozen weights, and clients that train side by"
            f" side share these weights. {_WAITS}",
        ),
        (
            aggregator.refactors,
            Feature.ASYNCHRONY,
            f"Its aggregator {aggregator.name!r} factors LoRA's products anew in every round, so"
            f" that changes from an older version belong to other factors. {_WAITS}",
        ),
        (
            aggregator.unmasked_policy == "refused",
            Feature.CLIENT_RANKS,
            f"Its aggregator {aggregator.name!r} cannot combine clients of different LoRA ranks:"
            " leave client_ranks out, or use one that can, such as flora, flexlora or hetlora.",
        ),
        (
            not aggregator.linear,
            Feature.SERVER_TRANSFORMS,
            f"The aggregator {aggregator.name!r} does not form that mean. Use an aggregator that is"
            " linear in the uploads, such as fp.aggregators.mean(), with an algorithm that takes"
            " one, such as 'fedavg'.",
        ),
        (
            server.frozen_delta is not None or traffic.relayed_leaves is not None,
            Feature.DOWNLINK,
            f"Clients also need what earlier rounds added to the frozen weights. {_UPLOADS_ONLY}",
        ),
        (
            bool(server.template or server.params or traffic.change_field),
            Feature.DOWNLINK,
            "Its broadcast holds more than the shared leaves, or uploads are not leaves of the same"
            f" form. {_UPLOADS_ONLY}",
        ),
    ]
    return [(feature, reason) for holds, feature, reason in reasons if holds]


_WAITS = (
    "Use an algorithm such as 'fedavg', 'fedprox', 'fedadam' or 'ditto', or leave out asynchronous."
)
_UPLOADS_ONLY = (
    "Compress uploads only, or use an algorithm that broadcasts its shared leaves, such as"
    " 'fedavg'."
)
