"""Decides the papers' claims by the rule of ``claims.toml``: tables, pages and a forest plot.

``python experiments/verdicts.py`` writes them from the CSV files of the runs. With ``--check`` it
compares them with what is there.
"""

import argparse
import csv
import statistics
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from significance import holm, p_value

from fedjax_peft.report import figure_files
from fedjax_peft.report.intervals import LEVEL, Difference, paired
from fedjax_peft.support.errors import InputError
from fedjax_peft.support.files import replace_file

FOLDER = Path(__file__).parent
CLAIMS = FOLDER / "claims.toml"
OUT = FOLDER / "results"
PAGE = FOLDER.parent / "docs" / "explanation" / "claims.md"
MARKS = ("<!-- verdicts: begin -->\n", "<!-- verdicts: end -->")
PENDING = "declared, not yet run"
SHOWN = 12.0
"""The plot ends at this many points; a longer interval ends in an arrow."""
WORDS = {"lost": "not checked", "stopped": "not decided", "waits": "not decided"}
WORDS |= {"counted": "counted", "circular": "circular"}
"""A field of a setting -> its verdict, without a test."""
PRINTED = str.maketrans({"−": "-", "[": "", "]": "", ",": ""})


class Row(NamedTuple):
    """A setting of a claim, with its verdict."""

    claim: str
    text: str
    setting: str
    verdict: str
    n: int = 0
    words: str = "–"
    """The difference with its interval."""
    difference: float | None = None
    """In points, or in % of the baseline; None without runs."""
    low: float | None = None
    high: float | None = None
    p: float | None = None
    """After Holm's correction; None where nothing is tested."""
    evaluations: str = "–"
    """The difference of the means over the evaluations."""
    paper: str = ""
    note: str = ""
    """Why there is no verdict."""
    runs: str = ""


def matches(value: str, wanted: Any) -> bool:
    """Returns whether a cell is a number, fits a pattern, or does one of a list of them."""
    if isinstance(wanted, list):
        return any(matches(value, one) for one in wanted)
    return fnmatchcase(value, wanted) if isinstance(wanted, str) else float(value) == wanted


def values(s: Mapping[str, Any], side: int, metric: str) -> dict[int, float]:
    """Returns seed -> the outcome of the method (side 0) or the baseline (1) of a setting."""
    path = FOLDER / s["runs"]
    if not path.exists():
        return {}
    with path.open(newline="", encoding="utf-8") as file:
        rows = [*csv.DictReader(file)]
    rate = s.get("rate", "rate")
    own = {s.get("by", "method"): s["difference"][side]}
    own |= {rate: s["rates"][side]} if "rates" in s else {}

    def of(where: Mapping[str, Any]) -> dict[int, float]:
        wanted = {**own, **where}
        found = [row for row in rows if all(matches(row[k], x) for k, x in wanted.items())]
        found = [row for row in found if row.get(metric) and int(row["seed"]) in s["seeds"]]
        if len({row.get(rate) for row in found}) > 1:
            raise InputError(f"{s['runs']} has several rates of {own} for {s['name']!r}")
        by_seed: dict[int, list[float]] = {}
        for row in found:
            by_seed.setdefault(int(row["seed"]), []).append(float(row[metric]))
        return {seed: statistics.fmean(xs) for seed, xs in by_seed.items()}

    taken = of(s.get("where", {}))
    if "less" not in s:
        return taken
    off = of(s["less"])
    return {seed: taken[seed] - off[seed] for seed in taken.keys() & off.keys()}


def both(s: Mapping[str, Any], metric: str) -> tuple[dict[int, float], dict[int, float]]:
    """Returns the outcomes of method and baseline in the setting's unit."""
    a, b = (values(s, side, metric) for side in (0, 1))
    if s.get("ratio"):
        shares = {k: 100 * (a[k] / b[k] - 1) for k in a.keys() & b.keys()}
        return shares, dict.fromkeys(shares, 0.0)
    scale = s.get("scale", 100)
    return {k: scale * x for k, x in a.items()}, {k: scale * x for k, x in b.items()}


