"""Compares the length of round plans with their lower bound, for unequal clients in lanes.

11,293 examples in 20 classes are divided among 100 clients by class-wise Dirichlet(0.1); batch 16,
20 clients per round. The bound is max(longest client, total steps / lanes). The script takes
seconds and needs no device.

    python experiments/benchmarks/packing.py
"""

import argparse

import numpy as np

from fedjax_peft.data import partition
from fedjax_peft.engine.plan import pack
from fedjax_peft.engine.schedule import Schedule


def excess(schedule: Schedule, round_index: int, lanes: int) -> float:
    """Returns the length of a round's plan divided by its lower bound, minus 1."""
    lengths = schedule.lengths(round_index)
    longest = max(sum(lengths[job] for job in queue) for queue in pack(lengths, lanes))
    return longest / max(max(lengths), -(-sum(lengths) // lanes)) - 1


def main() -> None:
    """Prints the mean and the largest excess for each number of lanes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=100, help="default 100")
    parser.add_argument("--seeds", type=int, default=3, help="default 3")
    a = parser.parse_args()
    labels = np.arange(11_293) % 20
    schedules = []
    for seed in range(a.seeds):
        clients = partition.dirichlet(labels, 100, 0.1, mode="class_wise", seed=seed)
        schedules.append(Schedule(clients.indices, 20, 16, 1, None, seed))
    print(f"{'lanes':>5} {'mean %':>8} {'worst mean of a seed %':>24} {'worst round %':>15}")
    for lanes in range(2, 17):
        rounds = range(1, a.rounds + 1)
        table = 100 * np.array([[excess(s, r, lanes) for r in rounds] for s in schedules])
        print(f"{lanes:5} {table.mean():8.2f} {table.mean(1).max():24.2f} {table.max():15.1f}")


if __name__ == "__main__":
    main()
