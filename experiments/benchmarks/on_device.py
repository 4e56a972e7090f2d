"""Runs the rounds of ``accelerators.py`` on the accelerator that is here, and times them.

    python experiments/benchmarks/on_device.py                     # every row, one after another
    python experiments/benchmarks/on_device.py --rows minilm gpt2 --lanes 1 2 4 8 16 32
    python experiments/benchmarks/on_device.py --together 7        # compile seven at once: quicker
    python experiments/benchmarks/on_device.py --rows minilm --free    # with any kernels
    python experiments/benchmarks/on_device.py --report            # only the tables, from the file

A cell is a row with a form of attention and a number of lanes, in a process of its own: LoRA by
FedAvg with AdamW, random weights and examples. It says the median seconds of a time step (a round
over its steps, so that beginning, aggregation and the host's work are in it), the peak of the
device's memory, and whether the same round twice gives the same bits. "asked to repeat" says
whether the compiler was asked for operations that do (``options_that_repeat``); with ``--free`` it
is not. ``results/on_device.json`` has the cells of each device, and ``.md`` the tables, beside the
least time that the compiler told ``accelerators.py``, and the rates of a large product and a copy
on this device. ``--together`` compiles side by side and times one by one; the seconds to compile
are then those of a busy machine.
"""

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import harness
from accelerators import RESULTS as PLANNED
from accelerators import ROWS, key_of, round_of

RESULTS = harness.RESULTS / "on_device.json"
KNOWN = {"H100": "h100", "A100": "a100-80gb", "T4": "t4", "v5 lite": "v5e"}
"""A part of a device's name -> its name in ``accelerators.json``."""
FREE = "--xla_gpu_exclude_nondeterministic_ops=false"
ROUND = 0.3
"""Seconds that a timed round should take at least."""


def on_device(shapes: dict[str, Any], seed: int) -> dict[str, Any]:
    """Returns random arrays of these shapes, made where they stay."""
    import jax
    import jax.numpy as jnp

    from fedjax_peft.numerics import tree

    def draw(x: Any, key: Any) -> Any:
        if jnp.issubdtype(x.dtype, jnp.floating):
            return 0.02 * jax.random.normal(key, x.shape, x.dtype)
        return jax.random.randint(key, x.shape, 0, 127).astype(x.dtype)

    keys = jax.random.split(jax.random.key(seed), len(shapes))
    made = jax.jit(draw, static_argnums=0)
    plain = tree.shapes(shapes)
    return {name: made(x, key) for (name, x), key in zip(plain.items(), keys, strict=True)}


def session_of(row: str, attention: str, lanes: int, steps: int) -> Any:
    """Returns a session: as many clients as lanes, each with so many steps on one batch."""
    import numpy as np

    import fedjax_peft as fp

    model, algorithm, task, batch = round_of(row, attention)
    frozen, trainable = on_device(model.frozen, 0), on_device(model.trainable, 1)
    model = model.replace(frozen=frozen, trainable=trainable)
    rng, size = np.random.default_rng(0), batch["mask"].shape[0]
    words = min(model.config.get("vocab_size", 30_000), 30_000)
    columns = {}
    for name, x in batch.items():
        shape = (lanes * size, *x.shape[1:])
        most = {"labels": 20, "input_ids": words, "pixel_values": 256}.get(name, 2)
        drawn = np.ones(shape) if x.dtype == bool else rng.integers(0, most, shape)
        columns[name] = drawn.astype(x.dtype)
    del columns["mask"]
    data = fp.Dataset(columns, tuple(map(str, range(20))), "random", task=task)
    return fp.session(
        *(model, algorithm, fp.partition.iid(data, lanes, seed=0)),
        batch_size=size,
        local_steps=steps,
        rounds=1,
        task=task,
        placement=fp.Placement(lanes=lanes, length_buckets=0),
    )


def digest_of(state: Any) -> str:
    """Returns a short digest of a state's bits, to compare processes."""
    import jax
    import numpy as np

    leaves = [np.asarray(x).tobytes() for x in jax.tree.leaves(state)]
    return hashlib.sha256(b"".join(leaves)).hexdigest()[:16]


