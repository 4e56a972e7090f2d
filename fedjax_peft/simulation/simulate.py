"""``simulate``: rounds of a federated algorithm, with evaluation, records and resume."""

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_peft.contracts import Algorithm, Asynchronous, Attack, Federation, Privacy, Task
from fedjax_peft.data.dataset import Clients, Dataset
from fedjax_peft.data.packing import text_length
from fedjax_peft.data.vocabulary import VOCABULARY, write_vocabulary
from fedjax_peft.engine.calls import Calling, alone
from fedjax_peft.engine.compilation import use_compilation_cache
from fedjax_peft.engine.devices.distributed import is_writer, processes, whole
from fedjax_peft.engine.schedule import BatchSampling, Range, Sampling
from fedjax_peft.engine.session import Session
from fedjax_peft.engine.state import State
from fedjax_peft.models.base import Model
from fedjax_peft.numerics.hyperparameters import Values
from fedjax_peft.simulation.arguments import Given, Transforms
from fedjax_peft.simulation.asynchrony import check_asynchronous
from fedjax_peft.simulation.checks import check_counts, check_test_data, check_test_objects
from fedjax_peft.simulation.classes import prepared
from fedjax_peft.simulation.clock import Clock
from fedjax_peft.simulation.cost import Costs
from fedjax_peft.simulation.estimate import estimate
from fedjax_peft.simulation.evaluation import Scores, evaluations
from fedjax_peft.simulation.guarantee import Accounted, accounted, watched
from fedjax_peft.simulation.interrupts import Request, noted
from fedjax_peft.simulation.ledger import Ledger
from fedjax_peft.simulation.local_models import LocalTest
from fedjax_peft.simulation.moment import Measure
from fedjax_peft.simulation.origin import (
    ORIGIN,
    carried,
    check_start,
    not_counted,
    origin_text,
    save_origin,
)
from fedjax_peft.simulation.planning.memory_plan import check_step_memory
from fedjax_peft.simulation.progress import Phase, Phases
from fedjax_peft.simulation.records import Evaluation, Placement, Records, System
from fedjax_peft.simulation.round_rows import start_row
from fedjax_peft.simulation.rounds import Driver, Listeners, Rounds, told
from fedjax_peft.simulation.rows import CLIENT_NAMES, LOWER, Row
from fedjax_peft.simulation.run import Run, global_leaves
from fedjax_peft.simulation.session import federation_of, session_of
from fedjax_peft.simulation.settings import settings
from fedjax_peft.simulation.storage.checkpoint import saved_parts
from fedjax_peft.simulation.storage.record import Record, device_name
from fedjax_peft.simulation.storage.saver import Saver
from fedjax_peft.simulation.time_model import Slowness, preload_bytes, start_seconds
from fedjax_peft.simulation.trained_rows import (
    check_unseen,
    rows_before,
    save_rows,
    when_asked,
)


