"""Sweeps on disk with planted results."""

import itertools

import tomli_w
from made_runs import write_run

__all__ = ["accuracy", "write_run", "write_sweep"]


def write_sweep(root, scores, *, keys=("optimizer.learning_rate", "seed"), **sweep):
    """Writes a sweep; ``scores`` is method -> learning rate -> seed -> fields of the last row."""
    root.mkdir(parents=True)
    (root / "sweep.toml").write_text(tomli_w.dumps({"keys": list(keys), **sweep}))
    for method, rates in scores.items():
        for (rate, seeds), flip in zip(rates.items(), itertools.cycle((False, True))):
            for seed, fields in seeds.items():
                point = f"seed={seed},rate={rate}" if flip else f"rate={rate},seed={seed}"
                config = {"name": method, "algorithm": method, "seed": seed}
                config |= {"optimizer": {"name": "adamw", "learning_rate": rate}}
                rows = [{"round": 0}, {"round": 3, **fields}]
                write_run(root / method / point, config, rows)
    return root


def accuracy(validation, test):
    """Tests have so many examples that the seeds decide about intervals."""
    scores = {"validation_accuracy": validation, "test_accuracy": test}
    return scores | {"validation_examples": 10**6, "test_examples": 10**6}