def measure(
    row: str, attention: str, lanes: int, steps: int, repeats: int, wait: Any = lambda: None
) -> dict[str, Any]:
    """Returns the figures of one cell; ``wait`` is called after it has compiled."""
    import jax
    import numpy as np

    from fedjax_peft.engine.compilation import options_that_repeat

    began = time.perf_counter()
    session = session_of(row, attention, lanes, steps)
    twice = [session.step(session.init(seed=0))[0].server for _ in range(2)]
    same = all(
        np.array_equal(a, b) for a, b in zip(*map(jax.tree.leaves, twice), strict=True)
    )  # reading them also waits
    prepared = time.perf_counter() - began
    wait()
    state = session.init(seed=0)

    def step() -> Any:
        nonlocal state
        state, _ = session.step(state)
        return state.server

    jax.block_until_ready(state)
    seconds = [harness.timed(step) for _ in range(repeats + 1)]
    stats = jax.local_devices()[0].memory_stats() or {}
    plan = session.plan(1)
    lowered = session.program(plan).lower(session.init(seed=0), plan)
    return {
        "device": jax.devices()[0].device_kind,
        "step": statistics.median(seconds[1:]) / steps,
        "rounds": seconds[1:],
        "steps": steps,
        "peak": stats.get("peak_bytes_in_use"),
        "asked to repeat": options_that_repeat(lowered, jax.default_backend()) is not None,
        "same bits": same,
        "digest": digest_of(twice[0]),
        "compile seconds": round(session.compile_seconds, 1),
        "prepare seconds": round(prepared, 1),
    }


def wait_for_parent() -> None:
    """Says that the cell is compiled, and waits for a line of the parent."""
    print("ready", flush=True)
    sys.stdin.readline()


def ceilings() -> dict[str, Any]:
    """Returns the rates that the device reaches: a large product, and a copy."""
    import jax
    import jax.numpy as jnp

    def rate(function: Any, *x: Any) -> float:
        run = jax.jit(function)
        seconds = [harness.timed(lambda: run(*x)) for _ in range(12)]
        return 1 / statistics.median(seconds[2:])

    n = 8192
    a = jax.random.normal(jax.random.key(0), (n, n), jnp.bfloat16)
    wide = a.astype(jnp.float32)
    large = jax.random.normal(jax.random.key(1), (1 << 29,), jnp.float32)
    return {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "bfloat16": 2 * n**3 * rate(jnp.dot, a, a),
        "float32": 2 * n**3 * rate(jnp.dot, wide, wide),
        "bandwidth": 2 * large.nbytes * rate(lambda x: x + 1, large),
    }


def started(*arguments: Any) -> tuple[subprocess.Popen, Any]:
    """Starts this script on one cell; returns the process and the file of its errors."""
    command = [sys.executable, __file__, "--cell", *map(str, arguments)]
    pipe = subprocess.PIPE
    errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  # a pipe that nobody reads would be full
    child = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=errors, text=True)
    return child, errors


def result_of(child: subprocess.Popen, errors: Any) -> dict[str, Any] | str:
    """Lets a child measure, and returns its figures or why there are none."""
    out, _ = child.communicate("go\n")
    if child.returncode == 0:
        return json.loads(out.splitlines()[-1])
    errors.seek(0)
    return harness.fault(errors.read())


