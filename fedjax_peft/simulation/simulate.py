"""``simulate``: rounds of a federated algorithm, with evaluation, records and resume."""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_peft import tasks, tree
from fedjax_peft.data.dataset import Clients, Dataset
from fedjax_peft.engine.compilation import use_compilation_cache
from fedjax_peft.engine.lanes import Lanes
from fedjax_peft.engine.lengths import Lengths
from fedjax_peft.engine.plan import Plan
from fedjax_peft.engine.program import Setup
from fedjax_peft.engine.schedule import Sampling, Schedule
from fedjax_peft.engine.session import Session
from fedjax_peft.engine.sharding import lane_mesh, replicate
from fedjax_peft.engine.state import RoundInfo
from fedjax_peft.errors import InputError
from fedjax_peft.measures.diagnosis import adapters_cka, diagnosis
from fedjax_peft.models.base import Model
from fedjax_peft.peft.ranks import rank_masks
from fedjax_peft.roles import assign_roles
from fedjax_peft.rows import Row, finite_or_none, seen_clients
from fedjax_peft.simulation.checkpoint import saved_parts, with_saved_parts
from fedjax_peft.simulation.checks import (
    Diagnostic,
    check_data,
    check_faults,
    check_memory,
    check_method,
    check_objects,
    check_settings,
    check_transforms,
    clients_a_round,
)
from fedjax_peft.simulation.cost import Costs, Ledger, TimeModel, preload_bytes, start_seconds
from fedjax_peft.simulation.estimate import estimate
from fedjax_peft.simulation.evaluation import evaluate, evaluations, worst
from fedjax_peft.simulation.progress import Phase, Phases
from fedjax_peft.simulation.recipe import save_recipe
from fedjax_peft.simulation.record import Record, device_name
from fedjax_peft.simulation.run import Run, global_leaves, learned_leaves
from fedjax_peft.simulation.stopping import Stop
from fedjax_peft.simulation.tuning import tuned, tuned_figures
from fedjax_peft.typing import Algorithm, Task, Transform

__all__ = ["simulate"]


