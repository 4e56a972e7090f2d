"""Rounds of 1,000 clients out of 10,000, of 100,000 and of 1,000,000, on the same examples.

FedAvg on the tiny transformer of ``scaling.py``. All federations deal out the same 2,000,000 rows,
in sizes by Zipf's law, so what differs is the number of clients. Every point is a process of its
own, and the sizes take turns, so that other load on the machine affects all of them. CPU seconds
(of all threads of the process) are beside those of the clock, because other load hardly changes
them. The compiled program comes from the cache, and the first round is not counted. On a machine
with much other load, ``--together`` runs the sizes once, at the same time.

    python experiments/benchmarks/million.py    # into results/million.json and million.md
"""

import json
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import harness
import scaling

SIZES = (10_000, 100_000, 1_000_000)
EXAMPLES = 2_000_000
FIELDS = {
    "partition_cpu": "partition, CPU s",
    "prepare_cpu": "preparation, CPU s",
    "round_cpu": "a round, CPU s",
    "round_seconds": "a round, s",
    "peak_mb": "peak memory, MB",
}


def measure(clients, cohort, rounds, examples=EXAMPLES):
    """Returns the measurements of one run, in this process."""
    import numpy as np
    import optax

    import fedjax_peft as fp

    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = fp.attach(fp.testing.tiny_model(**off), fp.lora(rank=scaling.TASK["rank"]))
    few = fp.testing.tiny_dataset(1_000, length=scaling.TASK["length"])
    data = few.take(np.resize(np.arange(len(few)), examples))
    times = [(time.process_time(), time.perf_counter())]

    def note(row=None):
        times.append((time.process_time(), time.perf_counter()))

    federation = fp.partition.zipf(data, clients)
    note()
    run = fp.simulate(
        *(model, fp.algorithms.fedavg(optax.sgd(scaling.TASK["rate"])), federation),
        rounds=rounds + 1,
        clients_per_round=cohort,
        batch_size=scaling.TASK["batch"],
        local_steps=scaling.TASK["steps"],
        records=fp.Records(on_round=note, progress=False),
    )
    cpu, clock = (np.diff(one) for one in zip(*times, strict=True))
    return {
        "clients": clients,
        "largest_client": int(federation.sizes.max()),
        "partition_cpu": float(cpu[0]),
        "prepare_cpu": float(cpu[1]),
        "round_cpu": float(np.median(cpu[3:])),
        "round_seconds": float(np.median(clock[3:])),
        "peak_mb": harness.peak() / 2**20,
        "losses": [row["train_loss"] for row in run.metrics[1:]],
    }


def main():
    """Measures all sizes in turns, and writes the medians with a table."""
    parser = harness.arguments(__doc__, cohort=1_000, rounds=8, repeats=3)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--file", type=Path, default=harness.RESULTS / "million.json")
    parser.add_argument("--together", action="store_true", help="all sizes at the same time")
    parser.add_argument("--point", type=int, help="measure this number of clients in this process")
    args = parser.parse_args()
    if args.point:
        print(json.dumps(measure(args.point, args.cohort, args.rounds)))
        return

    def point(clients):
        words = ("--cohort", args.cohort, "--rounds", args.rounds, "--point", clients)
        return harness.ask(__file__, *words, check=True)

    point(args.sizes[0])  # compiles the program, which the others find in the cache
    if args.together:
        with ThreadPoolExecutor() as pool:
            made = pool.map(point, args.sizes)
            found = {str(n): [one] for n, one in zip(args.sizes, made, strict=True)}
    else:
        programs = {str(n): lambda n=n: point(n) for n in args.sizes}
        found = harness.turns(programs, args.repeats, warm=0)
    rows = [
        {"clients": int(n)} | {name: statistics.median(x[name] for x in own) for name in FIELDS}
        for n, own in found.items()
    ]
    cells = [[f"{row['clients']:,}", *(f"{row[name]:,.4g}" for name in FIELDS)] for row in rows]
    table = harness.markdown(["clients", *FIELDS.values()], cells)
    harness.write(args.file, {"machine": harness.machine(), "medians": rows, "runs": found}, table)
    print(table)


if __name__ == "__main__":
    main()
