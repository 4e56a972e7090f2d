"""Reading config files, their methods, and what the command line replaces."""

import copy
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedjax_peft.config.keys import CHAINED, DEFAULT_NAMES, NAMESPACES, Config
from fedjax_peft.simulation.storage.calls import ARGUMENTS
from fedjax_peft.simulation.storage.named_data import PATHS, absolute
from fedjax_peft.simulation.storage.record import as_asked
from fedjax_peft.support import plugins, toml
from fedjax_peft.support.display import show
from fedjax_peft.support.errors import InputError, nearest
from fedjax_peft.support.nested import flatten, merge, unset

_NAME_KEYS = {"model": "name", "data": "name", "time": "preset"} | {
    table: "name" for table in NAMESPACES if table not in CHAINED
}
"""Table -> the key whose value a string in place of the table stands for."""


def load(path: str | Path) -> Config:
    """Returns the content of a config file, with absolute paths for files in the config's folder.

    Raises:
      InputError: the file does not exist or is not TOML.
    """
    path = Path(path)
    try:
        raw = toml.read_toml(path)
    except FileNotFoundError:
        raise InputError(f"There is no config file {str(path)!r}.") from None
    except OSError as error:
        raise InputError(
            f"The config {str(path)!r} cannot be read as a TOML file: {error.strerror}."
        ) from None
    except ValueError as error:
        raise InputError(f"The config {str(path)!r} is not a TOML file: {error}.") from None
    _check_names(path, raw.get("methods"))
    if (path.parent / "environment.json").is_file():
        raw = as_asked(raw)
    return _with_absolute_paths(raw, path.parent)


def _check_names(path: Path, methods: Any) -> None:
    """Raises InputError for the name of a method that cannot be that of its folder."""
    for name in methods if isinstance(methods, dict) else ():
        if name in ("", ".", "..") or "/" in name:
            raise InputError(
                f"The config {str(path)!r} has a method {show(name)}. Its runs are in a folder of"
                " this name, so choose one without '/', such as [methods.mine]."
            )


def _with_absolute_paths(raw: Config, folder: Path) -> Config:
    """Returns the config with absolute paths for the files in ``folder``.

    A run then finds its model and data from every working directory. Other values are unchanged:
    names, hub ids and paths from the working directory.
    """
    result = expanded(raw)
    for table, keys in PATHS.items():
        given = result.get(table)
        if isinstance(given, dict):
            found = {key: absolute(given[key], folder) for key in keys if key in given}
            result[table] = given | found
    for table in NAMESPACES:
        given = result.get(table)
        if isinstance(given, dict) and table in CHAINED:
            links = given.items()
            result[table] = {plugins.with_absolute_path(name, folder): x for name, x in links}
        elif isinstance(given, dict) and "name" in given:
            result[table] = given | {"name": plugins.with_absolute_path(given["name"], folder)}
    methods = result.get("methods")
    if isinstance(methods, dict):
        result["methods"] = {
            name: _with_absolute_paths(one, folder) if isinstance(one, dict) else one
            for name, one in methods.items()
        }
    return result


def placed(parts: list[str], value: Any, folder: Path) -> tuple[list[str], Any]:
    """Returns the parts of a key and its value with absolute paths for the files in ``folder``."""
    before = expanded(_nested(parts, value))
    after: Any = _with_absolute_paths(before, folder)
    if after == before:
        return parts, value
    names = []
    for _ in parts:
        ((name, after),) = after.items()
        names.append(name)
    whole = isinstance(value, str) and isinstance(after, dict) and "name" in after
    return names, after["name"] if whole else after


def _nested(parts: Sequence[str], value: Any) -> Any:
    for part in reversed(parts):
        value = {part: value}
    return value


def override(raw: Config, text: str) -> Config:
    """Returns the config with one override applied.

    Args:
      text: ``dotted.key=value`` sets a key; the value is TOML or a word without quotes.
        ``dotted.key=`` removes a key or table, so that the preset's value or the default applies.

    Raises:
      InputError: the override is not of this form, or a part of its key is not a table.
    """
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise InputError(f"The override {show(text)} is not of the form key=value.")
    if not value.strip():
        return unset(raw, key_parts(raw, key.strip()))[0]
    try:
        parsed = toml.parse_value(value)
    except ValueError as error:
        raise InputError(f"The override {show(text)} has no usable value: {error}.") from None
    result = expanded(copy.deepcopy(raw))
    *tables, last = key_parts(result, key.strip())
    change = _with_absolute_paths(_nested([*tables, last], parsed), Path())
    if not tables and (last == "epochs" or (last in _NAME_KEYS and isinstance(parsed, str))):
        return overlay(result, change)
    node = result
    for table in tables:
        node, change = node.setdefault(table, {}), change[table]
        if not isinstance(node, dict):
            raise InputError(
                f"The override {show(text)} treats {show(table)} as a table; it is a value."
            )
    node[last] = change[last]
    return result


