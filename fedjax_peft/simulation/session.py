"""``session``: an algorithm over a federation, for your own loop over rounds."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import numpy as np

from fedjax_peft import tasks
from fedjax_peft.contracts import (
    Algorithm,
    Asynchronous,
    Attack,
    Federation,
    Privacy,
    Stages,
    Task,
    Transform,
    Wrapped,
)
from fedjax_peft.data.dataset import Clients, Dataset
from fedjax_peft.engine.computation import Computation
from fedjax_peft.engine.layout import layout_over
from fedjax_peft.engine.lengths import Lengths
from fedjax_peft.engine.plan import no_larger
from fedjax_peft.engine.schedule import BatchSampling, Range, Sampling, Schedule
from fedjax_peft.engine.session import Session
from fedjax_peft.engine.setup import Setup
from fedjax_peft.measures.diagnosis import diagnosis, probe
from fedjax_peft.models.base import Model
from fedjax_peft.numerics import tree
from fedjax_peft.numerics.hyperparameters import Maker, Values, parametrised
from fedjax_peft.numerics.roles import assign_roles
from fedjax_peft.peft.ranks import rank_masks
from fedjax_peft.simulation.asynchrony import (
    asynchronous_schedule,
    check_asynchronous,
    check_availability,
    check_transform_state,
    failure_probability,
)
from fedjax_peft.simulation.checks import (
    check_batch_sampling,
    check_counts,
    check_data,
    check_memory,
    check_method,
    check_objects,
    check_transforms,
    check_work,
    clients_a_round,
    joined_transform,
)
from fedjax_peft.simulation.cost import Costs
from fedjax_peft.simulation.description import describe, digest
from fedjax_peft.simulation.ledger import Ledger
from fedjax_peft.simulation.records import Diagnostic, Placement, System, moved
from fedjax_peft.simulation.time_model import preload_bytes
from fedjax_peft.support.libraries import limit_blas_threads

__all__ = ["Transforms", "federation_of", "poisson_width", "schedule_of", "session", "wrapped"]

Transforms: TypeAlias = Transform | Sequence[Transform] | None
"""One upload transform, or several in the order in which a client applies them."""


@moved
def session(
    model: Model,
    algorithm: Algorithm | Callable[[Values], Algorithm],
    clients: Clients,
    *,
    rounds: int = 100,
    clients_per_round: int | None = None,
    sampling: Sampling = "uniform",
    batch_size: int = 16,
    batch_sampling: BatchSampling = "shuffled",
    epochs: Range = 1,
    local_steps: Range | None = None,
    task: Task | None = None,
    transforms: Transforms | Callable[[Values], Transforms] = None,
    privacy: Privacy | Callable[[Values], Privacy] | None = None,
    attack: Attack | Callable[[Values], Attack] | None = None,
    asynchronous: Asynchronous | None = None,
    values: Values | None = None,
    system: System = System(),
    placement: Placement = Placement(),
    diagnostics: Sequence[Diagnostic] = (),
) -> Session:
    """Returns a :class:`fedjax_peft.engine.session.Session`, which runs rounds one by one.

    ``simulate`` is a loop over such a session, with evaluation, records and checkpoints. A session
    is for your own loop::

        session = fp.session(model, algorithm, clients, clients_per_round=10)
        state = session.init(seed=0)
        for _ in range(100):
            state, info = session.step(state)
            if session.evaluate(state, test)["accuracy"] > 0.8:
                break

    The round program is compiled when the first round runs. With the same arguments and seed, the
    rounds give exactly the same numbers as those of ``simulate``, whose arguments these are.

    Args:
      model: as for ``simulate``, like the arguments that are not named below.
      rounds: the compiled program has room for the largest cohort of this number of rounds. More
        rounds can be run; a round that needs more room is compiled again.
      asynchronous: a round is then an aggregation.
      values: ``Session.init(seed, values)`` replaces some of them, and nothing is compiled again.
      system: of it, the deadline and what ``nonfinite`` says are for ``simulate`` alone. The time
        model matters for ``asynchronous`` and ``failure_exponent`` only. With an availability and
        without ``asynchronous``, give the clients that are available to
        :meth:`fedjax_peft.engine.session.Session.plan` (``among``).
      diagnostics: as ``Evaluation.diagnostics``; their values are in ``RoundInfo.aggregation``.

    Raises:
      InputError: arguments contradict each other or the data.
    """
    plain, make_plain = parametrised(algorithm, values)
    uploads, make_uploads = parametrised(transforms, values)
    check_objects(model, plain, clients, task)
    counts = {"clients_per_round": 1 if clients_per_round is None else clients_per_round}
    check_counts({**counts, "batch_size": batch_size, "rounds": rounds}, {})
    check_data(model, clients, task)
    schedule = schedule_of(
        clients,
        clients_per_round=clients_per_round,
        sampling=sampling,
        batch_size=batch_size,
        batch_sampling=batch_sampling,
        epochs=epochs,
        local_steps=local_steps,
        system=system,
        length_buckets=placement.length_buckets,
    )
    time_model, availability, client_ranks = system.time, system.availability, system.client_ranks
    check_availability(availability, time_model, privacy)
    slowness = functools.cache(functools.partial(time_model.slowness, len(clients)))

    def failure(seed: int, client: int) -> float:
        odds = (system.failure_rate, system.failure_exponent)
        return failure_probability(*odds, slowness(seed)[client])

    def costs(seed: int) -> Costs:
        server = jax.eval_shape(chosen.server.init, shared)
        ledger = Ledger(model, chosen, server, len(clients), client_ranks, transform)
        return Costs(ledger, time_model, slowness(seed), None, preload_bytes(time_model, model))

    if system.failure_exponent:
        schedule = schedule._replace(failure=failure)
    schedule = schedule._replace(intermittent=availability is not None)
    if asynchronous is not None:
        refused = {"sampling": sampling, "privacy": privacy}
        check_asynchronous(asynchronous, clients, time_model, refused)
        parts = (clients_per_round, costs, failure, availability)
        schedule = asynchronous_schedule(schedule, asynchronous, *parts)
    federation = federation_of(schedule, clients.data, plain)
    wrappers = [parametrised(wrapper, values) for wrapper in (attack, privacy)]
    wrappers.append((asynchronous, None))
    chosen, stages = wrapped(plain, [made for made, _ in wrappers], federation)
    make: _Wrapped | None = None
    if make_plain is not None or any(made is not None for made, _ in wrappers):
        # A wrapped algorithm is a new object; functions of equal parts are equal, and sessions with
        # equal ones share their programs.
        functions = tuple(function or _Constant(made) for made, function in wrappers)
        make = _Wrapped(make_plain or _Constant(plain), functions, federation)
    # Clients that add noise themselves are not left out for reasons that lie in their data.
    schedule = schedule._replace(all_send=chosen.aggregator.randomise is not None)
    check_method(model, chosen, len(clients), client_ranks, diagnostics)
    transform = check_transforms(uploads, chosen)
    names = assign_roles(model.kinds, chosen.roles)
    shared, private = (tree.select(model.trainable, names[r]) for r in ("shared", "private"))
    if asynchronous is not None:
        check_transform_state(transform, chosen, shared)
    check_memory(
        model,
        clients.data,
        schedule.all_most_steps,
        schedule.per_round,
        batch_size=schedule.room,
        local_steps=schedule.local_steps,
        epochs=schedule.epochs,
    )
    masks: Any = None if client_ranks is None else rank_masks(model, client_ranks, len(clients))
    setup = Setup(
        chosen,
        model.apply,
        task or tasks.for_data(clients.data),
        model.compute_frozen(),
        tree.select(model.trainable, names["fixed"]),
        len(clients),
        layout_over(placement.devices, placement.model_parallel, placement.model_sharding),
        splits=model.splits,
        rank_mask=masks,
        diagnosis=diagnosis(diagnostics),
        probe=probe(diagnostics),
        total_clients=len(clients) if schedule.all_send else int(np.count_nonzero(clients.sizes)),
        dtype=model.dtype,
        sampling_probability=federation.sampling_probability,
        transform=transform,
        stages=stages,
        maker=_maker(Wrapped(chosen, stages), make, uploads, make_uploads),
    )
    salt = None
    if privacy is not None:
        given = {"algorithm": algorithm, "privacy": privacy, "attack": attack}
        facts: dict[str, Any] = {
            "federation": federation,
            "work": (schedule.epochs, schedule.local_steps, system.stragglers),
            "failures": (system.failure_rate, system.failure_exponent),
            "clients": _digest_of(clients),
            "client_ranks": client_ranks,
            "model": _facts_of(model),
            "task": getattr(setup.task, "name", None),
        }

        def salt(chosen: Values) -> np.ndarray:
            own = None if values is None else chosen
            made = {name: parametrised(one, own)[0] for name, one in given.items()}
            made["transforms"] = joined_transform(parametrised(transforms, own)[0])
            return _salt({**facts, **made})

    columns = clients.data.columns
    place = (placement.engine, placement.client_state, placement.examples)
    computation = Computation(placement.lanes, rounds, *place)
    leaves = (shared, private)
    return Session(setup, leaves, schedule, columns, computation, values=values, salt=salt)


def _salt(settings: Any) -> np.ndarray:
    """Returns two numbers that differ for different settings, uint32 ``[2]``."""
    return np.frombuffer(bytes.fromhex(digest(describe(settings))), "<u4")


def _digest_of(clients: Clients) -> str:
    """Returns a digest of which examples each client has."""
    numbers = (clients.sizes, np.concatenate(clients.indices))
    return digest([clients.data.name, *(digest(np.asarray(x, np.int64)) for x in numbers)])


def _facts_of(model: Model) -> tuple:
    """Returns how a model was made, and the shapes of its trained leaves."""
    computing = ("attention", "remat", "scan_layers")  # these change no result
    recipe = {name: x for name, x in model.recipe.items() if name not in computing}
    return model.name, recipe, model.method, model.kinds, model.trainable


OVERFLOW = 1e-12
"""The probability at most with which a Poisson-sampled batch does not fit, and is cut."""


def schedule_of(
    clients: Clients,
    *,
    clients_per_round: int | None,
    sampling: Sampling,
    batch_size: int,
    batch_sampling: BatchSampling,
    epochs: Range,
    local_steps: Range | None,
    system: System,
    length_buckets: int = 0,
) -> Schedule:
    """Returns the schedule of the seed 0; the arguments are those of :func:`session`.

    Raises:
      InputError: an argument is wrong.
    """
    check_counts({"batch_size": batch_size}, {})
    epochs, local_steps = check_work(epochs, local_steps, system.stragglers)
    per_round = clients_a_round(clients, clients_per_round, sampling)
    work = (clients.indices, per_round, batch_size, epochs, local_steps, 0)
    tokens = Lengths.of(clients.data.columns, length_buckets)
    schedule = Schedule(
        *(*work, sampling, system.failure_rate),
        tokens=tokens,
        stragglers=system.stragglers,
        counted=clients.sizes.astype(np.int64),
        given_weights=clients.weights,
    )
    if check_batch_sampling(batch_sampling) == "poisson":
        width = poisson_width(schedule.sizes, batch_size)
        return schedule._replace(batch_sampling="poisson", width=width)
    return schedule._replace(width=no_larger(batch_size, int(schedule.sizes.max(initial=0))))


def poisson_width(sizes: Sequence[int] | np.ndarray, batch_size: int) -> int:
    """Returns the examples that a Poisson-sampled batch has room for.

    A batch is larger with a probability of at most :data:`OVERFLOW`.

    Args:
      sizes: the numbers of examples of all clients.
      batch_size: examples in a batch on average.
    """
    limit_blas_threads()
    from scipy.stats import binom  # an import that takes long

    counts = np.unique(sizes)
    counts = counts[counts > 0]
    most = binom.isf(OVERFLOW, counts, np.minimum(batch_size / counts, 1.0))
    return int(np.max(np.minimum(most, counts), initial=1))


def federation_of(schedule: Schedule, data: Dataset, algorithm: Algorithm) -> Federation:
    """Returns the facts about a run that privacy mechanisms and attacks depend on."""
    sizes, steps, size = schedule.sizes, schedule.all_most_steps, schedule.batch_size
    # Clients of one size make the same number of steps, and there are few sizes.
    counts, first = np.unique(sizes, return_index=True)
    workloads = [(n, s) for n, s in zip(counts.tolist(), steps[first].tolist(), strict=True) if s]
    poisson = schedule.batch_sampling == "poisson"
    return Federation(
        clients=len(sizes),
        per_round=schedule.per_round,
        sampling=schedule.sampling,
        batch_size=size,
        batch_sampling=schedule.batch_sampling,
        most_steps=int(steps.max()),
        most_passes=max(-(-s // -(-n // size)) for n, s in workloads),
        fewest_examples=min(n for n, _ in workloads),
        columns=tuple((name, x.shape[1:]) for name, x in data.columns.items()),
        classes=len(data.label_names),
        workloads=tuple(workloads),
        overflow_probability=OVERFLOW if poisson else 0.0,
        gradients_per_step=algorithm.gradients_per_step,
    )


def wrapped(
    algorithm: Algorithm,
    wrappers: Sequence[Attack | Privacy | Asynchronous | None],
    federation: Federation,
) -> Wrapped:
    """Returns the algorithm under attack, with a privacy mechanism and an asynchronous server.

    The attack comes first: the server's mechanism handles whatever hostile clients send.
    """
    stages = Stages()
    for wrapper in wrappers:
        match wrapper:
            case Privacy():
                algorithm = wrapper.protect(algorithm, federation)
            case Attack() | Asynchronous():
                algorithm, own = wrapper.apply(algorithm, federation)
                stages = stages.then(own)
    return Wrapped(algorithm, stages)


@dataclass(frozen=True)
class _Wrapped:
    """An algorithm, wrapped, as a function of the run-time values."""

    make: Callable[[Values], Algorithm]
    wrappers: tuple[Callable[[Values], Any], ...]
    federation: Federation

    def __call__(self, values: Values) -> Wrapped:
        made = [wrapper(values) for wrapper in self.wrappers]
        return wrapped(self.make(values), made, self.federation)


@dataclass(frozen=True)
class _Constant:
    """A function of the run-time values that does not depend on them."""

    value: Any

    def __call__(self, values: Values) -> Any:
        return self.value


@dataclass(frozen=True)
class _Transform:
    """The upload transform as a function of the run-time values."""

    make: Callable[[Values], Any]

    def __call__(self, values: Values) -> Transform | None:
        return joined_transform(self.make(values))


def _maker(chosen: Wrapped, make: Any, transforms: Any, make_transforms: Any) -> Maker | None:
    """Returns the functions of the run-time values; None if nothing depends on them.

    Equal arguments give equal makers, so that sessions share their programs.
    """
    if make is None and make_transforms is None:
        return None
    if not isinstance(transforms, list | tuple) or isinstance(transforms, Transform):
        transforms = (transforms,) if transforms is not None else ()
    return Maker(
        make or _Constant(chosen), _Transform(make_transforms or _Constant(tuple(transforms)))
    )
