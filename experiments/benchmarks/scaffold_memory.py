"""Measures the memory of SCAFFOLD with a control variate for each of 1,000 clients.

The model has MiniLM-L6's shape (6 layers, width 384, 12 heads), random weights, LoRA of rank 8 on
query and value, and a shared classification head. The texts are random. ``fp.simulate`` runs 10
clients per round. The clients' state is in the memory of the device, which is the host here. The
result is the peak resident memory of the process, including Python, JAX's compiler and the frozen
weights.

    python experiments/benchmarks/scaffold_memory.py
"""

import argparse
import json
import os
import resource
import time
from importlib import metadata

import jax
import numpy as np
import optax

import fedjax_peft as fp
from fedjax_peft.numerics import tree

TARGET_GB = 4.0
MINILM = {
    "model_type": "bert",
    "vocab_size": 30522,
    "hidden_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "intermediate_size": 1536,
    "max_position_embeddings": 512,
}
CLASSES, RATE = 20, 0.01


def main() -> None:
    """Runs a few rounds; prints the peak memory, its parts, and one line of JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    defaults = {"clients": 1000, "per-round": 10, "rounds": 3, "steps": 2, "batch": 16}
    for name, default in {**defaults, "length": 64, "rank": 8}.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    a = parser.parse_args()

    peaks = {"imports": peak()}
    model = fp.random_model(MINILM, head=fp.heads.classification(CLASSES))
    model = fp.attach(model, fp.lora(rank=a.rank, targets=["query", "value"]))
    jax.block_until_ready((model.frozen, model.trainable))
    peaks["model"] = peak()
    clients = fp.partition.iid(texts(a.clients * a.batch, a.length), clients=a.clients)
    algorithm = fp.algorithms.scaffold(optax.sgd(RATE), learning_rate=RATE)
    began = time.perf_counter()
    run = fp.simulate(
        model,
        algorithm,
        clients,
        rounds=a.rounds,
        clients_per_round=a.per_round,
        local_steps=a.steps,
        batch_size=a.batch,
        records=fp.Records(on_round=lambda row: peaks.update({f"round {row['round']}": peak()})),
    )
    seconds = time.perf_counter() - began
    sizes = {"client_state": tree.nbytes(run.client_state), "frozen": tree.nbytes(model.frozen)}
    sizes["shared"] = tree.nbytes(run.server["model"])

    for name, size in peaks.items():
        print(f"peak until {name:8} {size / 1e9:6.2f} GB")
    print(
        f"what {a.clients} clients keep: {sizes['client_state'] / 1e9:.3f} GB"
        f" ({sizes['client_state'] / a.clients / 1e6:.3f} MB each)"
    )
    print(f"frozen weights: {sizes['frozen'] / 1e9:.3f} GB; {a.rounds} rounds in {seconds:.0f} s")
    print(f"peak {peak() / 1e9:.2f} GB, target {TARGET_GB} GB")
    device = jax.devices()[0]
    environment = {
        "device": f"{device.device_kind} ({device.platform})",
        "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        **{n: metadata.version(n) for n in ("jax", "jaxlib", "optax")},
    }
    report = {"peak": peak(), "peaks": peaks, "bytes": sizes, "seconds": seconds}
    print(json.dumps({"arguments": vars(a), "environment": environment, **report}))


def peak() -> int:
    """Returns the peak resident memory of the process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def texts(examples: int, length: int) -> fp.Dataset:
    """Returns random tokens without padding, and random labels."""
    rng = np.random.default_rng(0)
    columns = {
        "input_ids": rng.integers(1000, MINILM["vocab_size"], (examples, length), dtype=np.int32),
        "attention_mask": np.ones((examples, length), bool),
        "labels": rng.integers(0, CLASSES, examples, dtype=np.int32),
    }
    return fp.Dataset(columns, tuple(f"class {i}" for i in range(CLASSES)), "random")


if __name__ == "__main__":
    main()
