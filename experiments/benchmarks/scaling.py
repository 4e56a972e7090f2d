"""Time and memory of a round against the number of clients and against the cohort.

Every point runs in a process of its own: some rounds of a tiny transformer (2 layers of width 32,
LoRA of rank 4 and a head), 4 examples and 2 local steps of 4 examples for each client. Compilation
and the first round are timed apart. `--peers` runs the same task on pfl-research and Flower, which
are installed into an environment of their own; see `peers.py`.

    python experiments/benchmarks/scaling.py                # our points, into results/scaling.json
    python experiments/benchmarks/scaling.py --peers DIR    # and those of the other libraries
    python experiments/benchmarks/scaling.py --report       # only table and figure, from the file

Points that the file has already are not measured again, unless `--again` is given.
"""

import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import harness

HERE = Path(__file__).parent
FILE = harness.RESULTS / "scaling.json"
TASK = {"examples": 4, "batch": 4, "steps": 2, "length": 12, "rank": 4, "rate": 0.1}
SIZES = {
    "clients": (10, 100, 1_000, 10_000, 100_000),  # with a cohort of 10
    "cohort": (10, 30, 100, 300, 1_000, 3_000, 10_000),  # of 10,000 clients
}
OURS = ("fedavg", "ditto")
PEERS = ("pfl", "flower")
PEER_LIMITS = {"pfl": {"cohort": 1_000}, "flower": {"clients": 1_000, "cohort": 100}}
"""The largest sizes at which another library is run, so that a point takes minutes at most."""
FIELDS = (
    *("system", "axis", "clients", "cohort", "round_seconds", "peak_mb", "program_mb"),
    *("prepare_seconds", "compile_seconds", "first_round_seconds", "load_before"),
)
"""The columns of the CSV."""
LABELS = {
    "fedavg": "fedjax_peft, FedAvg",
    "ditto": "fedjax_peft, Ditto (state for each client)",
    "pfl": "pfl-research, FedAvg",
    "flower": "Flower, FedAvg",
}


def wanted(system):
    """Returns the points of a system: (axis, clients, cohort)."""
    limits = PEER_LIMITS.get(system, {})
    points = [
        (axis, size, 10) if axis == "clients" else (axis, 10_000, size)
        for axis, sizes in SIZES.items()
        for size in sizes
        if size <= limits.get(axis, math.inf)
    ]
    if system == "flower":  # its simulation starts with a node for each client
        points = [(axis, min(clients, 1_000), cohort) for axis, clients, cohort in points]
    return points


def make_federation(clients):
    """Returns the transformer and its clients."""
    import numpy as np

    import fedjax_peft as fp

    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = fp.attach(fp.testing.tiny_model(**off), fp.lora(rank=TASK["rank"]))
    data = fp.testing.tiny_dataset(clients * TASK["examples"], length=TASK["length"])
    rows = np.arange(len(data), dtype=np.int32).reshape(clients, -1)
    return model, fp.Clients(data, tuple(rows))


def measure(system, clients, cohort, rounds):
    """Returns the measurements of one point of our library, in this process."""
    import jax
    import numpy as np
    import optax

    import fedjax_peft as fp

    def memory():
        return harness.peak() / 2**20

    model, federation = make_federation(clients)
    algorithm = getattr(fp.algorithms, system)(optax.sgd(TASK["rate"]))
    before = memory()
    began = time.perf_counter()
    session = fp.session(
        *(model, algorithm, federation),
        clients_per_round=cohort,
        batch_size=TASK["batch"],
        local_steps=TASK["steps"],
        rounds=rounds + 1,
    )
    state = jax.block_until_ready(session.init(seed=0))
    prepared = time.perf_counter() - began
    losses = []

    def step():
        nonlocal state
        state, info = session.step(state)
        losses.append(info.sums["loss"])
        return state.server

    seconds = [harness.timed(step) for _ in range(rounds + 1)]
    losses = [float(total.sum() / count.sum()) for total, count in losses]
    return {
        "prepare_seconds": prepared,
        "compile_seconds": session.compile_seconds,
        "first_round_seconds": seconds[0],
        "round_seconds": float(np.median(seconds[1:])),
        "rounds": seconds[1:],
        "peak_mb": memory(),
        "before_mb": before,
        "program_mb": session.peak_bytes / 2**20,
        "lanes": session.lanes(),
        "losses": losses,
        "trained_numbers": sum(
            x.size for name, x in model.trainable.items() if model.kinds[name] != "fixed"
        ),
    }


def run_point(system, axis, clients, cohort, rounds, python, limit):
    """Returns the row of a point that a child process measures."""
    script = Path(__file__) if system in OURS else HERE / "peers.py"
    point = {"system": system, "clients": clients, "cohort": cohort, "rounds": rounds}
    load = os.getloadavg()[0]
    words = ("--point", json.dumps({**TASK, **point}))
    found = harness.ask(script, *words, limit=limit, PYTHON=python)
    found = {"error": found} if isinstance(found, str) else found
    return {"axis": axis, **point, "load_before": load, **found}


