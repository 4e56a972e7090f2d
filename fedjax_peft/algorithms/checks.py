"""Checks of an algorithm's options and of the model; a failed check raises an InputError."""

import functools
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar, cast

import jax.numpy as jnp
from jax import Array

from fedjax_peft import contracts as c
from fedjax_peft.algorithms.keeping import keeping, marked
from fedjax_peft.contracts.part import part
from fedjax_peft.numerics.lowrank import pairs
from fedjax_peft.numerics.optimizers import Kept
from fedjax_peft.numerics.schedules import Scheduled, scaled
from fedjax_peft.support.errors import InputError

SHARED_OPTIONS = {
    "optimizer": "the clients' optimizer.",
    "aggregator": "how uploads combine; by default their mean.",
    "space": "whether the server steps on LoRA's ``factors`` or on their ``product``. With"
    " ``product`` the aggregator says how products are factored anew; by default as FRA does.",
    "head": "``shared``: the classification head is trained and averaged; ``private``: it is"
    " trained and never sent; ``frozen``: it is not trained.",
    "weights": "how clients are weighed in the aggregate: by ``size``, the number of their"
    " examples, or all the same (``uniform``).",
    "server_schedule": "factor of the server's learning rate by round, such as"
    " ``fp.schedules.cosine(rounds=100)``; by default 1 in every round.",
}
"""Option that many algorithms have -> its description. :func:`checked` adds it to the docstring of
every algorithm that has the option and does not describe it itself."""

SHARED_KINDS = {
    **{"optimizer": c.Optimizer, "server": c.Optimizer, "aggregator": c.Aggregator | None},
    "server_schedule": c.RateSchedule | None,
}
"""Argument of many algorithms -> its type, where a user's function has no annotation."""

Factory = TypeVar("Factory", bound=Callable[..., Any])


CLIENT_RATES = ("learning_rate", "alpha_rate")
"""Options that are learning rates of the clients, next to the optimizer's: they follow its
schedule."""


def checked(factory: Factory) -> Factory:
    """Decorates a function that returns an algorithm. Four things follow:

    * The algorithm knows its call, and its arguments are checked
      (:func:`fedjax_peft.contracts.part.part`); :data:`SHARED_KINDS` are known without annotation.
    * ``optimizer`` can have a schedule over rounds
      (:func:`fedjax_peft.numerics.schedules.scheduled`). The function is then called again in
      every round that is traced, with the rates of the round.
    * ``optimizer`` can be one whose states clients keep
      (:func:`fedjax_peft.numerics.optimizers.kept`, :mod:`fedjax_peft.algorithms.keeping`).
    * The descriptions of the function's :data:`SHARED_OPTIONS` are added to its docstring.
    """
    signature = inspect.signature(factory)

    @functools.wraps(factory)
    def make(*arguments: Any, **options: Any) -> Any:
        call = signature.bind(*arguments, **options)
        call.apply_defaults()
        return _made(factory, call)

    make.__annotations__ = {**SHARED_KINDS, **make.__annotations__}
    make.__doc__ = _documented(factory.__doc__ or "", signature.parameters)
    return part(cast(Factory, make))


def _made(factory: Callable[..., Any], call: inspect.BoundArguments) -> Any:
    """Returns the algorithm of a call, with its schedule and with kept optimizer states."""
    given = call.arguments
    plain, schedule = given.get("optimizer"), None
    if isinstance(plain, Scheduled):
        plain, schedule = plain.optimizer, plain.schedule
    if keep := isinstance(plain, Kept):
        plain = plain.optimizer

    def at(factor: Array | None) -> Any:
        """Returns the algorithm with the clients' rates multiplied by ``factor``."""
        now = plain if factor is None else scaled(plain, factor)
        changed = {"optimizer": marked(now) if keep else now}
        if factor is not None:
            changed |= {name: given[name] * factor for name in CLIENT_RATES if name in given}
        arguments = {n: changed.get(n, value) for n, value in given.items()}
        again = inspect.BoundArguments(call.signature, cast(Any, arguments))
        algorithm = factory(*again.args, **again.kwargs)
        return keeping(algorithm) if keep else algorithm

    algorithm = at(None)
    return algorithm if schedule is None else _scheduled(algorithm, schedule, at)


