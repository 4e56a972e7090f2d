"""The examples of the README and of documentation pages run, with the expected results.

``test_docs.py`` runs all Python of all pages; these tests check the results.
"""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from closeness import approx

from fedjax_peft import aggregators, algorithms, assets, testing
from fedjax_peft.cli import main as cli
from fedjax_peft.data import sources

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]


def code_block(containing: str, page: str = "README.md") -> str:
    """Returns a page's Python block with that text."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    (block,) = [b for b in blocks if containing in b]
    return block


def test_first_example_prints_what_it_shows(capsys):
    """The example without a download: the words are equal, and its scores nearly."""
    exec(code_block("for row in run.metrics"), {})
    (shown,) = re.findall(r"```text\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    printed = [line.split() for line in capsys.readouterr().out.splitlines()]
    for line, expected in zip(printed, map(str.split, shown.splitlines()), strict=True):
        assert float(line.pop(2)) == approx(float(expected.pop(2)), abs=0.05)
        assert line == expected


FEDERATED_LORA = (
    *("fedalt", "feddpa_t", "fedex", "fedmomentum", "fedrot", "fedsa", "fedsb", "fedsvd", "ffa"),
    *("flexlora", "flora", "flora_na", "fra", "hetlora", "hilora", "ilora", "lora_a2"),
    *("lora_fair", "pfedlora", "ravan", "rolora", "slora"),
)
"""An algorithm or aggregator of each paper."""
OVER_FEDAVG = ("zhang2024fedit", "yan2024federa")
"""Papers whose method is FedAvg over a LoRA."""


def test_numbers_of_methods_are_those_of_the_library():
    """Algorithms by name, methods of federated LoRA by paper."""
    text = (ROOT / "README.md").read_text()
    assert f"| {len(algorithms.__all__)}: baselines" in text
    cited = (ROOT / "docs/reference/cite.md").read_text()
    rows = [line for line in cited.splitlines() if line.startswith("| `")]
    papers = {row for row in rows for name in FEDERATED_LORA if f"`{name}`" in row.split("|")[1]}
    assert len(papers) == len(FEDERATED_LORA)
    assert all(f"`{paper}`" in cited for paper in OVER_FEDAVG)
    assert f"| federated LoRA methods | {len(papers) + len(OVER_FEDAVG)} |" in text
    for module in (algorithms, aggregators):
        for name in module.__all__:
            doc = sys.modules[getattr(module, name).__module__].__doc__ or ""
            if "LoRA" in doc.partition("\n")[0] and name not in ("fedavg", "mean"):
                assert any(f"`{name}`" in row for row in papers), name


def test_own_algorithm(capsys):
    """The page on writing an algorithm is a whole program."""
    names: dict = {}
    for containing in ("def fedprox", "def keeping"):
        exec(code_block(containing, "docs/howto/own-algorithm.md"), names)
    printed = capsys.readouterr().out
    assert "fedprox: 3 rounds" in printed
    assert "keeping: 1 rounds" in printed


def test_any_algorithm(capsys):
    """Two algorithms on the same clients."""
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


@pytest.mark.assets
@pytest.mark.timeout(600)
def test_python_example(tmp_path, monkeypatch):
    """The ten-line example with the demo's assets, for one round."""
    monkeypatch.chdir(tmp_path)
    code = code_block("run.export")
    short = (
        code.replace("rounds=10", "rounds=1")
        .replace("=500", "=64")
        .replace("clients_per_round=10", "clients_per_round=2")
    )
    short = short.replace("max_length=64", "max_length=16")
    assert short.count("rounds=1,") == 1
    names: dict = {}
    exec(short, names)
    assert len(names["run"].metrics) == 2
    assert (tmp_path / "adapter" / "adapter_model.safetensors").exists()


def test_data_sets_of_the_papers(tmp_path, monkeypatch, capsys):
    """Tagging on the stand-in of WNUT 2017 improves the score."""
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    exec(code_block('by="tag_set"', "docs/reference/data.md"), names)
    assert "fedavg: 20 rounds, test f1 0." in capsys.readouterr().out
    assert names["run"].metrics[-1]["test_f1"] > 0.5


RUN = ["rounds=1", "local_steps=1", "batch_size=4", "data.max_length=8", "lanes=1"]
SMALL = {
    "run": RUN,
    "sweep": [*RUN, "seed=0..1", "optimizer.learning_rate=1e-3,3e-3"],
    "bench": ["layers=1", "hidden=8", "heads=2", "ffn=8", "vocab=9", "length=4", "batch=2"],
}
"""What makes a command quick; the rest of it stays as the README has it."""


def commands(page: str = "docs/howto/command-line.md") -> list[str]:
    """Returns the lines of a page's shell blocks, but for those of ``make``."""
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines() if line]
    return [line for line in lines if not line.startswith("make ")]


def test_commands_of_the_readme_are_those_of_the_page():
    """They are executed by the next test."""
    assert len(commands("README.md")) >= 3
    assert {*commands("README.md")} <= {*commands()}


@pytest.mark.timeout(2400)
@pytest.mark.long("a page of commands, each of which needs those before it")
def test_commands_in_order(tmp_path, monkeypatch, capfd):
    """From top to bottom in one folder, as a newcomer types them; on a tiny model and tiny data.

    No directory is written twice, and none is read that no command has made.
    """
    tiny = {
        "minilm-l6": testing.write_tiny_checkpoint(tmp_path / "assets" / "model"),
        "20newsgroups": testing.write_tiny_texts(tmp_path / "assets" / "news", train=400, test=500),
    }
    for module in (assets, sources):
        monkeypatch.setattr(module, "fetch", tiny.__getitem__)
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