def simulate(
    model: Model,
    algorithm: Algorithm | Callable[[Values], Algorithm],
    clients: Clients,
    *,
    rounds: int,
    test: Dataset | None = None,
    validation: Dataset | None = None,
    clients_per_round: int | None = None,
    sampling: Sampling = "uniform",
    batch_size: int = 16,
    batch_sampling: BatchSampling = "shuffled",
    epochs: Range = 1,
    local_steps: Range | None = None,
    task: Task | None = None,
    seed: int = 0,
    transforms: Transforms | Callable[[Values], Transforms] = None,
    privacy: Privacy | Callable[[Values], Privacy] | None = None,
    attack: Attack | Callable[[Values], Attack] | None = None,
    asynchronous: Asynchronous | None = None,
    values: Values | None = None,
    system: System = System(),
    placement: Placement = Placement(),
    evaluation: Evaluation = Evaluation(),
    records: Records = Records(),
    out: str | Path | None = None,
    resume: bool = False,
) -> Run:
    """Runs a federated algorithm and returns the result.

    Every random number is derived from ``seed`` and names (see ``fedjax_peft.numerics.random``). So
    the same call gives the same metrics, for any placement (to float32 rounding) and after a
    resume.

    Ctrl-C and SIGTERM in the main thread end the run after the round, with a checkpoint in ``out``,
    by ``KeyboardInterrupt`` and ``SystemExit(143)``. A second signal ends it at once. Handlers that
    the program has set itself stay.

    Example::

        run = fp.simulate(
            *(model, fp.algorithms.fedavg(optax.adamw(1e-3)), clients),
            rounds=20,
            clients_per_round=10,
            test=test,
            evaluation=fp.Evaluation(every=5),
        )

    Args:
      model: from ``load_model`` and ``attach``; its trainable leaves are the initial values for the
        server and all clients.
      algorithm: such as ``algorithms.fedavg(optax.adamw(5e-4))``.
      clients: the training examples of every client.
      rounds: communication rounds.
      test: global test set; with private leaves, the mean over the models of
        ``evaluation.test_clients`` clients.
      validation: examples to choose settings or the round to stop on; evaluated like ``test``, in
        the same rounds, as ``validation_accuracy`` and so on.
      clients_per_round: number of clients that are drawn for a round; by default all clients take
        part in every round.
      sampling: how clients are drawn: ``uniform`` without replacement; ``size`` (probability in
        proportion to ``Clients.weights``, by default the numbers of examples); ``poisson`` (each
        client independently, with ``clients_per_round`` clients on average; a round may have no
        clients); ``round_robin`` (the next clients in a random order); or ``all``.
      batch_size: examples in a local step. A client with fewer examples takes all of them, so a
        batch is at most the examples of the largest client.
      batch_sampling: how a client draws the examples of a step: ``shuffled``, passes over its
        examples in a random order; or ``poisson``, each example independently with the probability
        that gives ``batch_size`` examples on average. The second makes example-level privacy much
        cheaper, but takes longer: its steps have room for larger draws (all but 1e-12 of them).
      epochs: local passes over a client's examples in a round. A pair ``(least, most)`` is a range:
        each client draws its number in each round, all numbers with the same probability.
      local_steps: local steps in a round, instead of ``epochs``. A pair ``(least, most)`` is a
        range, as for ``epochs``.
      task: loss and metrics; by default the task of the data (``Dataset.task``).
      seed: the seed of everything random in the run. In Python ``attach``, ``load_model`` and
        partitions have their own, 0 by default. In a config they take this one, except that
        ``model.seed`` is that of a new head, ``data.seed`` that of the splits, and
        ``partition.seed`` that of the partition, where these keys are written.
      transforms: one transform of the clients' uploads, such as ``fp.transforms.clip_norm(1.0)``,
        or several in the order in which a client applies them.
      privacy: a mechanism of differential privacy, such as ``fp.privacy.central(...)``.
      attack: what hostile clients do, such as ``fp.attacks.sign_flip(0.2)``. With a backdoor,
        evaluated rounds also have ``test_backdoor_success``.
      asynchronous: a server that does not wait for all clients, such as
        ``fp.asynchronous.fedbuff(buffer_size=10)``. ``rounds``, ``evaluation.every`` and the rows
        then count aggregations, and ``clients_per_round`` clients work at the same time.
      values: numbers such as ``{"learning_rate": 1e-3}`` that are run-time values of the compiled
        program instead of constants. ``algorithm``, and perhaps ``transforms``, are then functions
        of them: ``lambda p: fp.algorithms.fedavg(optax.adamw(p["learning_rate"]))``. Another run
        with the same function, model and data but other values needs no compilation.
      system: the clients' devices and network: their speed, availability, failures and deadline.
      placement: where and how the run is computed, such as lanes, devices and the engine.
      evaluation: when and on what the model is evaluated, and the rule that ends the run early.
      records: checkpoints, callbacks and progress.
      out: a run directory to write records and checkpoints to.
      resume: continue the run in ``out`` from its last checkpoint, if it has one. The run must be
        the same: a call with another fingerprint (arguments, examples, clients, model) is refused.
        More ``rounds``, another stop rule, and what
        ``fedjax_peft.simulation.storage.fingerprint.MAY_CHANGE`` names may differ.

    Raises:
      InputError: settings contradict each other or the data; ``out`` holds a run, without
        ``resume``, or another run; or an upload is not finite, with ``System(nonfinite="raise")``.
    """
    given = Given(
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
        test=test,
        validation=validation,
        seed=seed,
        evaluation=evaluation,
        records=records,
        out=out,
        resume=resume,
        diagnostics=evaluation.diagnostics,
    )
    return alone(simulating(given))


def arguments(*arguments: Any, **options: Any) -> Given:
    """Returns the arguments of :func:`simulate`, with the defaults of those that are left out."""
    bound = inspect.signature(simulate).bind(*arguments, **options)
    bound.apply_defaults()
    how = bound.arguments["evaluation"]
    return Given(**bound.arguments, diagnostics=how.diagnostics)


