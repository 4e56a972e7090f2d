"""Running a resolved config."""

import functools
import json
import operator
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedjax_peft import peft, tasks
from fedjax_peft.config import building, reading
from fedjax_peft.config.federation import evaluation_data, explicit, load_data
from fedjax_peft.config.keys import SCHEDULES, Config, EvaluationKeys
from fedjax_peft.config.origins import check_adapter, with_missing
from fedjax_peft.config.parts import Parts, fingerprint
from fedjax_peft.config.resolving import PROGRAM, resolve_recorded
from fedjax_peft.config.schema import OF_THE_RUN, fields_of
from fedjax_peft.contracts.part import unrecorded
from fedjax_peft.data import Clients, Dataset
from fedjax_peft.models.base import Model
from fedjax_peft.numerics.hyperparameters import Maker, Values
from fedjax_peft.privacy.accounting import smallest_noise
from fedjax_peft.simulation.origin import ORIGIN, base_seed, with_origin
from fedjax_peft.simulation.progress import Phase, PhaseName
from fedjax_peft.simulation.run import Run
from fedjax_peft.simulation.session import federation_of, schedule_of
from fedjax_peft.simulation.simulate import simulate
from fedjax_peft.simulation.stopping import Stop
from fedjax_peft.simulation.storage.record import read_config
from fedjax_peft.support.errors import InputError
from fedjax_peft.support.nested import flatten, unset
from fedjax_peft.tasks import Task


def run(
    config: Config,
    *,
    out: str | Path | None = None,
    resume: bool = False,
    on_round: Callable[[dict[str, Any]], None] | None = None,
    on_phase: Callable[[Phase], None] | None = None,
    parts: Parts | None = None,
    stop: Stop | None = None,
    act: Callable[..., Any] = simulate,
    origin: Run | None = None,
) -> Any:
    """Runs a resolved config. Arguments that are not named below are those of ``simulate``.

    Args:
      parts: the parts of other runs of a sweep; data, models and programs are shared with them.
      stop: a rule that can end the run in addition to the one of the config's ``[stop]``.
      act: what is called with the arguments of ``simulate`` and whose result is returned, such as
        :func:`fedjax_peft.simulation.simulate.arguments`.
      origin: the run of the config's ``origin``, which a new run starts from.
    """
    building.check_recorded(config, advice=PROGRAM)
    parts = Parts() if parts is None else parts

    def report_phase(name: PhaseName) -> None:
        if on_phase is not None:
            on_phase(Phase(name, 0, config["rounds"]))

    report_phase("reading")
    if resume and out is not None:
        config = _as_begun(Path(out), config)
    config, train, clients, evaluated = _federation(config, parts)
    check_adapter(config, {name: data for name, data in evaluated.items() if data is not None})
    task = tasks.for_data(train, config["metric"])
    report_phase("loading")
    model = _first_model(config, train, parts, origin, out)
    if config["origin"] is None:
        model = started(config, model, clients, task)
    watching = {"on_round": on_round, "on_phase": on_phase, "progress": False}
    objects = {"config": config, "origin": origin, **watching, **evaluated}
    data = {"clients": clients, "task": task, **{n: evaluated[n] for n in ("test", "validation")}}
    return act(model, **data, **arguments_of(config, objects, stop), out=out, resume=resume)


def arguments_of(
    config: Config, objects: dict[str, Any], stop: Stop | None = None
) -> dict[str, Any]:
    """Returns the arguments of ``simulate`` that a config makes without its model and its data.

    Args:
      objects: fields of the records that are no values of a config.
      stop: a rule that can end the run in addition to the one of the config's ``[stop]``.
    """
    return {
        **made_from_values(config),
        "asynchronous": building.build(config, "asynchronous"),
        **building.build_records(config, objects, stop=stop),
        **{name: config[name] for name in fields_of(simulate)},
    }


