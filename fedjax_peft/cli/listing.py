"""The commands ``list`` and ``assets``: names and descriptions in sections.

Names and descriptions are read from the source, because importing them all would take seconds.
"""

import argparse
import textwrap
from collections.abc import Mapping, Sequence

from fedjax_peft.config import presets
from fedjax_peft.data.catalog import DATASETS, Source
from fedjax_peft.support import accelerators, source
from fedjax_peft.support import assets as stored
from fedjax_peft.support.errors import InputError, nearest
from fedjax_peft.support.rooms import TABLES
from fedjax_peft.support.source import FirstLines

Sections = Mapping[str, Mapping[str, str]]
"""Title -> name -> description, which can have several lines."""

_ALIASES = {"method": "peft", "dataset": "data", "key": "keys"}


def assets(options: argparse.Namespace) -> None:
    """Fetches one asset and prints its path, or lists all assets."""
    if options.name is not None:
        print(stored.fetch(options.name))
        return
    for name, asset in stored.ASSETS.items():
        state = "fetched" if stored.is_cached(name) else "not fetched"
        print(f"{name:14} {state:12} {asset.description} ({asset.licence})")
    print(f"Stored in {stored.cache_dir()} (set FEDJAX_PEFT_CACHE to change the directory).")


def list_names(options: argparse.Namespace) -> None:
    """Lists the names that a config can use, with descriptions."""
    folder = stored.cache_dir() / "data"
    sections = {
        "models": {
            **{name: a.description for name, a in stored.ASSETS.items() if a.kind == "model"},
            "(a checkpoint)": "hub id or path of a backbone below (config.json + safetensors)",
        },
        "backbones (model_type) and their heads": _backbones(),
        f"data sets (from source = DIR or {folder}/NAME, otherwise as described)": {
            **{name: _data_lines(entry) for name, entry in DATASETS.items()},
            "(a directory)": "with json, csv or parquet files, images, or LEAF's json by user",
        },
        **{table: source.FirstLines(module) for table, module in TABLES.items()},
        "presets (preset = ...), and the keys that you choose": presets.lines(),
        "devices (plan --device)": accelerators.lines(),
    }
    print(listing(sections, options.words))


def listing(sections: Sections, words: Sequence[str]) -> str:
    """Returns the output of ``fedjax-peft list WORDS``.

    Args:
      words: empty for an overview of one screen; a section (``algorithms``); a section and a name,
        for the name's arguments (``algorithm ditto``) or settings (``preset federa``); a section
        and a part of a name or description; ``keys``, optionally with a part of a key; or a part of
        any name or description.

    Raises:
      InputError: no name or description contains the words; the message gives the nearest name.
    """
    if not words:
        return _overview(sections)
    first, rest = words[0], " ".join(words[1:])
    section = _singular(first)
    if section == "keys":
        from fedjax_peft.cli import explain

        return explain.key_lines(rest)
    titles = {_singular(title.split()[0]): title for title in sections}
    if section not in titles:
        return _containing(sections, " ".join(words), [*titles, "keys"])
    title, entries = titles[section], sections[titles[section]]
    if not rest:
        return _text({title: entries})
    if rest in entries and section == "preset":
        return presets.describe(rest)
    if rest in entries and isinstance(entries, FirstLines):
        from fedjax_peft.cli import explain

        text = explain.explain_function(title, rest)
        return text + _refusals(rest) if section == "algorithm" else text
    return _containing({title: entries}, rest, [])


def _refusals(algorithm: str) -> str:
    """Returns a line of what an algorithm with default options cannot be combined with."""
    import inspect

    import optax

    from fedjax_peft import algorithms
    from fedjax_peft.contracts import refusals

    make = getattr(algorithms, algorithm)
    parameters = inspect.signature(make).parameters.values()
    options = {p.name: 2 for p in parameters if p.default is p.empty}
    found = refusals(make(**options | {"optimizer": optax.identity()}))
    return f"\n\nNot with: {', '.join(sorted(x.value for x in found))}." if found else ""


