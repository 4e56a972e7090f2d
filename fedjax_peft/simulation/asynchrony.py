"""Asynchronous runs: their checks, their timelines by the time model, and their rows."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from fedjax_peft.asynchronous.queue import Queue, Settings
from fedjax_peft.contracts import (
    Aggregation,
    Algorithm,
    Asynchronous,
    Availability,
    Params,
    Timeline,
    Transform,
)
from fedjax_peft.data.dataset import Clients
from fedjax_peft.engine.schedule import Schedule
from fedjax_peft.simulation.cost import Costs
from fedjax_peft.simulation.rows import Row
from fedjax_peft.simulation.time_model import TimeModel
from fedjax_peft.support.display import show
from fedjax_peft.support.errors import InputError


def check_asynchronous(
    asynchronous: Asynchronous, clients: Clients, time_model: TimeModel, others: Mapping[str, Any]
) -> None:
    """Raises InputError for arguments that do not fit an asynchronous server.

    Args:
      others: arguments of ``simulate`` by name, which must be at their defaults.
    """
    if not isinstance(asynchronous, Asynchronous):
        raise InputError(
            f"asynchronous = {show(asynchronous)} is not an fp.contracts.Asynchronous. Make one,"
            " such as fp.asynchronous.fedbuff(buffer_size=10)."
        )
    name = asynchronous.name
    for argument, reason in _REFUSED.items():
        if others.get(argument) not in (None, "uniform", "all"):
            raise InputError(f"{argument} does not fit the asynchronous server {name!r}: {reason}")
    if time_model.seconds_per_step == "measured":
        raise InputError(
            f"The asynchronous server {name!r} needs a time model that tells beforehand when"
            " clients finish: give seconds_per_step as a number, not 'measured'."
        )
    if time_model.topology != "parallel":
        raise InputError(
            f"The asynchronous server {name!r} needs clients with links of their own:"
            f" topology = 'parallel', not {time_model.topology!r}."
        )
    working = int(np.count_nonzero(clients.sizes))
    for argument in ("buffer_size", "concurrency"):
        value = getattr(asynchronous, argument)
        if value is not None and value > working:
            raise InputError(
                f"{argument} = {value} of {name} is more than the {working} clients that have"
                " examples: a client works on one job at a time, and is in an aggregation once."
            )


_REFUSED = {
    "sampling": "it draws a client uniformly whenever a place is free. Use sampling = 'uniform'.",
    "privacy": (
        "the accountant counts rounds of randomly sampled clients, and an aggregation has those"
        " that finished. Leave out privacy, or asynchronous."
    ),
    "deadline": "no round waits for late clients. Use semi_synchronous, or leave out the deadline.",
}
"""Arguments of ``simulate`` for a synchronous server -> why they do not fit this one."""


def check_transform_state(
    transform: Transform | None, algorithm: Algorithm, shared: Params
) -> None:
    """Raises InputError for an upload transform whose state clients fetch with the broadcast."""
    if transform is None:
        return

    def received(shared: Params) -> Any:
        template = algorithm.server.unchanged(algorithm.server.init(shared))
        return transform.broadcast(transform.init(algorithm.change_part(template)))

    if jax.tree.leaves(jax.eval_shape(received, shared)):
        raise InputError(
            f"The upload transform {transform.name!r} has a state on the server, which all clients"
            " of an aggregation must have fetched in the same version. Use a transform without"
            " such a state, such as a sparsifier or a quantiser, or leave out asynchronous."
        )


def check_availability(
    availability: Availability | None, time_model: TimeModel, privacy: Any
) -> None:
    """Raises InputError for an availability that does not fit the time model or the privacy."""
    if availability is None:
        return
    if not isinstance(availability, Availability):
        raise InputError(
            f"availability = {show(availability)} is not an fp.contracts.Availability. Make one,"
            " such as fp.availability.diurnal()."
        )
    if privacy is not None:
        raise InputError(
            "The accountant of privacy counts clients that are drawn from all clients, and"
            " availability decides who can be drawn. Leave out one of them."
        )
    if time_model.seconds_per_step == "measured":
        raise InputError(
            "Availability needs a time model that tells beforehand when clients finish: give"
            " seconds_per_step as a number, not 'measured'."
        )


def asynchronous_schedule(
    schedule: Schedule,
    asynchronous: Asynchronous,
    given: int | None,
    costs: Callable[[int], Costs],
    failure: Callable[[int, int], float],
    availability: Availability | None,
) -> Schedule:
    """Returns the schedule whose cohorts are the arrivals at an asynchronous server.

    Args:
      schedule: the synchronous schedule, which gives steps and examples of a client in a round.
      given: ``clients_per_round``, the default of the concurrency.
      costs: seed -> the costs, which give the seconds of a job.
      failure: (seed, client) -> the probability that a job fails.
      availability: when clients are available; None: always.

    Raises:
      InputError: two different numbers are given for the concurrency.
    """
    clients = np.flatnonzero(schedule.sizes)
    wanted = asynchronous.concurrency
    if wanted is not None and given is not None and wanted != given:
        raise InputError(
            f"clients_per_round = {given} and concurrency = {wanted} of {asynchronous.name} are two"
            " numbers for the same thing, the clients that work at the same time: give one."
        )
    concurrency = min(wanted or given or len(clients), len(clients))
    made: dict[int, Timeline] = {}

    def timeline(seed: int) -> Timeline:
        if seed not in made:
            own = costs(seed)
            made[seed] = Queue(
                Settings(
                    seed=seed,
                    clients=clients,
                    concurrency=concurrency,
                    buffer_size=asynchronous.buffer_size,
                    period=asynchronous.period,
                    max_staleness=asynchronous.max_staleness,
                    steps=schedule._replace(seed=seed).steps,
                    seconds=own.job_seconds,
                    failure=lambda c: failure(seed, c),
                    availability=availability,
                )
            )
        return made[seed]

    per_round = asynchronous.buffer_size or concurrency
    return schedule._replace(per_round=per_round, timelines=timeline)


def failure_probability(rate: float, exponent: float, slowness: float) -> float:
    """Returns the probability that a client fails, by its slowness.

    The odds of failing are those of ``rate``, times ``slowness ** exponent``. So the median client,
    whose slowness is 1, fails with the probability ``rate``. The formula is our choice: it is
    monotone in the slowness and always a probability.
    """
    odds = rate / (1 - rate) * slowness**exponent
    return odds / (1 + odds)


def aggregation_row(aggregation: Aggregation, before: float, costs: Costs) -> Row:
    """Returns the fields of a row about the jobs of an aggregation, their bytes and seconds.

    Args:
      before: the simulated seconds of the aggregation before it.
    """
    staleness = [aggregation.version - job.version for job in aggregation.jobs]
    arrived = (*aggregation.jobs, *aggregation.discarded)
    row: Row = {"staleness_mean": float(np.mean(staleness))} if staleness else {}
    row |= {"staleness_max": max(staleness)} if staleness else {}
    fetched = (costs.fetch(j.client, first=j.first, version=j.version) for j in aggregation.started)
    return row | {
        "failed": sorted({job.client for job in aggregation.lost}),
        "discarded": sorted({job.client for job in aggregation.discarded}),
        "in_flight": aggregation.in_flight,
        "versions": aggregation.versions,
        "bytes_up": sum(costs.up(job.client) for job in arrived),
        "bytes_down": sum(fetched),
        "simulated_seconds": aggregation.time - before,
    }
