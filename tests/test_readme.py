"""The README's blocks run and its numbers hold; so do some pages whose results are checked.

``test_docs.py`` runs the Python of all other pages.
"""

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from closeness import approx
from internals import assets, cli
from shallow import simplify

from fedjax_peft import testing

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def blocks(language: str, text: str = README) -> list[str]:
    """Returns the blocks of a language in a page's text."""
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def code_block(containing: str, page: str) -> str:
    """Returns a page's Python block with that text."""
    found = blocks("python", (ROOT / page).read_text())
    (block,) = [b for b in found if containing in b]
    return block


@pytest.mark.long("it compiles a program for each block")
def test_python_of_the_readme_prints_what_it_shows(tmp_path, monkeypatch, capsys):
    """From top to bottom: the words are equal, and the scores nearly. The encoder is tiny."""
    with monkeypatch.context() as patch:
        patch.setitem(testing.TINY_BERT, "num_hidden_layers", 1)
        encoder = testing.write_tiny_checkpoint(tmp_path / "encoder")
    monkeypatch.setattr(assets, "fetch", {"minilm-l6": encoder}.__getitem__)
    monkeypatch.chdir(tmp_path)
    assert cli.main(["init", "mine"]) == 0  # the command above the block
    capsys.readouterr()
    code = "\n".join(blocks("python"))
    exec(compile(code.replace("max_length=64", "max_length=16"), "README.md", "exec"), {})
    *printed, predicted, run, own = capsys.readouterr().out.splitlines()
    (shown,) = blocks("text")
    for line, expected in zip(printed, shown.splitlines(), strict=True):
        words, expected = line.split(), expected.split()
        assert float(words.pop(2)) == approx(float(expected.pop(2)), abs=0.05)
        assert words == expected
    # A tiny encoder knows none of the words, so the class and the score are others.
    assert "  # ['good']\n" in code
    assert predicted in ("['good']", "['bad']")
    (shown,) = re.findall(r"# (Run\(fedavg: .*)0\.\d{4}\)$", code, re.MULTILINE)
    assert run.startswith(f"{shown}0.")
    assert own.startswith("Run(fedprox: 3 rounds, test accuracy 0.")
    assert Path("adapter/adapter_model.safetensors").exists()


def test_readme_is_short():
    """It is read in three minutes, and no page cuts its code."""
    assert len(README.splitlines()) <= 120
    assert max(map(len, README.splitlines())) <= 120
    code = "".join(blocks(r"\w+"))
    assert max(map(len, code.splitlines())) <= 96


KINDS = {
    "backbones": "backbones",
    "PEFT methods": "peft",
    "algorithms": "algorithm",
    "aggregators": "aggregator",
    "data sets": "data",
    "partitions": "partition",
    "attacks": "attack",
    "upload transforms": "transforms",
}
"""The README's words for what ``fedjax-peft list`` counts."""


def test_numbers_of_names_are_those_of_the_list(capsys):
    """As the README says, ``fedjax-peft list`` has them all."""
    assert cli.main(["list"]) == 0
    counts = dict(re.findall(r"^(\w+) +(\d+)  ", capsys.readouterr().out, re.MULTILINE))
    table = README.partition("## What there is")[2].partition("\n## ")[0]
    for word, kind in KINDS.items():
        assert re.findall(rf"(\d+) {word}\b", table) == [counts[kind]], word


@pytest.mark.long("two algorithms that a user compiles")
def test_any_algorithm(monkeypatch, capsys):
    """Two algorithms on the same clients."""
    simplify(monkeypatch)
    exec(code_block("fp.algorithms.ditto", "docs/reference/algorithms.md"), {})
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert names == ["fedavg", "ditto"]