def key_parts(raw: Config, key: str) -> list[str]:
    """Returns the parts of a dotted key: the tables, and the key in the last of them.

    ``algorithm.optimizer.learning_rate``, as in Python, is ``optimizer.learning_rate`` here. The
    name of a user's function can contain dots, as in ``transforms.mine.py:codec.share``. It is
    the name that the config has for it, with the path of its file, or else one from the working
    directory.
    """
    for argument in ARGUMENTS:
        if f"{key}.".startswith(f"algorithm.{argument}."):
            key = key.removeprefix("algorithm.")
    table, _, rest = key.partition(".")
    name, _, option = rest.rpartition(".")
    if ":" in option:
        name, option = rest, ""
    if table not in CHAINED or not plugins.is_user_function(name):
        return key.split(".")
    links = expanded(raw).get(table, {})
    return [table, plugins.known_name(name, links), *([option] if option else [])]


def methods(raw: Config, overrides: Sequence[str] = ()) -> dict[str, Config]:
    """Returns the configs of a file: one per ``[methods.NAME]``, or the file itself as ``""``.

    Overrides are applied last. ``key=value`` replaces the key in every method;
    ``methods.NAME.key=value`` replaces it in one method, also beside ``key=value``, in any order.
    ``key=`` removes the key.

    Raises:
      InputError: an override is not of this form, it removes a key that does not exist, or there is
        no method of its name.
    """
    _check_removals(raw, overrides)
    given, common, special = _split(raw), list[str](), dict[str, list[str]]()
    for text in overrides:
        name, own = of_method(raw, text)
        if name is not None:
            tables = raw["methods"]
            raw = {**raw, "methods": {**tables, name: override(tables[name], own)}}
            if own.partition("=")[2].strip():
                special.setdefault(name, []).append(own)
        elif text.startswith("methods."):
            raw = override(raw, text)
        else:
            common.append(text)
    written = _split(raw)
    result = {
        name: functools.reduce(override, [*common, *special.get(name, [])], one)
        for name, one in written.items()
    }
    tables = _tables(raw) if raw.get("methods") is not None else {}
    # A preset that is given to one method is what this method is, such as fedlr of another table.
    before = {n: given.get(n, one) | {"preset": one.get("preset")} for n, one in written.items()}
    return {n: _renamed(before[n], one, tables.get(n, {})) for n, one in result.items()}


def of_method(raw: Config, text: str) -> tuple[str | None, str]:
    """Returns the method of a key or override ``methods.NAME.key``, and what follows its name.

    A name may contain dots. The method is None for other keys, which are those of all methods, and
    for a whole ``methods.NAME``.

    Raises:
      InputError: there is no method of this name.
    """
    key = text.partition("=")[0].strip()
    if not key.startswith("methods."):
        return None, text
    names, asked = _tables(raw), key.removeprefix("methods.")
    if found := [name for name in names if asked.startswith(f"{name}.")]:
        name = max(found, key=len)
        return name, text.strip().removeprefix(f"methods.{name}.")
    if "." in asked and asked not in names:
        advice = nearest(asked.partition(".")[0], names)
        raise InputError(f"{show(text)} is for a method that the config does not have. {advice}")
    return None, text


def only(methods: Mapping[str, Config], names: Sequence[str]) -> dict[str, Config]:
    """Returns the methods of these names; without names, all of them.

    Args:
      names: of a method each, or of several with commas between them.

    Raises:
      InputError: there is no method of a name.
    """
    names = [one for text in names for one in ([text] if text in methods else text.split(","))]
    for name in names:
        if name not in methods:
            advice = nearest(name, filter(None, methods))
            raise InputError(f"The config has no [methods.{name}]. {advice}")
    return {name: one for name, one in methods.items() if name in names or not names}


