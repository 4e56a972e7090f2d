"""Times FRA-LoRA's server step: the QR decomposition of the factors, and the dense SVD.

The default is 10 clients' uploads of rank 16 for query and value of a 12-layer model of width 768:
24 matrices of 768x768. Both give the same result; the dense SVD is the algorithm as written in the
paper. The two run alternately. Medians are reported, and compilation separately.

    python experiments/benchmarks/fra_server_step.py
    python experiments/benchmarks/fra_server_step.py --devices h100 a100-80gb t4 v5e

With ``--devices`` nothing is timed. The compilers of accelerators that are not there
(``pip install -e ".[compile-gpu,compile-tpu]"``) say which kernels both programs have, in
``results/server_step.json`` and ``.md``. What happens inside of a library's kernel is not counted.
FlexLoRA's products are decomposed by the same function.
"""

import argparse
import functools
import time
from statistics import median
from typing import Any

import harness
import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from fedjax_peft.aggregators.fra import truncated_average

TARGETS = {"seconds": 0.5, "ratio": 4.0}
FORMS = {"qr": False, "dense": True}
RESULTS = harness.RESULTS / "server_step.json"


def main() -> None:
    """Measures and prints a table and one line of JSON."""
    parser = harness.arguments(
        __doc__, clients=10, rank=16, matrices=24, inputs=768, outputs=768, repeats=5
    )
    parser.add_argument(
        "--no-error", dest="error", action="store_false", help="without the aggregation error"
    )
    parser.add_argument("--devices", nargs="+", help="compile for these, and time nothing")
    a = parser.parse_args()
    if a.devices:
        found = harness.known(RESULTS) | planned(a)
        harness.write(RESULTS, found, table(found))
        return

    keys = jax.random.split(jax.random.key(0), 2)
    uploads = (
        jax.random.normal(keys[0], (a.matrices, a.clients, a.inputs, a.rank)),
        jax.random.normal(keys[1], (a.matrices, a.clients, a.rank, a.outputs)),
        jnp.full(a.clients, 1 / a.clients),
        jnp.ones(a.matrices),
    )
    programs, compile_s = {}, {}
    for name in FORMS:
        began = time.perf_counter()
        programs[name] = _step(a, name).lower(*uploads).compile()
        compile_s[name] = time.perf_counter() - began
    results = {name: jax.block_until_ready(program(*uploads)) for name, program in programs.items()}
    difference = _difference(results["qr"], results["dense"])

    seconds = harness.turns(
        {
            name: functools.partial(harness.timed, functools.partial(program, *uploads))
            for name, program in programs.items()
        },
        a.repeats,
        warm=0,
    )
    medians = {name: median(s) for name, s in seconds.items()}
    ratio = medians["dense"] / medians["qr"]

    print(f"{a.matrices} matrices {a.inputs}x{a.outputs}, {a.clients} clients, rank {a.rank}")
    for name, middle in medians.items():
        print(f"{name:>6} {middle:8.3f} s   compiled in {compile_s[name]:.1f} s")
    print(f"dense / qr = {ratio:.1f}; relative difference of the products {difference:.1e}")
    print(f"targets: qr within {TARGETS['seconds']} s, ratio at least {TARGETS['ratio']}")
    harness.print_json(a, seconds=seconds, medians=medians, ratio=ratio, compile_s=compile_s)


def _step(a: argparse.Namespace, form: str) -> Any:
    return jax.jit(functools.partial(truncated_average, dense=FORMS[form], error=a.error))


def planned(a: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Returns what each device's compiler makes of both programs."""
    from fedjax_peft.simulation.planning.compiled_step import compile_step, target_devices
    from fedjax_peft.support.accelerators import find_device

    shapes = [(a.matrices, a.clients, a.inputs, a.rank), (a.matrices, a.clients, a.rank, a.outputs)]
    shapes += [(a.clients,), (a.matrices,)]
    cells = {}
    for device in a.devices:
        here = SingleDeviceSharding(target_devices(find_device(device))[0])
        uploads = [jax.ShapeDtypeStruct(x, jnp.float32, sharding=here) for x in shapes]
        for form in FORMS:
            found = compile_step(_step(a, form).lower(*uploads))
            names = ("kernels", "nbytes", "temporary", "program")
            cell = {name: getattr(found, name) for name in names}
            cell |= {"calls": dict(found.calls), "compile seconds": round(found.seconds)}
            cells[f"{device} | {form}"] = cell
            print(f"{device} | {form}: {cell}", flush=True)
    return cells


def table(cells: dict[str, dict[str, Any]]) -> str:
    """Returns the table in Markdown."""
    names = ["device", "step", "kernels", "MB", "temporary, MB", "library kernels", "program, MB"]
    names.append("compile, s")
    rows = []
    for key, x in cells.items():
        # A TPU's decompositions are loops, whose turns are not counted.
        sizes = [x["kernels"], x["nbytes"] / 1e6] if x["nbytes"] > 1e5 else ["in loops"] * 2
        words = [y if isinstance(y, str) else f"{y:,.0f}" for y in [*sizes, x["temporary"] / 1e6]]
        words.append(", ".join(f"{n} x {name}" for name, n in x["calls"].items()))
        words += [f"{x['program'] / 1e6:.0f}" if x["program"] else "", str(x["compile seconds"])]
        rows.append([key, *words])
    return harness.markdown(names, rows)


def _difference(one: tuple, other: tuple) -> float:
    """Returns the largest relative Frobenius distance between the products of two results."""
    x, y = (jnp.matmul(r[0], r[1], precision="highest") for r in (one, other))
    return float(jnp.max(jnp.linalg.norm(x - y, axis=(1, 2)) / jnp.linalg.norm(y, axis=(1, 2))))


if __name__ == "__main__":
    main()