def table(cells: dict[str, Any], device: str, best: dict[str, Any]) -> str:
    """Returns the table of a device in Markdown."""
    known = next((name for part, name in KNOWN.items() if part in device), "")
    planned, rows = harness.known(PLANNED), []
    rates = [f"{best[dtype] / 1e12:.0f}" for dtype in ("bfloat16", "float32")]
    title = (
        f"**{device}**, jax {best['jax']}: products of 8,192 x 8,192 matrices reach {rates[0]}"
        f" TFLOP/s in bfloat16 and {rates[1]} in float32, a copy"
        f" {best['bandwidth'] / 1e12:.2f} TB/s.\n\n"
    )
    names = ["round", "attention", "lanes", "step, ms", "least, ms", "of the product"]
    names += ["examples/s", "peak, GB", "asked to repeat", "same bits"]
    for key, x in cells.items():
        row, attention, lanes = key.split(" | ")[:3]
        words = [row, attention, lanes]
        if isinstance(x, str):
            words += [x] + [""] * (len(names) - 4)
        else:
            own, step = int(lanes) / ROWS[row][3], x["step"]
            plan = planned.get(key_of(row, known, attention))
            plan = plan if isinstance(plan, dict) else {"flops": 0}
            least = f"{1e3 * plan['seconds']:.2f}" if plan["flops"] and own == 1 else ""
            share = f"{own * plan['flops'] / step / best['bfloat16']:.0%}" if plan["flops"] else ""
            words += [f"{1e3 * step:.2f}", least, share]
            words += [f"{int(lanes) * ROWS[row][4] / step:,.0f}", f"{(x['peak'] or 0) / 1e9:.2f}"]
            words.append("yes" if x["asked to repeat"] else "no")
            words.append("yes" if x["same bits"] else "**no**")
        rows.append(words)
    return title + harness.markdown(names, rows)


def report(found: dict[str, Any]) -> None:
    """Writes the file and its tables."""
    texts = [table(x["cells"], device, x["best"]) for device, x in found.items()]
    harness.write(RESULTS, found, "\n".join(texts))


def steps_for(row: str, lanes: int) -> int:
    """Returns the steps of a round that takes long enough, by the least time of a step."""
    plan = harness.known(PLANNED).get(key_of(row, "h100", "auto"), {})
    least = plan.get("seconds", 0.01) * max(lanes / ROWS[row][3], 0.3)
    return max(4, min(128, round(ROUND / least)))


def main() -> int:
    """Measures the cells, or reports; returns the exit code."""
    parser = harness.arguments(__doc__)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--attention", nargs="+", choices=["auto", "whole"], default=["auto"])
    parser.add_argument("--lanes", nargs="+", type=int, help="default: those of the row")
    parser.add_argument("--steps", type=int, help="of a round; default: enough for a third second")
    parser.add_argument("--repeats", type=int, default=5, help="timed rounds")
    parser.add_argument("--together", type=int, default=1, help="cells that compile side by side")
    parser.add_argument("--free", action="store_true", help="any kernels, also if bits differ")
    parser.add_argument("--report", action="store_true", help="measure nothing")
    parser.add_argument("--cell", nargs=5, help=argparse.SUPPRESS)
    parser.add_argument("--best", action="store_true", help=argparse.SUPPRESS)
    a = parser.parse_args()
    if a.cell:
        row, attention, *numbers = a.cell
        print(json.dumps(measure(row, attention, *map(int, numbers), wait=wait_for_parent)))
        return 0
    if a.best:
        print(json.dumps(ceilings()))
        return 0
    if a.free:
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FREE}"
    found = harness.known(RESULTS)
    if a.report:
        report(found)
        return 0
    best = harness.ask(__file__, "--best", check=True)
    print(best, flush=True)
    own = found.setdefault(best["device"], {"cells": {}})
    own["best"] = best
    wanted = [
        (row, form, n) for row in a.rows for form in a.attention for n in a.lanes or [ROWS[row][3]]
    ]
    for at in range(0, len(wanted), a.together):
        group = wanted[at : at + a.together]
        steps = [a.steps or steps_for(row, lanes) for row, _, lanes in group]
        children = [started(*cell, n, a.repeats) for cell, n in zip(group, steps, strict=True)]
        for child, _ in children:
            child.stdout.readline()  # "ready", or nothing if it has failed
        for cell, child in zip(group, children, strict=True):
            key = " | ".join(map(str, [*cell, "free"] if a.free else cell))
            own["cells"][key] = result_of(*child)
            print(f"{key}: {own['cells'][key]}", flush=True)
            report(found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
