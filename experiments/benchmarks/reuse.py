"""Measures rounds that start from kept hidden states, against rounds that compute all blocks.

MiniLM-L6's shape without dropout, LoRA of rank 8 on query and value of upper blocks, plus the head;
random weights and tokens (the speed does not depend on the values). Both do the same rounds, with
the same examples, and alternate in one process. The table has the median seconds of a round, the
ratio (the median of the ratios of consecutive rounds), what arithmetic says about the ratio (the
products of a step), the seconds to compute the states of all examples, which happens once, and the
largest difference of the trained leaves after a round.

    python experiments/benchmarks/reuse.py                     # 3 min on two cores
    python experiments/benchmarks/reuse.py --json experiments/benchmarks/results/reuse.json
"""

import argparse
import json
import os
import statistics
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

import fedjax_peft as fp
from fedjax_peft.models.reuse import STORED, split
from fedjax_peft.simulation.planning.step_cost import count_flops, step_flops, traced_live
from fedjax_peft.tasks import classification

CLASSES = 20


def federation(a: argparse.Namespace) -> fp.Clients:
    """Returns clients with random tokens."""
    rng = np.random.default_rng(0)
    n = a.clients * a.steps * a.batch
    columns = {
        "input_ids": rng.integers(0, 30522, (n, a.length)).astype(np.int32),
        "attention_mask": np.ones((n, a.length), bool),
        "labels": rng.integers(0, CLASSES, n).astype(np.int32),
    }
    data = fp.Dataset(columns, tuple(map(str, range(CLASSES))))
    return fp.Clients(data, tuple(np.arange(n, dtype=np.int32).reshape(a.clients, -1)))


def expected(model: Any, clients: fp.Clients, batch: int) -> float:
    """Returns the ratio of the products of a step: all of them, over those above the cut."""
    columns = clients.data.columns
    rows = {n: jax.ShapeDtypeStruct((batch, *x.shape[1:]), x.dtype) for n, x in columns.items()}
    parts = split(model, rows)
    below = count_flops(traced_live(parts.states, {**model.frozen, **model.trainable}, rows))
    rows[STORED] = jax.ShapeDtypeStruct((batch, *parts.state.shape), parts.state.dtype)
    rows["mask"] = jax.ShapeDtypeStruct((batch,), bool)
    above = step_flops(parts.above, classification(), rows)
    return (below + above) / above


def measure(a: argparse.Namespace, layers: tuple[int, ...]) -> dict[str, Any]:
    """Returns a row of the table."""
    config = {"model_type": "bert", "hidden_size": 384, "num_hidden_layers": a.layers}
    config |= {"num_attention_heads": 12, "intermediate_size": 1536}
    bare = fp.random_model(config, head=fp.heads.classification(CLASSES), dropout=0.0)
    model = fp.attach(bare, fp.lora(rank=8, layers=layers))
    clients = federation(a)
    algorithm = fp.algorithms.fedavg(optax.adamw(1e-3))
    sessions, preparing = {}, {}
    for reuse in ("none", "exact"):
        began = time.perf_counter()
        placement = fp.Placement(lanes=1, length_buckets=0, reuse=reuse)
        sessions[reuse] = fp.session(
            model, algorithm, clients, batch_size=a.batch, placement=placement
        )
        preparing[reuse] = time.perf_counter() - began
    seconds: dict[str, list[float]] = {reuse: [] for reuse in sessions}
    ends: dict[str, Any] = {}
    for number in range(a.repeats + 1):  # the first round is the warm-up
        for reuse, session in sessions.items():
            state = jax.block_until_ready(session.init())
            began = time.perf_counter()
            ends[reuse] = jax.block_until_ready(session.step(state)[0]).server
            if number:
                seconds[reuse].append(time.perf_counter() - began)
    pairs = zip(*seconds.values(), strict=True)
    apart = jax.tree.map(lambda x, y: float(abs(x - y).max()), ends["none"], ends["exact"])
    return {
        "blocks trained": len(layers),
        "seconds without": statistics.median(seconds["none"]),
        "seconds with": statistics.median(seconds["exact"]),
        "ratio": statistics.median(none / exact for none, exact in pairs),
        "ratio of the products": expected(model, clients, a.batch),
        "seconds to prepare": preparing["exact"] - preparing["none"],
        "difference": max(jax.tree.leaves(apart)),
        "all seconds": seconds,
    }


def main() -> None:
    """Measures and prints a Markdown table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    defaults = {"layers": 6, "length": 64, "batch": 16, "clients": 4, "steps": 4, "repeats": 7}
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    parser.add_argument("--json", type=Path, help="write the results here too")
    a = parser.parse_args()
    rows = []
    for first in (a.layers // 2, a.layers - 1):
        rows.append(measure(a, tuple(range(first, a.layers))))
        if first == a.layers // 2:
            print("|", " | ".join(list(rows[0])[:-1]), "|")
            print("|", " | ".join("---" for _ in list(rows[0])[:-1]), "|")
        print("|", " | ".join(f"{x:.3g}" for x in list(rows[-1].values())[:-1]), "|", flush=True)
    if a.json is not None:
        settings = {name: x for name, x in vars(a).items() if name != "json"}
        versions = {name: metadata.version(name) for name in ("jax", "jaxlib", "flax")}
        machine = {"device": jax.devices()[0].device_kind, "cores": os.cpu_count(), **versions}
        machine["load average"] = os.getloadavg()[0]
        found = {"settings": settings, "machine": machine, "rows": rows}
        a.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
