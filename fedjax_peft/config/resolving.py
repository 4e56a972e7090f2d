"""The complete config of a run: every key checked, every default filled in."""

import inspect
from collections.abc import Mapping
from typing import Any

from fedjax_peft import algorithms, peft, tasks
from fedjax_peft.config import keys, presets
from fedjax_peft.config.building import NOISE, call, check_recorded, rate
from fedjax_peft.config.origins import with_seeds
from fedjax_peft.config.reading import expanded, overlay
from fedjax_peft.config.schema import checked_values, fields_of, parts_in
from fedjax_peft.contracts.part import OWN, unrecorded
from fedjax_peft.models import heads
from fedjax_peft.numerics.hyperparameters import constants_of
from fedjax_peft.simulation.records import RECORDS
from fedjax_peft.simulation.simulate import simulate
from fedjax_peft.simulation.stopping import early_stop
from fedjax_peft.simulation.storage.calls import NO_METHOD
from fedjax_peft.simulation.storage.record import PROGRAMS
from fedjax_peft.support.display import show
from fedjax_peft.support.errors import InputError, nearest


def resolve(raw: keys.Config) -> keys.Config:
    """Returns the complete config: every key checked, every default filled in.

    Raises:
      InputError: a key or name is unknown (the message gives the nearest one), or a value has the
        wrong type.
    """
    raw = _with_none({key: value for key, value in raw.items() if key not in keys.OF_A_STUDY})
    check_recorded(raw, advice=PROGRAM)
    _check_present(raw)
    try:
        result = _resolved(presets.expand(expanded(raw), overlay))
    except InputError as error:
        raise InputError(f"{error}{presets.missing_advice(raw, str(error))}") from None
    result["preset_changes"] = presets.changes(result) or None
    _check_noise(result["privacy"])
    return with_seeds(result)


PROGRAM = (
    "Run the program again that started this run, or give what is missing in a copy of the config."
)


def resolve_recorded(config: keys.Config) -> keys.Config:
    """Returns the complete config of a run's ``config.toml``, which contains every key.

    The run's own values are used, even if its preset was changed or renamed since then. Tables of
    which the run could not record everything stay as they are.
    """
    config = _with_kept_optimizer(config)
    preset = {key: config.get(key) for key in ("preset", "preset_changes")}
    apart = {*preset, *PROGRAMS}
    return _resolved(_with_none({k: v for k, v in config.items() if k not in apart})) | preset


def _with_kept_optimizer(config: keys.Config) -> keys.Config:
    """Returns the config of a run of the time when algorithms had the argument keep_optimizer."""
    algorithm, optimizer = ({**config.get(table, {})} for table in ("algorithm", "optimizer"))
    keep = algorithm.pop("keep_optimizer", None)
    if algorithm.get("name") == "centralised" and keep is False:
        algorithm["fresh_optimizer"] = True
    elif keep:
        optimizer["keep"] = True
    return {**config, "algorithm": algorithm, "optimizer": optimizer}


def _with_none(value: Any) -> Any:
    """Returns a config with None where a run has recorded it in place of another default."""
    if not isinstance(value, dict):
        return value
    return None if value == {OWN: "None"} else {key: _with_none(x) for key, x in value.items()}


def _check_present(raw: keys.Config) -> None:
    """Raises InputError for an unknown key at the top level that is, or is like, one of a table."""
    tables = (*keys.FUNCTIONS, *keys.NAMESPACES)
    top = {*fields_of(simulate), *fields_of(keys.RunKeys), *tables}
    for key in raw:
        if key not in top:
            dotted = {x.dotted: x.name for x in keys.all_keys()}
            same = " or ".join(show(x) for x, name in dotted.items() if name == key)
            advice = f"Did you mean {same}?" if same else nearest(key, {*top, *dotted})
            if advice.startswith("Did you mean"):  # else the keys of the top level are listed
                raise InputError(f"Unknown config key {show(key)}. {advice}")


def _resolved(raw: keys.Config) -> keys.Config:
    """Returns the complete config; the preset's settings are already in ``raw``."""
    tables = [*keys.FUNCTIONS, *keys.NAMESPACES]
    result = checked_values("", {**fields_of(simulate), **fields_of(keys.RunKeys)}, raw, tables)
    for table in tables:
        given = raw.get(table, {})
        if not isinstance(given, dict):
            or_name = "" if table in RECORDS else " or a name"
            raise InputError(f"[{table}] must be a table{or_name}, not {show(given)}.")
        result[table] = resolve_table(table, given)
    if result["stop"] and not unrecorded(result["stop"]):
        early_stop(**result["stop"])  # raises InputError for values that cannot be used
    _check_parts(result)
    if not unrecorded([result["algorithm"], result["optimizer"]]):
        rate(result)  # raises InputError if it is missing
    result["model"]["head"] = head_kind(result["model"].get("head"))
    return result


