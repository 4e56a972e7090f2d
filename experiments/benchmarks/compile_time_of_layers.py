"""Compile time of a training round against the number of layers, with and without ``scan_layers``.

A round of FedAvg with LoRA on a decoder of Llama's form with random weights: 2 clients, 2 local
steps of AdamW, ``next_token``'s loss. Only the first round is timed, minus the time of the second,
which needs no compilation. Times are those of the Python thread and of all threads of XLA together
(CPU seconds), so that other load of the machine does not count.

    python experiments/benchmarks/compile_time_of_layers.py          # CPU, about 3 min
    python experiments/benchmarks/compile_time_of_layers.py --layers 4 16 32 --remat blocks
"""

import argparse
import time

import harness
import numpy as np
import optax

import fedjax_peft as fp
from fedjax_peft import tasks
from fedjax_peft.data.dataset import Dataset
from fedjax_peft.models.registry import random_model


def seconds(layers: int, a: argparse.Namespace, *, scan: bool) -> dict[str, float]:
    """Returns the seconds to trace and compile a round, and the seconds of one round."""
    config = {
        "model_type": "llama",
        "vocab_size": 512,
        "hidden_size": a.width,
        "intermediate_size": 2 * a.width,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    model = random_model(config, head=fp.heads.causal_lm(), remat=a.remat, scan_layers=scan)
    model = fp.attach(model, fp.lora(rank=8))
    rng = np.random.default_rng(0)
    columns = {
        "input_ids": rng.integers(3, 512, (32, a.length)).astype(np.int32),
        "attention_mask": np.ones((32, a.length), bool),
    }
    data = Dataset(columns, (), "random", task=tasks.next_token())
    session = fp.session(
        model,
        fp.algorithms.fedavg(optax.adamw(1e-3)),
        fp.partition.iid(data, 4, seed=0),
        clients_per_round=2,
        local_steps=2,
        batch_size=4,
    )
    state = session.init(seed=0)

    def step() -> object:
        nonlocal state
        state, _ = session.step(state)
        return state.server

    times = [harness.timed(step, time.process_time) for _ in range(2)]
    return {"compile_s": times[0] - times[1], "round_s": times[1]}


def main() -> None:
    """Measures and prints a table and one line of JSON."""
    parser = harness.arguments(__doc__, width=64, length=64)
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 32])
    parser.add_argument("--remat", choices=["none", "blocks", "dots"], default="none")
    a = parser.parse_args()
    results = []
    print(f"{'layers':>7} {'scan':>6} {'compile':>9} {'round':>8}  seconds")
    for scan in (True, False):
        for layers in a.layers:
            found = seconds(layers, a, scan=scan)
            results.append({"layers": layers, "scan_layers": scan, **found})
            print(
                f"{layers:7} {scan!s:>6} {found['compile_s']:9.1f} {found['round_s']:8.2f}",
                flush=True,
            )
    harness.print_json(a, results=results)


if __name__ == "__main__":
    main()
