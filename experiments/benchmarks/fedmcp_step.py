"""Compares a local step of FedMCP with one of FedAvg with a single adapter, in seconds.

FedMCP runs the encoder forward and backward with both adapters, with the global one and with the
private one, and once more forward with the received global adapter. This is 3.5 single steps if a
forward pass costs as much as a backward pass (frozen weights need no gradient). The steps of each
algorithm run in one program, as on a client. The two programs run alternately. Medians are
reported, and compilation separately.

    python experiments/benchmarks/fedmcp_step.py                 # BERT-base's shape
    python experiments/benchmarks/fedmcp_step.py --layers 6 --hidden 384 --ffn 1536   # MiniLM-L6's
"""

import argparse
import json
import os
import statistics
import time
from importlib import metadata

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_peft import algorithms, attach, heads, peft, random_model, tasks
from fedjax_peft.contracts import Algorithm, ClientContext
from fedjax_peft.numerics import tree
from fedjax_peft.numerics.roles import assign_roles

TARGET = 3.8


def program(algorithm: Algorithm, head: heads.Head, method: peft.base.Method, a, batch: dict):
    """Returns (the compiled local steps of a client, their arguments, seconds of compilation)."""
    config = {
        "model_type": "bert",
        "hidden_size": a.hidden,
        "num_hidden_layers": a.layers,
        "num_attention_heads": 12,
        "intermediate_size": a.ffn,
    }
    model = random_model(config, head=head, dtype=a.dtype, dropout=a.dropout)
    model = attach(model, method)
    names = assign_roles(model.kinds, algorithm.roles)
    shared, private = (tree.select(model.trainable, names[role]) for role in ("shared", "private"))

    def steps(frozen, shared, private, batch, key):
        def apply(params, batch, key, train):
            return model.apply(frozen, params, batch, key, train)

        update = algorithm.client(ClientContext(apply, tasks.classification(), {}, jnp.int32(1)))

        def step(i, state):
            return update.step(state, batch, jax.random.fold_in(key, i))[0]

        return update.final(jax.lax.fori_loop(0, a.steps, step, update.init(shared, private, key)))

    arguments = (model.compute_frozen(), shared, private, batch, jax.random.key(0))
    start = time.perf_counter()
    compiled = jax.jit(steps).lower(*arguments).compile()
    return compiled, arguments, time.perf_counter() - start


def main() -> None:
    """Measures and prints a table and one line of JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    defaults = {"layers": 12, "hidden": 768, "ffn": 3072, "batch": 16, "length": 64}
    for name, default in {**defaults, "steps": 2, "repeats": 5}.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    parser.add_argument("--dropout", type=float, default=0.1, help="default 0.1")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--mu", type=float, default=0.05, help="default 0.05")
    a = parser.parse_args()

    rng = np.random.default_rng(0)
    batch = {
        "input_ids": rng.integers(0, 30522, (a.batch, a.length)).astype(np.int32),
        "attention_mask": np.ones((a.batch, a.length), bool),
        "labels": rng.integers(0, 2, a.batch).astype(np.int32),
        "mask": np.ones(a.batch, bool),
    }
    adam = optax.adam(5e-4)
    single = algorithms.fedavg(adam, head="private")
    runs = {
        "fedavg": program(single, heads.classification(2), peft.opendelta(size=16), a, batch),
        "fedmcp": program(
            algorithms.fedmcp(adam, mu=a.mu), heads.two_classifiers(2), peft.dual(size=16), a, batch
        ),
    }
    for compiled, arguments, _ in runs.values():
        jax.block_until_ready(compiled(*arguments))
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(a.repeats):
        for name, (compiled, arguments, _) in runs.items():
            start = time.perf_counter()
            jax.block_until_ready(compiled(*arguments))
            seconds[name].append((time.perf_counter() - start) / a.steps)
    # Ratios of consecutive runs, which have the same load of the machine; then their median.
    pairs = zip(seconds["fedmcp"], seconds["fedavg"], strict=True)
    ratio = statistics.median(x / y for x, y in pairs)

    print(f"{a.layers} layers, width {a.hidden}, batch {a.batch}, length {a.length}, {a.dtype}")
    for name, (compiled, _, compile_s) in runs.items():
        memory = compiled.memory_analysis().temp_size_in_bytes / 1e6
        print(
            f"{name:>7} {statistics.median(seconds[name]):8.3f} s per step (minimum"
            f" {min(seconds[name]):.3f})   {memory:,.0f} MB   compiled in {compile_s:.1f} s"
        )
    print(f"fedmcp / fedavg = {ratio:.2f} (target: at most {TARGET})")
    device = jax.devices()[0]
    environment = {
        "device": f"{device.device_kind} ({device.platform})",
        "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        **{n: metadata.version(n) for n in ("jax", "jaxlib")},
    }
    report = {"arguments": vars(a), "environment": environment, "seconds": seconds, "ratio": ratio}
    print(json.dumps(report))


if __name__ == "__main__":
    main()
