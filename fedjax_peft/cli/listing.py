"""The text that ``fedjax-peft list`` prints: names and descriptions in sections."""

import textwrap
from collections.abc import Mapping, Sequence

from fedjax_peft.config import presets
from fedjax_peft.support.errors import InputError, nearest
from fedjax_peft.support.source import FirstLines

Sections = Mapping[str, Mapping[str, str]]
"""Title -> name -> description, which can have several lines."""

_ALIASES = {"method": "peft", "dataset": "data", "key": "keys"}


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
