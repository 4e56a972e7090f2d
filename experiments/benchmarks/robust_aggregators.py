"""Times the server's part of a round for every robust aggregator, against the mean.

The default is 50 clients' uploads of LoRA of rank 8 for query and value of MiniLM: 12 matrices of
384x384, and a head. The mean does not measure its aggregation error here, FRA does. The aggregators
run alternately; medians are reported, and compilation separately.

    python experiments/benchmarks/robust_aggregators.py
"""

import argparse
import functools
import json
import os
import statistics
import time
from collections.abc import Callable
from importlib import metadata

import jax
import jax.numpy as jnp

from fedjax_peft import aggregators
from fedjax_peft.contracts import Aggregated, Aggregator, Params, PyTree, RoundContext
from fedjax_peft.numerics import summation


def rules(hostile: int, space: str) -> dict[str, Aggregator]:
    """Returns the robust aggregators that resist ``hostile`` of the clients."""
    at = functools.partial
    made: dict[str, Callable[..., Aggregator]] = {
        "median": aggregators.median,
        "trimmed_mean": at(aggregators.trimmed_mean, 0.2),
        "geometric_median": aggregators.geometric_median,
        "krum": at(aggregators.krum, hostile),
        "multi_krum": at(aggregators.multi_krum, hostile),
        "bulyan": at(aggregators.bulyan, hostile),
        "norm_bounding": aggregators.norm_bounding,
        "centred_clipping": aggregators.centred_clipping,
        "fltrust": aggregators.fltrust,
    }
    return {f"{name}, {space}": make(space=space) for name, make in made.items()}


def combine(
    aggregator: Aggregator, uploads: Params, template: Params, fixed: Params, state: PyTree
) -> Aggregated:
    """Returns the aggregate of the uploads of all clients."""
    clients = len(next(iter(uploads.values())))
    ones, slots = jnp.ones(clients), jnp.arange(clients)
    total = summation.empty(aggregator, template, fixed, clients)
    total = summation.add(aggregator, total, uploads, ones, slots, template, fixed)
    context = RoundContext(
        round_index=jnp.int32(1),
        participants=jnp.float32(clients),
        total_clients=clients,
        metrics={},
        fixed=fixed,
        key=jax.random.key(0),
        sampling_probability=1.0,
        clients=slots,
    )
    return summation.finish(aggregator, total, template, context, state)


def main() -> None:
    """Measures and prints a table and one line of JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    defaults = {"clients": 50, "rank": 8, "matrices": 12, "width": 384, "hostile": 10}
    for name, default in {**defaults, "repeats": 3}.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    spaces = ("factors", "product")
    parser.add_argument("--space", nargs="+", choices=spaces, default=spaces, help="default both")
    a = parser.parse_args()

    keys = iter(jax.random.split(jax.random.key(0), 4 * a.matrices + 2))
    shapes = {"head.kernel": (a.width, 20)}
    for i in range(a.matrices):
        shapes |= {f"{i}.lora_a": (a.width, a.rank), f"{i}.lora_b": (a.rank, a.width)}
    template = {n: jax.random.normal(next(keys), s) for n, s in shapes.items()}
    uploads = {
        n: x[None] + 0.1 * jax.random.normal(next(keys), (a.clients, *x.shape))
        for n, x in template.items()
    }
    fixed = {f"{i}.lora_scale": jnp.ones(a.rank) for i in range(a.matrices)}
    made = {"mean": aggregators.mean(error=False), "fra": aggregators.fra()}
    for space in a.space:
        made |= rules(a.hostile, space)

    programs, compile_s, states = {}, {}, {}
    for name, aggregator in made.items():
        states[name] = aggregator.init(template)
        began = time.perf_counter()
        step = jax.jit(functools.partial(combine, aggregator))
        programs[name] = step.lower(uploads, template, fixed, states[name]).compile()
        compile_s[name] = time.perf_counter() - began
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(a.repeats):
        for name, program in programs.items():
            began = time.perf_counter()
            jax.block_until_ready(program(uploads, template, fixed, states[name]))
            seconds[name].append(time.perf_counter() - began)
    medians = {name: statistics.median(s) for name, s in seconds.items()}

    print(f"{a.clients} clients, rank {a.rank}, {a.matrices} matrices {a.width}x{a.width}")
    for name, median in medians.items():
        times = median / medians["mean"]
        print(f"{name:>26} {median:8.3f} s {times:8.1f} x   compiled in {compile_s[name]:.1f} s")
    device = jax.devices()[0]
    environment = {
        "device": f"{device.device_kind} ({device.platform})",
        "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        **{n: metadata.version(n) for n in ("jax", "jaxlib")},
    }
    report = {"seconds": seconds, "medians": medians, "compile_s": compile_s}
    print(json.dumps({"arguments": vars(a), "environment": environment, **report}))


if __name__ == "__main__":
    main()
