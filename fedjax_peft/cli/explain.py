"""The meaning of config keys and of what a config names, from docstrings.

The commands ``explain KEY``, ``list keys [WORD]`` and ``list algorithm ditto`` print these texts.
"""

import argparse
import ast
import importlib
import inspect
import itertools
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from fedjax_peft.config import config as configs
from fedjax_peft.config.config import Key
from fedjax_peft.config.schema import OF_THE_RUN
from fedjax_peft.contracts.arguments import in_words
from fedjax_peft.simulation.records import RECORDS
from fedjax_peft.support.errors import InputError, check_known, nearest

TABLES = {
    table: (record.__doc__ or "").partition("\n")[0].rstrip(".")
    for table, record in RECORDS.items()
} | {
    "model": "the pretrained model, and its head",
    "data": "the data set, and its tokenizer",
    "task": "the task: what is learned, and how it is scored; without this table the data's own",
    "time": "the time model, which gives the simulated seconds of a round",
    "stop": "conditions for ending a run early; without this table a run makes all its rounds",
    "partition": "the partition of the training examples into clients",
    "peft": "the PEFT method, which decides what is trained",
    "algorithm": "the federated algorithm",
    "aggregator": "the aggregation of uploads; without this table the algorithm's own aggregator",
    "optimizer": "the clients' optimizer",
    "schedule": "the clients' learning rates over rounds; without this table they are constant",
    "server_schedule": "the server's learning rate over rounds; without this table it is constant",
    "privacy": "differential privacy; without this table none",
    "asynchronous": "a server that does not wait for all clients; without this table it waits",
    "availability": "when clients can take part; without this table always",
    "attack": "what hostile clients do; without this table there are none",
    "transforms": "upload transforms, applied in this order; without these tables none",
    "trackers": "where the rows of a run go beside its directory; without these tables nowhere",
}
"""Table of a config -> its meaning."""


def print_explanation(options: argparse.Namespace) -> None:
    """Prints the meaning, the type and the default of a config key."""
    print(explain(options.key))


def explain(word: str) -> str:
    """Returns the meaning, type and default of a config key, or the functions of a table.

    Args:
      word: a key as on the command line (``peft.rank``), its last part (``rank``), or the name of
        a table (``peft``).

    Raises:
      InputError: the key does not exist; the message gives the nearest ones.
    """
    known = configs.all_keys()
    if word in TABLES:
        return _table(word, known)
    found = [key for key in known if word in (key.dotted, key.name)]
    if not found:
        table, _, name = word.rpartition(".")
        if name == "name" and table in configs.NAMESPACES:
            return _table(table, known)
        if table in configs.NAMESPACES and name in configs.NAMESPACES[table].__all__:
            return explain_function(table, name)
        names = {key.dotted for key in known} | {key.name for key in known} | {*TABLES}
        raise InputError(f"There is no config key {word!r}. {nearest(word, names)}")
    return "\n\n".join(_paragraphs(found))


def explain_function(table: str, name: str) -> str:
    """Returns the description and the keys of a function that ``[table]`` can name.

    Raises:
      InputError: the function does not exist; the message gives the nearest ones.
    """
    module = configs.NAMESPACES[table]
    check_known(configs.in_words(table), name, module.__all__)
    function = getattr(module, name)
    description = _plain(re.split(r"\n(?:Args|Returns|Raises):", _document(function))[0].strip())
    head = f'In a config:\n\n  [{table}]\n  name = "{name}"'
    if table in configs.CHAINED:
        head = f"In a config:\n\n  [{table}.{name}]"
    found = [key for key in configs.all_keys() if key.table == table and key.owner is function]
    rows = [
        _paragraph(f"{key.name}: {in_words(key.kind)}, {default_text(key)}", meaning(key))
        for key in found
    ]
    body = "\n".join(["and its keys:", "", *rows]) if rows else "It has no keys."
    return f"{description}\n\n{head}\n\n{body}"


def key_lines(word: str = "") -> str:
    """Returns a short paragraph for each key: its type, default and meaning.

    Args:
      word: select the keys whose name or meaning contains this word.

    Raises:
      InputError: no key contains the word; the message gives the nearest ones.
    """
    known = configs.all_keys()
    found = [key for key in known if word.lower() in f"{key.dotted} {meaning(key)}".lower()]
    if not found:
        names = {key.dotted for key in known} | {key.name for key in known}
        raise InputError(f"No config key contains {word!r}. {nearest(word, names)}")
    return "\n".join(_paragraphs(found, _first_sentence))


