"""``simulate``: rounds of a federated algorithm, with evaluation, records and resume."""

import inspect
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from fedjax_peft.contracts import Algorithm, Asynchronous, Attack, Federation, Privacy, Task
from fedjax_peft.data.dataset import Clients, Dataset
from fedjax_peft.data.vocabulary import write_vocabulary
from fedjax_peft.engine.compilation import use_compilation_cache
from fedjax_peft.engine.devices.distributed import is_writer, processes, whole
from fedjax_peft.engine.schedule import BatchSampling, Range, Sampling
from fedjax_peft.engine.session import Session
from fedjax_peft.engine.state import State
from fedjax_peft.models.base import Model
from fedjax_peft.numerics.hyperparameters import Values, parametrised
from fedjax_peft.simulation.asynchrony import check_asynchronous
from fedjax_peft.simulation.checks import check_counts, check_test_data, check_test_objects
from fedjax_peft.simulation.classes import in_models_classes
from fedjax_peft.simulation.cost import Costs
from fedjax_peft.simulation.estimate import estimate
from fedjax_peft.simulation.evaluation import Evaluated, evaluations
from fedjax_peft.simulation.guarantee import Accounted, accounted, watched
from fedjax_peft.simulation.interrupts import Request, noted
from fedjax_peft.simulation.ledger import Ledger
from fedjax_peft.simulation.local_models import LocalTest
from fedjax_peft.simulation.loop import Loop
from fedjax_peft.simulation.origin import (
    carried,
    check_start,
    not_counted,
    origin_row,
    origin_text,
    save_origin,
)
from fedjax_peft.simulation.planning.memory_plan import check_step_memory
from fedjax_peft.simulation.progress import Phase, Phases
from fedjax_peft.simulation.records import Evaluation, Placement, Records, System
from fedjax_peft.simulation.rows import Row
from fedjax_peft.simulation.run import Run, global_leaves
from fedjax_peft.simulation.session import Transforms, federation_of
from fedjax_peft.simulation.session import session as make_session
from fedjax_peft.simulation.storage import calls
from fedjax_peft.simulation.storage.checkpoint import saved_parts
from fedjax_peft.simulation.storage.fingerprint import check_same, check_same_run, fingerprint
from fedjax_peft.simulation.storage.record import Record, device_name, recorded_config
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
        proportion to the number of examples); ``poisson`` (each client independently, with
        ``clients_per_round`` clients on average; a round may have no clients); ``round_robin`` (the
        next clients in a random order); or ``all``.
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
    raw = SimpleNamespace(**locals())
    use_compilation_cache()
    _check(raw)
    given = in_models_classes(raw)
    model, clients, evaluation = given.model, given.clients, given.evaluation
    of_session = {name: x for name, x in vars(given).items() if name in _OF_SESSION}
    session = make_session(**of_session, diagnostics=evaluation.diagnostics)
    algorithm = session.setup.algorithm
    check_test_data(model, clients, *_evaluated(given), task)
    schedule = session.schedule(seed)
    check_step_memory(session, model, schedule, placement.lanes)
    state = session.init(seed)
    federation = federation_of(schedule, clients.data, algorithm)
    private = _private(given, session, federation)
    parts = _parts(given, session, state, private, federation)
    complete = records.config is not None and "point" not in records.config
    begins = None if records.origin is None else origin_text(records.origin)
    metadata = {**({} if complete else calls.settings(raw, begins)), **(records.config or {})}
    found = fingerprint(vars(raw)) if out is not None or processes() > 1 else {}
    before = rows_before(records.origin, out if resume else None)
    trained_on = when_asked(clients, _tested(given), before)
    check_same_run({**metadata, **_of_this_process(given), **found})
    shown = records.progress if is_writer() else False
    with (
        noted() as request,
        Phases(rounds, records.on_phase, shown, _early(request, out)) as phases,
        Record.open(
            *(out, resume, metadata, found, phases.apart(records.on_round)), records.trackers
        ) as record,
    ):
        if record.out is not None:
            _save_start(record.out, given)
            save_rows(record.out, trained_on())
        loop = Loop(**parts, record=record, phases=phases, request=request)
        state = _train(loop, state, given)
    server, client_state, *others = whole(saved_parts(session.trimmed(state)))
    return Run(
        model,
        algorithm,
        global_leaves(model, algorithm, server),
        client_state,
        server,
        record.rows,
        None if out is None else Path(out),
        system.client_ranks,
        _text_length(clients.data),
        session.setup.task,
        trained_on,
        others[0] if others else {},
    )


