"""Measures rounds whose clients are on the device, in host memory and on disk; and peak memory.

The model has MiniLM-L6's shape (6 layers, width 384, 12 heads), random weights, LoRA of rank 8 on
query and value, and Ditto: every client keeps a personal copy of the adapters and the head. The
texts are random.

Without ``--only``, sessions of all places run in turns in one process, after rounds that are not
counted. The result is the median time of a round, and its ratio to the device's. With ``--only``,
one ``fp.simulate`` with a run directory runs, and the result is the peak resident memory of the
process, including Python, JAX's compiler and the model. ``--dense`` gives every client a state of
its own before the first round, as if all had trained.

    python experiments/benchmarks/client_store.py
    python experiments/benchmarks/client_store.py --only disk --clients 100000
    python experiments/benchmarks/client_store.py --only disk --clients 20000 --dense
"""

import argparse
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import harness
import numpy as np
import optax
from accelerators import MINILM
from harness import peak

import fedjax_peft as fp
from fedjax_peft.engine.stores.client_store import room_for

PLACES = ("device", "host", "disk")


def main() -> None:
    """Measures what the arguments say; prints the results and one line of JSON."""
    parser = harness.arguments(
        __doc__,
        **{"clients": 2000, "per_round": 10, "rounds": 12, "steps": 2, "batch": 16},
        **{"examples": 8, "length": 64, "rank": 8},
    )
    parser.add_argument("--only", choices=PLACES, help="measure the memory of one place")
    parser.add_argument("--dense", action="store_true", help="all clients have their own state")
    a = parser.parse_args()
    report = turns(a) if a.only is None else memory(a)
    harness.print_json(a, **report)


def parts(a: argparse.Namespace) -> tuple[Any, ...]:
    """Returns the model, the algorithm and the clients."""
    model = fp.random_model(MINILM, head=fp.heads.classification(20))
    model = fp.attach(model, fp.lora(rank=a.rank, targets=["query", "value"]))
    clients = fp.partition.iid(
        harness.random_texts(a.clients * a.examples, a.length), clients=a.clients
    )
    return model, fp.algorithms.ditto(optax.adam(1e-3)), clients


def turns(a: argparse.Namespace) -> dict[str, Any]:
    """Returns the seconds of rounds in each place, measured in turns."""
    given, sessions, states = parts(a), {}, {}
    options = {"clients_per_round": a.per_round, "local_steps": a.steps, "batch_size": a.batch}
    for place in PLACES:
        sessions[place] = fp.session(
            *given, rounds=a.rounds + 2, placement=fp.Placement(client_state=place), **options
        )
        states[place] = sessions[place].init(0)
        if a.dense and place != "device":
            fill(states[place].client_state)

    def round_of(place: str) -> float:
        def step() -> Any:
            states[place], info = sessions[place].step(states[place])
            return info.sums, states[place].server

        return harness.timed(step)

    programs = {place: partial(round_of, place) for place in PLACES}
    seconds = harness.turns(programs, a.rounds, warm=2)  # the first rounds compile
    for place, found in seconds.items():
        ratio = statistics.median(found) / statistics.median(seconds["device"])
        print(
            f"{place:6} median {statistics.median(found):.3f} s, {ratio:.3f} of the device;"
            f" median of paired ratios {harness.ratio(found, seconds['device']):.3f}"
        )
    return {"seconds": seconds, "peak": peak()}


def memory(a: argparse.Namespace) -> dict[str, Any]:
    """Returns the peak memory of a run and the size of its files."""
    model, algorithm, clients = parts(a)
    peaks: dict[str, float] = {"data and model": peak() / 1e9}
    with tempfile.TemporaryDirectory() as directory:
        if a.dense:
            return peaks | dense(a, (model, algorithm, clients))
        began = time.perf_counter()
        run = fp.simulate(
            *(model, algorithm, clients),
            test=clients.data.take(np.arange(64)),
            rounds=a.rounds,
            clients_per_round=a.per_round,
            local_steps=a.steps,
            batch_size=a.batch,
            evaluation=fp.Evaluation(every=4),
            records=fp.Records(
                checkpoint_every=4,
                on_round=lambda row: peaks.update({f"round {row['round']}": peak() / 1e9}),
                progress=False,
            ),
            placement=fp.Placement(client_state=a.only),
            out=Path(directory) / "run",
        )
        spent = time.perf_counter() - began
        files = [f for f in Path(directory).rglob("*") if f.is_file()]
        sizes = {"all": sum(f.stat().st_size for f in files)}
        sizes |= {f.name: f.stat().st_size for f in files if f.name == "records.bin"}
        seconds = [row["time"]["train_s"] for row in run.metrics[1:]]
    for name, size in peaks.items():
        print(f"peak until {name:14} {size:6.2f} GB")
    print(
        f"{a.clients} clients, {a.only}: peak {peak() / 1e9:.2f} GB, files {sizes}, {spent:.0f} s"
    )
    print(f"median round {statistics.median(seconds):.2f} s")
    return {"peaks": peaks, "peak": peak(), "files": sizes, "seconds": seconds}


def dense(a: argparse.Namespace, given: tuple[Any, ...]) -> dict[str, Any]:
    """Returns the peak memory and the seconds of rounds when all clients have trained."""
    options = {"clients_per_round": a.per_round, "local_steps": a.steps, "batch_size": a.batch}
    session = fp.session(
        *given, rounds=a.rounds, placement=fp.Placement(client_state=a.only), **options
    )
    state = session.init(0)
    began = time.perf_counter()
    fill(state.client_state)
    filled = time.perf_counter() - began

    def step() -> Any:
        nonlocal state
        state, info = session.step(state)
        return info.sums, state.server

    seconds = [harness.timed(step) for _ in range(a.rounds)]
    store = state.client_state.store
    size = store.slots * store.packing.nbytes
    print(f"{a.clients} clients that all have trained, {a.only}: {size / 1e9:.1f} GB of records,")
    print(f"written in {filled:.0f} s; median round {statistics.median(seconds[1:]):.2f} s;")
    print(f"peak {peak() / 1e9:.2f} GB")
    return {"peak": peak(), "records": size, "seconds": seconds, "fill_seconds": filled}


def fill(stored: Any) -> None:
    """Gives every client a record of its own, in parts."""
    part = room_for(stored.store.packing.nbytes)
    for first in range(0, len(stored), part):
        clients = np.arange(first, min(first + part, len(stored)))
        stored.put(clients, stored.take(clients))


if __name__ == "__main__":
    main()
