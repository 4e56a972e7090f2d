"""Times FRA-LoRA's server step: the QR decomposition of the factors, and the dense SVD.

The default is 10 clients' uploads of rank 16 for query and value of a 12-layer model of width 768:
24 matrices of 768x768. Both give the same result; the dense SVD is the algorithm as written in the
paper. The two run alternately. Medians are reported, and compilation separately.

    python experiments/benchmarks/fra_server_step.py
"""

import argparse
import functools
import json
import os
import statistics
import time
from importlib import metadata

import jax
import jax.numpy as jnp

from fedjax_peft.aggregators.fra import truncated_average

TARGETS = {"seconds": 0.5, "ratio": 4.0}


def main() -> None:
    """Measures and prints a table and one line of JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    defaults = {"clients": 10, "rank": 16, "matrices": 24, "inputs": 768, "outputs": 768}
    for name, default in {**defaults, "repeats": 5}.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    parser.add_argument(
        "--no-error", dest="error", action="store_false", help="without the aggregation error"
    )
    a = parser.parse_args()

    keys = jax.random.split(jax.random.key(0), 2)
    uploads = (
        jax.random.normal(keys[0], (a.matrices, a.clients, a.inputs, a.rank)),
        jax.random.normal(keys[1], (a.matrices, a.clients, a.rank, a.outputs)),
        jnp.full(a.clients, 1 / a.clients),
        jnp.ones(a.matrices),
    )
    programs, compile_s = {}, {}
    for name, dense in (("qr", False), ("dense", True)):
        began = time.perf_counter()
        step = jax.jit(functools.partial(truncated_average, dense=dense, error=a.error))
        programs[name] = step.lower(*uploads).compile()
        compile_s[name] = time.perf_counter() - began
    results = {name: jax.block_until_ready(program(*uploads)) for name, program in programs.items()}
    difference = _difference(results["qr"], results["dense"])

    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(a.repeats):
        for name, program in programs.items():
            began = time.perf_counter()
            jax.block_until_ready(program(*uploads))
            seconds[name].append(time.perf_counter() - began)
    medians = {name: statistics.median(s) for name, s in seconds.items()}
    ratio = medians["dense"] / medians["qr"]

    print(f"{a.matrices} matrices {a.inputs}x{a.outputs}, {a.clients} clients, rank {a.rank}")
    for name, median in medians.items():
        print(f"{name:>6} {median:8.3f} s   compiled in {compile_s[name]:.1f} s")
    print(f"dense / qr = {ratio:.1f}; relative difference of the products {difference:.1e}")
    print(f"targets: qr within {TARGETS['seconds']} s, ratio at least {TARGETS['ratio']}")
    device = jax.devices()[0]
    environment = {
        "device": f"{device.device_kind} ({device.platform})",
        "cores": os.cpu_count(),
        "openblas_threads": os.environ.get("OPENBLAS_NUM_THREADS"),
        "load_average": os.getloadavg()[0],
        **{n: metadata.version(n) for n in ("jax", "jaxlib")},
    }
    report = {"seconds": seconds, "medians": medians, "ratio": ratio, "compile_s": compile_s}
    print(json.dumps({"arguments": vars(a), "environment": environment, **report}))


def _difference(one: tuple, other: tuple) -> float:
    """Returns the largest relative Frobenius distance between the products of two results."""
    x, y = (jnp.matmul(r[0], r[1], precision="highest") for r in (one, other))
    return float(jnp.max(jnp.linalg.norm(x - y, axis=(1, 2)) / jnp.linalg.norm(y, axis=(1, 2))))


if __name__ == "__main__":
    main()
