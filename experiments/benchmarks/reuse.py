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
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import harness
import jax
import numpy as np
import optax
from accelerators import MINILM

import fedjax_peft as fp
from fedjax_peft.models.reuse import STORED, split
from fedjax_peft.simulation.planning.step_cost import count_flops, step_flops, traced_live
from fedjax_peft.tasks import classification


def federation(a: argparse.Namespace) -> fp.Clients:
    """Returns clients with random tokens."""
    n = a.clients * a.steps * a.batch
    data = harness.random_texts(n, a.length)
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
    config = {**MINILM, "num_hidden_layers": a.layers}
    bare = fp.random_model(config, head=fp.heads.classification(20), dropout=0.0)
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
    ends: dict[str, Any] = {}

    def round_of(reuse: str) -> float:
        state = jax.block_until_ready(sessions[reuse].init())

        def step() -> Any:
            ends[reuse] = sessions[reuse].step(state)[0].server
            return ends[reuse]

        return harness.timed(step)

    seconds = harness.turns({reuse: partial(round_of, reuse) for reuse in sessions}, a.repeats)
    apart = jax.tree.map(lambda x, y: float(abs(x - y).max()), ends["none"], ends["exact"])
    return {
        "blocks trained": len(layers),
        "seconds without": median(seconds["none"]),
        "seconds with": median(seconds["exact"]),
        "ratio": harness.ratio(seconds["none"], seconds["exact"]),
        "ratio of the products": expected(model, clients, a.batch),
        "seconds to prepare": preparing["exact"] - preparing["none"],
        "difference": max(jax.tree.leaves(apart)),
        "all seconds": seconds,
    }


def main() -> None:
    """Measures and prints a Markdown table."""
    parser = harness.arguments(
        __doc__, layers=6, length=64, batch=16, clients=4, steps=4, repeats=7
    )
    parser.add_argument("--json", type=Path, help="write the results here too")
    a = parser.parse_args()
    rows = [measure(a, tuple(range(first, a.layers))) for first in (a.layers // 2, a.layers - 1)]
    cells = [[f"{x:.3g}" for x in list(row.values())[:-1]] for row in rows]
    print(harness.markdown(list(rows[0])[:-1], cells))
    if a.json is not None:
        settings = {name: x for name, x in vars(a).items() if name != "json"}
        harness.write(a.json, {"settings": settings, "machine": harness.machine(), "rows": rows})


if __name__ == "__main__":
    main()