def meaning(key: Key) -> str:
    """Returns the meaning of a key from its function's docstring; empty if it is not documented."""
    if isinstance(key.owner, type):
        return _plain(_field_documents(key.owner).get(key.name, ""))
    arguments = _arguments(key.owner)
    other = re.search(r"arguments are those of\s+:func:`([\w.]+)`", _document(key.owner))
    if key.name not in arguments and other is not None:
        module, _, name = other[1].rpartition(".")
        place = importlib.import_module(module) if module else inspect.getmodule(key.owner)
        arguments = _arguments(getattr(place, name))
    return _plain(arguments.get(key.name, ""))


def default_text(key: Key) -> str:
    """Returns the default of a key in words, written as in TOML."""
    default = key.default
    if key.table and key.name in OF_THE_RUN and default is None:
        return "by default that of the run"
    if default is ...:
        return "must be given"
    if default is None:
        return "none by default"
    if isinstance(default, bool):
        return f"default {str(default).lower()}"
    if isinstance(default, str):
        return f'default "{default}"'
    if isinstance(default, tuple):
        return f"default {list(default)}"
    return f"default {default}"


def _paragraphs(
    keys: Sequence[Key], shortened: Callable[[str], str] = lambda text: text
) -> list[str]:
    """Returns a paragraph for each key; functions with the same description share a paragraph."""
    groups: dict[tuple[str, str, str, str], list[Key]] = {}
    for key in keys:
        description = (key.dotted, in_words(key.kind), default_text(key), meaning(key))
        groups.setdefault(description, []).append(key)
    return [
        _paragraph(f"{dotted}: {kind}, {default}{_of(group)}", shortened(text))
        for (dotted, kind, default, text), group in groups.items()
    ]


def _of(group: Sequence[Key]) -> str:
    """Returns the functions with this key, if the table can name several functions."""
    if group[0].table not in configs.NAMESPACES:
        return ""
    functions = [name for key in group for name in key.functions]
    return f" (of {', '.join(functions)})" if functions else ""


def _table(table: str, known: Sequence[Key]) -> str:
    head = f"[{table}]: {TABLES[table]}"
    if table not in configs.NAMESPACES:
        names = [key.name for key in known if key.table == table]
        lines = f"Its keys: {', '.join(dict.fromkeys(names))}."
        return f"{head}\n{textwrap.indent(textwrap.fill(lines, 90), '  ')}"
    module = configs.NAMESPACES[table]
    width = max(map(len, module.__all__), default=0)
    rows = [
        f"  {name:{width}}  {_plain(_document(getattr(module, name)).split(chr(10))[0])}"
        for name in module.__all__
    ]
    place = f"[{table}.NAME] for" if table in configs.CHAINED else "name is"
    return "\n".join([f"{head}; {place} one of", *rows])


def _paragraph(head: str, text: str) -> str:
    body = textwrap.fill(text, 92, initial_indent="    ", subsequent_indent="    ")
    return f"{head}\n{body}" if text else head


def _first_sentence(text: str) -> str:
    return re.split(r"(?<=[.;])\s", f"{text} ", maxsplit=1)[0].rstrip(";. ") if text else ""


def _plain(text: str) -> str:
    """Returns a docstring's text without its markup."""
    text = re.sub(r":\w+:`~?([^`]+)`", r"\1", text)
    return text.replace("``", "")


def _document(function: Callable[..., Any]) -> str:
    return inspect.cleandoc(function.__doc__ or "")


@cache
def _arguments(function: Callable[..., Any]) -> Mapping[str, str]:
    """Returns the ``Args`` of a docstring: argument -> its description in one line."""
    match = re.search(r"^Args:\n(.*?)(?=^\S|\Z)", _document(function), re.DOTALL | re.MULTILINE)
    if match is None:
        return {}
    block = textwrap.dedent(match[1])
    found = re.findall(r"^(\w+): (.*?)(?=^\S|\Z)", block, re.DOTALL | re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in found}


@cache
def _field_documents(owner: type) -> Mapping[str, str]:
    """Returns the docstrings below the fields of a class: field -> docstring in one line."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(owner)))
    (body,) = [node.body for node in tree.body if isinstance(node, ast.ClassDef)]
    documents: dict[str, str] = {}
    for field, below in itertools.pairwise(body):
        if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
            continue
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            documents[field.target.id] = " ".join(str(below.value.value).split())
    return documents