_WIDTH = 100
_MORE = """\
Every name of a line, described:     fedjax-peft list algorithms
One of them, with its keys:          fedjax-peft list algorithm ditto
Names and descriptions with a word:  fedjax-peft list cluster
Config keys with a word:             fedjax-peft list keys rate
One key:                             fedjax-peft explain peft.rank"""


def _overview(sections: Sections) -> str:
    """Returns a line for each section: its word, the number of its names, and the first of them."""
    words = [title.split()[0] for title in sections]
    width = max(map(len, words))
    lines = []
    for word, entries in zip(words, sections.values(), strict=True):
        names = [name for name in entries if not name.startswith("(")]
        head = f"{word:{width}}  {len(names):3}  "
        shown = textwrap.shorten(", ".join(names), _WIDTH - len(head), placeholder=" ...")
        lines.append(head + shown)
    return "\n".join([*lines, "", _MORE])


def _containing(sections: Sections, word: str, others: Sequence[str]) -> str:
    found = {
        title: {n: t for n, t in entries.items() if word.lower() in f"{n}\n{t}".lower()}
        for title, entries in sections.items()
    }
    found = {title: entries for title, entries in found.items() if entries}
    if not found:
        names = {name for entries in sections.values() for name in entries} | {*others}
        raise InputError(f"No name or description contains {word!r}. {nearest(word, names)}")
    return _text(found)


def _singular(word: str) -> str:
    word = word.lower()
    word = word if word == "keys" else word.removesuffix("s")
    return _ALIASES.get(word, word)


def _text(sections: Sections) -> str:
    lines = []
    for title, entries in sections.items():
        lines.append(title)
        width = max(map(len, entries), default=0)
        for name, text in entries.items():
            first, *others = text.split("\n")
            lines.append(f"  {name:{width}}  {first}")
            lines += [f"  {'':{width}}  {line}" for line in others]
    return "\n".join(lines)


def _backbones() -> dict[str, str]:
    """Returns the families of models -> their heads."""
    families = source.keys("fedjax_peft.models.registry", "FAMILIES")
    return {name: ", ".join(_heads(family)) for name, family in families.items()}


def _heads(place: source.Place) -> list[str]:
    """Returns the kinds of heads that a statement names, itself or by the functions that it calls.

    A statement that names some calls no function for them but ``class_kinds`` and ``text_kinds``.
    """
    kinds = source.strings(source.find("fedjax_peft.models.heads", "__all__"))
    found = {text for text in source.strings(place) if text in kinds}
    for module, function in source.called(place):
        if not found or getattr(function, "name", "").endswith("_kinds"):
            found |= {*_heads((module, function))}
    return [kind for kind in kinds if kind in found]


def _data_lines(entry: Source) -> str:
    """Returns the description of a data set and the ways to get it, one on each line."""
    if entry.parts:
        ways = [f"the data sets {', '.join(entry.parts)}", "validation: a split of its own"]
        return "\n".join([entry.description, *ways, *_paper_line(entry)])
    ways = ["from PyPI"] if entry.asset else []
    ways += [f"from the hub, {entry.hub}"] if entry.hub else []
    ways += [f"by hand: {entry.download}"]
    share = "a share of train, as in validation_share = 0.1"
    ways += [f"validation: {share if entry.validation is None else 'the official split'}"]
    return "\n".join([entry.description, *ways, *_paper_line(entry)])


def _paper_line(entry: Source) -> list[str]:
    """Returns a line about ``partition = "paper"`` for a data set; no line if there is none."""
    settings = entry.settings
    if settings.partition is None:
        return []
    options = {k: v for k, v in settings.partition.items() if k != "name"}
    arguments = ", ".join(f"{key} = {value}" for key, value in options.items())
    return [
        f'partition = "paper": {settings.partition["name"]} ({arguments}),'
        f" {settings.clients_per_round} clients per round, {settings.rounds} rounds"
        f" ({settings.paper})"
    ]
