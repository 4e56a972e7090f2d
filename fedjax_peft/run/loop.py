"""``simulate``: rounds of a federated algorithm, with evaluation, records and resume."""

import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_peft import tasks, tree
from fedjax_peft.data.dataset import Clients, Dataset
from fedjax_peft.engine.lanes import best_lanes, cpu_lanes
from fedjax_peft.engine.plan import Plan
from fedjax_peft.engine.program import Evaluator, Program, Setup
from fedjax_peft.engine.round import RoundResult
from fedjax_peft.engine.schedule import Schedule
from fedjax_peft.engine.sharding import lane_mesh, replicate
from fedjax_peft.errors import InputError
from fedjax_peft.models.base import Model
from fedjax_peft.peft.ranks import rank_masks, spread
from fedjax_peft.random import host_rng, stream
from fedjax_peft.run.cost import TimeModel, Traffic, traffic
from fedjax_peft.run.history import Row
from fedjax_peft.run.record import Record
from fedjax_peft.typing import Algorithm, Params, PyTree, Task

__all__ = ["Run", "choose_lanes", "simulate"]

Lanes = int | Literal["auto"]


@dataclass(frozen=True, repr=False)
class Run:
    """The result of :func:`simulate`: what was learned, and one row of metrics a round."""

    model: Model
    algorithm: Algorithm
    params: Params
    """All trainable leaves of the global model (private ones at their initial values)."""
    private: PyTree
    """What the clients keep, such as their private leaves, ``[clients, ...]``."""
    server: PyTree
    """The server's state."""
    metrics: list[Row]
    out: Path | None = None
    client_ranks: Sequence[int] | None = None
    """As given to :func:`simulate`."""

    @property
    def trained(self) -> Model:
        """The global model as it is now, to go on from: its leaves start where this run ended."""
        frozen = self.algorithm.server.shifted(self.server, self.model.frozen)
        return self.model.replace(frozen=frozen, trainable=self.params)

    def client_params(self, client: int) -> Params:
        """Returns the trainable leaves of one client's model."""
        from fedjax_peft.run.predict import client_leaves

        one = tree.take(self.private, client)
        return client_leaves(
            self.algorithm, self.params, self.server, one, self.client_ranks, client
        )

    def plot(self, x: Literal["round", "bytes", "simulated_seconds"] = "round") -> Any:
        """Returns a matplotlib figure of test accuracy against ``x``."""
        from fedjax_peft.run.plots import curves

        return curves({self.algorithm.name: self.metrics}, x)

    def export(
        self,
        directory: str | Path,
        *,
        format: Literal["peft", "adapterhub", "merged"] = "peft",
        client: int | None = None,
    ) -> Path:
        """Writes the global model's adapter and head; see :func:`fedjax_peft.peft.export.export`.

        Args:
          directory: new, empty, or with an earlier export.
          format: ``peft`` (Hugging Face PEFT), ``adapterhub``, or ``merged``: a plain checkpoint.
          client: write this client's own model instead, of a run that keeps something private.

        Raises:
          InputError: a method that the format cannot hold, no such client, or nothing private.
        """
        from fedjax_peft.peft.export import export
        from fedjax_peft.run.predict import check_clients, check_format

        check_format(format, moved=self.algorithm.server.shift is not None)
        params = self.params
        if client is not None:
            check_clients([client], self.private)
            params = self.client_params(client)
        model = self.model.replace(frozen=self.trained.frozen)
        return export(model, params, directory, format=format)

    def predict(self, texts: Sequence[str], pairs: Sequence[str] | None = None) -> np.ndarray:
        """Returns the global model's logits ``[texts, classes]``."""
        from fedjax_peft.run.predict import predict

        return predict(self.trained, self.params, texts, pairs)

    def __repr__(self) -> str:
        last = next((r for r in reversed(self.metrics) if "test_accuracy" in r), None)
        result = f", test accuracy {last['test_accuracy']:.4f}" if last else ""
        return f"Run({self.algorithm.name}: {max(len(self.metrics) - 1, 0)} rounds{result})"


