"""The data of a resolved config: splits, clients, and what is evaluated on."""

import copy
from collections.abc import Mapping
from typing import Any

from fedjax_peft import tasks
from fedjax_peft.config.building import call, named_task, seeded, tokenizer_of
from fedjax_peft.config.keys import SCHEDULES, Config, DataKeys, function_of
from fedjax_peft.config.schema import checked_values, fields_of
from fedjax_peft.data import Clients, Dataset, partition
from fedjax_peft.data.catalog import DATASETS
from fedjax_peft.data.packing import text_length
from fedjax_peft.support.errors import InputError
from fedjax_peft.tasks.sources import load_dataset


def load_data(config: Config) -> dict[str, Dataset]:
    """Returns the splits of a resolved config's data.

    Raises:
      InputError: the data are not available or cannot be read, or settings contradict each other.
    """
    _check_own_examples(config, "test", "tests", 0.2)
    _check_own_examples(config, "validation", "validates", 0.1)
    task = named_task(config)
    if task is not None and config["metric"] is not None:
        raise InputError("With a [task] table, set metric there and not at the top level.")
    options = {k: v for k, v in config["data"].items() if k not in DataKeys._fields}
    tokenizer = tokenizer_of(config)
    data = seeded(load_dataset, config, options, tokenizer=tokenizer, task=task)
    for key in ("client_validation", "global_validation"):
        if config["evaluation"][key] and "validation" not in data:
            raise InputError(
                f"evaluation.{key} = true needs a validation split, and"
                f" {config['data']['name']!r} has none. To hold out a share of the training rows,"
                " set data.validation_share = 0.1."
            )
    return data


def federation(config: Config) -> tuple[dict[str, Dataset], Clients]:
    """Returns the splits of a resolved config's data, and the clients of the training split."""
    data = load_data(config)
    return data, call(config, "partition", data["train"])


def evaluation_data(
    config: Config, data: Mapping[str, Dataset], clients: Clients
) -> tuple[Clients, dict[str, Any]]:
    """Returns the clients without what they hold out, and the data to evaluate on.

    Returns:
      The clients, packed if ``[data]`` says so, and the arguments ``test``, ``client_test``,
      ``validation`` and ``client_validation`` of ``simulate``.
    """
    asked = config["evaluation"]
    validates = asked["global_validation"]
    validates = asked["global_test"] if validates is None else validates
    result: dict[str, Any] = {
        "test": data["test"] if asked["global_test"] else None,
        "validation": data.get("validation") if validates else None,
    }
    for split in ("test", "validation"):
        if asked[f"client_{split}"]:
            by = config["partition"].get("by", "client")
            # A client can be without examples of this split.
            own = partition.natural(data[split], by=by, names=clients.names, min_size=0)
            result[f"client_{split}"] = own
    seed = config["seed"] if asked["holdout_seed"] is None else asked["holdout_seed"]
    for split, key in (("test", "client_holdout"), ("validation", "client_validation_holdout")):
        if asked[key] is not None:
            clients, result[f"client_{split}"] = clients.holdout(asked[key], seed=seed)
    if config["data"]["packing"] is not None:
        clients = clients.pack(config["data"]["packing"])
    return clients, result


def _check_own_examples(config: Config, split: str, does: str, share: float) -> None:
    """Raises InputError for clients that cannot have own examples of a split.

    Args:
      does: what is done with them, as a verb.
      share: an example of what can be held out instead.
    """
    own = f"client_{split}"
    holdout = "client_holdout" if split == "test" else "client_validation_holdout"
    asked, partitioned = config["evaluation"], config["partition"]["name"]
    if asked[own] and partitioned != "natural":
        raise InputError(
            f"evaluation.{own} = true {does} clients on their own {split} examples. Only clients of"
            " [partition] name = 'natural' have such examples, not those of"
            f" {partitioned!r}. For other partitions, hold out a share of each"
            f" client's training examples: evaluation.{holdout} = {share}."
        )
    if asked[own] and asked[holdout] is not None:
        raise InputError(
            f"evaluation.{own} = true and evaluation.{holdout} exclude each other: use only one."
        )


def _kind_of_validation(config: Config, data: Mapping[str, Dataset]) -> str | None:
    """Returns what the validation examples of a run are, in words; None if there are none."""
    kinds = []
    share = config["data"]["validation_share"]
    holdout = config["evaluation"]["client_validation_holdout"]
    if share is not None:
        kinds.append(f"{100 * share:g} % of train")
    elif "validation" in data:
        entry = DATASETS.get(config["data"]["name"])
        rule = config["data"]["split"] or "6:2:2"
        kinds.append(f"a part of the split {rule}" if entry and entry.parts else "official")
    if holdout is not None:
        kinds.append(f"{100 * holdout:g} % of each client's examples")
    return "; ".join(kinds) or None


def explicit(config: Config, data: Mapping[str, Dataset]) -> Config:
    """Returns the config with the settings that follow from the data, so that it is complete."""
    config, train = copy.deepcopy(config), data["train"]
    config["validation"] = _kind_of_validation(config, data)
    # A run that is continued for more rounds keeps its schedule, and its correlated noise.
    for table in (*SCHEDULES, "privacy"):
        if "rounds" in config[table]:
            config[table]["rounds"] = config[table]["rounds"] or config["rounds"]
    task = tasks.for_data(train)
    if config["model"]["head"] is None:
        config["model"]["head"] = task.head
    # A later reader, such as ``predict``, does not have the data; a head serves several tasks.
    unsaid = not config["task"] and config["metric"] is None and task.name in tasks.__all__
    if unsaid and task.head == "causal_lm" and tasks.for_head(task.head).name != task.name:
        fields = fields_of(function_of("task", task.name))
        config["task"] = {"name": task.name, **checked_values("task", fields, {})}
    if (length := text_length(train.columns)) is not None:
        config["data"]["max_length"] = length
    return config
