"""The hours that a config's runs take on a device, before anything is downloaded or trained.

    seconds of a run = rounds · (time steps of a round) · step + evaluations · (batches) · step / 3

A step is the least time of :mod:`fedjax_peft.simulation.planning.devices`, times a factor: on an
H100 real steps took :data:`SLOWER` times the least time (``docs/explanation/accelerators.md``). An
evaluation is a forward pass, about a third of a step. It counts as one pass over the test set: the
evaluation before round 1, validation examples, tests of the clients' own and further passes for
personal models are not counted. Neither are compilation, loading and generation of texts.

If the data are a file or folder here, they are read and divided, and the steps of a round are the
mean over its clients. Otherwise the steps of a client follow from ``local_steps``, or else from the
mean number of examples of a client and the epochs. The examples are then those that the catalogue
states for the data set.
"""

import functools
import heapq
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

from fedjax_peft.config import config as configs
from fedjax_peft.config import sweeps
from fedjax_peft.config.federation import evaluation_data
from fedjax_peft.config.parts import fingerprint
from fedjax_peft.data.catalog import DATASETS
from fedjax_peft.engine.plan import steps_of
from fedjax_peft.support.display import counted
from fedjax_peft.support.errors import InputError
from fedjax_peft.support.nested import unset

SLOWER = (1.4, 3.4)
"""A measured step over its least time, from the fastest to the slowest round of an H100."""


class Work(NamedTuple):
    """The work of a run."""

    steps: float | None
    """Local steps of a client in a round, a mean; None: only the data know."""
    clients: int | None
    """In a round; None: only the data know."""
    rounds: int
    evaluations: int
    """Without the one before round 1."""
    tested: int
    """Examples of the test data."""
    note: str
    """What the steps were computed from."""


def examples_of(data: Mapping[str, Any]) -> dict[str, int]:
    """Returns the examples of a config's data set that the catalogue states: split -> number."""
    entry = DATASETS.get(data["name"])
    if entry is None:
        return {}
    if entry.examples:
        first = next(iter(entry.examples.values()))
        return dict(zip(("train", "test"), entry.examples.get(data["split"], first), strict=True))
    if rows := re.search(r"([\d,]+) rows", entry.description):  # a share of them is the test split
        count = int(rows[1].replace(",", ""))
        tests = round(count * (data["test_share"] or 0.2))
        return {"train": count - tests, "test": tests}
    found = re.search(r"([\d,]+) train(.*)", entry.description)
    if found is None:
        return {}
    after = re.findall(r"\d[\d,]*", found[2])  # the split that is tested stands last
    numbers = {"train": found[1]} | ({"test": after[-1]} if after else {})
    return {split: int(n.replace(",", "")) for split, n in numbers.items()}


def work_of(config: Mapping[str, Any]) -> Work:
    """Returns the work of a resolved config."""
    data, steps = config["data"], config["local_steps"]
    every, rounds = config["evaluation"]["every"], config["rounds"]
    evaluations = math.ceil(rounds / every) if every else 1
    if (read := _read(config)) is not None:
        sizes, tests = read
        given = steps if isinstance(steps, int) else None
        each = [steps_of(n, config["batch_size"], config["epochs"], given) for n in sizes]
        cohort, note = config["clients_per_round"] or len(each), "steps from the clients' examples"
        return Work(sum(each) / len(each), cohort, rounds, evaluations, tests, note)
    known = examples_of(data)
    clients, share = _clients_of(config)
    cohort = config["clients_per_round"] or clients
    note = "steps of the config"
    train = data["train_examples"] or known.get("train")
    if not isinstance(steps, int):
        steps = None
        if train and clients and share and isinstance(config["epochs"], int):
            kept = share * train * (1 - (data["validation_share"] or 0))
            batches = math.ceil(kept / clients / config["batch_size"])
            steps, note = config["epochs"] * batches, "steps from the mean examples of a client"
    tests = data["test_examples"] or known.get("test", 0)
    return Work(steps, cohort, rounds, evaluations, tests, note)


def _read(config: Mapping[str, Any]) -> tuple[tuple[int, ...], int] | None:
    """Returns the examples of each client and of the test data; None if the data are not here.

    Points of a sweep that differ in their seed and optimizer only are read once.
    """
    places = [config["data"][key] for key in ("name", "source")]
    if not any(place and Path(str(place)).exists() for place in places):
        return None
    unread = {"seed": 0, "name": "", "optimizer": None}
    return _divided(json.dumps({**config, **unread}, default=str))


@functools.lru_cache(maxsize=64)
def _divided(text: str) -> tuple[tuple[int, ...], int] | None:
    """Returns what :func:`_read` does, of a resolved config as JSON."""
    config = json.loads(text)
    try:
        data, clients = configs.federation(config)
        clients, tested = evaluation_data(config, data, clients)
    except InputError:  # such as a tokenizer that is not here: what is stated must do
        return None
    test = tested["test"]
    return tuple(clients.sizes.tolist()), 0 if test is None else len(test)


