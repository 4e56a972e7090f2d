"""The notebooks run, with one round and tiny stand-ins of what they download.

``test_readme.py`` has the first one's steps with the real model and data.
"""

import glob
import importlib.util
import json
import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from shallow import shallow

from fedjax_peft import testing

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
shared = SimpleNamespace(**runpy.run_path(str(ROOT / "docs" / "_ext" / "notebooks.py")))
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


PRELUDE = """
%reset -f
import os, sys
from pathlib import Path
import pytest
sys.path.append("{tests}")
import shallow
from fedjax_peft import testing
from fedjax_peft.support import assets

shallow.simplify(pytest.MonkeyPatch())
testing.TINY_LLAMA["num_hidden_layers"] = 1
assets.fetch = Path("{assets}").joinpath
os.chdir("{place}")
%reset -f
"""
"""What one kernel runs before each notebook: the last one's names go, models and data are tiny."""


@pytest.fixture(scope="module")
def client():
    """A client of a kernel."""
    nbclient, nbformat = map(pytest.importorskip, ("nbclient", "nbformat"))
    client = nbclient.NotebookClient(nbformat.v4.new_notebook(), timeout=240)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("FEDJAX_PEFT_NOTEBOOK_ROUNDS", "1")
        with client.setup_kernel():
            yield client


@pytest.fixture(scope="module")
def assets(tmp_path_factory):
    """A folder with what the notebooks load by name."""
    folder = tmp_path_factory.mktemp("assets")
    with pytest.MonkeyPatch.context() as patch, shallow():
        patch.setitem(testing.TINY_BERT, "max_position_embeddings", 64)
        testing.write_tiny_checkpoint(folder / "minilm-l6")
    testing.write_tiny_texts(folder / "20newsgroups", train=4000, test=400)
    return folder


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the Jupyter client's own
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
@pytest.mark.long("a notebook compiles its programs one after the other")
@pytest.mark.exhaustive  # dist.py runs the first one, and test_docs.py compares all calls
def test_notebook(path, client, assets, tmp_path):
    """Every cell runs, and none prints an error."""
    nbformat = pytest.importorskip("nbformat")
    client.nb = nbformat.read(path, as_version=4)
    prelude = nbformat.v4.new_code_cell(
        PRELUDE.format(assets=assets, place=tmp_path, tests=ROOT / "tests" / "helpers")
    )
    client.nb.cells.insert(0, prelude)
    client.reset_execution_trackers()
    for place, cell in enumerate(client.nb.cells):
        client.execute_cell(cell, place)
    outputs = [o for c in client.nb.cells if c.cell_type == "code" for o in c.outputs]
    kinds = {output.output_type for output in outputs}
    assert "error" not in kinds
    assert {"display_data", "execute_result"} & kinds


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_saved_outputs(path):
    """A reader sees the results without running anything."""
    notebook = json.loads(path.read_text())
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [c for c in code if "print(" in "".join(c["source"]) and not c["outputs"]] == []
    kinds = [output["output_type"] for cell in code for output in cell["outputs"]]
    assert "display_data" in kinds or "execute_result" in kinds
    assert "error" not in kinds
    text = [str(x) for cell in code for output in cell["outputs"] for x in _texts(output)]
    assert not re.search(r"/(tmp|home|root|work|Users)/", " ".join(text)), "a place of one machine"
    assert {output.get("name") for cell in code for output in cell["outputs"]} <= {None, "stdout"}


def test_shared_cells_are_renewed():
    """``python docs/_ext/notebooks.py`` would change nothing."""
    for path in NOTEBOOKS:
        notebook = json.loads(path.read_text())
        assert shared.with_shared_cells(notebook, path.name, shared.address()) == notebook


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_the_code_of_the_first_cell_is_hidden(path):
    """In Jupyter, in Colab and on the site; the others are shown."""
    first, *others = (c for c in json.loads(path.read_text())["cells"] if c["cell_type"] == "code")
    assert first["metadata"]["jupyter"] == {"source_hidden": True}
    assert first["metadata"]["cellView"] == "form"
    assert first["metadata"]["tags"] == ["hide-input"]
    assert all("jupyter" not in cell["metadata"] for cell in others)


def test_badges_come_from_the_address():
    """Below the title, once; none without an address, or where no service reads it."""
    notebook = json.loads(NOTEBOOKS[0].read_text())
    name = NOTEBOOKS[0].name
    for _ in range(2):
        notebook = shared.with_shared_cells(notebook, name, "https://github.com/us/peft")
    title, badges, *_ = "".join(notebook["cells"][0]["source"]).splitlines()
    assert title.startswith("# ")
    assert badges.count("[![") == 2
    assert f"/us/peft/blob/main/notebooks/{name})" in badges
    for address in ("", "https://forge/us/peft"):
        plain = shared.with_shared_cells(notebook, name, address)
        assert "[![" not in "".join(plain["cells"][0]["source"])


@pytest.mark.parametrize(
    ("device", "file", "words", "installed"),
    [
        (None, None, "Here: a CPU; fedjax_peft is installed.", None),
        (None, "../fedjax_peft/__init__.py", "from the checkout", "-e .."),
        ("nvidia[0-9]*", "fedjax_peft/fedjax_peft/__init__.py", "GPU", "-e fedjax_peft[cuda]"),
        ("accel*", "fedjax_peft-0.2-any.whl", "a TPU", "fedjax_peft-0.2-any.whl[tpu]"),
    ],
)
def test_first_cell_installs_what_fits(
    device, file, words, installed, tmp_path, monkeypatch, capsys
):
    """From a checkout or the wheel beside it, for the accelerator that is there."""
    (tmp_path / "notebooks").mkdir()
    monkeypatch.chdir(tmp_path / "notebooks")
    if file:
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        Path(file).touch()
    found, called = glob.glob, []

    def look(pattern):
        return [pattern] * (pattern == f"/dev/{device}") if pattern[0] == "/" else found(pattern)

    monkeypatch.setattr(glob, "glob", look)
    present = {"pip"} if installed else {"pip", "fedjax_peft"}
    monkeypatch.setattr(importlib.util, "find_spec", present.__contains__)
    monkeypatch.setattr(subprocess, "run", lambda command, check: called.append(command))
    monkeypatch.setattr(sys, "path", [])
    exec(compile(shared.SETUP, "first cell", "exec"), {})
    assert words in capsys.readouterr().out
    pip = [sys.executable, "-m", "pip", "install", "-q"]
    assert called == ([[*pip, *installed.split()]] if installed else [])
    assert sys.path == ([str(Path(file).parents[1])] if file and "-e" in installed else [])
    if installed:  # in an environment of uv
        present.clear()
        exec(compile(shared.SETUP, "first cell", "exec"), {})
        uv = ["uv", "pip", "install", "-q", "--python", sys.executable]
        assert called[1:] == [[*uv, *installed.split()]]


def test_first_cell_without_anything_to_install_says_what_to_upload(tmp_path, monkeypatch):
    """The name of the package on the index is nobody's, so nothing is installed by it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("something is installed"))
    with pytest.raises(SystemExit, match=r"Upload fedjax_peft-.*\.whl"):
        exec(compile(shared.SETUP, "first cell", "exec"), {})


def _texts(output):
    """Returns the texts of an output."""
    return [output.get("text", ""), *output.get("data", {}).get("text/plain", [])]
