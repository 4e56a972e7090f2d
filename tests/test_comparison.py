"""The comparison with other systems: complete data, which the page and the README show."""

import re
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from internals import cli

from fedjax_peft import aggregators, algorithms

ROOT = Path(__file__).parents[1]
comparison = SimpleNamespace(**runpy.run_path(str(ROOT / "docs" / "_ext" / "comparison.py")))
DATA = comparison.load()
METHODS = DATA["lora_methods"]
ADDRESS = re.compile(r"https://github\.com/[\w-]+/[\w-]+/blob/[0-9a-f]{40}/[\w/.-]+")


def test_page_and_readme_are_made_from_the_data():
    """``python docs/_ext/comparison.py`` renews both."""
    assert comparison.page(DATA) == comparison.PAGE.read_text()
    (shown,) = comparison.SHORT.findall(comparison.README.read_text())
    assert shown == comparison.short(DATA)


@pytest.mark.parametrize("feature", DATA["features"], ids=lambda feature: feature["name"])
def test_cells(feature):
    """A mark that claims something names a file; our own files exist."""
    for system, (mark, place, note) in feature["cells"].items():
        assert mark in ("●", "◐", "–") or mark.isdigit()
        assert place or (mark in ("–", "0") and not note)
        if place.startswith("release:"):
            assert DATA["systems"][system]["released"]
            continue
        if not place:
            continue
        address = comparison.evidence(DATA, system, place)
        if system == DATA["ours"]:
            assert (comparison.PAGE.parent / address).is_file()
        else:
            assert ADDRESS.fullmatch(address)


def test_every_feature_has_every_system():
    """In the order of the columns, with a definition; nothing was committed after it was read."""
    for feature in DATA["features"]:
        assert [*feature["cells"]] == [DATA["ours"], *DATA["systems"]]
        assert feature["definition"].endswith(".")
    for system in DATA["systems"].values():
        assert all(day <= DATA["read"] for _, day in system["commits"].values())


def test_federated_lora_methods_are_those_of_the_papers(capsys):
    """Each has a paper of its own, ``fedjax-peft list lora`` has it, and none is left out."""
    cited = (ROOT / "docs/reference/cite.md").read_text()
    rows = [line for line in cited.splitlines() if line.startswith("| `")]
    named = [name for name in METHODS if name.isidentifier()]
    papers = {row for row in rows for name in named if f"`{name}`" in row.split("|")[1]}
    assert len(papers) == len(named)
    assert len(METHODS) == len(named) + 1  # FeDeRA is an initialisation of LoRA
    assert 'with `init="svd"`: `yan2024federa`' in cited
    (ours,) = (f["cells"] for f in DATA["features"] if f["name"] == "federated LoRA methods")
    assert int(ours[DATA["ours"]][0]) == len(METHODS)
    assert cli.main(["list", "lora"]) == 0
    listed = set(re.findall(r"^  (\w+)  ", capsys.readouterr().out, re.MULTILINE))
    assert {*named, "lora"} <= listed
    for module in (algorithms, aggregators):
        for name in {*module.__all__} - {"fedavg", "mean"}:
            doc = sys.modules[getattr(module, name).__module__].__doc__ or ""
            if "LoRA" in doc.partition("\n")[0]:
                assert any(f"`{name}`" in row for row in papers), name