def simulating(raw: Given, adapt: Callable[[Session], list[Measure]] | None = None) -> Calling[Run]:
    """Does what :func:`simulate` does, in step with other runs; see ``engine/calls.py``.

    Args:
      adapt: of a run whose clients are elsewhere: changes the session before it is used, and
        returns measures of its own.
    """
    use_compilation_cache()
    _check(raw)
    given, records, seed = prepared(raw), raw.records, raw.seed
    session = session_of(given)
    own = [] if adapt is None else adapt(session)
    _check_made(given, session)
    state = session.init(seed)
    facts = federation_of(session.schedule(seed), given.clients.data, session.setup.algorithm)
    private = _private(given, session, facts)
    config, found = settings(raw)
    before = rows_before(records.origin, given.out if given.resume else None)
    trained_on: Callable[[], np.ndarray | None] = _nothing_known
    if adapt is None:
        trained_on = when_asked(given.clients, given.tested, before)
    shown = records.progress if is_writer() else False
    on_round = () if records.on_round is None else (told(records.on_round),)
    with (
        noted() as request,
        Phases(given.rounds, records.on_phase, shown, _early(request, given.out)) as phases,
    ):
        scores = _scores(given, session, phases)
        measures: list[Measure] = [scores] if private is None else [private.measure, scores]
        rounds = _rounds(given, session, state, [*measures, *own], phases)
        with (
            Record.open(given.out, given.resume, config, found, records.trackers) as record,
            Listeners([*on_round, *records.listeners], phases) as listeners,
        ):
            if record.out is not None:
                _save_start(record.out, given)
                if (rows := trained_on()) is not None:
                    save_rows(record.out, rows)
            saver = Saver(session, given.model, record, phases, request, records.checkpoint_every)
            saved = saver.restore(state)
            details = _details(given, rounds, state, saved, record) | {
                "evaluations": scores.examples,
                "privacy": None if private is None else private.promise(given.rounds),
            }
            phases.send("starting", saved.round_index if saved else 0, **details)
            run = Driver(rounds, saver, listeners, watched(given.evaluation.stop, private))
            if saved is None:
                state, row = _begin(given, session, saver.clients.begin(state), facts)
                state = yield from run.begin(state, row)
            else:
                how = given.evaluation
                state = yield from run.go_on(saved, how.due, given.placement.lanes)
    return _ended(given, session, state, record.rows, trained_on)


def _check_made(given: Given, session: Session) -> None:
    """Raises InputError if the model cannot be tested on the data, or the memory is too small."""
    check_test_data(given.model, given.clients, given.tested, given.task)
    lanes = given.placement.lanes
    check_step_memory(session, given.model, session.schedule(given.seed), lanes)


def _check(given: Given) -> None:
    """Raises InputError for arguments that only ``simulate`` takes."""
    check_test_objects({"test": given.test, "validation": given.validation})
    check_counts({"rounds": given.rounds}, {"seed": given.seed})
    if (origin := given.records.origin) is not None:
        check_start(given.model, origin)
        check_unseen(given.tested, origin.trained_on(), origin_text(origin))
    deadline = given.system.deadline
    if given.asynchronous is not None and deadline is not None:
        refused = {"deadline": deadline}
        check_asynchronous(given.asynchronous, given.clients, given.system.time, refused)


def _private(given: Given, session: Session, federation: Federation) -> Accounted | None:
    """Returns the accountant of a run with differential privacy."""
    private = accounted(
        given.made("privacy"),
        federation,
        session,
        given.system,
        diagnostics=given.evaluation.diagnostics,
    )
    if private is None or given.records.origin is None:
        return private
    return private._replace(before=not_counted(given.records.origin))


def _scores(given: Given, session: Session, phases: Phases) -> Scores:
    """Returns the measure of the evaluations of a run."""
    how, attack = given.evaluation, given.made("attack")
    triggered = None if attack is None else attack.triggered
    sets = (given.test, given.validation, how)
    tested = evaluations(session, *sets, triggered=triggered, seed=given.seed)
    return Scores(session, tested, how, phases)


