"""Writes the comparison with other systems from its data: a page, and the README's short form.

``python docs/_ext/comparison.py`` renews both after a change of ``explanation/comparison.toml``;
``python docs/_ext/comparison.py --newer`` lists the versions on the package index that are newer
than those that were read.
"""

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
DATA = ROOT / "docs" / "explanation" / "comparison.toml"
PAGE = DATA.with_suffix(".md")
README = ROOT / "README.md"
SHORT = re.compile(r"^\| ● yes, ◐ in part.*?\n\n", re.DOTALL | re.MULTILINE)

INTRODUCTION = """\
# Compared with other systems

● yes, ◐ in part, – not found. A mark leads to the file that shows it. Everything was read on
{read}, from the newest commit that we had of each repository and from the newest released package;
what was added later is not here.
The definitions below say what a mark means. If a cell is wrong, open an issue with the file that
shows it: `docs/explanation/comparison.toml` has one line for each cell, and this page and the table
of the README are made from it.
"""
METHODS = """\
## What counts as a federated LoRA method

A method of a paper that changes how clients initialise, train, share or combine the factors of
LoRA. A paper counts once. FedAvg over LoRA (FedIT, FedLR) is in every system that has LoRA, and
does not count. `fedjax-peft list lora` describes the {number} that are here, and
{{doc}}`../reference/cite` names their papers. They are {names}.
"""


def load() -> dict[str, Any]:
    """Returns the data."""
    return tomllib.loads(DATA.read_text())


def page(data: dict[str, Any]) -> str:
    """Returns the text of the page."""
    names = [data["ours"], *data["systems"]]
    rows = [
        [f"[{f['name']}](#{_anchor(f['name'])})", *(_marked(data, f, name) for name in names)]
        for f in data["features"]
    ]
    methods = ", ".join(f"`{name}`" for name in data["lora_methods"])
    parts = [
        INTRODUCTION.format(read=data["read"]),
        _table(["", *names], rows),
        METHODS.format(number=len(data["lora_methods"]), names=methods),
        "## Definitions and evidence\n",
        *(_section(data, feature) for feature in data["features"]),
        "## What was read\n",
        _table(["system", "version", "commit", "of", "package"], list(_commits(data))),
    ]
    return "\n".join(parts)


def short(data: dict[str, Any]) -> str:
    """Returns the README's table."""
    names = [data["ours"], *(name for name, s in data["systems"].items() if s.get("readme"))]
    rows = []
    for feature in data["features"]:
        if feature.get("readme"):
            title = feature.get("short", feature["name"])
            rows.append([title, *(feature["cells"][system][0] for system in names)])
    return _table([f"● yes, ◐ in part, – not found ({data['read']:%Y-%m})", *names], rows) + "\n"


RELEASE = "release:"


def evidence(data: dict[str, Any], system: str, place: str) -> str:
    """Returns the address of a file of a commit, or relative to the page for our own.

    It is empty for a file of a released package, which has no address.
    """
    if place.startswith(RELEASE):
        return ""
    if system == data["ours"]:
        return "../" + place.removeprefix("docs/")
    branch, _, path = place.rpartition(":")
    found = data["systems"][system]
    commit, _ = found["commits"][branch or next(iter(found["commits"]))]
    return f"{found['repository']}/blob/{commit}/{path}"


def _marked(data: dict[str, Any], feature: dict[str, Any], system: str) -> str:
    mark, place, _ = feature["cells"][system]
    address = evidence(data, system, place) if place else ""
    return f"[{mark}]({address})" if address else mark


def _section(data: dict[str, Any], feature: dict[str, Any]) -> str:
    """Returns a feature's definition, and what was found where."""
    lines = [f"### {_title(feature['name'])}\n", feature["definition"] + "\n"]
    for system, (mark, place, note) in feature["cells"].items():
        if place:
            address = evidence(data, system, place)
            shown = f"[{place}]({address})" if address else _released(data, system, place)
            lines.append(f"* {system} {mark} {shown}{': ' + note if note else ''}")
    rest = [system for system, (_, place, _) in feature["cells"].items() if not place]
    if rest:
        lines.append(f"* Nothing found in {', '.join(rest)}.")
    return "\n".join([*lines, ""])


def _released(data: dict[str, Any], system: str, place: str) -> str:
    """Returns a file of a released package in words."""
    found = data["systems"][system]
    return f"`{place.removeprefix(RELEASE)}` of {found['package']} {found['released']}"


def _commits(data: dict[str, Any]) -> Iterator[list[str]]:
    for name, system in data["systems"].items():
        package = f"{system['package']} {system['released']}" if "package" in system else "–"
        for branch, (commit, day) in system["commits"].items():
            address = f"{system['repository']}/tree/{commit}"
            where = f"[{branch} {commit[:7]}]({address})"
            yield [name, system["version"], where, str(day), package]
        if not system["commits"]:
            yield [name, system["version"], "–", "–", package]


def newer(data: dict[str, Any]) -> Iterator[str]:
    """Yields the packages of which the index has another version than the one that was read."""
    for name, system in data["systems"].items():
        if "package" in system:
            asked = [sys.executable, "-m", "pip", "index", "versions"]
            asked += ["--ignore-requires-python", system["package"]]
            answer = subprocess.run(asked, capture_output=True, text=True, check=False).stdout
            found = re.search(r"\(([^)]+)\)", answer)
            last = found[1] if found else "not found on the index"
            if last != system["released"]:
                yield f"{name}: {system['package']} {last}, read: {system['released']}"


def _title(name: str) -> str:
    return name[0].upper() + name[1:]


def _anchor(name: str) -> str:
    return re.sub(r"[^\w-]", "", name.lower().replace(" ", "-"))


def _table(header: list[str], rows: list[list[str]]) -> str:
    lines = [f"| {' | '.join(line)} |\n" for line in (header, *rows)]
    return "".join([lines[0], "|---" * len(header) + "|\n", *lines[1:]])


def main() -> None:
    """Writes the page, and the table into the README."""
    data = load()
    PAGE.write_text(page(data))
    README.write_text(SHORT.sub(lambda _: short(data), README.read_text()))


if __name__ == "__main__":
    if "--newer" in sys.argv:
        print(*newer(load()), sep="\n")
    else:
        main()
