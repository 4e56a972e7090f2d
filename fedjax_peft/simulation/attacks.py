"""Checks of an attack against what it meets in a run: a client that is trusted."""

from fedjax_peft.contracts import Algorithm, Attack
from fedjax_peft.support.errors import InputError


def check_honest(algorithm: Algorithm, attack: Attack, clients: int) -> None:
    """Raises InputError for an aggregator that trusts a client that an attack makes hostile."""
    trusted = algorithm.aggregator.trusted
    if trusted is None or trusted not in (hostile := attack.hostile(clients)):
        return
    advice = "Make fewer clients hostile"
    if honest := sorted({*range(clients)} - {*hostile}):
        advice = f"Trust an honest one, such as {honest[0]}, or give the attack another seed"
    raise InputError(
        f"The aggregator {algorithm.aggregator.name!r} trusts client {trusted}, which is hostile"
        f" under the attack {attack.name!r}: nothing would defend the model. {advice}."
    )
