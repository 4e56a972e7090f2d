"""What is wrong with a config, before its data are tokenized and its model is loaded.

The headers of the user's files and the ``config.json`` of a model take a second; texts and weights
take a minute. The functions that raise are those that a run calls later, here over no rows and over
shapes.
"""

from collections.abc import Iterable
from typing import Any

from fedjax_peft.config import config as configs
from fedjax_peft.config import memory
from fedjax_peft.config.parts import fingerprint
from fedjax_peft.simulation import checks
from fedjax_peft.simulation.records import RECORDS
from fedjax_peft.support import plugins
from fedjax_peft.tasks.sources import check_header

_COUNTS = ("rounds", "clients_per_round", "batch_size")


def check(resolved: Iterable[dict[str, Any]]) -> None:
    """Raises InputError for a column, target, rank or algorithm that does not fit.

    Args:
      resolved: the configs of all runs, from :func:`fedjax_peft.config.config.resolve`. Equal parts
        are checked once.
    """
    seen = set()
    for config in resolved:
        for function, tables in _CHECKS.items():
            key = fingerprint([function.__name__, [config[table] for table in tables]])
            if key not in seen:
                function(config)
                seen.add(key)


def _check_data_and_model(config: dict[str, Any]) -> None:
    """Reads the headers of the user's files, and attaches the PEFT method to the model's shapes."""
    data, named = config["data"], configs.named_task(config)
    chosen = {key: data[key] for key in ("name", "columns", "csv")}
    task = check_header(**chosen, task=named, by=config["partition"].get("by"))
    kind = config["model"]["head"] or (task and task.head)
    # A method of the user's own may need the values of the weights, and a pretrained adapter has a
    # head for the labels of the data.
    method = config["peft"]["name"]
    known = method != "pretrained" and not plugins.is_user_function(method)
    if kind is not None and known:
        memory.shapes(config, "causal_lm" if data["instructions"] else kind)


def _check_rest(config: dict[str, Any]) -> None:
    """Makes the algorithm and everything else that needs neither data nor model."""
    configs.build_algorithm(config)
    configs.build(config, "transforms")
    configs.build(config, "attack")
    configs.build(config, "asynchronous")
    configs.build_records(config)


def _check_numbers(config: dict[str, Any]) -> None:
    """Checks the numbers of a run's rounds, clients and local work."""
    given = {name: config[name] for name in _COUNTS}
    positive = {name: number for name, number in given.items() if number is not None}
    checks.check_counts(positive, {"seed": config["seed"]})
    stragglers = config["system"]["stragglers"]
    checks.check_work(config["epochs"], config["local_steps"], stragglers)


_CHECKS = {
    _check_numbers: (*_COUNTS, "seed", "epochs", "local_steps", "system"),
    _check_data_and_model: ("data", "partition", "task", "model", "peft"),
    _check_rest: (
        *("algorithm", "aggregator", "optimizer", "schedule", "server_schedule", "transforms"),
        *("attack", "asynchronous", "availability", "rounds", "time", "stop", *RECORDS),
    ),
}
"""Check -> the keys of the config that it reads."""