@pytest.mark.assets
def test_backbones_and_methods(capsys):
    """Adapters, merging and counting, on the demo's model."""
    names: dict = {}
    exec(code_block("fp.merge", "docs/reference/models.md"), names)
    lines = capsys.readouterr().out.splitlines()
    # 6 layers of width 384, two adapters of 24 each; FRA-LoRA's set-up on RoBERTa-base.
    assert f"'adapter': {12 * (2 * 384 * 24 + 24 + 384)}" in lines[0]
    assert lines[1] == "{'adapter': 589824, 'head': 592130, 'frozen': 124055040}"
    assert names["merged"].counts()["adapter"] == 0


@pytest.mark.long("twenty rounds, after which the score has risen")
def test_data_sets_of_the_papers(tmp_path, monkeypatch, capsys):
    """Tagging on the stand-in of WNUT 2017 improves the score."""
    simplify(monkeypatch)
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    exec(code_block('by="tag_set"', "docs/reference/data.md"), names)
    assert "fedavg: 20 rounds, test f1 0." in capsys.readouterr().out
    assert names["run"].metrics[-1]["test_f1"] > 0.5


RUN = ["rounds=1", "local_steps=1", "batch_size=4", "data.max_length=8", "placement.lanes=1"]
SMALL = {
    "run": RUN,
    "sweep": [*RUN, "seed=0..0", "optimizer.learning_rate=1e-3,3e-3"],
    "bench": ["layers=1", "hidden=8", "heads=2", "ffn=8", "vocab=9", "length=4", "steps=1"],
    "privacy": ["--clients", "100"],  # all of them in each round: no search over samples
}
"""What makes a command quick; the rest of it stays as the page has it."""


UNREAD = ("runs/federa", "runs/sst2", "runs/algorithms")
"""Runs that no later command reads: ``make exhaustive`` has them, ``make test`` checks them."""


def commands(page: str = "docs/howto/command-line.md") -> list[str]:
    """Returns the commands of a page's shell blocks, but for those of ``make``."""
    found = blocks("bash", (ROOT / page).read_text())
    lines = [line for block in found for line in block.replace("\\\n", "").splitlines()]
    return [line for line in lines if line and not line.startswith(("make ", "#"))]


def test_commands_of_the_readme_are_those_of_the_page():
    """They are executed by the next test; comments may differ."""
    shown, run = (
        [shlex.split(line, comments=True) for line in commands(page)]
        for page in ("README.md", "docs/howto/command-line.md")
    )
    assert len(shown) >= 3
    assert all(line in run for line in shown)


@pytest.mark.timeout(2400)
@pytest.mark.long("a page of commands, each of which needs those before it")
@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_commands_in_order(whole, tmp_path, monkeypatch, capfd):
    """From top to bottom in one folder, as a newcomer types them; on a tiny model and tiny data.

    No directory is written twice, and none is read that no command has made.
    """
    simplify(monkeypatch)
    tiny = {
        "minilm-l6": testing.write_tiny_checkpoint(tmp_path / "assets" / "model"),
        "20newsgroups": testing.write_tiny_texts(tmp_path / "assets" / "news", train=400, test=500),
    }
    monkeypatch.setattr(assets, "fetch", tiny.__getitem__)
    place = tmp_path / "clone"
    shutil.copytree(ROOT / "experiments", place / "experiments")
    monkeypatch.chdir(place)
    assert len(commands()) > 20
    for line in commands():
        program, *words = shlex.split(line, comments=True)
        if program != "fedjax-peft":
            subprocess.run(line, shell=True, check=True)
            continue
        small = [] if "--explain" in words else SMALL.get(words[0], [])
        if not whole and words[-1] in UNREAD:
            small = [*small, "--dry-run"]
        try:
            code = cli.main([*words, *small])
        except SystemExit as exit_:  # of --explain
            code = exit_.code
        assert code == 0, f"{line}: {capfd.readouterr().err}"
    made = {str(path.relative_to(place)) for path in place.glob("*/*")}
    assert {"runs/mine", "runs/fra", "runs/compared", "adapters/mine"} <= made
    assert len((place / "labels.jsonl").read_text().splitlines()) == 1
    names = [path.name for path in (place / "adapters" / "personal").iterdir()]
    assert len(names) == 10, "one for each client"
