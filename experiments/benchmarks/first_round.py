"""Seconds from ``import fedjax_peft`` to the end of the first round, cold and warm.

Cold: the persistent compilation cache is empty. Warm: the same script, run again, finds the
compiled program there. Each run is a process of its own; the interpreter's start is not counted.

    python experiments/benchmarks/first_round.py
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile

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
    environment = {
        **os.environ,
        "JAX_COMPILATION_CACHE_DIR": cache,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    command = [sys.executable, "-c", RUN]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.strip().splitlines()[-1])


def main():
    """Prints the medians of some repeats as a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    repeats = parser.parse_args().repeats
    found = {"cold": [], "warm": []}
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as cache:
            found["cold"].append(measure(cache))
            found["warm"].append(measure(cache))
    parts = list(found["cold"][0])
    print(f"load average {os.getloadavg()[0]:.1f}\n")
    print(f"| cache | {' | '.join(parts)} |\n|{'---|' * (len(parts) + 1)}")
    for name, runs in found.items():
        medians = (statistics.median(run[part] for run in runs) for part in parts)
        print(f"| {name} | {' | '.join(f'{x:.2f}' for x in medians)} |")


if __name__ == "__main__":
    main()