def simulate(
    model: Model,
    algorithm: Algorithm,
    clients: Clients,
    *,
    test: Dataset | None = None,
    rounds: int,
    clients_per_round: int | None = None,
    sampling: Sampling = "uniform",
    batch_size: int = 16,
    epochs: int = 1,
    local_steps: int | None = None,
    task: Task | None = None,
    seed: int = 0,
    lanes: Lanes = "auto",
    devices: int | None = None,
    eval_every: int = 1,
    eval_batch_size: int = 64,
    length_buckets: int = 4,
    test_clients: int = 10,
    client_test: Clients | None = None,
    client_ranks: Sequence[int] | None = None,
    transforms: Transform | Sequence[Transform] | None = None,
    diagnostics: Sequence[Diagnostic] = (),
    nonfinite: Literal["drop", "raise"] = "drop",
    failure_rate: float = 0.0,
    deadline: float | None = None,
    time_model: TimeModel | None = None,
    out: str | Path | None = None,
    checkpoint_every: int = 10,
    resume: bool = False,
    config: Mapping[str, Any] | None = None,
    on_round: Callable[[Row], bool | None] | None = None,
    stop: Stop | None = None,
    on_phase: Callable[[Phase], None] | None = None,
    progress: bool | Literal["auto"] = "auto",
) -> Run:
    """Runs a federated algorithm and returns what it learned.

    Every random number follows from ``seed`` and names (see ``fedjax_peft.random``): the same call
    gives the same metrics, for any number of lanes (to float32 rounding) and after a resume.

    Args:
      model: from ``load_model`` and ``attach``; its trainable tree is where everybody starts.
      algorithm: such as ``algorithms.fedavg(optax.adamw(5e-4))``.
      clients: the training examples of every client.
      test: global test set; with private leaves, the mean over ``test_clients`` clients' models.
      rounds: communication rounds.
      clients_per_round: how many are drawn; by default all clients take part in every round.
      sampling: how: ``uniform`` without replacement, by ``size`` (chances in proportion to the
        numbers of examples), ``poisson`` (each client by itself, so many on average; a round may
        have nobody), ``round_robin`` (the next ones of a random order), or ``all``.
      batch_size: examples in a local step.
      epochs: local passes over a client's examples in a round.
      local_steps: a fixed number of local steps instead of ``epochs``.
      task: loss and metrics; by default what the data are for (``Dataset.task``).
      seed: of everything random but the model's own initial values.
      lanes: clients that run side by side on the device; ``auto`` chooses for speed.
      devices: how many devices share the lanes; by default all accelerators.
      eval_every: rounds between evaluations; the last round is always evaluated.
      eval_batch_size: examples in an evaluation step.
      length_buckets: of texts: for how many padded lengths a step is compiled, each step then
        running at the shortest that its examples fit in. They are chosen from the data, and fewer
        where more would not pay. 1 pads everything to the longest text, 0 leaves the padding of
        the data. Results differ by float32 rounding only.
      test_clients: clients whose personal models the global test set is put to.
      client_test: examples of every client to evaluate its model on (mean, deviation, worst).
      client_ranks: the LoRA rank of every client (a shorter list is repeated), at most the
        adapters': it trains and sends only its first so many directions, the others add nothing
        for it and stay as the server sent them.
      transforms: of the clients' uploads, such as ``fp.transforms.clip_norm(1.0)``: one, or several
        in the order in which a client applies them.
      diagnostics: what else to measure in every round, see ``Diagnostic``; each costs time.
      nonfinite: what to do with an upload that is not finite: leave it out and name its client in
        the metrics, or raise.
      failure_rate: chance of a sampled client to drop out of the round: it has fetched what the
        server broadcasts, but sends nothing, and what it keeps stays as it was.
      deadline: simulated seconds after which the server takes no more uploads. Who is late by the
        time model counts as one that failed; the others are aggregated.
      time_model: simulated seconds; by default ``TimeModel()``.
      out: a run directory to write records, checkpoints and TensorBoard files to.
      checkpoint_every: rounds between checkpoints; the last round always has one.
      resume: continue the run in ``out`` from its last checkpoint, if it has one.
      config: recorded as the run's ``config.toml``.
      on_round: called with every row of metrics as it is made (row 0 is before training). If it
        returns True the run ends after this round: its row gains the final evaluation and the
        field ``stopped``, and a checkpoint is written. A resume goes on from there.
      stop: ends the run in the same way, such as ``early_stop(target=0.8, patience=5)``: a function
        of all rows so far that returns whether, or a sentence why, to stop. It reads nothing but
        the rows, so a resumed run stops where one that was not interrupted does.
      on_phase: called with a ``fedjax_peft.simulation.progress.Phase`` at the beginning of whatever
        takes time: compiling, training a round, evaluating a part of the examples, saving.
      progress: show these phases on stderr: ``"auto"`` in a terminal or notebook only, True
        everywhere, False nowhere.

    Raises:
      InputError: settings that contradict each other or the data, an ``out`` that holds a run (and
        not ``resume``), or with ``nonfinite="raise"`` an upload that is not finite.
    """
    use_compilation_cache()
    check_objects(model, algorithm, clients, test, client_test, task, stop)
    counts = {
        "rounds": rounds,
        "clients_per_round": 1 if clients_per_round is None else clients_per_round,
        "batch_size": batch_size,
        "epochs": epochs,
        "local_steps": 1 if local_steps is None else local_steps,
        "lanes": 1 if lanes == "auto" else lanes,
        "eval_every": eval_every,
        "eval_batch_size": eval_batch_size,
        "test_clients": test_clients,
        "checkpoint_every": checkpoint_every,
    }
    from_zero = {"seed": seed, "length_buckets": length_buckets}
    check_settings(counts, from_zero, nonfinite, diagnostics)
    check_data(model, clients, test, client_test, task)
    check_method(model, algorithm, len(clients), client_ranks, diagnostics)
    transform = check_transforms(transforms, algorithm)
    names = assign_roles(model.kinds, algorithm.roles)
    time_model = time_model or TimeModel()
    check_faults(failure_rate, deadline, time_model)
    per_round = clients_a_round(clients, clients_per_round, sampling)
    work = (clients.indices, per_round, batch_size, epochs, local_steps, seed)
    tokens = Lengths.of(clients.data.columns, length_buckets)
    schedule = Schedule(*work, sampling, failure_rate, tokens=tokens)
    check_memory(
        model,
        clients.data,
        [schedule.steps(client) for client in range(len(clients))],
        per_round,
        batch_size=batch_size,
        local_steps=local_steps,
        epochs=epochs,
    )
    mesh = lane_mesh(devices)
    task = task or tasks.for_data(clients.data)
    rank_mask = {} if client_ranks is None else rank_masks(model, client_ranks, len(clients))
    frozen, fixed, columns, rank_mask = replicate(
        (
            model.compute_frozen(),
            tree.select(model.trainable, names["fixed"]),
            dict(clients.data.columns),
            rank_mask,
        ),
        mesh,
    )
    setup = Setup(
        algorithm,
        model.apply,
        task,
        frozen,
        fixed,
        len(clients),
        mesh,
        rank_mask,
        diagnosis(diagnostics),
        adapters_cka if "cka" in diagnostics else None,
        int(np.count_nonzero(clients.sizes)),
        model.dtype,
        per_round / len(clients),
        transform,
    )
    leaves = (
        tree.select(model.trainable, names["shared"]),
        tree.select(model.trainable, names["private"]),
    )
    session = Session(setup, leaves, schedule, columns, lanes=lanes, rounds=rounds)
    state = session.init(seed)
    tested = evaluations(
        setup,
        clients.data,
        columns,
        test=test,
        client_test=client_test,
        private=bool(names["private"]),
        test_clients=test_clients,
        batch_size=eval_batch_size,
        length_buckets=length_buckets,
        seed=seed,
    )
    metadata = config or {
        "algorithm": algorithm.name,
        "rounds": rounds,
        "clients": len(clients),
        "clients_per_round": per_round,
        "sampling": sampling,
        "batch_size": batch_size,
        "epochs": epochs,
        "local_steps": local_steps,
        "failure_rate": failure_rate,
        "deadline": deadline,
        "time": time_model._asdict(),
        "seed": seed,
    }
    if transform is not None and config is None:
        metadata = {**metadata, "transforms": transform.name}
    ledger = Ledger(model, algorithm, state.server, len(clients), client_ranks, transform)
    slowness, preload = time_model.slowness(len(clients), seed), preload_bytes(time_model, model)
    costs = Costs(ledger, time_model, slowness, deadline, preload)

    def skipped_leaves(round_index: int) -> list[str]:
        """Returns the leaves that clients do not send in a round."""
        return _skipped_leaves(
            algorithm.sent_leaves(algorithm.server.broadcast(state.server), jnp.int32(round_index))
        )

    each = "clients" in diagnostics
    lower = (*task.lower_is_better, *algorithm.lower_is_better, "update_norm")
    with (
        Phases(rounds, on_phase, progress) as phases,
        Record.open(out, resume, metadata, phases.apart(on_round)) as record,
    ):
        if record.out is not None and config is None:
            save_recipe(record.out, model, _text_length(clients.data))
        saved = None
        if record.checkpoints:
            last = record.rows[-1]["round"] if record.rows else -1
            saved = record.checkpoints.restore(saved_parts(state), last)
        record.rewind(saved[0] if saved else None)
        phases.send(
            "starting",
            saved[0] if saved else 0,
            algorithm=algorithm.name,
            clients=len(clients),
            clients_per_round=per_round,
            parameters=model.counts(),
            train_examples=int(clients.sizes.sum()),
            test_examples=0 if test is None else len(test),
            evaluations={name: one.evaluator.examples for name, one in tested.items()},
            eval_every=eval_every,
            estimate=estimate(
                schedule.for_rounds(rounds),
                costs,
                skipped_leaves(1),
                frozen=frozen,
                server=state.server,
                client_state=state.client_state,
                columns=columns,
            ),
            device=device_name(),
            out=record.out,
            resumed_from=saved[0] if saved else None,
        )
        if saved is None:
            done = 0
            began = time.perf_counter()
            row = {"round": 0, **evaluate(tested, state, each=each, phases=phases)}
            row |= {"bytes_up": 0, "bytes_down": 0}
            row["simulated_seconds"] = start_seconds(time_model, model)
            row["parameters"] = model.counts()
            row["roles"] = {
                role: tree.size(tree.select(model.trainable, leaves))
                for role, leaves in names.items()
            }
            row["time"] = {"eval_s": time.perf_counter() - began}
            stopped = _asked(record.add(row))
            if stopped:
                record.amend({**row, "stopped": stopped})
        else:
            done, parts = saved
            state = with_saved_parts(state, parts)._replace(round_index=done)
            stopped = _reason(stop, record.rows)
        if lanes == "auto":  # it may choose otherwise on another day
            session.set_lanes(record.rows[-1].get("lanes", lanes))
        schedule = session.schedule(seed)
        for earlier in record.rows:
            costs.record(earlier)

        def prepare(round_index: int) -> tuple[Plan, list[int]]:
            """Returns a round's plan, and the clients that it is without because they are late."""
            late: list[int] = []
            if deadline is not None:
                steps = {c: n for c in schedule.present(round_index) if (n := schedule.steps(c))}
                late = costs.late(steps, skipped_leaves(round_index))
            return session.plan(round_index, seed, late), late

        def measure(row: Row, round_index: int, *, last: bool) -> Row:
            """Returns the scores that a round's row lacks, with the seconds (``time``) it took."""
            scores: Row = {}
            spent = dict(row["time"])
            if "eval_s" not in spent and (last or round_index % eval_every == 0):
                began = time.perf_counter()
                seen = seen_clients([*record.rows[:round_index], row])
                scores |= evaluate(tested, state, each=each, seen=seen, phases=phases)
                spent["eval_s"] = time.perf_counter() - began
            if last and algorithm.tuning is not None:
                began = time.perf_counter()
                own = tuned(setup, columns, schedule, session.lanes(seed), state)
                scores |= tuned_figures(evaluate(tested, own, each=False, phases=phases))
                spent["tune_s"] = time.perf_counter() - began
            return {**scores, "time": spent}

        def keep(round_index: int) -> None:
            """Writes a checkpoint, where there is a run directory."""
            if record.checkpoints:
                phases.send("saving")
                record.save_params(learned_leaves(model, algorithm, state.server), model.labels)
                # After its row: a resumed run makes the rows after its checkpoint again.
                record.checkpoints.save(round_index, saved_parts(state))

        round_index = done
        if stopped and saved is None:
            keep(round_index)
        ahead = prepare(min(done + 1, rounds))
        while round_index < rounds and not stopped:
            round_index += 1
            plan, late = ahead
            if not session.known(state, plan):
                phases.send("compiling", round_index, program="round")
            phases.send("training", round_index)
            began, compiled = time.perf_counter(), session.compile_seconds
            state, info = session.step(state, plan)
            if deadline is None:
                # The next plan is made while the device computes. Who is late in the next round
                # depends on what this one changes.
                ahead = prepare(min(round_index + 1, rounds))
            row = _row(info, each=each, lower=lower)
            share = schedule.padding_share(plan) if plan.useful else None
            row |= {} if share is None else {"padding_share": share}
            row |= {"failed": schedule.failed(round_index)} if failure_rate else {}
            row |= {"late": late} if deadline is not None else {}
            compiled = session.compile_seconds - compiled
            spent = {"train_s": time.perf_counter() - began - compiled}
            spent |= {"compile_s": compiled} if compiled else {}
            if nonfinite == "raise" and row["dropped"]:
                raise InputError(
                    f"In round {round_index} the uploads of the clients {row['dropped']} were not"
                    " finite."
                )
            row |= costs.charge(row, plan.client_steps, spent["train_s"])
            if deadline is not None:
                ahead = prepare(min(round_index + 1, rounds))
            row["time"] = spent
            row |= measure(row, round_index, last=round_index == rounds)
            stopped = _reason(stop, [*record.rows, row]) if round_index < rounds else None
            if stopped:
                row |= {**measure(row, round_index, last=True), "stopped": stopped}
            phases.took(spent["train_s"] + row["time"].get("eval_s", 0.0))
            asked = _asked(record.add(row))
            if asked and not stopped and round_index < rounds:
                stopped = asked
                record.amend({**row, **measure(row, round_index, last=True), "stopped": stopped})
            if stopped or round_index % checkpoint_every == 0 or round_index == rounds:
                keep(round_index)
        phases.send("finished", round_index, stopped=stopped)
    params = global_leaves(model, algorithm, state.server)
    return Run(
        model,
        algorithm,
        params,
        state.client_state,
        state.server,
        record.rows,
        record.out,
        client_ranks,
        _text_length(clients.data),
    )


