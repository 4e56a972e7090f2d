"""Seconds from ``import fedjax_peft`` to the end of the first round, cold and warm.

Cold: the persistent compilation cache is empty. Warm: the same script, run again, finds the
compiled program there. Each run is a process of its own; the interpreter's start is not counted.

    python experiments/benchmarks/first_round.py
"""

import statistics
import tempfile

import harness

RUN = """
import json, time
began = time.perf_counter()
import fedjax_peft as fp, jax, optax
imported = time.perf_counter()
model = fp.attach(fp.testing.tiny_model(), fp.lora(rank=4))
clients = fp.partition.dirichlet(fp.testing.tiny_dataset(400), clients=20, alpha=0.5)
session = fp.session(model, fp.algorithms.fedavg(optax.adamw(5e-3)), clients, clients_per_round=5)
state = session.init(seed=0)
prepared = time.perf_counter()
state, _ = session.step(state)
jax.block_until_ready(state.server)
first = time.perf_counter()
state, _ = session.step(state)
jax.block_until_ready(state.server)
print(json.dumps({"import": imported - began, "prepare": prepared - imported,
                  "compile": session.compile_seconds, "first round": first - prepared,
                  "second round": time.perf_counter() - first, "all": first - began}))
"""


def measure(cache):
    """Returns the seconds of the parts, in a new process with this compilation cache."""
    return harness.ask(
        *("-c", RUN),
        check=True,
        JAX_COMPILATION_CACHE_DIR=cache,
        JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0",
        JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES="-1",
    )


def main():
    """Prints the medians of some repeats as a Markdown table."""
    a = harness.arguments(__doc__, repeats=3).parse_args()
    found = {"cold": [], "warm": []}
    for _ in range(a.repeats):
        with tempfile.TemporaryDirectory() as cache:
            for runs in found.values():
                runs.append(measure(cache))
    parts = list(found["cold"][0])
    rows = [
        [name, *(f"{statistics.median(run[part] for run in runs):.2f}" for part in parts)]
        for name, runs in found.items()
    ]
    print(harness.markdown(["cache", *parts], rows))
    harness.print_json(a, results=found)


if __name__ == "__main__":
    main()