def resolve_table(table: str, given: keys.Config) -> keys.Config:
    """Returns the complete options of a table."""
    if unrecorded(given) or (table == "peft" and given == {"name": NO_METHOD}):
        return given
    if table in keys.CHAINED:
        return {name: _resolved_link(table, name, options) for name, options in given.items()}
    if table in keys.OPTIONAL and not given:
        return {}
    if table in keys.FUNCTIONS:
        fields = {**fields_of(keys.FUNCTIONS[table])}
        if table in keys.MORE_KEYS:
            fields |= fields_of(keys.MORE_KEYS[table])
        return checked_values(table, fields, given)
    name = given.get("name", keys.DEFAULT_NAMES.get(table))
    function = keys.function_of(table, name)
    options = {k: v for k, v in given.items() if k != "name"}
    fields = {**fields_of(function)}
    if table == "privacy" and NOISE in fields:  # epsilon can stand for it
        fields |= {NOISE: (fields[NOISE][0] | None, None), **fields_of(keys.PrivacyKeys)}
    if table == "peft":
        own = fields_of(keys.MethodKeys)
        starts = {peft.lora_sb: "gradient_", peft.lora: "activation_"}.get(function, "seed")
        fields |= {k: v for k, v in own.items() if k == "seed" or k.startswith(starts)}
    return {"name": name, **_checked(table, function, fields, options)}


def _checked(
    table: str, function: Any, fields: Mapping[str, Any], options: keys.Config
) -> keys.Config:
    """Returns all options of a function; parts inside of it are checked when they are made."""
    parts = parts_in(function, options)
    plain = {key: x for key, x in options.items() if key not in parts}
    for key in (key for key in plain if key not in fields):
        same = [one for one in keys.all_keys() if (one.table, one.name) == (table, key)]
        if owners := sorted(name for one in same for name in one.functions):
            name = function.__name__
            raise InputError(
                f"Unknown config key [{table}] {show(key)} of {name}; it is one of"
                f" {', '.join(owners[:6])}. {nearest(key, fields)} An override {table}={name}"
                f" drops the keys of the name before, {table}.name={name} keeps them."
            )
    return {**checked_values(table, fields, plain), **parts}


def _check_noise(table: keys.Config) -> None:
    """Raises InputError if [privacy] says the noise not at all, or twice."""
    if NOISE in table and (table[NOISE] is None) == (table["epsilon"] is None):
        said = "neither" if table[NOISE] is None else "both"
        raise InputError(
            f"[privacy] needs one of {NOISE} and epsilon, and has {said}. On the command line,"
            f" 'privacy.{NOISE}=' removes a key."
        )


def _check_parts(config: keys.Config) -> None:
    """Raises InputError for a schedule or an aggregator that the algorithm does not take."""
    if unrecorded(config["algorithm"]):
        return
    name = config["algorithm"]["name"]
    options = inspect.signature(keys.function_of("algorithm", name)).parameters
    for table in (x for x in keys.SCHEDULES if config[x] and not unrecorded(config[x])):
        call(config, table)  # raises InputError for values that cannot be used
    if config["schedule"] and "optimizer" not in options:
        raise InputError(f"[schedule] is for an optimizer, and {show(name)} takes none.")
    if config["server_schedule"] and "server_schedule" not in options:
        made = {n: inspect.signature(getattr(algorithms, n)) for n in algorithms.__all__}
        known = [n for n, signature in made.items() if "server_schedule" in signature.parameters]
        raise InputError(
            f"[server_schedule] is for a server with a learning rate, and that of {show(name)}"
            f" has none. Remove the table, or use one of {', '.join(known)}."
        )
    if config["aggregator"] and "aggregator" not in options:
        raise InputError(
            f"[aggregator] chooses {show(config['aggregator']['name'])}, and {show(name)} takes no"
            " aggregator: a built-in algorithm of this kind has its own. Remove the table, or give"
            " your own function an argument 'aggregator'."
        )


def _resolved_link(table: str, name: str, options: Any) -> keys.Config:
    """Returns the complete options of one function of a table such as ``[transforms]``."""
    function = keys.function_of(table, name)
    if not isinstance(options, dict):
        raise InputError(
            f"The config key {table}.{name} cannot be {show(options)}: it must be a table of the"
            f" options of {name!r}, [{table}.{name}]."
        )
    return _checked(f"{table}.{name}", function, fields_of(function), options)


def head_kind(name: str | None) -> str | None:
    """Returns the kind of head that a config names by its kind or by a task.

    Raises:
      InputError: neither.
    """
    kind = None if name is None else tasks.head_kind(name)
    if kind is not None and kind not in heads.KINDS:
        raise InputError(
            f"The config key [model] 'head' cannot be {show(name)}. {nearest(kind, heads.KINDS)}"
        )
    return kind


def is_constant(key: str) -> bool:
    """Returns whether a dotted key such as ``transforms.top_k.share`` decides sizes."""
    table, _, rest = key.partition(".")
    name, _, option = rest.rpartition(".")
    return table in keys.CHAINED and option in constants_of(keys.function_of(table, name))