def _reason(stop: Stop | None, rows: Sequence[Row]) -> str | None:
    """Returns why the rule ends the run after these rows, None if it does not."""
    answer = None if stop is None else stop(rows)
    if not answer:
        return None
    return answer if isinstance(answer, str) else "the stop rule was met"


def _asked(answer: Any) -> str | None:
    """Returns why ``on_round`` ends the run, None if it does not."""
    asked = isinstance(answer, bool | np.bool_) and bool(answer)
    return "on_round returned True" if asked else None


def _text_length(data: Dataset) -> int | None:
    """Returns the tokens that texts are padded to, None for other data."""
    ids = data.columns.get("input_ids")
    return None if ids is None else int(ids.shape[1])


def _row(info: RoundInfo, *, each: bool, lower: Sequence[str]) -> Row:
    """Returns the metrics of a round, with ``each`` those of every client; waits for the device.

    ``lower`` names the metrics of which less is better.
    """
    plan = info.plan
    row: Row = {"round": info.round_index}
    if not plan.useful:  # nobody takes part
        return row | {"clients": [], "dropped": [], "steps": 0, "lanes": plan.lanes}
    sums, finite, norms, aggregation = jax.device_get(
        (info.sums, info.finite, info.norms, info.aggregation)
    )
    for name, (total, count) in sums.items():
        good = finite & (count > 0)
        row[f"train_{name}"] = (
            finite_or_none(total[good].sum() / count[good].sum()) if good.any() else None
        )
    took_part = plan.client >= 0
    row["clients"] = plan.client[took_part].tolist()
    row["dropped"] = plan.client[took_part & ~finite].tolist()
    row["steps"] = plan.useful
    row["lanes"] = plan.lanes
    row["slot_utilisation"] = plan.slot_utilisation
    row["padded_utilisation"] = plan.padded_utilisation
    good = took_part & finite
    row["update_norm"] = finite_or_none(norms[good].mean()) if good.any() else None
    if each:
        per_client = {n: (s / np.maximum(c, 1))[took_part] for n, (s, c) in sums.items()}
        per_client["update_norm"] = norms[took_part]
        row["per_client"] = {n: [finite_or_none(x) for x in v] for n, v in per_client.items()}
        for name, values in per_client.items():
            received = values[finite[took_part]]
            if len(received):
                row[f"train_{name}_std"] = finite_or_none(received.std())
                row[f"train_{name}_worst"] = finite_or_none(worst(received, name, lower))
    layers: dict[str, dict[str, float | None]] = {}
    for name, value in aggregation.items():
        kind, _, path = name.partition("/")
        if path:
            layers.setdefault(kind, {})[path] = finite_or_none(value)
        else:
            row[name] = finite_or_none(value)
    skipped_leaves = _skipped_leaves(info.sent_leaves)
    return (
        row
        | ({"layers": layers} if layers else {})
        | ({"skipped_leaves": skipped_leaves} if skipped_leaves else {})
    )


def _skipped_leaves(sent_leaves: Mapping[str, jax.Array]) -> list[str]:
    """Returns the leaves that are not sent in a round."""
    return sorted(name for name, moves in jax.device_get(sent_leaves).items() if not moves)