def simulate(
    model: Model,
    algorithm: Algorithm,
    clients: Clients,
    *,
    test: Dataset | None = None,
    rounds: int,
    clients_per_round: int,
    batch_size: int = 16,
    epochs: int = 1,
    local_steps: int | None = None,
    task: Task | None = None,
    seed: int = 0,
    lanes: Lanes = "auto",
    devices: int | None = None,
    eval_every: int = 1,
    eval_batch_size: int = 64,
    test_clients: int = 10,
    client_test: Clients | None = None,
    client_ranks: Sequence[int] | None = None,
    nonfinite: Literal["drop", "raise"] = "drop",
    time_model: TimeModel | None = None,
    out: str | Path | None = None,
    checkpoint_every: int = 10,
    resume: bool = False,
    config: Mapping[str, Any] | None = None,
    on_round: Callable[[Row], None] | None = None,
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
      clients_per_round: drawn uniformly without replacement.
      batch_size: examples in a local step.
      epochs: local passes over a client's examples in a round.
      local_steps: a fixed number of local steps instead of ``epochs``.
      task: loss and metrics; by default sequence classification.
      seed: of everything random but the model's own initial values.
      lanes: clients that run side by side on the device; ``auto`` chooses for speed.
      devices: how many devices share the lanes; by default all accelerators.
      eval_every: rounds between evaluations; the last round is always evaluated.
      eval_batch_size: examples in an evaluation step.
      test_clients: clients whose personal models the global test set is put to.
      client_test: examples of every client to evaluate its model on (mean, deviation, worst).
      client_ranks: the LoRA rank of every client (a shorter list is repeated), at most the
        adapters': it trains and sends only its first so many directions, the others add nothing
        for it and stay as the server sent them.
      nonfinite: what to do with an upload that is not finite: leave it out and name its client in
        the metrics, or raise.
      time_model: simulated seconds; by default ``TimeModel()``.
      out: a run directory to write records, checkpoints and TensorBoard files to.
      checkpoint_every: rounds between checkpoints; the last round always has one.
      resume: continue the run in ``out`` from its last checkpoint, if it has one.
      config: recorded as the run's ``config.toml``.
      on_round: called with every row of metrics as it is made (row 0 is before training).

    Raises:
      InputError: settings that contradict each other or the data, an ``out`` that holds a run (and
        not ``resume``), or with ``nonfinite="raise"`` an upload that is not finite.
    """
    counts = {
        "rounds": rounds,
        "clients_per_round": clients_per_round,
        "batch_size": batch_size,
        "epochs": epochs,
        "local_steps": 1 if local_steps is None else local_steps,
        "lanes": 1 if lanes == "auto" else lanes,
        "eval_every": eval_every,
        "eval_batch_size": eval_batch_size,
        "test_clients": test_clients,
        "checkpoint_every": checkpoint_every,
    }
    _check(clients, counts, seed, nonfinite)
    _check_data(model, clients, test, client_test)
    if (
        model.method is not None
        and model.method.start_shapes_frozen
        and algorithm.aggregator.name == "fra"
    ):
        warnings.warn(
            "FRA truncates the whole product of the factors, and after an SVD start most of that"
            " is the pretrained weight's principal part: small updates outside of its directions"
            " are lost. Watch aggregation_error, or aggregate by the mean.",
            stacklevel=2,
        )
    algorithm.check(model.kinds, len(clients))
    names = tree.assign_roles(model.kinds, algorithm.roles)
    schedule = Schedule(clients.indices, clients_per_round, batch_size, epochs, local_steps, seed)
    mesh = lane_mesh(devices)
    _check_lanes(lanes, mesh)

    def start() -> tuple[PyTree, PyTree]:
        shared, private = (tree.select(model.trainable, names[r]) for r in ("shared", "private"))
        # Copies: the round program donates its state, and the model's arrays must survive.
        server = jax.tree.map(jnp.copy, algorithm.server.init(shared))
        return replicate(
            (server, tree.broadcast(algorithm.keep(shared, private), len(clients))), mesh
        )

    server, store = start()
    # What the aggregator cannot combine is said now, before there is a run directory.
    jax.eval_shape(lambda s: algorithm.aggregator.zero(algorithm.server.unchanged(s), 1), server)
    if client_ranks is not None and algorithm.aggregator.unowned == "refused":
        raise InputError(
            f"The aggregator {algorithm.aggregator.name!r} of {algorithm.name!r} cannot combine"
            " clients of different LoRA ranks: leave client_ranks out, or use one that can, such"
            " as flora, flexlora or hetlora."
        )
    frozen, fixed, columns = replicate(
        (
            model.compute_frozen(),
            tree.select(model.trainable, names["fixed"]),
            dict(clients.data.columns),
        ),
        mesh,
    )
    task = task or tasks.classification()
    key = stream(seed, "clients")
    owned = {} if client_ranks is None else rank_masks(model, client_ranks, len(clients))
    owned = replicate(owned, mesh)
    setup = Setup(algorithm, model.apply, task, frozen, fixed, key, len(clients), mesh, owned)

    def program() -> Program:
        return Program(setup, columns)

    personal = algorithm.personal or bool(names["private"])
    everyone = setup._replace(owned=None)  # the global model is nobody's own
    evaluators: dict[str, Evaluator] = {}

    def evaluate_on(name: str, data: Dataset, members: list, *, personal: bool) -> None:
        held = columns if data is clients.data else replicate(dict(data.columns), mesh)
        evaluators[name] = Evaluator(
            setup if personal else everyone,
            held,
            members=members,
            batch_size=eval_batch_size,
            personal=personal,
        )

    if test is not None:
        rows = np.arange(len(test), dtype=np.int32)
        if personal:
            order = host_rng(seed, "test clients").permutation(len(clients))
            chosen = sorted(order[:test_clients].tolist())
            evaluate_on("test", test, [(c, rows) for c in chosen], personal=True)
        if not names["private"]:
            # One model for all, here in the guise of client 0: the devices share the examples.
            parts = np.array_split(rows, 1 if mesh is None else mesh.size)
            name = "global_test" if personal else "test"
            evaluate_on(name, test, [(0, part) for part in parts], personal=False)
    if client_test is not None:
        owners = [(c, rows) for c, rows in enumerate(client_test.indices) if len(rows)]
        evaluate_on("client", client_test.data, owners, personal=True)

    about = config or {
        "algorithm": algorithm.name,
        "rounds": rounds,
        "clients": len(clients),
        "clients_per_round": clients_per_round,
        "batch_size": batch_size,
        "epochs": epochs,
        "local_steps": local_steps,
        "seed": seed,
    }
    with Record.open(out, resume, about, on_round) as record:
        saved = None
        if record.checkpoints:
            last = record.rows[-1]["round"] if record.rows else -1
            saved = record.checkpoints.restore((server, store), last)
        record.rewind(saved[0] if saved else None)
        if saved is None:
            done = 0
            began = time.perf_counter()
            row = {"round": 0, **_evaluate(evaluators, server, store)}
            row |= {"bytes_up": 0, "bytes_down": 0, "simulated_seconds": 0.0}
            row["parameters"] = model.counts()
            record.add({**row, "time": {"eval_s": time.perf_counter() - began}})
        else:
            done, (server, store) = saved
        if lanes == "auto":  # it may choose otherwise on another day
            lanes = record.rows[-1].get("lanes", lanes)
        weights = {**model.frozen, **model.trainable}
        lanes = choose_lanes(lanes, schedule, rounds, start, program, mesh, weights)
        time_steps = schedule.time_steps(rounds, lanes)
        run_round = program()
        ranks = spread(client_ranks or [None], len(clients))
        by_rank = {rank: traffic(model, names, rank) for rank in set(ranks)}
        costs = [by_rank[rank] for rank in ranks]
        seen = {c for number in range(1, done + 1) for c in schedule.members(number)}
        plan = schedule.plan(min(done + 1, rounds), lanes, time_steps)
        for number in range(done + 1, rounds + 1):
            began = time.perf_counter()
            result = run_round(server, store, plan, number)
            # The next plan is made while the device computes.
            ahead = schedule.plan(min(number + 1, rounds), lanes, time_steps)
            row = _row(number, plan, result)
            spent = {"train_s": time.perf_counter() - began}
            if nonfinite == "raise" and row["dropped"]:
                raise InputError(
                    f"In round {number} the uploads of the clients {row['dropped']} were not"
                    " finite."
                )
            server, store = result.server, result.private
            row |= _cost(number, plan, costs, seen, time_model or TimeModel())
            if number % eval_every == 0 or number == rounds:
                began = time.perf_counter()
                row |= _evaluate(evaluators, server, store)
                spent["eval_s"] = time.perf_counter() - began
            if number == done + 1:
                spent["compile_s"] = run_round.compile_seconds
                spent["train_s"] -= run_round.compile_seconds
            record.add({**row, "time": spent})
            if record.checkpoints and (number % checkpoint_every == 0 or number == rounds):
                record.save_params(_learned(model, algorithm, server), model.labels)
                # After its row: a resumed run makes the rows after its checkpoint again.
                record.checkpoints.save(number, (server, store))
            plan = ahead
    params = _global(model, algorithm, server)
    return Run(model, algorithm, params, store, server, record.rows, record.out, client_ranks)


def _global(model: Model, algorithm: Algorithm, server: PyTree) -> Params:
    return {**model.trainable, **algorithm.server.model(server)}


def _learned(model: Model, algorithm: Algorithm, server: PyTree) -> Params:
    """Returns the global leaves, and those of the frozen tree that the server has moved."""
    moved = {} if algorithm.server.shift is None else algorithm.server.shift(server)
    frozen = algorithm.server.shifted(server, tree.select(model.frozen, moved))
    return {**_global(model, algorithm, server), **frozen}


def _evaluate(evaluators: Mapping[str, Evaluator], server: PyTree, store: PyTree) -> Row:
    """Returns the metrics of the global test set (joint) and of the clients' own (spread)."""
    row: Row = {}
    for name, evaluator in evaluators.items():
        for metric, (total, count) in evaluator(server, store).items():
            if name != "client":
                row[f"{name}_{metric}"] = _number(total.sum() / count.sum())
                continue
            values = total / count
            worst = values.max() if metric == "loss" else values.min()
            row[f"client_{metric}_mean"] = _number(values.mean())
            row[f"client_{metric}_std"] = _number(values.std())
            row[f"client_{metric}_worst"] = _number(worst)
    return row


def _row(number: int, plan: Plan, result: RoundResult) -> Row:
    """Returns the metrics of a round; waits for the device."""
    sums, finite, aggregation = jax.device_get((result.sums, result.finite, result.aggregation))
    row: Row = {"round": number}
    for name, (total, count) in sums.items():
        good = finite & (count > 0)
        row[f"train_{name}"] = (
            _number(total[good].sum() / count[good].sum()) if good.any() else None
        )
    took_part = plan.client >= 0
    row["clients"] = plan.client[took_part].tolist()
    row["dropped"] = plan.client[took_part & ~finite].tolist()
    row["steps"] = plan.useful
    row["lanes"] = plan.lanes
    row["slot_utilisation"] = plan.slot_utilisation
    row["padded_utilisation"] = plan.padded_utilisation
    layers: dict[str, dict[str, float | None]] = {}
    for name, value in aggregation.items():
        kind, _, path = name.partition("/")
        if path:
            layers.setdefault(kind, {})[path] = _number(value)
        else:
            row[name] = _number(value)
    return row | ({"layers": layers} if layers else {})


def _cost(
    number: int, plan: Plan, costs: Sequence[Traffic], seen: set[int], model: TimeModel
) -> Row:
    """Returns bytes and simulated seconds of a round; adds its clients to ``seen``."""
    up = down = 0
    slowest = 0.0
    for client, steps in zip(plan.client.tolist(), plan.length.tolist(), strict=True):
        if client < 0:
            continue
        cost = costs[client]
        extra = cost.first if number > 1 and client not in seen else 0
        up, down = up + cost.up, down + cost.down + extra
        slowest = max(slowest, model.round_seconds(steps, cost.up, cost.down + extra))
        seen.add(client)
    return {"bytes_up": up, "bytes_down": down, "simulated_seconds": slowest}


def _check_lanes(lanes: Lanes, mesh: Any) -> None:
    if mesh is not None and lanes != "auto" and lanes % mesh.size:
        raise InputError(f"lanes = {lanes} is not a multiple of {mesh.size} devices.")


def choose_lanes(
    lanes: Lanes,
    schedule: Schedule,
    rounds: int,
    start: Callable[[], tuple[PyTree, PyTree]],
    program: Callable[[], Program],
    mesh: Any,
    weights: Params,
) -> int:
    """Returns the number of lanes, a multiple of the devices; ``weights`` are all of the model."""
    devices = 1 if mesh is None else mesh.size
    most = -(-schedule.per_round // devices) * devices
    if lanes != "auto":
        _check_lanes(lanes, mesh)
        return min(lanes, most)
    device = jax.devices()[0]
    if device.platform == "cpu":
        kernels = sum(x.size for name, x in weights.items() if name.endswith("kernel"))
        return -(-cpu_lanes(kernels, schedule.per_round) // devices) * devices
    limit = int(0.9 * (device.memory_stats() or {}).get("bytes_limit", 16 << 30))

    def measure(lanes: int) -> tuple[float, int]:
        plan = schedule.plan(1, lanes, schedule.time_steps(rounds, lanes))
        plan = plan._replace(steps=np.minimum(plan.steps, np.int32(4)))
        live = int((plan.slot[: int(plan.steps)] < schedule.per_round).sum())
        run = program()
        run.compile(*start(), plan)
        if run.peak_bytes > limit:
            return 0.0, run.peak_bytes
        seconds = []
        for _ in range(3):
            server, store = jax.block_until_ready(start())
            began = time.perf_counter()
            jax.block_until_ready(run(server, store, plan, 1))
            seconds.append(time.perf_counter() - began)
        return live / min(seconds), run.peak_bytes  # the first is a warm-up

    return best_lanes(measure, schedule.per_round, limit, devices)


def _number(value: Any) -> float | None:
    """Returns a float, None (JSON's null) if it is not finite."""
    return float(value) if math.isfinite(value) else None


def _check(clients: Clients, counts: Mapping[str, int], seed: int, nonfinite: str) -> None:
    for name, value in counts.items():
        if not isinstance(value, int) or value < 1:
            raise InputError(f"{name} = {value!r} must be a positive whole number.")
    per_round = counts["clients_per_round"]
    if per_round > len(clients):
        raise InputError(
            f"clients_per_round = {per_round} is more than the {len(clients)} clients there are."
        )
    if not isinstance(seed, int) or seed < 0:
        raise InputError(f"seed = {seed!r} must be a whole number from 0 up.")
    if nonfinite not in ("drop", "raise"):
        raise InputError(f"nonfinite = {nonfinite!r} is neither 'drop' nor 'raise'.")


def _check_data(
    model: Model, clients: Clients, test: Dataset | None, client_test: Clients | None
) -> None:
    if not clients.sizes.any():
        raise InputError("No client has an example to train on.")
    if test is not None and not len(test):
        raise InputError("The test data have no examples.")
    if client_test is not None:
        if len(client_test) != len(clients):
            raise InputError(
                f"client_test is of {len(client_test)} clients, but there are {len(clients)}."
            )
        if not client_test.sizes.any():
            raise InputError("client_test gives no client an example to be tested on.")
    tested = None if client_test is None else client_test.data
    for name, data in {"training": clients.data, "test": test, "client_test": tested}.items():
        if data is None or "labels" not in data.columns or not model.labels:
            continue
        highest = int(data.labels.max(initial=0))
        if highest >= len(model.labels):
            raise InputError(
                f"The {name} data have the label {highest}, but the model's head has"
                f" {len(model.labels)} classes (0 to {len(model.labels) - 1})."
            )
