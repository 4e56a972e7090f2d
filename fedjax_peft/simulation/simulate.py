"""``simulate``: rounds of a federated algorithm, with evaluation, records and resume."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from fedjax_peft.contracts import Algorithm, Asynchronous, Attack, Availability, Privacy, Task
from fedjax_peft.data.dataset import Clients, Dataset
from fedjax_peft.data.vocabulary import write_vocabulary
from fedjax_peft.engine.client_store import ClientPlace
from fedjax_peft.engine.compilation import use_compilation_cache
from fedjax_peft.engine.distributed import is_writer, processes, whole
from fedjax_peft.engine.lanes import Lanes
from fedjax_peft.engine.layout import ModelSharding
from fedjax_peft.engine.schedule import BatchSampling, Range, Sampling
from fedjax_peft.engine.session import Engine
from fedjax_peft.engine.streaming import ExamplesPlace
from fedjax_peft.models.base import Model
from fedjax_peft.numerics.hyperparameters import Values, parametrised
from fedjax_peft.simulation.agreement import check_same_run
from fedjax_peft.simulation.asynchrony import check_asynchronous
from fedjax_peft.simulation.checks import (
    Diagnostic,
    Late,
    check_counts,
    check_deadline,
    check_test_data,
    check_test_objects,
    check_words,
)
from fedjax_peft.simulation.cost import (
    Costs,
    Ledger,
    Slowness,
    TimeModel,
    preload_bytes,
    start_seconds,
)
from fedjax_peft.simulation.estimate import estimate
from fedjax_peft.simulation.evaluation import evaluations
from fedjax_peft.simulation.fingerprint import MAY_CHANGE, check_same, fingerprint
from fedjax_peft.simulation.guarantee import accounted, watched
from fedjax_peft.simulation.interrupts import Request, noted
from fedjax_peft.simulation.local_models import LocalTest
from fedjax_peft.simulation.loop import Loop
from fedjax_peft.simulation.memory_plan import check_step_memory
from fedjax_peft.simulation.origin import (
    carried,
    check_start,
    not_counted,
    origin_row,
    origin_text,
    save_origin,
)
from fedjax_peft.simulation.progress import Phase, Phases
from fedjax_peft.simulation.recipe import save_recipe
from fedjax_peft.simulation.record import Record, device_name, read_config
from fedjax_peft.simulation.rows import Row
from fedjax_peft.simulation.run import Run, global_leaves
from fedjax_peft.simulation.session import Transforms, federation_of
from fedjax_peft.simulation.session import session as make_session
from fedjax_peft.simulation.stopping import Stop

__all__ = ["check_recorded", "simulate"]


def simulate(
    model: Model,
    algorithm: Algorithm | Callable[[Values], Algorithm],
    clients: Clients,
    *,
    test: Dataset | None = None,
    validation: Dataset | None = None,
    rounds: int,
    clients_per_round: int | None = None,
    sampling: Sampling = "uniform",
    batch_size: int = 16,
    batch_sampling: BatchSampling = "shuffled",
    epochs: Range = 1,
    local_steps: Range | None = None,
    stragglers: float = 1.0,
    task: Task | None = None,
    seed: int = 0,
    lanes: Lanes = "auto",
    devices: int | None = None,
    model_parallel: int = 1,
    model_sharding: ModelSharding = "tensor",
    eval_every: int = 1,
    eval_batch_size: int = 64,
    length_buckets: int = 4,
    test_clients: int = 10,
    client_test: Clients | None = None,
    client_validation: Clients | None = None,
    client_ranks: Sequence[int] | None = None,
    transforms: Transforms | Callable[[Values], Transforms] = None,
    privacy: Privacy | Callable[[Values], Privacy] | None = None,
    attack: Attack | Callable[[Values], Attack] | None = None,
    diagnostics: Sequence[Diagnostic] = (),
    nonfinite: Literal["drop", "raise"] = "drop",
    failure_rate: float = 0.0,
    failure_exponent: float = 0.0,
    deadline: float | None = None,
    late: Late = "drop",
    time_model: TimeModel | None = None,
    asynchronous: Asynchronous | None = None,
    availability: Availability | None = None,
    out: str | Path | None = None,
    checkpoint_every: int = 10,
    resume: bool = False,
    origin: Run | None = None,
    config: Mapping[str, Any] | None = None,
    on_round: Callable[[Row], bool | None] | None = None,
    stop: Stop | None = None,
    on_phase: Callable[[Phase], None] | None = None,
    progress: bool | Literal["auto"] = "auto",
    engine: Engine = "compiled",
    values: Values | None = None,
    client_state: ClientPlace = "device",
    examples: ExamplesPlace = "device",
) -> Run:
    """Runs a federated algorithm and returns the result.

    Every random number is derived from ``seed`` and names (see ``fedjax_peft.numerics.random``).
    So the same call gives the same metrics, for any number of lanes (to float32 rounding) and
    after a resume.

    Ctrl-C and SIGTERM in the main thread end the run after the round, with a checkpoint in ``out``,
    by ``KeyboardInterrupt`` and ``SystemExit(143)``. A second signal ends it at once. Handlers that
    the program has set itself stay.

    Args:
      model: from ``load_model`` and ``attach``; its trainable leaves are the initial values for the
        server and all clients.
      algorithm: such as ``algorithms.fedavg(optax.adamw(5e-4))``.
      clients: the training examples of every client.
      test: global test set; with private leaves, the mean over ``test_clients`` clients' models.
      validation: examples to choose settings or the round to stop on; evaluated like ``test``, in
        the same rounds, as ``validation_accuracy`` and so on.
      rounds: communication rounds.
      clients_per_round: number of clients that are drawn for a round; by default all clients take
        part in every round.
      sampling: how clients are drawn: ``uniform`` without replacement; ``size`` (probability in
        proportion to the number of examples); ``poisson`` (each client independently, with
        ``clients_per_round`` clients on average; a round may have no clients); ``round_robin`` (the
        next clients in a random order); or ``all``.
      batch_size: examples in a local step. A client with fewer examples takes all of them, so a
        batch is at most the examples of the largest client.
      batch_sampling: how a client draws them: ``shuffled``, passes over its examples in a random
        order; or ``poisson``, each example independently with the probability that gives
        ``batch_size`` examples on average. The second makes example-level privacy much cheaper. Its
        steps have room for larger draws (a draw that does not fit has a probability of 1e-12), and
        so take longer.
      epochs: local passes over a client's examples in a round. A pair ``(least, most)`` is a range:
        each client draws its number in each round, all numbers with the same probability.
      local_steps: local steps in a round, instead of ``epochs``. A pair ``(least, most)`` is a
        range, as for ``epochs``.
      stragglers: with a range: the share of clients that draw their number. A client draws in a
        round with this probability; otherwise it does the most. FedProx's experiments have
        ``epochs=(1, 20)`` and stragglers of 0, 0.5 and 0.9.
      task: loss and metrics; by default the task of the data (``Dataset.task``).
      seed: the seed of everything random, except for the model's initial values.
      lanes: clients that run side by side on the device; ``auto`` chooses for speed.
      devices: how many devices share the work; by default all accelerators. Each has a part of the
        lanes and of the state that the clients keep.
      model_parallel: how many devices share one copy of the frozen weights; a divisor of
        ``devices``. By default every device holds all of them.
      model_sharding: how they share it. ``tensor``: each device computes with its part of every
        matrix. ``gather``: each device stores a part; a matrix is put together just before its use,
        and every device has lanes of its own.
      eval_every: rounds between evaluations; the last round is always evaluated.
      eval_batch_size: examples in an evaluation step.
      length_buckets: for texts: the largest number of padded lengths for which a step is compiled.
        Each step runs at the shortest length that its examples fit in. The lengths are chosen from
        the data; fewer are used if more would not save time. 1 pads all texts to the longest
        text, 0 keeps the padding of the data. Results differ by float32 rounding only.
      test_clients: the number of clients whose personal models are evaluated on ``test``.
      client_test: examples of every client to evaluate its model on (mean, deviation, worst).
      client_validation: the same for choosing, as ``client_validation_accuracy_mean`` and so on.
      client_ranks: the LoRA rank of every client (a shorter list is repeated), at most the
        adapters' rank. A client of rank r trains and sends only the first r directions. The other
        directions add nothing to its model and stay as the server sent them.
      transforms: of the clients' uploads, such as ``fp.transforms.clip_norm(1.0)``: one, or several
        in the order in which a client applies them.
      privacy: a mechanism of differential privacy, such as ``fp.privacy.central(...)``.
      attack: what hostile clients do, such as ``fp.attacks.sign_flip(0.2)``. With a backdoor,
        evaluated rounds also have ``test_backdoor_success``.
      diagnostics: additional measurements in every round, see ``Diagnostic``; each takes time.
      nonfinite: what to do with an upload that is not finite: ``drop`` leaves it out and names its
        client in the metrics, ``raise`` ends the run with an error.
      failure_rate: probability that a sampled client drops out of the round. The client has fetched
        the broadcast of the server, but it sends nothing, and its client state does not change.
      failure_exponent: how failures depend on speed: the odds of a failure are proportional to the
        client's slowness to this power. 0: all clients fail with ``failure_rate``; otherwise the
        median client does.
      deadline: simulated seconds after which the server accepts no more uploads. The time model
        says who is late; the other uploads are aggregated.
      late: what clients do whose work does not end before the deadline. ``drop``: they send
        nothing, like failed clients. ``partial``: they send what they have learned in the local
        steps that fit before the deadline; a client sends nothing if not a single step fits. The
        aggregation weights stay the same. With privacy whose clients add the noise (``local``,
        ``distributed``), sending nothing means to send the noise alone.
      time_model: gives the simulated seconds; by default ``TimeModel()``.
      asynchronous: a server that does not wait for all clients, such as
        ``fp.asynchronous.fedbuff(buffer_size=10)``. ``rounds``, ``eval_every`` and the rows then
        count aggregations, and ``clients_per_round`` clients work at the same time.
      availability: when clients can take part, such as ``fp.availability.diurnal()``; by default
        always. Clients are drawn from those that are available when they start. A client that
        leaves before its upload has arrived loses its work.
      out: a run directory to write records, checkpoints and TensorBoard files to.
      checkpoint_every: rounds between checkpoints; the last round always has one.
      resume: continue the run in ``out`` from its last checkpoint, if it has one. The run must be
        the same: a call with another fingerprint (arguments, examples, clients, model) is refused.
        More ``rounds``, ``stop``, and what ``fedjax_peft.simulation.fingerprint.MAY_CHANGE`` names
        may differ.
      origin: the run that this one starts from, with ``run.trained`` as the model: the clients
        begin with what they keep after it (private leaves, control variates), and so does the
        server if it keeps the same. Rounds count from 1. Recorded in row 0.
      config: recorded as the run's ``config.toml``. ``{"point": ...}``, the values of a sweep, is
        added to the settings that a run made in Python records.
      on_round: called with every row of metrics as it is made (row 0 is before training). If it
        returns True the run ends after this round: its row gains the final evaluation and the
        field ``stopped``, and a checkpoint is written. A resume goes on from there; the row then
        loses the field, and the evaluation unless it was due.
      stop: rule that ends the run in the same way, such as ``early_stop(target=0.8, patience=5)``.
        It is a function of all rows so far, and returns True or a sentence with the reason if the
        run should stop. It reads only the rows, so a resumed run stops at the same round as an
        uninterrupted one.
      on_phase: called with a ``fedjax_peft.simulation.progress.Phase`` at the beginning of each
        phase that takes time: compiling, training a round, evaluating a part of the examples,
        saving.
      progress: show these phases on stderr: ``"auto"`` in a terminal or notebook only, True
        everywhere, False nowhere.
      engine: ``compiled``: a round is one XLA program. ``reference``: a round is a Python loop over
        clients, one at a time and without jit; it is slow, and meant for reading and debugging. The
        results are equal up to float32 rounding.
      values: numbers such as ``{"learning_rate": 1e-3}`` that are run-time values of the compiled
        program instead of constants. ``algorithm``, and perhaps ``transforms``, are then functions
        of them: ``lambda p: fp.algorithms.fedavg(optax.adamw(p["learning_rate"]))``. Another run
        with the same function, model and data but other values needs no compilation.
      client_state: where the state of all clients is between rounds: ``device``; ``host`` (the
        host's memory); or ``disk`` (a file in ``out``, or without ``out`` a temporary file). With
        ``host`` and ``disk`` only the clients of a round are on the device, and those of the next
        round are read while it computes. The results are the same. Checkpoints then only write the
        clients that have changed.
      examples: where the training examples are: ``device``, or ``host``. With ``host`` only the
        examples of a round are on the device, and the columns of the data may be memory-mapped
        files (``numpy.load(path, mmap_mode="r")``). The results are the same.

    Raises:
      InputError: settings contradict each other or the data; ``out`` holds a run, without
        ``resume``, or another run; or an upload is not finite, with ``nonfinite="raise"``.
    """
    arguments = dict(locals())
    use_compilation_cache()
    data = {"test": test, "validation": validation}
    own_data = {"client_test": client_test, "client_validation": client_validation}
    check_test_objects(data, own_data, stop)
    counts = {
        "rounds": rounds,
        "eval_every": eval_every,
        "eval_batch_size": eval_batch_size,
        "test_clients": test_clients,
        "checkpoint_every": checkpoint_every,
    }
    check_counts(counts, {"seed": seed})
    check_words(nonfinite, diagnostics)
    if origin is not None:
        check_start(model, origin)
    time_model = time_model or TimeModel()
    check_deadline(deadline, late, time_model)
    if asynchronous is not None and deadline is not None:
        refused = {"deadline": deadline}
        check_asynchronous(asynchronous, clients, time_model, refused)
    session = make_session(
        model,
        algorithm,
        clients,
        clients_per_round=clients_per_round,
        sampling=sampling,
        batch_size=batch_size,
        batch_sampling=batch_sampling,
        epochs=epochs,
        local_steps=local_steps,
        stragglers=stragglers,
        task=task,
        lanes=lanes,
        devices=devices,
        model_parallel=model_parallel,
        model_sharding=model_sharding,
        length_buckets=length_buckets,
        client_ranks=client_ranks,
        transforms=transforms,
        privacy=privacy,
        attack=attack,
        diagnostics=diagnostics,
        failure_rate=failure_rate,
        failure_exponent=failure_exponent,
        time_model=time_model,
        asynchronous=asynchronous,
        availability=availability,
        rounds=rounds,
        engine=engine,
        values=values,
        client_state=client_state,
        examples=examples,
    )
    algorithm = session.setup.algorithm
    check_test_data(model, clients, data, own_data, task)
    schedule = session.schedule(seed)
    check_step_memory(session, model, schedule, clients.data, lanes)
    state = session.init(seed)
    federation = federation_of(schedule, clients.data, algorithm)
    private = accounted(
        parametrised(privacy, values)[0],
        federation,
        diagnostics=diagnostics,
        nonfinite=nonfinite,
        transform=session.setup.transform,
        personal=session.personal,
    )
    made_attack, _ = parametrised(attack, values)
    tested = evaluations(
        session,
        test=test,
        client_test=client_test,
        validation=validation,
        client_validation=client_validation,
        triggered=None if made_attack is None else made_attack.triggered,
        test_clients=test_clients,
        batch_size=eval_batch_size,
        seed=seed,
    )
    local = LocalTest(session, test, eval_batch_size) if "local" in diagnostics else None
    transform = session.setup.transform
    ledger = Ledger(model, algorithm, state.server, len(clients), client_ranks, transform)
    slowness = Slowness(time_model.spread, len(clients), seed)
    preload = preload_bytes(time_model, model)
    costs = Costs(ledger, time_model, slowness, deadline, preload)
    recorded = config is not None and "point" not in config
    metadata = {
        "algorithm": algorithm.name,
        "rounds": rounds,
        "clients": len(clients),
        "clients_per_round": schedule.per_round,
        "sampling": sampling,
        "batch_size": batch_size,
        "batch_sampling": batch_sampling,
        "epochs": epochs,
        "local_steps": local_steps,
        "stragglers": stragglers,
        "failure_rate": failure_rate,
        "deadline": deadline,
        "late": late,
        "time": time_model._asdict(),
        "seed": seed,
    }
    if failure_exponent:
        metadata["failure_exponent"] = failure_exponent
    if asynchronous is not None:
        metadata["asynchronous"] = asynchronous.name
    if availability is not None:
        metadata["availability"] = availability.name
    if values:
        metadata = {**metadata, "values": dict(values)}
    if client_state != "device":
        metadata = {**metadata, "client_state": client_state}
    if transform is not None:
        metadata = {**metadata, "transforms": transform.name}
    if private is not None:
        metadata = {**metadata, "privacy": private.privacy.name}
    if origin is not None:
        metadata = {**metadata, "origin": origin_text(origin)}
        private = None if private is None else private._replace(before=not_counted(origin))
    metadata = dict(config or {}) if recorded else {**metadata, **(config or {})}
    text_length = _text_length(clients.data)
    found = fingerprint(arguments) if out is not None or processes() > 1 else {}
    placement = {name: arguments[name] for name in MAY_CHANGE["placement"]}
    check_same_run({**metadata, **counts, **placement, **found})
    shown = progress if is_writer() else False
    with (
        noted() as request,
        Phases(rounds, on_phase, shown, _early(request, out)) as phases,
        Record.open(out, resume, metadata, found, phases.apart(on_round)) as record,
    ):
        if record.out is not None and not recorded:
            save_recipe(record.out, model, text_length, session.setup.task)
        if record.out is not None and origin is not None:
            save_origin(record.out, origin)
        if record.out is not None and clients.data.vocabulary:
            write_vocabulary(record.out, clients.data.vocabulary)
        loop = Loop(
            *(session, model, tested, costs, record, phases, watched(stop, private)),
            rounds=rounds,
            eval_every=eval_every,
            checkpoint_every=checkpoint_every,
            deadline=deadline,
            late=late,
            nonfinite=nonfinite,
            each="clients" in diagnostics,
            local=local,
            private=private,
            availability=None if asynchronous is not None else availability,
            wrapped_for=federation if privacy is not None or attack is not None else None,
            request=request,
        )
        saved = loop.restore(state)
        phases.send(
            "starting",
            saved.round_index if saved else 0,
            algorithm=algorithm.name,
            clients=len(clients),
            clients_per_round=schedule.per_round,
            parameters=model.counts(),
            train_examples=int(clients.sizes.sum()),
            batch_size=batch_size,
            most_examples=int(clients.sizes.max()),
            test_examples=0 if test is None else len(test),
            evaluations={name: one.evaluator.examples for name, one in tested.items()},
            eval_every=eval_every,
            estimate=estimate(
                *(session, state, costs),
                skipped_leaves=loop.skipped_leaves(state, 1),
                late=loop.late_steps(state, 1),
            ),
            privacy=None if private is None else private.promise(rounds),
            device=device_name(),
            out=record.out,
            resumed_from=saved.round_index if saved else None,
        )
        if saved is None:
            state = loop.begin(state)
            if origin is not None:
                state = carried(session, state, origin)
            begins = {} if origin is None else origin_row(origin)
            stopped = loop.start(state, start_seconds(time_model, model), begins)
        else:
            state, stopped = saved, loop.resume()
        if lanes == "auto":  # a resumed run keeps its lanes, also on other devices
            session.request_lanes(record.rows[-1].get("lanes", lanes))
        while state.round_index < rounds and not stopped:
            state, stopped = loop.round(state)
        phases.send("finished", state.round_index, stopped=stopped)
    server, client_state = whole((state.server, session.trimmed(state).client_state))
    return Run(
        model,
        algorithm,
        global_leaves(model, algorithm, server),
        client_state,
        server,
        record.rows,
        None if out is None else Path(out),
        client_ranks,
        text_length,
        session.setup.task,
    )


def check_recorded(*arguments: Any, **options: Any) -> None:
    """Raises InputError if the run in ``out`` is not that of these arguments of :func:`simulate`.

    Nothing is compiled or written.
    """
    given = inspect.signature(simulate).bind(*arguments, **options)
    given.apply_defaults()
    directory = Path(given.arguments["out"])
    recorded, config = read_config(directory), given.arguments["config"] or {}
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