def _rounds(
    given: Given, session: Session, state: State, measures: Sequence[Measure], phases: Phases
) -> Rounds:
    """Returns what makes the moments of a run: its clock and its measures."""
    model, system, how, setup = given.model, given.system, given.evaluation, session.setup
    parts = (setup.algorithm, state.server, len(given.clients), system.client_ranks)
    ledger = Ledger(model, *parts, setup.transform)
    slowness = Slowness(system.time.spread, len(given.clients), given.seed)
    preload = preload_bytes(system.time, model)
    costs = Costs(ledger, system.time, slowness, system.deadline, preload)
    clock = Clock(session, system, costs, given.rounds)
    lower = [*setup.task.lower_is_better, *setup.algorithm.lower_is_better, "update_norm"]
    for declared in (getattr(measure, LOWER, ()) for measure in how.measures):
        lower += [declared] if isinstance(declared, str) else declared
    start = start_row(model, setup.algorithm, start_seconds(system.time, model), lower)
    local = None
    if "local" in how.diagnostics:
        local = LocalTest(session, state, given.test, how, phases)
    return Rounds(
        session=session,
        clock=clock,
        phases=phases,
        last=given.rounds,
        measures=[clock.measure(start), *measures, *how.measures],
        before=local,
        nonfinite=system.nonfinite,
        each="clients" in how.diagnostics,
        lower=lower,
    )


def _save_start(out: Path, given: Given) -> None:
    """Writes what a reader of the run needs beside its rows and checkpoints."""
    if not given.resume:  # an attempt that failed before its first row may have left its own
        for name in (ORIGIN, VOCABULARY):
            (out / name).unlink(missing_ok=True)
    if given.records.origin is not None:
        save_origin(out, given.records.origin)
    if vocabulary := given.clients.data.vocabulary:
        write_vocabulary(out, vocabulary)


def _begin(given: Given, session: Session, state: State, facts: Federation) -> tuple[State, Row]:
    """Returns the state before the first round, and what row 0 says beside the measures.

    Args:
      facts: what mechanisms of privacy and attacks depend on, so that they can be made again.
    """
    row: Row = {}
    if (origin := given.records.origin) is not None:
        state, row = carried(session, state, origin)
    if (given.privacy, given.attack) != (None, None):
        row["federation"] = facts._asdict()
    row |= {"notes": notes} if (notes := given.notes()) else {}
    return state, row | ({CLIENT_NAMES: [*names]} if (names := given.clients.names) else {})


def _details(
    given: Given, rounds: Rounds, state: State, saved: State | None, record: Record
) -> dict[str, Any]:
    """Returns what the phase ``starting`` says about a run."""
    session, sizes, clock = rounds.session, given.clients.sizes, rounds.clock
    start = {"simulated_seconds": start_seconds(given.system.time, given.model)}
    schedule, late, left, _ = clock.expected(state, [start])
    return {
        "algorithm": session.setup.algorithm.name,
        "clients": len(given.clients),
        "clients_per_round": session.schedule(given.seed).per_round,
        "parameters": given.model.counts(),
        "fresh": () if saved or given.records.origin else given.model.fresh,
        "train_examples": int(sizes.sum()),
        "batch_size": given.batch_size,
        "most_examples": int(sizes.max()),
        "test_examples": 0 if given.test is None else len(given.test),
        "eval_every": given.evaluation.every,
        "estimate": estimate(
            session, state, clock.costs, clock.skipped(state), schedule, late, left
        ),
        "device": device_name(),
        "dtype": np.dtype(given.model.dtype).name,
        "out": record.out,
        "resumed_from": saved.round_index if saved else None,
    }


def _ended(
    given: Given,
    session: Session,
    state: State,
    rows: list[Row],
    trained_on: Callable[[], np.ndarray | None],
) -> Run:
    """Returns the run after its last round."""
    server, client_state, *others = whole(saved_parts(session.trimmed(state)))
    algorithm = session.setup.algorithm
    return Run(
        given.model,
        algorithm,
        global_leaves(given.model, algorithm, server),
        client_state,
        server,
        rows,
        None if given.out is None else Path(given.out),
        given.system.client_ranks,
        text_length(given.clients.data.columns),
        session.setup.task,
        trained_on,
        others[0] if others else {},
    )


def _early(request: Request, out: str | Path | None) -> Callable[[Phase], None]:
    """Returns the listener that ends a run between its programs while it has nothing to save."""

    def check(phase: Phase) -> None:
        nothing = out is None or (not phase.round_index and phase.name != "saving")
        if nothing and processes() == 1:
            request.check()

    return check


def _nothing_known() -> None:
    """Returns None: the training examples are not here."""
