"""The notebooks run, in a short form."""

from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))


@pytest.mark.assets
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the Jupyter client's own
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebook(path, tmp_path, monkeypatch):
    """Every cell runs, and none prints an error."""
    nbformat = pytest.importorskip("nbformat")
    from nbclient import NotebookClient

    monkeypatch.setenv("FEDJAX_PEFT_NOTEBOOK_ROUNDS", "1")
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    kinds = [o.output_type for c in notebook.cells if c.cell_type == "code" for o in c.outputs]
    assert "error" not in kinds
    assert "display_data" in kinds or "execute_result" in kinds