_OF_SESSION = inspect.signature(make_session).parameters


def _parts(
    given: SimpleNamespace,
    session: Session,
    state: State,
    private: Accounted | None,
    federation: Federation,
) -> dict[str, Any]:
    """Returns the parts of the loop over rounds that need no run directory."""
    evaluation, wrapping = given.evaluation, (given.privacy, given.attack)
    local = None
    if "local" in evaluation.diagnostics:
        local = LocalTest(session, state, given.test, evaluation.batch_size)
    return {
        "session": session,
        "model": given.model,
        "tested": _tests(given, session),
        "costs": _costs(given, session, state),
        "stop": watched(evaluation.stop, private),
        "rounds": given.rounds,
        "system": given.system,
        "evaluation": evaluation,
        "checkpoint_every": given.records.checkpoint_every,
        "private": private,
        "local": local,
        "wrapped_for": None if wrapping == (None, None) else federation,
        "notes": _notes(given),
        "client_names": given.clients.names,
    }


def _notes(given: SimpleNamespace) -> list[str]:
    """Returns the sentences on what was done to the data, each once."""
    data = [given.clients, *_tested(given).values()]
    notes = (note for one in data for note in getattr(one, "data", one).notes)
    return list(dict.fromkeys(notes))


def _check(given: SimpleNamespace) -> None:
    """Raises InputError for arguments that only ``simulate`` takes."""
    data, _ = _evaluated(given)
    check_test_objects(data)
    check_counts({"rounds": given.rounds}, {"seed": given.seed})
    if (origin := given.records.origin) is not None:
        check_start(given.model, origin)
        check_unseen(_tested(given), origin.trained_on(), origin_text(origin))
    deadline = given.system.deadline
    if given.asynchronous is not None and deadline is not None:
        refused = {"deadline": deadline}
        check_asynchronous(given.asynchronous, given.clients, given.system.time, refused)


def _evaluated(given: SimpleNamespace) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the data sets of the global model, and those of the clients' models."""
    own = ("client_test", "client_validation")
    data = {"test": given.test, "validation": given.validation}
    return data, {name: getattr(given.evaluation, name) for name in own}


def _tested(given: SimpleNamespace) -> dict[str, Any]:
    """Returns everything that a run is evaluated on, by name."""
    data, own = _evaluated(given)
    return {name: one for name, one in {**data, **own}.items() if one is not None}


def _tests(given: SimpleNamespace, session: Session) -> dict[str, Evaluated]:
    """Returns the evaluations of a run by name."""
    attack, _ = parametrised(given.attack, given.values)
    triggered = None if attack is None else attack.triggered
    sets = (given.test, given.validation, given.evaluation)
    return evaluations(session, *sets, triggered=triggered, seed=given.seed)


def _private(given: SimpleNamespace, session: Session, federation: Federation) -> Accounted | None:
    """Returns the accountant of a run with differential privacy."""
    private = accounted(
        parametrised(given.privacy, given.values)[0],
        federation,
        diagnostics=given.evaluation.diagnostics,
        nonfinite=given.system.nonfinite,
        transform=session.setup.transform,
        personal=session.personal,
    )
    if private is None or given.records.origin is None:
        return private
    return private._replace(before=not_counted(given.records.origin))


def _costs(given: SimpleNamespace, session: Session, state: State) -> Costs:
    """Returns what counts the bytes and simulated seconds of a run."""
    model, clients, system = given.model, given.clients, given.system
    parts = (session.setup.algorithm, state.server, len(clients), system.client_ranks)
    ledger = Ledger(model, *parts, session.setup.transform)
    slowness = Slowness(system.time.spread, len(clients), given.seed)
    return Costs(ledger, system.time, slowness, system.deadline, preload_bytes(system.time, model))