def row(claim: Mapping[str, Any], s: Mapping[str, Any]) -> Row:
    """Returns a setting without its corrected p: ``p`` is that of the test, 1 without one."""
    word = "–" if "beside" in s else next((WORDS[x] for x in WORDS if x in s), "")
    note = next(
        (s[x] for x in ("beside", "stopped", "waits", "circular") if isinstance(s.get(x), str)), ""
    )
    paper = s.get("paper", "")
    paper = paper if isinstance(paper, str) else f"{paper:+.12g}".replace("-", "−")
    one = Row(claim["id"], claim["text"], s["name"], word, paper=paper, note=note)
    if "runs" not in s:
        words, p = s.get("counted", "–"), 1.0 if word == "not checked" else None
        numbers = [float(x) for x in s.get("printed", "").translate(PRINTED).split()]
        ends = dict(zip(("difference", "low", "high"), numbers, strict=False))
        return one._replace(n=s.get("n", 0), words=s.get("printed", words), p=p, **ends)
    metric = s.get("metric", "test_accuracy")
    a, b = both(s, metric)
    if {*a} != {*s["seeds"]} or {*b} != {*s["seeds"]}:
        if "declared" not in s:
            raise InputError(f"{s['runs']} does not have the seeds of {s['name']!r}")
        return one._replace(verdict=PENDING, p=1.0)
    found, aside = paired(a, b), paired(*both(s, s.get("mean", f"{metric}_mean")))
    word = word or ("one seed" if found.n == 1 else "")
    tested = 1.0 if word or (p := p_value(a, b)) is None else p
    if found.low is not None and found.high is not None and isinstance(s.get("paper"), int | float):
        paper += "" if found.low <= s["paper"] <= found.high else ", excluded"
    return one._replace(
        verdict=word,
        n=found.n,
        words=in_words(found) + " %" * s.get("ratio", False),
        difference=found.mean,
        low=found.low,
        high=found.high,
        p=None if word in ("–", "one seed") else tested,
        evaluations=in_words(aside),
        paper=paper,
        runs=s["runs"],
    )


def in_words(found: Difference) -> str:
    """Returns text such as ``+1.2 [+0.3, +2.1]``."""
    return "–" if found.mean is None else found.text().replace("-", "−")


def decide(claim: Mapping[str, Any]) -> list[Row]:
    """Returns the settings of a claim with corrected p-values and verdicts."""
    rows = [row(claim, s) for s in claim["setting"]]
    family = [i for i, one in enumerate(rows) if one.p is not None]
    for i, p in zip(family, holm([rows[i].p or 0.0 for i in family]), strict=True):
        word = rows[i].verdict or verdict(rows[i], p, claim["sign"], claim["setting"][i])
        rows[i] = rows[i]._replace(p=p if not rows[i].verdict else None, verdict=word)
    return rows


def verdict(one: Row, p: float, sign: int, s: Mapping[str, Any]) -> str:
    """Returns the verdict of a tested setting."""
    margin = s.get("margin", 0.0)
    equal = one.low is not None and max(-one.low, one.high or 0.0) <= margin
    if p < LEVEL and not (equal and sign == 0):
        return "holds" if sign * (one.difference or 0.0) > 0 else "opposite"
    return "equivalent" if equal else "not seen"


def decided(path: Path = CLAIMS) -> list[Row]:
    """Returns all settings of all claims with their verdicts."""
    return [x for claim in tomllib.loads(path.read_text("utf-8"))["claim"] for x in decide(claim)]


# ------------------------------------------------------------------------------------- the pages


def table(rows: Sequence[Row], full: bool) -> str:
    """Returns the Markdown table; the full one has p, the paper and the mean of evaluations."""
    names = ["claim", "setting", "difference", "n", "verdict"]
    names += ["p", "mean of evaluations", "paper", "note"] if full else []
    lines = [f"| {' | '.join(names)} |", "|---|---|---|--:|---|" + "--:|---|--:|---|" * full]
    last = ""
    for one in rows if full else [x for x in rows if x.verdict != "–"]:
        p = "–" if one.p is None else "< .001" if one.p < 0.001 else f"{one.p:.3f}".lstrip("0")
        setting = f"[{one.setting}](../{one.runs})" if full and one.n and one.runs else ""
        cells = [one.text if one.claim != last else "", setting or one.setting, one.words]
        cells += [str(one.n or "–"), f"**{one.verdict}**" if one.verdict != "–" else "–"]
        cells += [p, one.evaluations, one.paper, one.note] if full else []
        lines.append(f"| {' | '.join(cells)} |")
        last = one.claim
    return "\n".join(lines)


def summary(rows: Sequence[Row]) -> str:
    """Returns a Markdown table with a row for each claim: how many settings have each verdict."""
    lines = ["| claim | settings by verdict |", "|---|---|"]
    for text in dict.fromkeys(one.text for one in rows):
        found = Counter(x.verdict for x in rows if x.text == text and x.verdict != "–")
        lines.append(f"| {text} | {', '.join(f'**{word}** {n}' for word, n in found.items())} |")
    return "\n".join(lines)