def fit(sizes, values):
    """Returns the slope of log(values) over log(sizes), and half its 95 % interval (Student)."""
    import numpy as np
    from scipy.stats import t

    x, y = np.log(sizes), np.log(values)
    if len(x) < 3:
        return float("nan"), float("nan")
    slope, start = np.polyfit(x, y, 1)
    rest = y - slope * x - start
    error = np.sqrt((rest**2).sum() / (len(x) - 2) / ((x - x.mean()) ** 2).sum())
    return float(slope), float(t.ppf(0.975, len(x) - 2) * error)


def report(rows, path):
    """Writes a figure and a CSV beside the file, and prints the Markdown table with the slopes."""
    import csv

    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    good = [row for row in rows if "error" not in row]
    with path.with_suffix(".csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS, extrasaction="ignore", restval="")
        writer.writeheader()
        writer.writerows(good)
    figure, axes = plt.subplots(2, 2, figsize=(9, 7), constrained_layout=True)
    styles = dict(zip(LABELS, ("o-", "s--", "^-.", "v:"), strict=True))
    heads = ["system", "against", "sizes", "round: slope", "last, s", "memory: slope", "last, MB"]
    print(harness.heading(heads))
    for i, axis in enumerate(SIZES):
        for system in LABELS:
            own = sorted(
                (r for r in good if (r["axis"], r["system"]) == (axis, system)),
                key=lambda r: r[axis],
            )
            if not own:
                continue
            sizes = [r[axis] for r in own]
            words = []
            for j, field in enumerate(("round_seconds", "peak_mb")):
                values = [r[field] for r in own]
                axes[j][i].loglog(sizes, values, styles[system], label=LABELS[system])
                slope, half = fit(sizes, values)
                words += [f"{slope:.2f} ± {half:.2f}", f"{values[-1]:.3g}"]
            ends = f"{sizes[0]:,} to {sizes[-1]:,}"
            print(harness.line([LABELS[system], axis, ends, *words]))
        fixed = "cohort of 10" if axis == "clients" else "10,000 clients"
        for j, unit in enumerate(("seconds of a round", "peak memory, MB")):
            axes[j][i].set(xlabel=f"{axis} ({fixed})", ylabel=unit)
            axes[j][i].grid(alpha=0.3)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=2, frameon=False)
    for suffix in (".png", ".svg"):
        figure.savefig(path.with_suffix(suffix), dpi=120)
    for row in rows:
        if "error" in row:
            print(f"{row['system']}, {row['clients']} clients, {row['cohort']}: {row['error']}")


def main():
    """Measures the missing points, and reports all."""
    parser = harness.arguments(__doc__, rounds=5)
    parser.add_argument("--point", help="measure this point in this process (JSON)")
    parser.add_argument("--limit", type=float, default=240, help="seconds of a point at most")
    parser.add_argument("--systems", nargs="+", default=list(OURS), choices=[*OURS, *PEERS])
    parser.add_argument("--peers", metavar="DIR", help="environment of the other libraries")
    parser.add_argument("--file", type=Path, default=FILE, help="the measurements")
    parser.add_argument("--again", action="store_true", help="measure points again")
    parser.add_argument("--report", action="store_true", help="only table and figure")
    args = parser.parse_args()
    if args.point:
        point = json.loads(args.point)
        print(json.dumps(measure(*(point[n] for n in ("system", "clients", "cohort", "rounds")))))
        return
    systems = [] if args.report else list(args.systems)
    python = dict.fromkeys(OURS, sys.executable)
    if args.peers and not args.report:
        subprocess.run([sys.executable, HERE / "peers.py", "--install", args.peers], check=True)
        python |= {system: str(Path(args.peers) / "bin" / "python") for system in PEERS}
        systems += [system for system in PEERS if system not in systems]
    rows = json.loads(args.file.read_text()) if args.file.exists() else []
    for system in systems:
        for axis, clients, cohort in wanted(system):
            same = {"system": system, "axis": axis, "clients": clients, "cohort": cohort}
            known = [row for row in rows if same.items() <= row.items()]
            if known and not args.again:
                continue
            row = run_point(system, axis, clients, cohort, args.rounds, python[system], args.limit)
            rows = [old for old in rows if old not in known] + [row]
            args.file.parent.mkdir(exist_ok=True)
            args.file.write_text(json.dumps(rows, indent=1))
            figures = row.get("error") or f"{row['round_seconds']:.4f} s, {row['peak_mb']:.0f} MB"
            print(system, axis, clients, cohort, figures, file=sys.stderr, flush=True)
    report(rows, args.file)


if __name__ == "__main__":
    main()