def _of_this_process(given: SimpleNamespace) -> dict[str, Any]:
    """Returns the settings that a run does not record, and that all its processes must share."""
    numbers = ("every", "batch_size", "test_clients")
    return {
        **{f"evaluation.{name}": getattr(given.evaluation, name) for name in numbers},
        "records.checkpoint_every": given.records.checkpoint_every,
        **{f"placement.{name}": value for name, value in vars(given.placement).items()},
    }


def _save_start(out: Path, given: SimpleNamespace) -> None:
    """Writes what a reader of the run needs beside its rows and checkpoints."""
    if given.records.origin is not None:
        save_origin(out, given.records.origin)
    if vocabulary := given.clients.data.vocabulary:
        write_vocabulary(out, vocabulary)


def _train(loop: Loop, state: State, given: SimpleNamespace) -> State:
    """Returns the state after the last round of a run, which begins or goes on."""
    session, record, origin = loop.session, loop.record, given.records.origin
    saved = loop.restore(state)
    loop.phases.send(
        "starting", saved.round_index if saved else 0, **_details(loop, state, saved, given)
    )
    if saved is None:
        state = loop.clients.begin(state)  # in the run directory, if they are in a store
        begins: Row = {}
        if origin is not None:
            state, anew = carried(session, state, origin)
            begins = origin_row(origin, anew)
        stopped = loop.start(state, start_seconds(given.system.time, given.model), begins)
    else:
        state, stopped = saved, loop.resume()
    lanes = given.placement.lanes
    if lanes == "auto":  # a resumed run keeps its lanes, also on other devices
        session.request_lanes(record.rows[-1].get("lanes", lanes))
    while state.round_index < loop.rounds and not stopped:
        state, stopped = loop.round(state)
    loop.phases.send("finished", state.round_index, stopped=stopped)
    return state


def _details(
    loop: Loop, state: State, saved: State | None, given: SimpleNamespace
) -> dict[str, Any]:
    """Returns what the phase ``starting`` says about a run."""
    session, sizes = loop.session, given.clients.sizes
    return {
        "algorithm": loop.algorithm.name,
        "clients": len(given.clients),
        "clients_per_round": session.schedule(given.seed).per_round,
        "parameters": given.model.counts(),
        "fresh": () if saved or given.records.origin else given.model.fresh,
        "train_examples": int(sizes.sum()),
        "batch_size": given.batch_size,
        "most_examples": int(sizes.max()),
        "test_examples": 0 if given.test is None else len(given.test),
        "evaluations": {name: one.evaluator.examples for name, one in loop.tested.items()},
        "eval_every": given.evaluation.every,
        "estimate": estimate(
            *(session, state, loop.costs),
            skipped_leaves=loop.skipped_leaves(state, 1),
            late=loop.late_steps(state, 1),
        ),
        "privacy": None if loop.private is None else loop.private.promise(given.rounds),
        "device": device_name(),
        "out": loop.record.out,
        "resumed_from": saved.round_index if saved else None,
    }


def check_recorded(*arguments: Any, **options: Any) -> None:
    """Raises InputError if the run in ``out`` is not that of these arguments of :func:`simulate`.

    Nothing is compiled or written.
    """
    given = inspect.signature(simulate).bind(*arguments, **options)
    given.apply_defaults()
    directory = Path(given.arguments["out"])
    recorded, config = recorded_config(directory), given.arguments["records"].config or {}
    if "point" in config:  # the run has recorded other settings as well
        recorded = {"point": recorded.get("point")}
    check_same(directory, recorded, config, fingerprint(given.arguments))


def _early(request: Request, out: str | Path | None) -> Callable[[Phase], None]:
    """Returns the listener that ends a run between its programs while it has nothing to save."""

    def check(phase: Phase) -> None:
        nothing = out is None or (not phase.round_index and phase.name != "saving")
        if nothing and processes() == 1:
            request.check()

    return check


def _text_length(data: Dataset) -> int | None:
    """Returns the number of tokens that texts are padded to, None for other data."""
    ids = data.columns.get("input_ids")
    return None if ids is None else int(ids.shape[1])