def _scheduled(
    algorithm: c.Algorithm, schedule: c.RateSchedule, at: Callable[[Array], c.Algorithm]
) -> c.Algorithm:
    """Returns the algorithm whose clients are those of ``at(schedule(round))``."""

    def client(context: c.ClientContext) -> c.ClientUpdate:
        return at(schedule(context.round_index)).client(context)

    return with_factor(algorithm._replace(client=client), "learning_rate_factor", schedule)


def with_factor(algorithm: c.Algorithm, name: str, schedule: c.RateSchedule | None) -> c.Algorithm:
    """Returns the algorithm that also reports a schedule's factor in the row of each round.

    Args:
      schedule: None reports nothing.
    """
    if schedule is None:
        return algorithm

    def round_metrics(round_index: Array) -> dict[str, Array]:
        factor = jnp.asarray(schedule(round_index), jnp.float32)
        return {**algorithm.round_metrics(round_index), name: factor}

    return algorithm._replace(round_metrics=round_metrics)


def _documented(document: str, options: Iterable[str]) -> str:
    """Returns a docstring whose ``Args`` describe the shared options among ``options`` too."""
    text, title, errors = inspect.cleandoc(document).partition("\n\nRaises:\n")
    text = text if "\nArgs:\n" in text else f"{text}\n\nArgs:"
    shared = [name for name in SHARED_OPTIONS if name in options]
    added = [f"\n  {n}: {SHARED_OPTIONS[n]}" for n in shared if f"\n  {n}: " not in text]
    return "".join([text, *added, title, errors])


def model_with(message: str, *rules: str) -> Callable[[Mapping[str, str], int], None]:
    """Returns an ``Algorithm.check`` for a model that has a leaf for each rule."""

    def check(kinds: Mapping[str, str], clients: int) -> None:
        if not all(any(re.search(rule, name) for name in kinds) for rule in rules):
            raise InputError(message)

    return check


def federation_of(clients: int, algorithm: str) -> Callable[[Mapping[str, str], int], None]:
    """Returns the check that a federation has as many clients as the algorithm was told."""

    def check(kinds: Mapping[str, str], count: int) -> None:
        if count != clients:
            raise InputError(
                f"{algorithm}(clients={clients}) keeps something of each client of the federation,"
                f" which has {count}: set clients = {count}."
            )

    return check


def dual_adapters(
    algorithm: str, *, alone: bool = False
) -> Callable[[Mapping[str, str], int], None]:
    """Returns the check that a model has a global and a private adapter at its sites.

    Args:
      alone: the encoder also runs with one of them alone, which the pair of ``dual_lora`` cannot
        (:mod:`fedjax_peft.contracts.dual_modes`).
    """
    what, leaf = ("bottleneck adapter", r"up\.") if alone else ("adapter", "")
    return model_with(
        f"{algorithm} needs a model with a global and a private {what} at every site: attach"
        " peft.dual().",
        *(rf"\.global_adapter\.{leaf}", rf"\.private_adapter\.{leaf}"),
    )


def lora_model(algorithm: str, *, alone: bool = False) -> Callable[[Mapping[str, str], int], None]:
    """Returns an ``Algorithm.check`` for a model with LoRA.

    Args:
      alone: the method must train LoRA's factors only: the adapted weight is ``W + s·AB``.
    """

    def check(kinds: Mapping[str, str], clients: int) -> None:
        factors = {name for pair in pairs(kinds).values() for name in pair}
        if not factors:
            raise InputError(
                f"{algorithm!r} is about LoRA's factors A and B, and this model has none: attach"
                " LoRA, or use 'fedavg'."
            )
        others = sorted(n for n, kind in kinds.items() if kind == "adapter" and n not in factors)
        if alone and others:
            raise InputError(
                f"{algorithm!r} folds LoRA's products into the frozen weights, which is only right"
                f" where they are all that is added, and this model also trains {others[0]!r}:"
                " attach plain LoRA, or use 'fedavg'."
            )

    return check
