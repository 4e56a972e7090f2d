"""The run that a config starts from: its data keep the seeds of that run.

One ``seed`` has two meanings: the chance of training, and which example is in which split and
belongs to which client. A new run from an earlier one may have another seed, but the same data: a
new split would test on examples that the model was trained on, and a new partition would give the
private model of a client the examples of others.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_peft.config.keys import Config
from fedjax_peft.contracts.part import unrecorded
from fedjax_peft.peft.io.export import run_of
from fedjax_peft.simulation.storage.named_data import absolute
from fedjax_peft.simulation.storage.record import has_begun, read_config
from fedjax_peft.simulation.trained_rows import check_unseen, read_rows

OF_THE_DATA = {"data": "seed", "partition": "seed", "evaluation": "holdout_seed"}
"""Table -> its key of a seed that decides splits, clients or hold-outs."""


def origin_of(config: Mapping[str, Any]) -> Path | None:
    """Returns the directory of the run that a config starts from.

    It is the ``origin`` of ``--from``, or the run whose directory holds the adapter or the model,
    or which exported it.
    """
    if config.get("origin") is not None:
        return Path(config["origin"])
    places = [config.get(table, {}).get(key) for table, key in (("peft", "adapter"), _MODEL)]
    for place in filter(None, places):
        path = Path(absolute(place, Path()))
        if not path.is_absolute():
            continue  # the name of a model, which is no path of the working directory
        near = (run_of(path), path.resolve(), *path.resolve().parents)
        if found := next((one for one in near if one is not None and has_begun(one)), None):
            return found
    return None


_MODEL = ("model", "name")


def with_seeds(config: Config) -> Config:
    """Returns a resolved config whose data have the seeds of the run that it starts from.

    A seed that the config writes stays.
    """
    place = origin_of(config)
    if place is None or not has_begun(place):
        return config
    before = read_config(place)
    known = not unrecorded([before["data"], before["partition"]])
    return with_missing(config, before, before.get("seed")) if known else config


def with_missing(config: Config, before: Mapping[str, Any], seed: int | None = None) -> Config:
    """Returns a config whose missing seeds of data are those of another config.

    Args:
      seed: of the other config where it says no other one.
    """
    result = dict(config)
    for table, key in OF_THE_DATA.items():
        if config[table].get(key, 0) is None:
            result[table] = config[table] | {key: before.get(table, {}).get(key, seed)}
    return result


def notices(config: Config) -> list[str]:
    """Returns what to say of a config whose data have other seeds because of its origin."""
    place, seeds = origin_of(config), []
    for table, key in OF_THE_DATA.items():
        if config[table].get(key) not in (None, config["seed"]):
            seeds.append(f"{table}.{key} = {config[table][key]}")
    if place is None or not seeds:
        return []
    said = f"the data keep the split and the clients of {place}"
    return [f"{said} ({', '.join(seeds)}); seed = {config['seed']} is the chance of training"]


def check_adapter(config: Config, tested: Mapping[str, Any]) -> None:
    """Raises InputError if a run is evaluated on training examples of the run of its adapter.

    Args:
      tested: name -> what the new run is evaluated on.
    """
    place = None if config["origin"] is not None else origin_of(config)
    if place is not None:
        check_unseen(tested, _rows(place), str(place))


def _rows(run: Path) -> np.ndarray | None:
    """Returns the training examples of a run, and of the runs whose adapters it started from."""
    rows, seen = read_rows(run), {run.resolve()}
    place = origin_of(read_config(run))
    while rows is not None and place is not None and has_begun(place):
        before = None if place.resolve() in seen else read_rows(place)
        if before is None:
            break
        rows, seen = np.union1d(rows, before), {*seen, place.resolve()}
        place = origin_of(read_config(place))
    return rows
