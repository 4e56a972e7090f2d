"""``session``: an algorithm over a federation, for your own loop over rounds."""

import functools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_args

import jax
import numpy as np

from fedjax_peft import contracts as c
from fedjax_peft import tasks
from fedjax_peft.data.dataset import Clients, Dataset
from fedjax_peft.engine.computation import Computation
from fedjax_peft.engine.devices.layout import layout_over
from fedjax_peft.engine.lengths import Lengths
from fedjax_peft.engine.plan import no_larger
from fedjax_peft.engine.schedule import BatchSampling, Range, Sampling, Schedule
from fedjax_peft.engine.session import Session
from fedjax_peft.engine.setup import Setup
from fedjax_peft.models.base import Model
from fedjax_peft.models.reuse import split, storing
from fedjax_peft.numerics import tree
from fedjax_peft.numerics.forms import check_type
from fedjax_peft.numerics.hyperparameters import Maker, Makers, Values, is_traced, parametrised
from fedjax_peft.numerics.measures.diagnosis import diagnosis, probe
from fedjax_peft.numerics.roles import assign_roles
from fedjax_peft.peft.ranks import rank_masks
from fedjax_peft.simulation import asynchrony, attacks, checks
from fedjax_peft.simulation.arguments import OfSession, Transforms
from fedjax_peft.simulation.classes import prepared, reader
from fedjax_peft.simulation.cost import Costs
from fedjax_peft.simulation.description import describe
from fedjax_peft.simulation.ledger import Ledger
from fedjax_peft.simulation.records import Diagnostic, Placement, System
from fedjax_peft.simulation.time_model import Slowness, preload_bytes
from fedjax_peft.support.digests import digest
from fedjax_peft.support.errors import InputError, check_known
from fedjax_peft.support.libraries import limit_blas_threads


