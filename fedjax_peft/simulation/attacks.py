"""Checks of an attack against what it meets in a run: the model, and a client that is trusted."""

from typing import Any

import numpy as np

from fedjax_peft.contracts import Algorithm, Attack
from fedjax_peft.data.dataset import Dataset
from fedjax_peft.models.base import Model
from fedjax_peft.support.errors import InputError


def check_trigger(model: Model, attack: Any, data: Dataset) -> None:
    """Raises InputError for an attack whose trigger has a token that the model does not have."""
    size, trigger = model.config.get("vocab_size"), getattr(attack, "triggered", None)
    if trigger is None or "input_ids" not in data.columns or not isinstance(size, int):
        return
    some = data.take(np.linspace(0, len(data) - 1, 64).astype(int))  # of several classes
    token = int(np.max(trigger(some).columns["input_ids"], initial=0))
    if token >= size:
        raise InputError(
            f"The trigger of the attack {attack.name!r} has the token {token}, but the model's"
            f" vocabulary has {size} tokens: choose one from 0 to {size - 1}."
        )


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
