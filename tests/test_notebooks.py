"""The notebooks run, with fewer rounds."""

import json
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))


@pytest.mark.assets
@pytest.mark.timeout(1800)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the Jupyter client's own
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebook(path, tmp_path, monkeypatch):
    """Every cell runs, and none prints an error."""
    nbformat = pytest.importorskip("nbformat")
    from nbclient import NotebookClient

    monkeypatch.setenv("FEDJAX_PEFT_NOTEBOOK_ROUNDS", "1")
    # As a user compiles: the settings of the tests are for tiny programs, and take minutes here.
    for name in ("XLA_FLAGS", "JAX_DISABLE_MOST_OPTIMIZATIONS"):
        monkeypatch.delenv(name, raising=False)
    notebook = nbformat.read(path, as_version=4)
    place = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=1500, resources=place).execute()
    kinds = [o.output_type for c in notebook.cells if c.cell_type == "code" for o in c.outputs]
    assert "error" not in kinds
    assert "display_data" in kinds or "execute_result" in kinds


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_saved_outputs(path):
    """A reader sees the results without running anything, and how to run it on Colab."""
    notebook = json.loads(path.read_text())
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [c for c in code if "print(" in "".join(c["source"]) and not c["outputs"]] == []
    kinds = [output["output_type"] for cell in code for output in cell["outputs"]]
    assert "display_data" in kinds or "execute_result" in kinds
    assert "error" not in kinds
    text = [str(x) for cell in code for output in cell["outputs"] for x in _texts(output)]
    assert not re.search(r"/(tmp|home|root|work|Users)/", " ".join(text)), "a place of one machine"
    assert {output.get("name") for cell in code for output in cell["outputs"]} <= {None, "stdout"}
    intro = "".join("".join(cell["source"]) for cell in notebook["cells"][:3])
    assert "colab-badge.svg" in intro
    assert "%pip install" in intro


def _texts(output):
    """Returns the texts of an output."""
    return [output.get("text", ""), *output.get("data", {}).get("text/plain", [])]
