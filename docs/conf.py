"""Configuration of the documentation site: ``make docs`` builds it, and every warning is an error.

Nothing is fetched and nothing is executed during a build.
"""

import sys
import tomllib
from pathlib import Path

import fedjax_peft

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

project = "fedjax_peft"
author = "the fedjax_peft authors"
copyright = f"2026, {author}"
version = release = fedjax_peft.__version__

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "myst_nb",
    "library_reference",
]
exclude_patterns = ["_build"]
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
nb_execution_mode = "off"  # the notebooks are shown with the outputs that they were saved with

nitpicky = True  # a reference in a docstring that leads nowhere is an error
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_default_options = {"members": True, "exclude-members": "__new__, __init__"}
napoleon_numpy_docstring = False

# Code has a button that copies it. Where lines have prompts, only these are copied, without the
# prompts. Outputs have no button.
copybutton_selector = "div:not(.highlight-text):not(.output) > div.highlight > pre"
copybutton_prompt_text = r"\$ |>>> |\.\.\. "
copybutton_prompt_is_regexp = True
copybutton_line_continuation_character = "\\"
copybutton_copy_empty_lines = False  # of outputs

html_theme = "furo"
html_title = f"fedjax_peft {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]

pyproject = Path(__file__).parents[1] / "pyproject.toml"
source = tomllib.loads(pyproject.read_text())["project"].get("urls", {}).get("Source")
if source:  # each page links to its text
    html_theme_options = {
        "source_repository": source,
        "source_branch": "main",
        "source_directory": "docs/",
    }
