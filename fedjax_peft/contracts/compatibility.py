"""Which features of a run an algorithm cannot be combined with, and why."""

from collections.abc import Iterator, Mapping

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


def _implied(algorithm: Algorithm) -> Iterator[tuple[Feature, str]]:
    """Yields the reasons that follow from the parts of an algorithm, the first ones first."""
    aggregator, server, traffic = algorithm.aggregator, algorithm.server, algorithm.traffic
    relays, folds = traffic.relayed_leaves is not None, server.frozen_delta is not None
    its = f"Its aggregator {aggregator.name!r}"
    if not algorithm.roles.shared:
        yield Feature.ATTACKS, _SENDS_NOTHING
    if relays:
        yield Feature.CLIENT_PRIVACY, _RELAYS
        yield Feature.ASYNCHRONY, f"{_PASSES} {_WAITS}"
    if aggregator.needs_all_uploads:
        yield Feature.CLIENT_PRIVACY, f"{its} {_LOOKS}"
    if folds:
        yield Feature.ASYNCHRONY, f"{_FOLDS} {_WAITS}"
    if aggregator.refactors:
        yield Feature.ASYNCHRONY, f"{its} {_REFACTORS} {_AVERAGES}"
    if aggregator.unmasked_policy == "refused":
        yield Feature.CLIENT_RANKS, f"{its} {_ONE_RANK}"
    if not aggregator.linear:
        yield Feature.SERVER_TRANSFORMS, f"The aggregator {aggregator.name!r} {_NO_MEAN}"
    if folds or relays:
        yield Feature.DOWNLINK, f"{_OLD_ROUNDS} {_UPLOADS_ONLY}"
    if server.template or server.params or traffic.change_field:
        yield Feature.DOWNLINK, f"{_MORE} {_UPLOADS_ONLY}"


_SENDS_NOTHING = (
    "Its clients send nothing. Attack an algorithm that shares leaves, such as 'fedavg'."
)
_RELAYS = (
    "Its server passes the factors of every client on to all clients, where they are seen without"
    " noise: noise on a sum protects nobody. Use 'fedavg' with the aggregator 'fra', which averages"
    " the same products and sends factors of their sum."
)
_PASSES = "Its server passes on every upload to all clients, round by round."
_LOOKS = (
    "looks at the uploads one by one, and noise is added to a sum. Use an aggregator that sums:"
    " 'mean', 'fra' or 'flexlora'."
)
_FOLDS = (
    "Its server adds what it learned to the frozen weights, and clients that train side by side"
    " share these weights."
)
_REFACTORS = (
    "factors LoRA's products anew in every round, so that changes from an older version belong to"
    " other factors."
)
_ONE_RANK = (
    "cannot combine clients of different LoRA ranks: leave client_ranks out, or use one that can,"
    " such as flora, flexlora or hetlora."
)
_NO_MEAN = (
    "does not form that mean. Use an aggregator that is linear in the uploads, such as"
    " fp.aggregators.mean(), with an algorithm that takes one, such as 'fedavg'."
)
_OLD_ROUNDS = "Clients also need what earlier rounds added to the frozen weights."
_MORE = (
    "Its broadcast holds more than the shared leaves, or uploads are not leaves of the same form."
)


_WAITS = (
    "Use an algorithm such as 'fedavg', 'fedprox', 'fedadam' or 'ditto', or leave out asynchronous."
)
_AVERAGES = (
    "Average A and B, as 'fedavg' does with the aggregator 'mean' or with a robust one in space ="
    " 'factors', or leave out asynchronous."
)
_UPLOADS_ONLY = (
    "Compress uploads only, or use an algorithm that broadcasts its shared leaves, such as"
    " 'fedavg'."
)