def with_table(text: str, made: str) -> str:
    """Returns the text of a page with the table between its marks."""
    before, rest = text.split(MARKS[0])
    return f"{before}{MARKS[0]}\n{made}\n{MARKS[1]}{rest.split(MARKS[1])[1]}"


def texts(rows: Sequence[Row]) -> Iterator[tuple[Path, str]]:
    """Yields path and text of the tables and of the pages."""
    yield OUT / "verdicts.csv", figure_files.table_csv([one._asdict() for one in rows])
    yield OUT / "verdicts.md", table(rows, True) + "\n"
    for page, made in ((FOLDER / "README.md", summary(rows)), (PAGE, table(rows, False))):
        yield page, with_table(page.read_text("utf-8"), made)


def drawn(x: Row) -> str:
    """Returns what the plot says on the right of a setting; nothing of one without an interval."""
    if x.low is None or "%" in x.words or x.verdict == "–":
        return ""
    return f"{x.words}, n = {x.n}: {x.verdict}"


def plot(rows: Sequence[Row]) -> bytes:
    """Returns the forest plot as SVG: hollow and grey points have no verdict that decides."""
    from matplotlib import rc_context  # slow to import

    shown = [x for x in rows if drawn(x)]
    lines: list[Row | None] = []  # None: the line of a claim, above its settings
    for before, one in zip([None, *shown], shown, strict=False):
        lines += [one] if before and before.claim == one.claim else [None, one]
    colors = {"holds": "#004488", "opposite": "#994455", "equivalent": "#997700"}
    with figure_files.style(), rc_context({"svg.fonttype": "none"}):
        fig, ax = figure_files.subplots(size=(9.5, 0.19 * len(lines) + 0.6))
        right = ax.twinx()
        for y, one in enumerate(lines):
            if one is None or one.low is None or one.high is None or one.difference is None:
                continue
            color = colors.get(one.verdict, figure_files.MUTED)
            look: dict[str, Any] = {"color": color, "markersize": 4}
            look["markerfacecolor"] = "none" if one.p is None else color
            ends = [max(-SHOWN, min(SHOWN, x)) for x in (one.low, one.difference, one.high)]
            ax.plot(ends[::2], [y, y], color=color, linewidth=1.4, linestyle="solid", marker="")
            for x, mark in zip(ends, ("<", "o", ">"), strict=True):
                if {"<": x == -SHOWN, "o": abs(x) < SHOWN, ">": x == SHOWN}[mark]:
                    ax.plot([x], [y], marker=mark, clip_on=False, **look)
        ax.axvline(0, color=figure_files.INK, linewidth=0.8, linestyle="solid")
        names = [a.setting if a else b.text if b else "" for a, b in pairwise([*lines, None])]
        for side, labels in ((ax, names), (right, [drawn(x) if x else "" for x in lines])):
            side.set(xlim=(-SHOWN, SHOWN), ylim=(len(lines) - 0.4, -0.6))
            side.set_yticks(range(len(lines)), labels, fontsize=7)
            side.grid(visible=False, axis="y")
        for one, label in zip(lines, ax.get_yticklabels(), strict=True):
            label.set_weight("normal" if one else "bold")
        ax.tick_params(left=False)
        right.tick_params(right=False)
        ax.set_xlabel("Method minus baseline, in points")
        made = figure_files.render(fig, "svg")
    return made.replace(b"'DejaVu Sans'", b"'DejaVu Sans', sans-serif")


def main(words: Sequence[str] | None = None) -> None:
    """Writes or compares the tables, the pages and the plot; prints the verdicts."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args(words)
    rows = decided()
    for path, text in texts(rows):
        if not options.check:
            replace_file(path, text.encode())
        elif path.read_text("utf-8") != text:
            raise InputError(f"{path} is not what experiments/verdicts.py writes")
    figure = PAGE.with_suffix(".svg")
    if options.check and not all(drawn(x) in figure.read_text("utf-8") for x in rows):
        raise InputError(f"{figure} is not of the verdicts")
    if not options.check:
        replace_file(figure, plot(rows))
        for one in rows:
            print(f"{one.claim:18} {one.setting:75} {one.words:26} {one.n:2} {one.p} {one.verdict}")


if __name__ == "__main__":
    main()
