"""Measures what differential privacy costs: seconds of a round with and without a mechanism.

The model is a BERT with random weights, LoRA of rank 8 on queries and values, and a head; texts are
random tokens. A round trains some clients and updates the server. The mechanism and the plain round
run alternately in one process. ``ratio`` is that of the medians of the wall-clock times, and
``cpu_ratio`` that of the medians of the processor's times, which other programs on the machine
hardly change. Compilation is separate.

    python experiments/benchmarks/privacy_cost.py --shape tiny            # CPU, a minute
    python experiments/benchmarks/privacy_cost.py --shape minilm --repeats 5
"""

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Callable

import jax
import numpy as np
import optax

import fedjax_peft as fp
from fedjax_peft.models.heads import classification
from fedjax_peft.models.registry import random_model

SHAPES = {
    "tiny": {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2},
    "minilm": {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12},
}
CLASSES, LENGTH, BATCH, EXAMPLES = 20, 64, 16, 64


def model(shape: str) -> fp.Model:
    """Returns a classifier of a shape of :data:`SHAPES` with LoRA."""
    config = {
        **SHAPES[shape],
        "model_type": "bert",
        "vocab_size": 1000,
        "intermediate_size": 4 * SHAPES[shape]["hidden_size"],
        "max_position_embeddings": LENGTH,
    }
    plain = random_model(config, head=classification(CLASSES))
    return fp.attach(plain, fp.peft.lora(rank=8, targets=("query", "value")))


def federation(clients: int) -> fp.Clients:
    """Returns clients with random tokens, all of the same number and length."""
    rng = np.random.default_rng(0)
    count = clients * EXAMPLES
    columns = {
        "input_ids": rng.integers(1, 1000, (count, LENGTH)).astype(np.int32),
        "attention_mask": np.ones((count, LENGTH), bool),
        "labels": rng.integers(0, CLASSES, count).astype(np.int32),
    }
    data = fp.Dataset(columns, tuple(f"class {i}" for i in range(CLASSES)), "random")
    return fp.partition.iid(data, clients=clients, seed=0)


def client_level() -> dict[str, tuple[fp.contracts.Algorithm, Callable | None]]:
    """Returns the cases of client-level mechanisms: name -> (algorithm, mechanism)."""
    optimizer = optax.adamw(1e-3)
    mean = fp.algorithms.fedavg(optimizer)
    fra = fp.algorithms.fedavg(optimizer, aggregator=fp.aggregators.fra())
    return {
        "mean": (mean, None),
        "mean, central": (mean, fp.privacy.central(1.0, 1.0)),
        "mean, adaptive": (mean, fp.privacy.adaptive(1.0, 1.0)),
        "fra": (fra, None),
        "fra, central": (fra, fp.privacy.central(1.0, 1.0)),
    }


def at_clients() -> dict[str, tuple[fp.contracts.Algorithm, Callable | None]]:
    """Returns the cases in which clients add the noise, in the same form."""
    mean = fp.algorithms.fedavg(optax.adamw(1e-3))
    return {
        "step": (mean, None),
        "step, example": (mean, fp.privacy.example(1.0, 1.0)),
        "step, example in microbatches of 4": (mean, fp.privacy.example(1.0, 1.0, microbatch=4)),
        "upload": (mean, None),
        "upload, local": (mean, fp.privacy.local(1.0, 1.0)),
        "upload, distributed": (mean, fp.privacy.distributed(1.0, 1.0)),
    }


CASES = [client_level, at_clients]
"""Functions that return cases. A case without a mechanism is what those after it are compared to.
"""


def measured(shape: str, clients: int, repeats: int, wanted: list[str]) -> list[dict]:
    """Returns a row for each case: seconds of a round, of compilation, and the ratio."""
    bound, data = model(shape), federation(clients)
    cases = {name: case for function in CASES for name, case in function().items()}
    sessions, states, rows = {}, {}, {}
    for name, (algorithm, privacy) in cases.items():
        if wanted and name.split(",")[0] not in wanted:
            continue
        sessions[name] = fp.session(
            *(bound, algorithm, data),
            batch_size=BATCH,
            placement=fp.Placement(lanes=1),
            privacy=privacy,
            rounds=1000,
        )
        began = time.perf_counter()
        states[name] = jax.block_until_ready(sessions[name].step(sessions[name].init(0))[0])
        rows[name] = {
            "case": name,
            "first_s": time.perf_counter() - began,
            "seconds": [],
            "cpu": [],
        }
    for _ in range(repeats):
        for name, session in sessions.items():
            began, busy = time.perf_counter(), time.process_time()
            states[name] = jax.block_until_ready(session.step(states[name])[0])
            rows[name]["cpu"].append(time.process_time() - busy)
            rows[name]["seconds"].append(time.perf_counter() - began)
    base: dict = {}
    for name, row in rows.items():
        row["median_s"] = statistics.median(row["seconds"])
        row["cpu_s"] = statistics.median(row["cpu"])
        base = row if cases[name][1] is None else base
        row["ratio"] = row["median_s"] / base["median_s"]
        row["cpu_ratio"] = row["cpu_s"] / base["cpu_s"]
        row["compile_s"] = sessions[name].compile_seconds
        row["peak_bytes"] = sessions[name].peak_bytes
    return list(rows.values())


def main() -> None:
    """Measures and prints a line of JSON for each case."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--only", nargs="*", default=[], help="first words of cases, such as fra")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    rows = measured(options.shape, options.clients, options.repeats, options.only)
    for row in rows:
        row["shape"], row["device"] = options.shape, jax.devices()[0].device_kind
        row |= {part: [round(x, 4) for x in row[part]] for part in ("seconds", "cpu")}
        print(json.dumps(row))


if __name__ == "__main__":
    main()
