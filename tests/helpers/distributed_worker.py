"""One process of several runs in succession; the fields of each are those that `simulate` reads."""

import json
import os
import signal
import sys
import time

import lowering  # noqa: F401
import optax
import toy

import fedjax_peft as fp


def main(scenarios, process, processes, port):
    # A process that is killed is noticed sooner than by default, and the reason read sooner.
    fp.distributed.SILENCE, fp.distributed.BEAT = 10.0, 0.5
    if processes > 1:
        fp.distributed.initialize(f"127.0.0.1:{port}", processes, process, timeout=60)
    for scenario in scenarios:
        print(json.dumps(simulate(scenario, process, processes)), flush=True)


def simulate(scenario, process, processes):
    """Returns what this process has seen of a run of four rounds."""

    def on_round(row):
        if row["round"] == scenario.get("end_round") and process == scenario["end_process"]:
            if scenario["end"] == "raise":
                raise fp.InputError("the disk is full")
            os.kill(os.getpid(), signal.Signals[scenario["end"]])
            time.sleep(1)  # a signal that is handled arrives in another thread

    run = fp.simulate(
        toy.model(dropout=0),
        fp.algorithms.fedavg(optax.adam(0.02), head="private"),
        toy.clients([7, 4, 12, 9, 16, 5]),
        test=toy.dataset(26, seed=7),
        rounds=4,
        clients_per_round=4,
        batch_size=4,
        placement=fp.Placement(lanes=4, devices=scenario.get("mesh")),
        seed=scenario.get("seeds", [0] * processes)[process],
        out=scenario.get("out"),
        records=fp.Records(checkpoint_every=1, on_round=on_round),
        resume=scenario.get("resume", False),
        evaluation=fp.Evaluation(
            stop=lambda rows: process == 0 and len(rows) > scenario.get("stop_after", 99)
        ),
    )
    rows = [{k: v for k, v in row.items() if k != "time"} for row in run.metrics]
    times = [row["time"] for row in run.metrics]
    return {"rows": rows, "times": times, "out": str(run.out)}


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), *map(int, sys.argv[2:]))
