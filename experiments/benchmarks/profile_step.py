"""Says which kernels the time of a step on the accelerator that is here goes to.

    python experiments/benchmarks/profile_step.py                   # every row, one after another
    python experiments/benchmarks/profile_step.py --rows minilm gpt2 --kernels 30
    python experiments/benchmarks/profile_step.py --report          # only the table, from the file

The rounds are those of ``on_device.py``. Each row runs in a process of its own, and one round is
traced by ``jax.profiler`` after it has run twice. ``results/profile.json`` has, for each device and
row, the milliseconds of a step by kind of kernel, the launches, the time in which no kernel ran
(longer than without tracing), and the longest kernels; ``.md`` has the table.
"""

import argparse
import json
import os
import re
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import harness
from accelerators import ROWS
from on_device import session_of, steps_for

RESULTS = harness.RESULTS / "profile.json"
KINDS = {
    "attention": r"fmha|sdpa|flash|cudnn",
    "products": r"gemm|nvjet|cutlass|cublas|dot|splitK|xmma",
    "copies": r"memcpy|memset|copy|transpose|concatenate|scatter|gather|slice",
    "reductions": r"reduce",
    "elementwise": r"fusion|wrapped|loop",
    "other": "",
}
"""Kind -> the names of its kernels; the first that matches counts."""
Event = tuple[str, float, float]
"""A kernel's name, when it began, and its nanoseconds."""


def kind_of(name: str) -> str:
    """Returns the kind of a kernel."""
    return next(kind for kind, names in KINDS.items() if re.search(names, name, re.I))


def traced(run: Any) -> list[Event]:
    """Returns what ran on the device meanwhile."""
    import jax

    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run()
        (file,) = Path(folder).rglob("*.xplane.pb")
        return [
            (event.name, event.start_ns, event.duration_ns)
            for plane in jax.profiler.ProfileData.from_file(str(file)).planes
            if plane.name.startswith("/device:")
            for line in plane.lines
            if line.name.startswith("Stream")
            for event in line.events
        ]


def summary(events: list[Event], steps: int, kernels: int) -> dict[str, Any]:
    """Returns the figures of a step, from the events of a round."""
    own: dict[str, list[float]] = defaultdict(list)
    kinds = dict.fromkeys(KINDS, 0.0)
    for name, _, duration in events:
        own[name].append(duration)
        kinds[kind_of(name)] += duration / steps / 1e6
    busy, end = 0.0, 0.0
    for _, start, duration in sorted(events, key=lambda event: event[1]):
        busy += max(0.0, start + duration - max(start, end))
        end = max(end, start + duration)
    span = end - min(start for _, start, _ in events)
    longest = sorted(own.items(), key=lambda item: -sum(item[1]))[:kernels]
    return {
        "steps": steps,
        "step, ms": span / steps / 1e6,
        "no kernel, ms": (span - busy) / steps / 1e6,
        "launches": round(len(events) / steps),
        "kinds, ms": kinds,
        "longest": [
            {"kernel": name[:120], "launches": len(x) / steps, "us": sum(x) / steps / 1e3}
            for name, x in longest
        ],
    }


def measure(row: str, attention: str, lanes: int, steps: int, kernels: int) -> dict[str, Any]:
    """Returns the figures of one row."""
    import jax

    session = session_of(row, attention, lanes, steps)
    state = session.init(seed=0)
    for _ in range(2):
        state, _ = session.step(state)
    jax.block_until_ready(state)

    def run() -> None:
        jax.block_until_ready(session.step(state)[0].server)

    return {"device": jax.devices()[0].device_kind, **summary(traced(run), steps, kernels)}


def report(found: dict[str, Any], file: Path) -> None:
    """Writes the file and its table."""
    names = ["round", "attention", "lanes", *KINDS, "kernels together", "launches"]
    tables = []
    for device, rows in found.items():
        cells = []
        for key, x in rows.items():
            own = [*x["kinds, ms"].values()]
            words = [*key.split(" | "), *(f"{ms:.2f}" for ms in [*own, sum(own)])]
            cells.append([*words, x["launches"]])
        title = f"**{device}**, milliseconds of a step:\n\n"
        tables.append(title + harness.markdown(names, cells))
    harness.write(file, found, "".join(tables))


def main() -> int:
    """Traces the rows, or reports; returns the exit code."""
    parser = harness.arguments(__doc__, kernels=20)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--attention", choices=["auto", "whole"], default="auto")
    parser.add_argument("--lanes", type=int, help="default: those of the row")
    parser.add_argument("--file", type=Path, default=RESULTS)
    parser.add_argument("--report", action="store_true", help="trace nothing")
    parser.add_argument("--cell", action="store_true", help=argparse.SUPPRESS)
    a = parser.parse_args()
    if a.cell:
        lanes = a.lanes or ROWS[a.rows[0]][3]
        steps = steps_for(a.rows[0], lanes)
        print(json.dumps(measure(a.rows[0], a.attention, lanes, steps, a.kernels)))
        return 0
    found = harness.known(a.file)
    for row in [] if a.report else a.rows:
        lanes = ["--lanes", a.lanes] if a.lanes else []
        cell = ("--cell", "--rows", row, "--attention", a.attention, "--kernels", a.kernels)
        figures = harness.ask(__file__, *cell, *lanes)
        if isinstance(figures, str):
            print(f"{row}: {figures}", flush=True)
            continue
        key = f"{row} | {a.attention} | {a.lanes or ROWS[row][3]}"
        found.setdefault(figures.pop("device"), {})[key] = figures
        print(f"{key}: { ({k: v for k, v in figures.items() if k != 'longest'}) }", flush=True)
    report(found, a.file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
