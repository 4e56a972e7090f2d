"""Writes what all notebooks share: badges, the cell that installs, and the site's copies.

``python docs/_ext/notebooks.py`` renews them after a change of ``notebook_setup.py``, of a notebook
or of ``[project.urls]`` in pyproject.toml.
"""

import json
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "notebooks"
COPIES = ROOT / "docs" / "tutorials"
SETUP = (Path(__file__).parent / "notebook_setup.py").read_text()
HERE = "Here: a CPU; fedjax_peft is installed.\n"
"""The saved output of the cell that installs."""
SERVICES = {
    "Colab": (
        "https://colab.research.google.com/github/{repository}/blob/main/notebooks/{name}",
        "https://colab.research.google.com/assets/colab-badge.svg",
    ),
    "Kaggle": (
        "https://kaggle.com/kernels/welcome?src=https://github.com/{repository}/blob/main/notebooks/{name}",
        "https://kaggle.com/static/images/open-in-kaggle.svg",
    ),
}
"""Service -> the address of a notebook, and of the badge. Both read repositories on GitHub."""
GITHUB = "https://github.com/"


def address() -> str:
    """Returns the project's address, ``[project.urls] Source``; empty: it has none yet."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return project.get("urls", {}).get("Source", "").rstrip("/")


def badges(name: str, source: str) -> str:
    """Returns the badges of a notebook, in Markdown; none without an address on GitHub."""
    if not source.startswith(GITHUB):
        return ""
    repository = source.removeprefix(GITHUB)
    return " ".join(
        f"[![{service}]({image})]({link.format(repository=repository, name=name)})"
        for service, (link, image) in SERVICES.items()
    )


def with_shared_cells(notebook: dict[str, Any], name: str, source: str) -> dict[str, Any]:
    """Returns a notebook with the badges below its title, and the cell that installs."""
    title, *rest = notebook["cells"]
    lines = [line for line in "".join(title["source"]).splitlines() if not line.startswith("[![")]
    shown = badges(name, source)
    text = "\n".join([lines[0], *([shown] if shown else []), *lines[1:]])
    first = next(i for i, cell in enumerate(rest) if cell["cell_type"] == "code")
    output = {"name": "stdout", "output_type": "stream", "text": [HERE]}
    hidden = rest[first]["metadata"] | {"cellView": "form", "jupyter": {"source_hidden": True}}
    code = rest[first] | {
        "source": _lines(SETUP.rstrip()),
        "outputs": [output],
        "metadata": hidden | {"tags": ["hide-input"]},
    }
    cells = [title | {"source": _lines(text)}, *rest[:first], code, *rest[first + 1 :]]
    return notebook | {"cells": cells}


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def main() -> None:
    """Writes the notebooks and their copies."""
    for path in sorted(FOLDER.glob("*.ipynb")):
        made = with_shared_cells(json.loads(path.read_text()), path.name, address())
        text = json.dumps(made, indent=1, ensure_ascii=False) + "\n"
        path.write_text(text)
        (COPIES / path.name).write_text(text)


if __name__ == "__main__":
    main()