def session(
    model: Model,
    algorithm: c.Algorithm | Callable[[Values], c.Algorithm],
    clients: Clients,
    *,
    rounds: int = 100,
    clients_per_round: int | None = None,
    sampling: Sampling = "uniform",
    batch_size: int = 16,
    batch_sampling: BatchSampling = "shuffled",
    epochs: Range = 1,
    local_steps: Range | None = None,
    task: c.Task | None = None,
    transforms: Transforms | Callable[[Values], Transforms] = None,
    privacy: c.Privacy | Callable[[Values], c.Privacy] | None = None,
    attack: c.Attack | Callable[[Values], c.Attack] | None = None,
    asynchronous: c.Asynchronous | None = None,
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
      system: its deadline and its ``nonfinite`` matter for ``simulate`` alone. Its time model
        matters for ``asynchronous`` and ``failure_exponent`` only. With an availability and
        without ``asynchronous``, give the clients that are available to
        :meth:`fedjax_peft.engine.session.Session.plan` (``among``).
      diagnostics: as ``Evaluation.diagnostics``; their values are in ``RoundInfo.aggregation``.

    Raises:
      InputError: arguments contradict each other or the data.
    """
    given = OfSession(
        model=model,
        algorithm=algorithm,
        clients=clients,
        rounds=rounds,
        clients_per_round=clients_per_round,
        sampling=sampling,
        batch_size=batch_size,
        batch_sampling=batch_sampling,
        epochs=epochs,
        local_steps=local_steps,
        task=task,
        transforms=transforms,
        privacy=privacy,
        attack=attack,
        asynchronous=asynchronous,
        values=values,
        system=system,
        placement=placement,
        diagnostics=diagnostics,
    )
    return session_of(prepared(given))


def session_of(given: OfSession) -> Session:
    """Returns the session of arguments whose data have the classes of the model."""
    model, clients, system, placement = given.model, given.clients, given.system, given.placement
    _check(given)
    schedule = _schedule_of(given)
    slowness = functools.partial(Slowness, system.time.spread, len(clients))

    def failure(seed: int, client: int) -> float:
        odds = (system.failure_rate, system.failure_exponent)
        return asynchrony.failure_probability(*odds, slowness(seed)[client])

    def costs(seed: int) -> Costs:
        server = jax.eval_shape(chosen.server.init, shared)
        parts = (len(clients), system.client_ranks, transform)
        preload = preload_bytes(system.time, model)
        ledger = Ledger(model, chosen, server, *parts)
        return Costs(ledger, system.time, slowness(seed), None, preload)

    if system.failure_exponent:
        schedule = schedule._replace(failure=failure)
    schedule = schedule._replace(intermittent=system.availability is not None)
    if given.asynchronous is not None:
        parts = (given.clients_per_round, costs, failure, system.availability)
        schedule = asynchrony.asynchronous_schedule(schedule, given.asynchronous, *parts)
    federation = federation_of(schedule, clients.data, given.made("algorithm"))
    wrappers = (given.attack, given.privacy, given.asynchronous)
    make = Maker(_wrapped, (given.algorithm, wrappers, federation))
    made = make(given.values)
    chosen = made.algorithm
    # Clients that add noise themselves are not left out for reasons that lie in their data.
    schedule = schedule._replace(all_send=chosen.aggregator.randomise is not None)
    checks.check_method(
        *(model, chosen, len(clients), system.client_ranks, given.diagnostics),
    )
    checks.check_trusted(chosen, schedule.weights)
    attacks.check_trigger(model, given.made("attack"), clients.data)
    transform = checks.check_transforms(given.made("transforms"), chosen)
    names = assign_roles(model.kinds, chosen.roles)
    shared, private = (tree.select(model.trainable, names[r]) for r in ("shared", "private"))
    checks.warn_of_feedback(transform, chosen, shared)
    if given.asynchronous is not None:
        asynchrony.check_transform_state(transform, chosen, shared)
    checks.check_memory(schedule)
    setup = _setup(given, made, schedule, federation, names["fixed"])
    uploads = given.transforms
    hashable = tuple(uploads) if isinstance(uploads, list) else uploads
    setup = setup._replace(maker=Makers(make, Maker(_joined, (hashable,))))
    place = (placement.engine, placement.client_state, placement.examples)
    read = reader(model, clients, setup.task)
    computation = Computation(placement.lanes, given.rounds, *place, read=read)
    if placement.reuse != "none":
        setup, computation = _reusing(given, setup, computation)
    return Session(
        setup._replace(transform=transform),
        (shared, private),
        schedule,
        clients.data.columns,
        computation,
        values=given.values,
        salt=None if given.privacy is None else _salter(given, federation, schedule, setup.task),
    )


_WORK = ("clients_per_round", "sampling", "batch_size", "batch_sampling", "epochs", "local_steps")
"""The arguments that say who works in a round, and how much."""


def _schedule_of(given: OfSession) -> Schedule:
    """Returns the schedule of the seed 0, whose steps have the tokens that the attack needs."""
    work = {name: getattr(given, name) for name in _WORK}
    buckets = given.placement.length_buckets
    schedule = schedule_of(given.clients, **work, system=given.system, length_buckets=buckets)
    attack = given.made("attack")
    if schedule.tokens is None or not isinstance(attack, c.Attack):
        return schedule
    return schedule._replace(tokens=schedule.tokens.at_least(attack.least_length))


def _check(given: OfSession) -> None:
    """Raises InputError for arguments of ``session`` of a wrong type, or that contradict others."""
    system, count = given.system, given.clients_per_round
    checks.check_objects(given.model, given.made("algorithm"), given.clients, given.task)
    counts = {"clients_per_round": 1 if count is None else count}
    checks.check_counts({**counts, "batch_size": given.batch_size, "rounds": given.rounds}, {})
    checks.check_data(given.model, given.clients, given.task)
    asynchrony.check_availability(system.availability, system.time, given.privacy)
    if given.asynchronous is not None:
        refused = {"sampling": given.sampling, "privacy": given.privacy}
        asynchrony.check_asynchronous(given.asynchronous, given.clients, system.time, refused)


def _setup(
    given: OfSession,
    made: c.Wrapped,
    schedule: Schedule,
    federation: c.Federation,
    fixed: Sequence[str],
) -> Setup:
    """Returns what training and evaluation share, without the transform."""
    model, clients, placement = given.model, given.clients, given.placement
    ranks = given.system.client_ranks
    count = max(int(np.count_nonzero(schedule.weights)), 1)
    masks: Any = None if ranks is None else rank_masks(model, ranks, len(clients))
    return Setup(
        made.algorithm,
        model.apply,
        given.task or tasks.for_data(clients.data),
        model.compute_frozen(),
        tree.select(model.trainable, fixed),
        len(clients),
        layout_over(placement.devices, placement.model_parallel, placement.model_sharding),
        splits=model.splits,
        rank_mask=masks,
        diagnosis=diagnosis(given.diagnostics),
        probe=probe(given.diagnostics),
        total_clients=len(clients) if schedule.all_send else count,
        dtype=model.dtype,
        sampling_probability=federation.sampling_probability,
        stages=made.stages,
    )


def _reusing(given: OfSession, setup: Setup, computation: Computation) -> tuple[Setup, Computation]:
    """Returns the setup of the model above what no training changes, and what adds this to columns.

    Raises:
      InputError: nothing can be reused.
    """
    attack = given.made("attack")
    if attack is not None and attack.triggered is not None:
        raise InputError(
            f"placement.reuse keeps what the examples give, and the attack {attack.name!r} changes"
            " examples while clients train. Leave reuse out."
        )
    if getattr(setup.task, "generate", None) is not None:
        raise InputError(
            "placement.reuse starts from kept hidden states, and the score of this task completes"
            " prompts with the whole model. Leave reuse out, or score without completions."
        )
    model, placement = given.model, given.placement
    parts = split(model, given.clients.data.columns)
    on_disk = placement.examples == "host"
    complete = storing(parts, model, placement.reuse, on_disk=on_disk)
    above = setup._replace(apply=parts.above.apply, frozen=parts.above.compute_frozen())
    return above, computation._replace(complete=complete)


def _salter(
    given: OfSession, federation: c.Federation, schedule: Schedule, task: Any
) -> Callable[[Values], np.ndarray]:
    """Returns the function of the run-time values that salts the noise of a private run.

    Its two numbers, uint32 ``[2]``, differ for different settings.
    """
    system = given.system
    facts: dict[str, Any] = {
        "federation": federation,
        "work": (schedule.epochs, schedule.local_steps, system.stragglers),
        "failures": (system.failure_rate, system.failure_exponent),
        "clients": _digest_of(given.clients),
        "client_ranks": system.client_ranks,
        "model": _facts_of(given.model),
        "task": _facts_of_task(task),
    }
    if system.deadline is not None or system.failure_exponent:  # speed then decides who sends
        facts["speed"] = (system.deadline, system.late, system.time)

    def salt(chosen: Values) -> np.ndarray:
        made = {name: given.made(name, chosen) for name in ("algorithm", "privacy", "attack")}
        made["transforms"] = checks.joined_transform(given.made("transforms", chosen))
        return np.frombuffer(bytes.fromhex(digest(describe({**facts, **made}))), "<u4")

    return salt


def _digest_of(clients: Clients) -> str:
    """Returns a digest of which examples each client has, and of the weights that it was given."""
    numbers = [np.asarray(x, np.int64) for x in (clients.sizes, clients.rows)]
    if clients.weights is not None:
        numbers.append(np.asarray(clients.weights, np.float64))
    return digest([_place(clients.data.name), *map(digest, numbers)])


def _facts_of_task(task: Any) -> Any:
    """Returns the name of a built-in task without options of its own, and any other task itself."""
    name = getattr(task, "name", None)
    plain = tasks.find(name)() if name in tasks.__all__ else None
    return name if describe(task) == describe(plain) else task


def _facts_of(model: Model) -> tuple:
    """Returns how a model was made, and the shapes and sums of the leaves that it starts from.

    The sums tell a run from one that starts elsewhere: from another seed of ``attach``, or from the
    result of another run, also if that changed frozen leaves (``Model.wide``). They have four
    digits, so that rounding, which depends on the processor, does not change them. A resumed run is
    given the model of its start, and has the same sums.
    """
    computing = ("attention", "remat", "scan_layers", "fresh")  # these change no result
    recipe = {name: x for name, x in model.recipe.items() if name not in computing}
    start = {**model.trainable, **tree.select(model.frozen, sorted(model.wide))}
    sums = {name: f"{np.asarray(x).sum(dtype=np.float64):.3e}" for name, x in start.items()}
    shapes = {name: f"{x.dtype}{x.shape}" for name, x in start.items()}
    return _place(model.name), recipe, model.method, model.kinds, shapes, sums


def _place(name: str) -> str:
    """Returns a name, of a file or folder its whole path: it is the same from everywhere."""
    return str(Path(name).resolve()) if name and os.path.exists(name) else name


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
    checks.check_counts({"batch_size": batch_size}, {})
    epochs, local_steps = checks.check_work(epochs, local_steps, system.stragglers)
    per_round = checks.clients_a_round(clients, clients_per_round, sampling)
    work = (clients.indices, per_round, batch_size, epochs, local_steps, 0)
    tokens = Lengths.of(clients.data.columns, length_buckets)
    schedule = Schedule(
        *(*work, sampling, system.failure_rate),
        tokens=tokens,
        stragglers=system.stragglers,
        given_weights=clients.weights,
    )
    check_known("batch_sampling", batch_sampling, get_args(BatchSampling))
    if batch_sampling == "poisson":
        width = poisson_width(schedule.sizes, batch_size)
        return schedule._replace(batch_sampling="poisson", width=width)
    return schedule._replace(width=no_larger(batch_size, int(schedule.sizes.max(initial=0))))


def poisson_width(sizes: Sequence[int] | np.ndarray, batch_size: int) -> int:
    """Returns the examples that a Poisson-sampled batch has room for.

    A batch is larger with a probability of at most :data:`OVERFLOW`.

    Args:
      batch_size: examples in a batch on average.
    """
    limit_blas_threads()
    from scipy.stats import binom  # an import that takes long

    counts = np.unique(sizes)
    counts = counts[counts > 0]
    most = binom.isf(OVERFLOW, counts, np.minimum(batch_size / counts, 1.0))
    return int(np.max(np.minimum(most, counts), initial=1))


def federation_of(schedule: Schedule, data: Dataset, algorithm: c.Algorithm) -> c.Federation:
    """Returns the facts about a run that privacy mechanisms and attacks depend on."""
    sizes, steps, size = schedule.sizes, schedule.all_most_steps, schedule.batch_size
    # Clients of one size make the same number of steps, and there are few sizes.
    counts, first = np.unique(sizes, return_index=True)
    workloads = [(n, s) for n, s in zip(counts.tolist(), steps[first].tolist(), strict=True) if s]
    poisson = schedule.batch_sampling == "poisson"
    return c.Federation(
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
    algorithm: c.Algorithm,
    wrappers: Sequence[c.Attack | c.Privacy | c.Asynchronous | None],
    federation: c.Federation,
) -> c.Wrapped:
    """Returns the algorithm under attack, with a privacy mechanism and an asynchronous server.

    The attack comes first: the server's mechanism handles whatever hostile clients send.
    """
    stages = c.Stages()
    for wrapper in wrappers:
        match wrapper:
            case c.Privacy():
                algorithm = wrapper.protect(algorithm, federation)
            case c.Attack() | c.Asynchronous():
                made = wrapper.apply(algorithm, federation)
                check_type(f"The function `apply` of {wrapper.name!r}", made, c.Wrapped)
                algorithm, stages = made.algorithm, stages.then(made.stages)
    return c.Wrapped(algorithm, stages)


def _wrapped(
    values: Values | None, algorithm: Any, wrappers: Sequence[Any], federation: c.Federation
) -> c.Wrapped:
    """Returns what :func:`wrapped` does, of parts or of functions of the run-time values."""
    plain, *made = (parametrised(one, values)[0] for one in (algorithm, *wrappers))
    if not any(map(is_traced, (values or {}).values())):
        for attack in (one for one in made if isinstance(one, c.Attack)):
            attacks.check_honest(plain, attack, federation.clients)
    return wrapped(plain, made, federation)


def _joined(values: Values | None, transforms: Any) -> c.Transform | None:
    """Returns the upload transform, of transforms or of a function of the run-time values."""
    return checks.joined_transform(parametrised(transforms, values)[0])