def _renamed(before: Config, after: Config, own: Config) -> Config:
    """Returns a config whose name shows which method the command line replaced.

    Without this, a run with ``--only fedlr algorithm=ditto`` would be "fedlr" in tables and plots.

    Args:
      own: the table of the method alone, whose other functions are a part of the method too.
    """
    if "name" not in before or after.get("name") != before["name"]:
        return after

    def name_of(config: Config, key: str) -> Any:
        value = expanded(config).get(key)
        if key in CHAINED:
            return "+".join(value or ()) or None
        return value.get("name") if isinstance(value, dict) else value

    keys = dict.fromkeys([*_OF_A_METHOD, *(key for key in NAMESPACES if key in own)])
    names = {key: (name_of(before, key), name_of(after, key)) for key in keys}
    changed = [f"{key}={new or ''}" for key, (old, new) in names.items() if old != new]
    return {**after, "name": f"{before['name']} ({', '.join(changed)})"} if changed else after


_OF_A_METHOD = ("preset", "algorithm", "peft", "aggregator")
"""Keys that say what a method is, also where all methods share them."""


def _check_removals(raw: Config, overrides: Sequence[str]) -> None:
    """Raises InputError for an override ``key=`` if no method of the config has the key."""
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals or value.strip() or not key.strip():
            continue
        name, own = of_method(raw, key.strip())
        if name is not None:
            configs = [raw["methods"][name]]
        else:
            configs = [raw] if own.startswith("methods.") else [*_split(raw).values()]
        if not any(unset(one, key_parts(one, own))[1] for one in configs):
            keys = {name for one in configs for name in flatten(one)}
            raise InputError(
                f"The override {show(text)} removes {show(key.strip())} from the config, which does"
                f" not have it. {nearest(own, keys)}"
            )


def _split(raw: Config) -> dict[str, Config]:
    if raw.get("methods") is None:
        return {"": raw}
    tables = _tables(raw)
    base = {k: v for k, v in raw.items() if k != "methods"}
    return {name: overlay(base, {"name": name, **table}) for name, table in tables.items()}


def _tables(raw: Config) -> dict[str, Config]:
    """Returns the tables ``[methods.NAME]`` of a config by name, checked; none without methods."""
    tables = raw.get("methods", {})
    if not isinstance(tables, dict) or not all(isinstance(t, dict) for t in tables.values()):
        raise InputError("[methods] must contain tables, one for each run: [methods.NAME].")
    return tables


def expanded(raw: Config) -> Config:
    """Returns the config with a table in place of each string or list that stands for one."""
    result = {
        key: {_NAME_KEYS[key]: value} if key in _NAME_KEYS and isinstance(value, str) else value
        for key, value in raw.items()
    }
    for table in CHAINED:
        if table in result:
            result[table] = _linked(table, result[table])
    algorithm = result.get("algorithm")
    for name in ARGUMENTS:
        if isinstance(algorithm, dict) and name in algorithm:
            if name in result:
                raise InputError(f"The config has {name} twice: once in [algorithm].")
            result[name] = algorithm[name]
            algorithm = {key: value for key, value in algorithm.items() if key != name}
            result = expanded({**result, "algorithm": algorithm})
    return result


def _linked(table: str, given: Any) -> Any:
    """Returns name -> options for a name, a list of names, or tables such as ``[[trackers]]``."""
    if not isinstance(given, str | list):
        return given
    names = [given] if isinstance(given, str) else given
    links: list[Any] = [{"name": one} if isinstance(one, str) else one for one in names]
    if not all(isinstance(one, dict) and isinstance(one.get("name"), str) for one in links):
        return given
    found = {one["name"]: {k: x for k, x in one.items() if k != "name"} for one in links}
    if len(found) < len(links):
        raise InputError(f"{table} has a name twice: {', '.join(one['name'] for one in links)}.")
    return found


def overlay(base: Config, over: Config) -> Config:
    """Returns ``base`` with the keys of ``over`` in place of its own.

    A table with another function replaces the whole table, because options belong to a function.
    ``epochs`` also replaces ``local_steps``, which would count in its place.
    """
    base, over = expanded(base), expanded(over)
    if over.get("epochs") is not None and over.get("local_steps") is None:
        base.pop("local_steps", None)
    for table in NAMESPACES:
        old, new = base.get(table), over.get(table)
        if isinstance(old, dict) and isinstance(new, dict):
            name = old.get("name", DEFAULT_NAMES.get(table))
            if new.get("name", name) != name:
                del base[table]
    for table in CHAINED:
        if over.get(table) == {}:
            base.pop(table, None)
    return merge(base, over)
