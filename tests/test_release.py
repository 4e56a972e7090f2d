"""What a release publishes: the contents of its archives, their fields, and one version.

``make dist`` does the rest: it installs the wheel into a fresh environment and uses it.
"""

import re

import dist
import pytest
import yaml

import fedjax_peft

PROJECT = dist.project()
NOTEBOOKS = {path.name: path for path in (dist.ROOT / "notebooks").glob("*.ipynb")}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """[wheel, source distribution], built from a copy of the tracked files without a network."""
    place = tmp_path_factory.mktemp("built")
    source = dist.copy_tracked(place / "source")
    return dist.build_here(source, place / "dist")


@pytest.mark.slow
def test_archives_have_what_they_should(built):
    """Both are there, none is too large, and nothing that tests or runs leave is in them."""
    assert [archive.suffix for archive in built] == [".whl", ".gz"]
    assert [problem for archive in built for problem in dist.problems(archive)] == []


def test_source_distribution_has_the_tests(built):
    """All of them, with what they import and read."""
    names = dist.names_in(built[1])
    tests = [path.relative_to(dist.ROOT) for path in (dist.ROOT / "tests").rglob("*.py")]
    assert {str(path) for path in tests} <= set(names)


def test_source_distribution_runs_the_tests_of_make_quick():
    """``make dist`` starts them with the same words."""
    makefile = (dist.ROOT / "Makefile").read_text()
    marks = dist.QUICK.index("-m")
    words = [*dist.QUICK[:marks], f'-m "{dist.QUICK[marks + 1]}"']
    assert " ".join(words[:-1]) in makefile
    assert words[-1] in makefile


@pytest.mark.parametrize(
    ("suffix", "name", "said"),
    [
        (".whl", "tests/conftest.py", "has tests/conftest.py"),
        (".whl", "fedjax_peft/data/news.csv", "has fedjax_peft/data/news.csv"),
        (".gz", "runs/mine/metrics.jsonl", "has runs/mine/metrics.jsonl"),
        (".gz", "experiments/fra/runs/a/config.toml", "has experiments/fra/runs/a/config.toml"),
        (".gz", "fedjax_peft/__pycache__/a.pyc", "has fedjax_peft/__pycache__/a.pyc"),
    ],
)
def test_a_file_too_many_is_found(suffix, name, said):
    """What is not the package's does not get into a wheel; runs and caches into neither."""
    assert said in dist.problems_of_names([name], suffix)


def test_a_missing_file_is_found():
    """A source distribution without its tests' settings is none."""
    assert "has no tests/conftest.py" in dist.problems_of_names(["tests/test_tree.py"], ".gz")


def test_fields_of_the_wheel(built):
    """An index shows them."""
    fields = dist.metadata_of(built[0])
    assert fields["Author"] == "The fedjax_peft authors"
    assert fields["Summary"] == PROJECT["description"]
    assert fields["Description-Content-Type"] == "text/markdown"
    assert fields["License-Expression"] == "Apache-2.0"
    assert fields["Keywords"].split(",") == PROJECT["keywords"]
    assert fields.get_all("Classifier") == PROJECT["classifiers"]
    assert fields.get_payload().strip() == (dist.ROOT / "README.md").read_text().strip()
    shown = [f"{name}, {url}" for name, url in PROJECT.get("urls", {}).items()]
    assert fields.get_all("Project-URL", []) == shown


def test_version_has_one_place(built):
    """The package has it; pyproject.toml and the site ask the package."""
    assert dist.metadata_of(built[0])["Version"] == fedjax_peft.__version__
    assert PROJECT["dynamic"] == ["version"]
    assert "release = fedjax_peft.__version__" in (dist.ROOT / "docs" / "conf.py").read_text()


def test_citation():
    """The fields that the format requires, and the version and licence of the release."""
    citation = yaml.safe_load((dist.ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= set(citation)
    assert citation["cff-version"] == "1.2.0"
    assert [author["name"] for author in citation["authors"]] == [
        author["name"] for author in PROJECT["authors"]
    ]
    assert str(citation["version"]) == fedjax_peft.__version__
    assert citation["license"] == PROJECT["license"]


def test_pages_fit_the_address():
    """No badge without an address; with one, badges, and absolute links in the README."""
    texts = {name: path.read_text() for name, path in NOTEBOOKS.items()}
    source = PROJECT.get("urls", {}).get("Source", "")
    assert dist.problems_of_address(source, (dist.ROOT / "README.md").read_text(), texts) == []
    pages = [*NOTEBOOKS.values(), dist.ROOT / "README.md", *(dist.ROOT / "docs").rglob("*.md")]
    holders = re.compile(r"USER/REPO|OWNER/|ADDRESS-OF|example\.org|your-?(name|org)")
    assert [path.name for path in pages if holders.search(path.read_text())] == []


def test_an_address_asks_for_badges_and_absolute_links():
    """Each problem says what to write."""
    badge = {"a.ipynb": "colab-badge.svg"}
    assert dist.problems_of_address("", "", badge) == [
        "a.ipynb has a Colab badge without an address"
    ]
    for address, missing in (
        ("https://github.com/us/fedjax_peft", ["a.ipynb has no Colab badge"]),
        ("https://forge/fedjax_peft", []),
    ):
        links = "[x](docs/a.md) [y](https://b)"
        *badges, link = dist.problems_of_address(address, links, {"a.ipynb": ""})
        assert badges == missing
        assert f"write {address}/blob/main/docs/a.md" in link


def test_tutorials_of_the_site_are_the_notebooks():
    """Byte for byte."""
    for name, path in NOTEBOOKS.items():
        assert (dist.ROOT / "docs" / "tutorials" / name).read_bytes() == path.read_bytes(), name


def test_nothing_installs_by_a_name_that_the_project_does_not_own():
    """The name on the package index is nobody's: whoever registers it would run code."""
    folders = ("docs", "experiments", "fedjax_peft", "notebooks")
    files = [path for name in folders for path in (dist.ROOT / name).rglob("*.*")]
    files += [dist.ROOT / name for name in ("README.md", "CONTRIBUTING.md", "Makefile")]
    install = re.compile(r"""pip3? install[^\n`]*[ "']fedjax[_-]peft(?!-[\d.])""")
    readable = [path for path in files if path.suffix in (".md", ".py", ".ipynb", ".toml", "")]
    texts = {path: path.read_text(encoding="utf-8") for path in readable if path.is_file()}
    assert [path for path, text in texts.items() if install.search(text)] == []
