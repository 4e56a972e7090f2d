"""The hours that a config's runs take on a device, before anything is downloaded or trained.

    seconds of a run = rounds · (time steps of a round) · step + evaluations · (batches) · step / 3

A step is the least time of :mod:`fedjax_peft.simulation.planning.devices`, times a factor: on an
H100 real steps took :data:`SLOWER` times the least time (``docs/explanation/accelerators.md``). An
evaluation is a forward pass, about a third of a step. Compilation, loading and generation of texts
are not counted.

The steps of a client follow from ``local_steps``, or else from the mean number of examples of a
client and the epochs. The examples are those that the catalogue states for the data set; the data
are not read.
"""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fedjax_peft.config import config as configs
from fedjax_peft.config import sweeps
from fedjax_peft.data.sources import DATASETS

SLOWER = (1.4, 3.4)
"""A measured step over its least time, from the fastest to the slowest round of an H100."""


class Work(NamedTuple):
    """The work of a run."""

    steps: int | None
    """Local steps of a client in a round; None: only the data know."""
    clients: int | None
    """In a round; None: only the data know."""
    rounds: int
    evaluations: int
    tested: int
    """Examples of the test data."""
    note: str
    """What the steps were computed from."""


def examples_of(name: str) -> dict[str, int]:
    """Returns the examples of a data set's splits that the catalogue states: split -> number."""
    entry = DATASETS.get(name)
    found = re.search(r"([\d,]+) train(.*)", "" if entry is None else entry.description)
    if found is None:
        return {}
    after = re.findall(r"\d[\d,]*", found[2])  # the split that is tested stands last
    numbers = {"train": found[1]} | ({"test": after[-1]} if after else {})
    return {split: int(n.replace(",", "")) for split, n in numbers.items()}


def work_of(config: Mapping[str, Any]) -> Work:
    """Returns the work of a resolved config."""
    data, partition, steps = config["data"], config["partition"], config["local_steps"]
    known = examples_of(data["name"])
    clients = partition.get("clients") or _clients_of(partition)
    cohort = config["clients_per_round"] or clients
    note = "steps of the config"
    train = data["train_examples"] or known.get("train")
    if not isinstance(steps, int):
        steps = None
        if train and clients and isinstance(config["epochs"], int):
            kept = train * (1 - (data["validation_share"] or 0))
            batches = math.ceil(kept / clients / config["batch_size"])
            steps, note = config["epochs"] * batches, "steps from the mean examples of a client"
    every = config["evaluation"]["every"]
    tests = data["test_examples"] or known.get("test", 0)
    rounds = config["rounds"]
    return Work(steps, cohort, rounds, math.ceil(rounds / every) if every else 1, tests, note)


def _clients_of(partition: Mapping[str, Any]) -> int | None:
    """Returns the clients of partitions that say so in other words."""
    if partition["name"] == "pooled":
        return 1
    if partition["name"] == "label_share":
        return len(partition["shares"][0])
    return None


def run_hours(config: Mapping[str, Any], step: float, lanes: int) -> float | None:
    """Returns the least hours of a resolved config's run; None: only the data know.

    Args:
      step: the seconds of a step of all lanes.
    """
    work = work_of(config)
    if work.steps is None or work.clients is None:
        return None
    width = min(lanes, work.clients)
    training = work.rounds * -(-work.clients // width) * work.steps * step
    batches = work.tested / (config["batch_size"] * width)
    return (training + work.evaluations * batches * step / 3) / 3600


def in_words(
    raw: configs.Config, overrides: Sequence[str], name: str, seconds: tuple[int, float]
) -> str:
    """Returns the hours of a method's runs in words, of all points of its sweep.

    Args:
      name: of the method; empty without methods.
      seconds: a number of lanes, and the least seconds of a step of all of them.
    """
    runs = [configs.methods(raw, overrides)[name]]
    if raw.get("sweep", {}).get("grid"):
        points = sweeps.plan(raw, overrides).points
        runs = [point.config for point in points if point.method == name]
    config = configs.resolve(runs[0])  # the points differ in seeds and rates, which take no time
    work, (lanes, step) = work_of(config), seconds
    one = run_hours(config, step, lanes)
    if one is None:
        return "hours: only the data know the steps or the clients of a round"
    low, high = (len(runs) * one * x for x in SLOWER)
    count = f"{len(runs):,} run{'s' * (len(runs) != 1)} of {work.rounds:,} rounds"
    return f"{count}: {low:,.4g} to {high:,.4g} hours ({work.note})"
