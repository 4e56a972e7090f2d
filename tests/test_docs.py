"""The documentation site: it builds without a warning, and its examples run as they stand there."""

import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

from fedjax_peft import aggregators, algorithms, peft

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def reference():
    """The site's own extension."""
    sys.path.insert(0, str(ROOT / "docs" / "_ext"))
    try:
        yield pytest.importorskip("library_reference")
    finally:
        sys.path.remove(str(ROOT / "docs" / "_ext"))


def test_site_builds_without_a_warning(tmp_path):
    """A broken link or reference, and a public name without documentation, fail."""
    words = ["-W", "--keep-going", "-q", "-d", str(tmp_path / "doctrees")]
    places = [str(ROOT / "docs"), str(tmp_path / "html")]
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", *words, *places],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "html" / "index.html").exists()


def test_names_without_a_docstring_are_found(reference):
    """Functions, classes and public methods are; private methods are not asked for one."""

    class Documented:
        """Has one."""

        def method(self): ...

        def _private(self): ...

        @property
        def held(self): ...

    def function(): ...

    module = types.ModuleType("example")
    vars(module).update(
        __all__=["Documented", "function"], Documented=Documented, function=function
    )
    found = ["example.Documented.method", "example.Documented.held", "example.function"]
    assert list(reference.undocumented(module)) == found


def test_glossary_is_short():
    """At most 40 words."""
    text = (ROOT / "docs" / "reference" / "glossary.md").read_text()
    assert 20 <= len(re.findall(r"^\w.*\n  \w", text, re.MULTILINE)) <= 40


def test_every_paper_has_an_entry():
    """Each algorithm, aggregator and method of a paper names entries of references.bib."""
    folder = ROOT / "docs" / "reference"
    text = (folder / "cite.md").read_text()
    table = re.findall(r"^\| (`.*?) \| (.*) \|$", text, re.MULTILINE)
    named = {name for names, _ in table for name in re.findall(r"`(\w+)`", names)}
    ours = {"local", "centralised", "full", "head_only", "layer_norm", "pretrained"}
    everything = {*algorithms.__all__, *aggregators.__all__, *peft.__all__}
    assert everything - named == ours
    known = set(re.findall(r"^@\w+{(\w+),", (folder / "references.bib").read_text(), re.MULTILINE))
    cited = set(re.findall(r"`([a-z]+\d{4}\w+)`", text))
    assert cited == known
