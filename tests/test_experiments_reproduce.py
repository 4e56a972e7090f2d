"""``experiments/reproduce.toml``: it has each table and figure of the papers, and its commands."""

import re
import runpy
import shlex
from pathlib import Path

import pytest
from internals import canonical, find, paper_of, read, sweeps
from internals import config as configs
from printouts import read_printed

FOLDER = Path(__file__).parents[1] / "experiments"
PAPERS = read(FOLDER)
RESULTS = [
    pytest.param(one, id=f"{paper} {one.words[0]}") for paper in PAPERS for one in PAPERS[paper]
]
NUMBERED = re.compile(r"\b(Table|Figure|Equation|T|F)s? ?((?:\d+|[IV]+)(?:, (?:\d+|[IV]+))*)\b")


def numbered(text: str) -> set[str]:
    """Returns the tables, figures and equations that a text names."""
    return {
        canonical(f"{kind} {number}")
        for kind, numbers in NUMBERED.findall(text)
        for number in numbers.split(", ")
    }


def index() -> dict[str, list[list[str]]]:
    """Returns paper -> the cells of its rows in the index of ``README.md``."""
    text = (FOLDER / "README.md").read_text().partition("## Index of tables and figures")[2]
    found = {}
    for section in text.split("\n### ")[1:]:
        title, _, rest = section.partition("\n")
        rows = [line.strip("| ").split(" | ") for line in rest.splitlines() if line[:1] == "|"]
        found[title] = rows[2:]
    return found


@pytest.mark.parametrize("paper", PAPERS)
def test_the_index_and_the_list_have_the_same_tables_and_figures(paper):
    """But for those that are drawings."""
    rows = index()[PAPERS[paper][0].paper]
    drawings = {x for row in rows if "a drawing" in row[1] for x in numbered(row[0])}
    named = {x for row in rows for x in numbered(row[0].partition(":")[0])} - drawings
    listed = [name for one in PAPERS[paper] for name in one.names]
    assert len({*map(canonical, listed)}) == len(listed), "each name once"
    assert named == {x for name in listed for x in numbered(name)}
    printed = {canonical(table) for table, _, _ in read_printed(paper_file(paper)).cells}
    assert printed - {"text"} <= {*map(canonical, listed)}


def paper_file(paper: str) -> Path:
    """Returns the file of the numbers that a paper prints."""
    return FOLDER / "papers" / f"{paper}.csv"


def test_each_paper_with_printed_numbers_is_listed():
    assert {*PAPERS} == {path.stem for path in (FOLDER / "papers").glob("*.csv")}
    assert [paper_of(PAPERS, name) for name in ("fra_lora", "FRA-LoRA", "FeDeRA")] == [
        *("fra", "fra", "federa"),
    ]


def test_each_config_of_the_papers_is_used():
    """But for what starts from a run of its own; the heads have its commands."""
    used = {y.config for own in PAPERS.values() for x in own for z in x.sweeps.values() for y in z}
    there = {path for paper in PAPERS for path in FOLDER.glob(f"{paper}/*/*.toml")}
    assert {path.stem for path in there - used} == {"pretrain", "shakespeare_pretrained"}
    assert used <= there


@pytest.mark.parametrize("result", RESULTS)
def test_sweeps_have_runs_and_scripts_know_what_is_asked(result):
    assert find(PAPERS[result.folder.name], result.names[0]) is result
    assert ("small" in result.sweeps and bool(result.sweeps["small"])) == (
        result.minutes is not None
    )
    for own in result.sweeps.values():
        assert len({one.out for one in own}) == len(own)
        for one in own:
            if one.only or one.overrides:
                raw = configs.load(one.config)
                assert sweeps.plan(raw, one.overrides, one.only).points
    name, *words = shlex.split(result.write)
    assert (result.folder / name).exists()
    shared = [*result.folder.glob("*.py"), FOLDER / "paper.py"]
    text = "".join(path.read_text() for path in shared)
    for word in words:
        if not re.fullmatch(r"\{\w+\}(/long)?", word):
            known = re.search(rf'"{re.escape(word)}[*+]?"', text)
            assert known or word in KNOWN.get(result.folder.name, []), word


KNOWN = {"federa": ["F7"], "fra": [*runpy.run_path(str(FOLDER / "fra" / "tables.py"))["ALL"]]}
"""Names that scripts make: the figures of all data sets, and tables and figures by number."""