def _clients_of(config: Mapping[str, Any]) -> tuple[int | None, float | None]:
    """Returns the clients, and the share of the training examples that they have together.

    None stands for what only the data know.
    """
    partition, entry = config["partition"], DATASETS.get(config["data"]["name"])
    name, clients = partition["name"], partition.get("clients")
    if name == "pooled":
        return 1, 1.0
    if name == "label_share":
        return len(partition["shares"][0]), 1.0
    drawn = None if config["data"]["users"] else 1.0
    if name not in ("natural", "grouped"):
        return clients, drawn
    by = partition.get("by") or "client"
    owners = None
    if entry is not None:
        owners = len(entry.parts if by == "task" else entry.keys.get(by, ())) or entry.users
    taken = partition.get("of") or clients or owners
    share = taken / owners if owners and taken and drawn else None
    return (partition["groups"] if name == "grouped" else taken), share


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


def runs_of(raw: configs.Config, overrides: Sequence[str] = ()) -> dict[str, list[configs.Config]]:
    """Returns method ("" without methods) -> the configs of its runs, all points of its sweep."""
    several = any(sweeps.axis(text) is not None for text in overrides)
    methods = {} if several else configs.methods(raw, overrides)
    if not several and not any(one.get("sweep", {}).get("grid") for one in methods.values()):
        return {name: [one] for name, one in methods.items()}
    found: dict[str, list[configs.Config]] = {}
    for point in sweeps.plan(raw, overrides).points:
        found.setdefault(point.method, []).append(point.config)
    return found


class Hours(NamedTuple):
    """The hours of some runs, one after another."""

    runs: int
    work: Work
    """Of the first of them."""
    least: float | None
    """By the least time of a step; None: only the data know."""
    each: tuple[float, ...] = ()
    """The hours of each run."""

    def __str__(self) -> str:
        """Returns a line of them."""
        if self.least is None:
            return "hours: only the data know the steps or the clients of a round"
        count = f"{counted(self.runs, 'run')} of {counted(self.work.rounds, 'round')}"
        return f"{count}: {from_to(self.least)} hours ({self.work.note})"


def hours_of(
    runs: Sequence[configs.Config], step: float | Callable[[configs.Config], float], lanes: int
) -> Hours:
    """Returns the hours of a method's runs, as :func:`runs_of` has them.

    Args:
      step: the least seconds of a step of all lanes, or a function of a resolved config.
    """
    resolved = [configs.resolve(run) for run in runs]
    steps = [step(config) if callable(step) else step for config in resolved]
    each = [run_hours(one, seconds, lanes) for one, seconds in zip(resolved, steps, strict=True)]
    known = tuple(one for one in each if one is not None)
    least = math.fsum(known) if len(known) == len(each) else None
    return Hours(len(runs), work_of(resolved[0]), least, known)


def program_of(config: configs.Config) -> str:
    """Returns a text that is equal for resolved configs whose steps take the same time.

    They differ in seeds, in the number of rounds and in run-time values.
    """
    rest = {key: x for key, x in config.items() if key not in ("seed", "name", "rounds")}
    for key in config["runtime"] or ():
        rest, _ = unset(rest, key.split("."))
    return fingerprint({key: x for key, x in rest.items() if key != "runtime"})


def on_workers(found: Sequence[Hours], workers: int, now: datetime) -> str:
    """Returns the line of all runs on several workers that begin now, the longest runs first."""
    who = f"with {counted(workers, 'worker')}"
    if any(one.least is None for one in found):
        return f"{who}: not known"
    loads = [0.0] * workers
    for hours in sorted((hours for one in found for hours in one.each), reverse=True):
        heapq.heapreplace(loads, loads[0] + hours)
    first, last = (f"{now + timedelta(hours=max(loads) * x):%a %d %b %H:%M}" for x in SLOWER)
    end = f"begun now, it ends {first} to {last}"
    return f"{who}: {from_to(max(loads))} hours; {end}"


def from_to(least: float) -> str:
    """Returns the range of hours, from the fastest to the slowest round that was measured."""
    low, high = (f"{least * factor:.2g}" for factor in SLOWER)
    return " to ".join(f"{float(text):,g}" for text in (low, high))


def together(found: Sequence[Hours]) -> str:
    """Returns the line of all methods' runs."""
    least = [one.least for one in found if one.least is not None]
    some = "" if len(least) == len(found) else f" for {len(least)} of {len(found)} methods"
    return f"together: {from_to(math.fsum(least))} hours{some}" if least else "together: not known"
