"""Writes the hours of the papers' configs on two devices into their heads, and tables of them.

    JAX_PLATFORMS=cpu python experiments/hours.py
    JAX_PLATFORMS=cpu python experiments/hours.py experiments/fra/paper/sst2_iid.toml
    python experiments/hours.py --tables
    python experiments/hours.py --check

The hours are those of ``fedjax-peft plan CONFIG --device NAME``, all methods and points of the
sweep together. Nothing is downloaded, compiled or trained. With paths, only the heads of these
configs are computed anew. The tables in ``README.md`` and, by ``reproduce.toml``, in ``papers.md``
are made from the heads. ``--check`` says whether they agree, and whether the numbers of runs are
those of the configs.
"""

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedjax_peft.cli import reproducible
from fedjax_peft.cli.reproducible import HEAD
from fedjax_peft.config import config as configs
from fedjax_peft.config import hours, memory
from fedjax_peft.data.catalog import DATASETS, OWN
from fedjax_peft.support.accelerators import find_device
from fedjax_peft.support.errors import InputError

FOLDER = Path(__file__).parent
DEVICES = {"h100": "an H100", "a100-80gb": "an A100 (80 GB)"}
UNKNOWN = "only the data know the steps of a round"
NOT_YET = "not computed yet"
MARKS = ("<!-- hours: begin -->\n", "<!-- hours: end -->\n")
_KEYS = ("model", "peft", "algorithm", "optimizer", "task", "privacy", "placement", "batch_size")
"""The keys of a config on which the time of a step depends, its data set's apart."""


def seconds(config: Mapping[str, Any], known: dict[str, dict[str, float]]) -> dict[str, float]:
    """Returns device -> the least seconds of a step of a resolved config with one lane.

    Args:
      known: the answers until now, which grow; the methods of several configs are alike.
    """
    data = config["data"]
    entry = DATASETS.get(data["name"], OWN)
    parts = [config[name] for name in _KEYS] + [data["max_length"], data["packing"]]
    parts += [str(entry.task), entry.settings.max_length, entry.shape]
    parts[3] = parts[3]["name"]  # rates take no time
    key = json.dumps(parts, default=str)
    if key not in known:
        first, *others = map(find_device, DEVICES)
        plan = memory.planned(config, first).on_device(1)
        # Both devices run the same program.
        plans = [plan, *(plan._replace(device=device) for device in others)]
        known[key] = dict(zip(DEVICES, (one.seconds for one in plans), strict=True))
    return known[key]


def head_of(path: Path, known: dict[str, dict[str, float]]) -> str:
    """Returns the line of hours for the head of a config."""
    raw = configs.load(path)
    runs = hours.runs_of(raw)
    count = sum(map(len, runs.values()))
    first = {name: configs.resolve(one) for name, one in configs.methods(raw).items()}
    words = UNKNOWN
    if all(hours.run_hours(config, 1.0, 1) is not None for config in first.values()):
        steps = {name: seconds(config, known) for name, config in first.items()}
        found = {
            device: [hours.hours_of(runs[name], steps[name][device], 1) for name in runs]
            for device in DEVICES
        }
        ranges = (
            f"{hours.from_to(sum(one.least or 0 for one in found[device]))} on {title}"
            for device, title in DEVICES.items()
        )
        works = [one.work for one in found["h100"]]
        notes = list(dict.fromkeys(work.note for work in works))
        tests = "with" if all(work.tested for work in works) else "without"
        words = "; ".join([", ".join(ranges), *notes, f"{tests} evaluation"])
    return f"# Hours of {count:,} run{'s' * (count != 1)}: {words} (experiments/hours.py).\n"


def with_head(text: str, line: str) -> str:
    """Returns a config's text with the line at the end of its head, in the place of an old one."""
    text = HEAD.sub("", text, count=1)
    head = re.match(r"(#.*\n)*", text)
    assert head is not None
    return text[: head.end()] + line + text[head.end() :]


def paths() -> list[Path]:
    """Returns the configs of the papers."""
    return sorted(FOLDER.glob("*/paper/*.toml"))


def table() -> str:
    """Returns the table of the heads, as Markdown."""
    lines = [f"| config | runs | {' | '.join(DEVICES.values())} | assumed |"]
    lines.append("|---|" + "--:|" * (1 + len(DEVICES)) + "---|")
    for path in paths():
        found = HEAD.search(path.read_text(encoding="utf-8"))
        runs, words = ("–", NOT_YET) if found is None else found.groups()
        numbers, _, notes = words.partition("; ")
        cells = [one.partition(" on ")[0] for one in numbers.split(", ")]
        if numbers in (UNKNOWN, NOT_YET):
            cells, notes = ["–"] * len(DEVICES), numbers
        place = path.relative_to(FOLDER).as_posix()
        lines.append(f"| [{place}]({place}) | {runs} | {' | '.join(cells)} | {notes} |")
    return "\n".join(lines) + "\n"


def commands() -> str:
    """Returns the table of the commands of ``reproduce.toml``, as Markdown."""
    heads = ("command", "table, figure", "what", "paper: hours", "small: minutes", "sweeps")
    lines = [f"| {' | '.join(heads)} |", "|---|---|---|--:|--:|---|"]
    for paper, results in reproducible.read(FOLDER).items():
        for one in results:
            sweeps = {x: ", ".join(f"`{y.text}`" for y in own) for x, own in one.sweeps.items()}
            shown = [f"{x}: {own}" for x, own in sweeps.items()]
            if len({*sweeps.values()}) < len(sweeps):
                shown = [sweeps["paper"]]
            cells = [f"`{paper} {one.words[0]}`", ", ".join(one.names), one.what]
            cells += [one.time("paper"), one.time("small"), "; ".join(shown)]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


TABLES = {"README.md": table, "papers.md": commands}
"""File -> what makes its table."""


def with_table(text: str, made: str) -> str:
    """Returns the text of a file with a table between its marks."""
    before, rest = text.split(MARKS[0])
    return before + MARKS[0] + "\n" + made + "\n" + MARKS[1] + rest.split(MARKS[1])[1]


def check() -> None:
    """Raises an InputError if a head is missing, or tables, heads and configs differ."""
    for name, make in TABLES.items():
        text = (FOLDER / name).read_text(encoding="utf-8")
        if with_table(text, make()) != text:
            raise InputError(
                f"The table in {FOLDER / name} is not that of the configs' heads and"
                " reproduce.toml. To renew it: python experiments/hours.py --tables"
            )
    for path in paths():
        count = sum(map(len, hours.runs_of(configs.load(path)).values()))
        found = HEAD.search(path.read_text(encoding="utf-8"))
        if found is None or found[1] != f"{count:,}":
            raise InputError(f"The head of {path} does not have the hours of its {count:,} runs.")


def main(words: Sequence[str] | None = None) -> None:
    """Writes the heads and the tables, or checks them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("configs", nargs="*", type=Path, help="by default all of the papers")
    parser.add_argument("--tables", action="store_true", help="write the tables alone")
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args(words)
    if options.check:
        return check()
    known: dict[str, dict[str, float]] = {}
    for path in [] if options.tables else options.configs or paths():
        line = head_of(path, known)
        text = path.read_bytes().decode("utf-8")
        path.write_bytes(with_head(text, line).encode("utf-8"))
        print(f"{path}: {line.strip('#').strip()}", flush=True)
    for name, make in TABLES.items():
        text = (FOLDER / name).read_text(encoding="utf-8")
        (FOLDER / name).write_text(with_table(text, make()), encoding="utf-8")
    return None


if __name__ == "__main__":
    main()