def _federation(config: Config, parts: Parts) -> tuple[Config, Dataset, Clients, dict[str, Any]]:
    """Returns the config as the data complete it, the training examples, and all clients' data."""
    data = parts.get("data", data_description(config), lambda: load_data(config))
    clients = building.call(config, "partition", data["train"])
    config = explicit(config, data)
    clients, evaluated = evaluation_data(config, data, clients)
    return with_noise(config, clients), data["train"], clients, evaluated


def data_description(config: Config) -> Config:
    """Returns everything that the data of a config depend on."""
    table, model, evaluated = config["data"], config["model"], config["evaluation"]
    seed = config["seed"] if table["seed"] is None else table["seed"]
    tokenizer = [model[key] for key in ("name", "source", "config")]
    chosen = {name: config[name] for name in ("data", "task", "metric")}
    chosen |= {name: evaluated[name] for name in EvaluationKeys._fields}
    return {**chosen, "seed": seed, "tokenizer": tokenizer, "by": config["partition"]["name"]}


def _first_model(
    config: Config, train: Dataset, parts: Parts, origin: Run | None, out: str | Path | None
) -> Model:
    """Returns the model before round 1: that of the config, or that of the run it starts from.

    Raises:
      InputError: the run has another model, or is missing.
    """
    if config["origin"] is None:
        return _shared_model(config, train, parts)
    if origin is None:
        folder = Path(out or "")
        if out is None or not (folder / ORIGIN).exists():
            raise InputError("origin is written by the program: fedjax-peft run CONFIG --from RUN.")
        again = {**config, "seed": base_seed(folder, config)}
        return with_origin(_shared_model(again, train, parts), folder)
    before = read_config(Path(config["origin"]))
    recorded = resolve_recorded(before)
    names = [name for name in ("model", "peft") if not unrecorded(recorded[name])]
    known, asked = (flatten({name: one[name] for name in names}) for one in (recorded, config))
    for key in [*asked, *known]:
        decided = key == "model.labels" or key.endswith(".seed")  # by the run that it starts from
        if asked.get(key) != known.get(key) and not decided:
            raise InputError(
                f"--from takes the model of {config['origin']}, with its [model] and [peft]:"
                f" {key} is {known.get(key)!r} there and {asked.get(key)!r} here."
            )
    return origin.trained


def _shared_model(config: Config, train: Dataset, parts: Parts) -> Model:
    """Returns the model of a config, with the forward pass of an equal model with another seed.

    Compiled programs belong to the forward pass, so the two models share them.
    """
    tables = [config["model"], config["peft"], config["data"]["tokenizer"]]
    description = [*tables, list(train.label_names), train.vocabulary]
    model = parts.get(
        "model",
        [description, config["seed"]],
        lambda: building.build_model(config, train.label_names, train.vocabulary),
    )
    return model.replace(apply=parts.get("forward pass", description, lambda: model.apply))


def started(config: Config, model: Model, clients: Clients, task: Task) -> Model:
    """Returns the model of a run with the start that ``[peft]`` takes from training examples.

    Raises:
      InputError: a run with differential privacy, or a number that cannot be used.
    """
    table = config["peft"]
    step, key = table.get("gradient_start"), "peft.gradient_start"
    if step is None:
        if table.get("init") != "eva":
            return model
        key = "peft.init = 'eva'"
    if config["privacy"]:
        raise InputError(
            f"{key} reads the clients' examples without noise, so the run's epsilon would not hold."
            " Leave it out, or the table [privacy]."
        )
    source, usual = ("activation", 200) if step is None else ("gradient", 50)
    number = table[f"{source}_examples"]
    number = usual if number is None else number
    if number < 1:
        raise InputError(f"peft.{source}_examples = {number} must be at least 1.")
    drawn = {"seed": config["seed"], "stream": f"{source} start"}
    if step is not None and task.prepare is not None:  # the loss reads what it adds
        clients = replace(clients, data=task.prepare(model, clients.data, clients.indices))
    batches = clients.sample(number, config["batch_size"], **drawn)
    if step is None:
        return peft.activation_start(model, batches)
    return peft.gradient_start(model, batches, task, step=step)


