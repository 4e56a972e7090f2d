"""The tables and figures of the papers that ``reproduce`` makes: ``experiments/reproduce.toml``.

Nothing here imports JAX, so that the list is shown at once.
"""

import argparse
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedjax_peft.support import toml
from fedjax_peft.support.display import show
from fedjax_peft.support.errors import InputError, nearest

LIST = "reproduce.toml"
SETTINGS = {"paper": "the paper's, for a GPU", "small": "small, for a CPU"}
HEAD = re.compile(r"^# Hours(?: of ([\d,]+) runs?)?: (.*) \(experiments/hours\.py\)\.\n", re.M)
"""The line of ``experiments/hours.py`` in the head of a config: its runs, and their hours."""
_NUMBERED = re.compile(r"(tables?|tab|t|figures?|fig|f|equations?|eq|e|)(\d+|[iv]+)")
_ROMAN = ("", "i", "ii", "iii", "iv", "v")


class Sweep(NamedTuple):
    """A sweep that a result needs."""

    text: str
    """As the list has it."""
    config: Path
    only: list[str]
    out: str
    """Its folder among the runs."""
    overrides: list[str]


class Result(NamedTuple):
    """A table or figure of a paper, or several that one script writes from the same runs."""

    folder: Path
    """The experiments of the paper."""
    paper: str
    names: list[str]
    what: str
    sweeps: dict[str, list[Sweep]]
    """Setting -> its sweeps; a result without sweeps is computed."""
    minutes: float | None
    """Of one CPU core, for all runs of the small setting."""
    write: str
    files: list[str]

    @property
    def words(self) -> list[str]:
        """Its names on the command line, such as ``IV`` and ``figure5``."""
        pairs = (name.partition(" ") for name in self.names)
        return [number if kind == "Table" else kind.lower() + number for kind, _, number in pairs]

    def out(self, setting: str) -> Path:
        """Returns the folder of its runs and results without ``--out``."""
        return Path("runs") / "reproduce" / self.folder.name / setting

    def written(self, out: Path) -> list[Path]:
        """Returns its files below the folder of its runs."""
        return [path for stem in self.files for path in sorted(out.glob(f"results/{stem}.*"))]

    def time(self, setting: str) -> str:
        """Returns the hours on an H100 of the paper's setting, or the minutes of the small one."""
        sweeps = self.sweeps.get(setting)
        if not sweeps:
            return "-" if sweeps is None else "computed"
        if setting == "small":
            return f"{self.minutes:g}"
        heads = [HEAD.search(one.config.read_text(encoding="utf-8")) for one in sweeps]
        found = [head and re.match(r"(\S+) to (\S+) on an H100", head[2]) for head in heads]
        ends = [[float(one[k].replace(",", "")) for one in found if one] for k in (1, 2)]
        if len(ends[0]) < len(found):
            return "unknown"
        most = "at most " if any(one.only for one in sweeps) else ""
        return most + " to ".join(f"{float(f'{sum(end):.2g}'):,g}" for end in ends)

    def state(self) -> str:
        """Returns what the default folders have of it."""
        found = []
        for setting, sweeps in self.sweeps.items():
            out = self.out(setting)
            if self.written(out):
                found.append(f"{setting} written")
            elif any((out / one.out / "sweep.toml").exists() for one in sweeps):
                found.append(f"{setting} begun")
        return ", ".join(found)


def experiments() -> Path:
    """Returns the folder of the experiments: here, or beside the package.

    Raises:
      InputError: there is none.
    """
    for place in (Path("experiments"), Path(__file__).parents[2] / "experiments"):
        if (place / LIST).is_file():
            return place
    raise InputError(
        "reproduce needs the folder experiments/, which the wheel does not contain: get the"
        " repository or the source distribution, and give the command in its folder."
    )


def read(folder: Path) -> dict[str, list[Result]]:
    """Returns paper -> its tables and figures, of the folder of the experiments."""
    return {
        paper: [_result(folder / paper, table["title"], one) for one in table["results"]]
        for paper, table in toml.read_toml(folder / LIST).items()
    }


def _result(folder: Path, paper: str, table: Mapping[str, Any]) -> Result:
    usual = None if SETTINGS.keys() & table.keys() else table.get("sweeps", [])
    texts = {setting: table.get(setting, usual) for setting in SETTINGS}
    sweeps = {x: [_sweep(folder / x, one) for one in y] for x, y in texts.items() if y is not None}
    names, what, write, files = (table[key] for key in ("names", "what", "write", "files"))
    return Result(folder, paper, names, what, sweeps, table.get("minutes"), write, files)


def _sweep(folder: Path, text: str) -> Sweep:
    name, *words = shlex.split(text)
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", action="append", default=[])
    parser.add_argument("--out", default=name)
    given, overrides = parser.parse_known_args(words)
    return Sweep(text, folder / f"{name}.toml", given.only, given.out, overrides)


def paper_of(papers: Mapping[str, Sequence[Result]], name: str) -> str:
    """Returns the paper of a name, such as ``fra`` of ``FRA-LoRA`` and ``fra_lora``.

    Raises:
      InputError: there is none.
    """
    for paper, results in papers.items():
        if _plain(name) in (_plain(paper), _plain(results[0].paper)):
            return paper
    raise InputError(f"There is no paper {show(name)} here. {nearest(name, papers)}")


def find(results: Sequence[Result], name: str) -> Result:
    """Returns the result of a name such as ``2``, ``IV``, ``Table 4``, ``T4``, ``F5`` or ``fig5``.

    Raises:
      InputError: there is none.
    """
    for result in results:
        if canonical(name) in map(canonical, result.words):
            return result
    words, paper = [word for one in results for word in one.words], results[0].folder.name
    raise InputError(
        f"{results[0].paper} has no table or figure {show(name)} here. {nearest(name, words)}"
        f" `fedjax-peft reproduce {paper}` lists them all."
    )


def _plain(text: str) -> str:
    return re.sub(r"[\W_]", "", text.lower())


def canonical(name: str) -> str:
    """Returns a name in one spelling: ``t4`` for ``IV`` and ``Table 4``, ``f5`` for ``figure5``."""
    found = _NUMBERED.fullmatch(_plain(name))
    if found is None:
        return _plain(name)
    number = _ROMAN.index(found[2]) if found[2] in _ROMAN else found[2]
    return f"{found[1][:1] or 't'}{number}"


def listing(papers: Mapping[str, Sequence[Result]]) -> list[str]:
    """Returns the lines of the tables and figures: names, times, state, content."""
    lines = []
    for paper, results in papers.items():
        rows = [("NAME", "paper: hours", "small: minutes", "state", "")]
        for one in results:
            times = (one.time("paper"), one.time("small"))
            rows.append((", ".join(one.words), *times, one.state(), one.what))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines.append(f"{results[0].paper}: fedjax-peft reproduce {paper} NAME [--small]")
        for row in rows:
            cells = (text.ljust(width) for text, width in zip(row, widths, strict=True))
            lines.append(("  " + "  ".join(cells)).rstrip())
        lines.append("")
    return [*lines, "Hours: of all runs, on an H100. Minutes: of all small runs, on one CPU core."]