def _of_values(values: Values, table: str, text: str) -> Any:
    """Returns a part of a config whose tables lack the run-time values.

    Args:
      table: such as ``algorithm``.
      text: JSON of the tables.
    """
    config = json.loads(text)
    for key, value in values.items():
        *tables, last = reading.key_parts(config, key)
        functools.reduce(operator.getitem, tables, config)[last] = value
    return building.BUILDERS[table](config)


def made_from_values(config: Config) -> dict[str, Any]:
    """Returns the arguments of ``simulate`` that depend on the run-time values, and the values."""
    # An epsilon was replaced by a noise multiplier, see with_noise.
    runtime = [
        f"privacy.{building.NOISE}" if k == "privacy.epsilon" else k
        for k in config["runtime"] or ()
    ]
    if not runtime:
        return {name: build(config) for name, build in building.BUILDERS.items()}
    flat = flatten(config)
    names = (*building.BUILDERS, "aggregator", "optimizer", *SCHEDULES)
    tables, _ = unset({name: config[name] for name in names}, ["privacy", "epsilon"])
    for name in OF_THE_RUN:  # a function that draws random numbers has a seed, or needs the run's
        if any(k.endswith(f".{name}") and x is None for k, x in flatten(tables).items()):
            tables[name] = config[name]
    for key in runtime:
        tables, _ = unset(tables, reading.key_parts(tables, key))
    text = fingerprint(tables)
    used = [name for name in building.BUILDERS if config[name] or name == "algorithm"]
    made = {name: Maker(_of_values, (name, text)) for name in used}
    return {**made, "values": {key: flat[key] for key in runtime}}


def describe(config: Config) -> str:
    """Returns a short description of a resolved config: algorithm, PEFT method, model and data."""
    names = {table: config[table]["name"] for table in ("partition", "peft", "algorithm")}
    parts = [config["aggregator"].get("name"), *config.get("transforms", {})]
    if private := config.get("privacy", {}).get("name"):
        parts.append(f"{private} privacy")
    if hostile := config.get("attack", {}).get("name"):
        parts.append(f"{hostile} attack")
    if server := config.get("asynchronous", {}).get("name"):
        parts.append(f"{server} server")
    combined = " and ".join(part for part in parts if part)
    combined = f" with {combined}" if combined else ""
    model, data = (Path(config[table]["name"]).name for table in ("model", "data"))
    return (
        f"{names['algorithm']}{combined} over {names['peft']} on {model},"
        f" {data} by {names['partition']}"
    )


def with_noise(config: Config, clients: Clients) -> Config:
    """Returns the config with the noise multiplier that gives it ``privacy.epsilon``.

    A config that says its noise is returned as it is.

    Raises:
      InputError: no noise is enough, or the mechanism does not fit the run.
    """
    table = config["privacy"]
    if table.get("epsilon") is None or table[building.NOISE] is not None:
        return config
    made = building.build_records(config)
    own = {"system": made["system"], "length_buckets": made["placement"].length_buckets}
    names = [name for name in fields_of(schedule_of) if name not in own]
    schedule = schedule_of(clients, **{name: config[name] for name in names}, **own)
    facts = federation_of(schedule, clients.data, building.build_algorithm(config))

    def epsilon_of(noise: float) -> float:
        mechanism = building.build_privacy({**config, "privacy": {**table, building.NOISE: noise}})
        assert mechanism is not None
        return mechanism.guarantee(facts, config["rounds"]).epsilon

    noise = smallest_noise(epsilon_of, table["epsilon"])
    return {**config, "privacy": {**table, building.NOISE: noise}}


def _as_begun(run: Path, config: Config) -> Config:
    """Returns the config with what a run that is continued took when it began.

    These are the noise, if it was for this epsilon, and the seeds of the data of its origin, which
    may be gone.
    """
    if not (run / "config.toml").exists():
        return config
    before, table = read_config(run), config["privacy"]
    recorded = before.get("privacy", {})
    if table.get("epsilon") is not None and recorded.get("epsilon") == table["epsilon"]:
        noise = {building.NOISE: recorded.get(building.NOISE)}
        config = {**config, "privacy": {**table, **noise}}
    return config if config["origin"] is None else with_missing(config, before)
