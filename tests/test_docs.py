"""The documentation builds without a warning, and its examples run."""

import ast
import contextlib
import inspect
import io
import json
import re
import shlex
import subprocess
import sys
import types
from importlib.machinery import ModuleSpec
from pathlib import Path
from unittest import mock

import memory
import pytest
from internals import assets, build_parser
from shallow import simple_encoder  # noqa: F401

import fedjax_peft as fp
from fedjax_peft import aggregators, algorithms, asynchronous, attacks, peft, testing, transforms

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("simple_encoder")]

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
ELSEWHERE = ("reference/algorithms.md", "reference/data.md", "reference/models.md")
"""Pages whose examples are run, and their results checked, in ``test_readme.py``."""
PAGES = sorted(
    page
    for page in (ROOT / "docs").rglob("*.md")
    if BLOCK.search(page.read_text()) and str(page.relative_to(ROOT / "docs")) not in ELSEWHERE
)
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
RARE = (
    "explanation/lanes.md",
    "howto/asynchrony.md",
    "howto/cluster.md",
    "howto/clusters.md",
    "howto/compression.md",
    "howto/early-stopping.md",
    "howto/figures.md",
    "howto/generation.md",
    "howto/gradients-through-rounds.md",
    "howto/instruction-data.md",
    "howto/learning-rates.md",
    "howto/logging.md",
    "howto/many-clients.md",
    "howto/memory.md",
    "howto/own-texts.md",
    "howto/preferences.md",
    "howto/privacy.md",
    "howto/resume.md",
    "howto/reuse.md",
    "howto/robustness.md",
    "howto/search.md",
    "howto/study.md",
    "howto/sweep.md",
    "howto/unequal-work.md",
    "tutorials/language-models.md",
)
"""Pages whose calls other tests have too, with the same arguments. Their calls are compared with
the signatures, and ``make exhaustive`` runs them."""
CASES = [
    pytest.param(page, id=name, marks=[pytest.mark.exhaustive] * (name in RARE))
    for page in PAGES
    for name in [str(page.relative_to(ROOT / "docs"))]
]
README = BLOCK.findall((ROOT / "README.md").read_text())
"""Blocks that run in ``test_readme.py``, and on no page again."""
SHORTER = {
    "max_length=64": "max_length=16",
    "rounds=20": "rounds=2",
    "rounds=10,": "rounds=1,",
    "rounds=5": "rounds=2",
    "rounds=3": "rounds=1",
    "in (weak, safe)": "in (safe,)",
    "mus    = [0.0, 0.1, 1.0]": "mus = [0.0, 0.1]",
    "rate=[3e-3, 1e-2]": "rate=[1e-2]",
}
"""What makes a page's runs quick; everything else stays as it is there."""


@pytest.fixture(scope="module")
def reference():
    """The site's own extension."""
    sys.path.insert(0, str(ROOT / "docs" / "_ext"))
    try:
        yield pytest.importorskip("library_reference")
    finally:
        sys.path.remove(str(ROOT / "docs" / "_ext"))


@pytest.mark.long("Sphinx reads every module and page")
@pytest.mark.parametrize("builder", ["dummy", "html"])
@pytest.mark.sample("dummy")
def test_site_builds_without_a_warning(tmp_path, builder):
    """A broken link or reference, and a public name without documentation, fail.

    The builder `dummy` resolves them all, but writes no page.
    """
    words = ["-b", builder, "-W", "--keep-going", "-q", "-d", tmp_path / "doctrees"]
    command = [sys.executable, "-m", "sphinx", *words, ROOT / "docs", tmp_path / "site"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert builder == "dummy" or (tmp_path / "site" / "index.html").exists()


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


@pytest.mark.parametrize(
    ("shown", "read"),
    [
        ("(f: ~a.B = <function g>, x: dict = <factory>)", "(f: ~a.B=g, x: dict=...)"),
        ("(f=<function C.g at 0x7f0d>, d=<class 'jax.numpy.int8'>)", "(f=g, d=int8)"),
        ("(f=<function <lambda> at 0x7f0d>, n: int = 2)", "(f=..., n: int=2)"),
        ("(x: ~typing.Annotated[int, ~t.Ge(ge=0)] | None)", "(x: int | None)"),
        ("(f=<function h.<locals>.<lambda> at 0x7f0d>)", "(f=...)"),
    ],
)
def test_types_are_printed_as_their_names(reference, shown, read):
    """For every signature can be read; the build warns of one that cannot."""
    assert reference.readable(shown) == read
    assert reference.process_signature(None, "function", "f", None, None, shown, None)[0] == read


WITHOUT = {
    "fp.deploy.flower": "Flower is not installed here; docs/howto/deploy.md shows it",
    "fp.distributed.initialize": "it connects processes; docs/howto/many-hosts.md shows it",
    "fp.lm_eval.of_model": "lm-eval is not installed here; docs/howto/generation.md shows it",
    "fp.lm_eval.of_run": "likewise",
}
"""Public name -> why no example of it can run."""


def test_public_names_have_examples(reference):
    """All but these; every example is of a public name, and stands with it in the reference."""
    pages = "\n".join(b for p in PAGES for b in BLOCK.findall(p.read_text()))
    known = {*reference.short_names().values()}
    shown = {n for n in known if n in reference.examples() or re.search(rf"{n}\b", pages)}
    assert known - shown == {*WITHOUT}, "give them an example in docs/reference/examples.py"
    beside = {"fp.transforms.chain", "fp.transforms.downlink", "fp.transforms.error_feedback"}
    assert {*reference.examples()} - known == beside
    lines = ["Columns of one batch."]  # a variable is documented where its docstring stands
    reference.add_example(None, "data", "fedjax_peft.contracts.types.Batch", None, None, lines)
    assert ".. code-block:: python" in lines


@pytest.mark.long("it attaches every PEFT method")
@pytest.mark.filterwarnings("ignore:The noise of the FRA-LoRA paper")
def test_examples_of_the_reference_run(reference, tmp_path, monkeypatch):
    """From the first to the last, in one namespace."""
    monkeypatch.chdir(tmp_path)
    Path("trace.csv").write_text("client,start,end\n0,0,5\n")
    exec(compile(reference.EXAMPLES.read_text(), "examples.py", "exec"), {})


def test_glossary_is_short():
    """At most 40 words."""
    text = (ROOT / "docs" / "reference" / "glossary.md").read_text()
    assert 20 <= len(re.findall(r"^\w.*\n  \w", text, re.MULTILINE)) <= 40


def test_every_paper_has_an_entry():
    """All algorithms, aggregators, attacks, transforms and PEFT methods have their papers."""
    folder = ROOT / "docs" / "reference"
    text = (folder / "cite.md").read_text()
    table = re.findall(r"^\| (`.*?) \| (.*) \|$", text, re.MULTILINE)
    named = {name for names, _ in table for name in re.findall(r"`(\w+)`", names)}
    ours = {"local", "centralised", "full", "head_only", "layer_norm", "pretrained"}
    ours |= {"clip_norm", "top_directions", "semi_synchronous"}
    everything = {*algorithms.__all__, *aggregators.__all__, *peft.__all__, *transforms.__all__}
    everything |= {*attacks.__all__, *asynchronous.__all__}
    assert everything - named == ours
    known = set(re.findall(r"^@\w+{(\w+),", (folder / "references.bib").read_text(), re.MULTILINE))
    cited = set(re.findall(r"`([a-z]+\d{4}\w+)`", text))
    assert cited == known


@pytest.fixture(scope="module")
def tiny_assets(tmp_path_factory):
    """Tiny stand-ins for what pages load by name, and files that are the reader's own."""
    folder = tmp_path_factory.mktemp("assets")
    encoder = testing.write_tiny_checkpoint(folder / "my-checkpoint")
    texts = testing.write_tiny_texts(folder / "news", train=400, test=500)
    rows = ["review,stars,customer", *(f"w{i} w{i % 7} w9,{i % 2},{i % 6}" for i in range(60))]
    return {"minilm-l6": encoder, "20newsgroups": texts}, {
        "my-checkpoint": encoder,
        "reviews.csv": "\n".join(rows),
    }


@pytest.fixture
def run_page(tiny_assets, tmp_path, monkeypatch):
    """Returns a function that runs a page's Python, from top to bottom, in an empty folder.

    Nothing is imported for it: a reader copies the page as it stands.
    """
    named, own = tiny_assets
    monkeypatch.setitem(testing.TINY_LLAMA, "num_hidden_layers", 1)
    monkeypatch.setattr(assets, "fetch", named.__getitem__)
    for name, content in own.items():
        if isinstance(content, Path):
            (tmp_path / name).symlink_to(content)
        else:
            (tmp_path / name).write_text(content)
    monkeypatch.chdir(tmp_path)
    names = ("wandb", "mlflow")  # packages that are not installed here
    services = {name: mock.MagicMock(__spec__=ModuleSpec(name, None)) for name in names}
    wandb = services["wandb"].init.return_value
    wandb.step = 0
    for name, module in {**services, "mlflow.entities": services["mlflow"]}.items():
        monkeypatch.setitem(sys.modules, name, module)

    def run(page):
        if page.name == "search.md":
            pytest.importorskip("optuna", reason="the extra optuna is not installed")
        code = "\n".join(b for b in BLOCK.findall(page.read_text()) if b not in README)
        for long, short in SHORTER.items():
            code = code.replace(long, short)
        exec(compile(code, str(page), "exec"), {})
        assert wandb.log.called or "trackers.wandb" not in code

    yield run
    memory.release()


@pytest.mark.timeout(900)
@pytest.mark.long("some pages compile ten programs")
@pytest.mark.parametrize("page", CASES)
def test_python_of_a_page_runs(page, run_page):
    """One round with a tiny model is enough to see that it works."""
    run_page(page)


def named(node):
    """Returns the object that an expression such as ``fp.peft.lora`` names; None: another one."""
    if isinstance(node, ast.Attribute) and (owner := named(node.value)) is not None:
        return getattr(owner, node.attr)
    return fp if isinstance(node, ast.Name) and node.id == "fp" else None


def python_of(page):
    """Returns the Python of a page, or of the cells of a notebook."""
    text = page.read_text()
    if page.suffix == ".md":
        return "\n".join(BLOCK.findall(text))
    cells = json.loads(text)["cells"]
    return "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")


@pytest.mark.parametrize("page", [*PAGES, *NOTEBOOKS], ids=lambda page: page.stem)
def test_calls_of_a_page_fit_the_signatures(page):
    """Every name of the library exists and has the arguments, also where the page is not run."""
    for node in ast.walk(ast.parse(python_of(page))):
        called = named(node.func if isinstance(node, ast.Call) else node)
        if isinstance(node, ast.Call) and called is not None:
            known = inspect.signature(called).parameters
            given = {word.arg for word in node.keywords if word.arg}
            free = any(x.kind is inspect.Parameter.VAR_KEYWORD for x in known.values())
            assert free or given <= known.keys(), ast.unparse(node)


def test_first_page_begins_with_the_example_of_the_readme():
    """Whose output ``test_readme.py`` checks."""
    assert BLOCK.findall((ROOT / "docs" / "start.md").read_text())[0] == README[0]


def test_files_that_pages_name_exist():
    """By their path, or in a link of a page that Sphinx does not check."""
    outside = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    for page in outside:
        for path in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (ROOT / path).exists(), f"{page.name} links to {path}"
    pages = [*outside, *(ROOT / "docs").rglob("*.md")]
    top = "docs|experiments|fedjax_peft|notebooks|tests"
    for page in pages:
        for path in re.findall(rf"`((?:{top})/[\w./-]*)`", page.read_text()):
            known = "NAME" in path or (ROOT / path).exists()
            assert known, f"{page.relative_to(ROOT)} names {path}"


def test_names_in_the_tables_of_the_architecture_exist():
    """In the file that stands before them."""
    text = (ROOT / "docs" / "explanation" / "architecture.md").read_text()
    rows = re.findall(r"^\| .* \| (.*) \|$", text, re.MULTILINE)
    found = 0
    for row in rows:
        source = ""
        for word in re.findall(r"`([\w./]+)`", row):
            if "/" in word:
                path = ROOT / "fedjax_peft" / word
                assert path.exists(), word
                source = path.read_text() if path.is_file() else ""
            elif source:
                name = word.rpartition(".")[2]
                assert re.search(rf"\b(def|class) {name}\b", source), f"{word} in {row}"
                found += 1
    assert found > 40


def test_commands_of_pages_are_accepted():
    """Their options are those of the command line; what they name need not be there."""
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for block in re.findall(r"```(?:bash|console)\n(.*?)```", page.read_text(), re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                command = line.removeprefix("$ ")
                if not command.startswith("fedjax-peft "):
                    continue
                with contextlib.redirect_stderr(io.StringIO()) as said:
                    try:
                        words = shlex.split(command, comments=True)[1:]
                        _, rest = build_parser().parse_known_args(words)
                    except SystemExit:
                        pytest.fail(f"{page.name}: {line}\n{said.getvalue()}")
                assert all("=" in word and word[0] != "-" for word in rest), line


def test_figures_of_the_gallery_have_commands():
    """Below each; the scripts and configs that they name are there."""
    text = (ROOT / "docs" / "gallery.md").read_text()
    sections = text.split("\n## ")[1:]
    assert all("![" in section and "```bash\n" in section for section in sections)
    named = re.findall(r"(?<=[ (/`])experiments/[\w/.-]+\w", text)
    assert len(named) > 20
    assert [path for path in named if not (ROOT / path).exists()] == []


def sentences(text):
    """Yields the sentences of a page, without those of code, tables and headings.

    A link counts as its words, and a piece of code as one word.
    """
    text = re.sub(r"^( *)(```+).*?^\1\2 *$", "\n", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"^ *[|#].*$", "\n", text, flags=re.MULTILINE)
    for block in re.split(r"\n\s*\n|\n(?= *(?:[*-]|\d+\.) )", text):
        plain = re.sub(r"`[^`]*`", "CODE", re.sub(r"\]\([^)]*\)", "]", block))
        yield from re.split(r"(?<=[.!?])[*)\"]*\s+(?=[^a-z])", " ".join(plain.split()))


def test_sentences_of_pages_are_short():
    """At most 40 words. A longer one becomes two, a list or a table."""
    assert [*sentences("One `a b`. [Two](x) is\nhere.\n* Three")] == [
        *("One CODE.", "[Two] is here.", "* Three")
    ]
    outside = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    for page in [*outside, *(ROOT / "docs").rglob("*.md")]:
        for sentence in sentences(page.read_text()):
            words = re.findall(r"[^\W_][\w'’.,/-]*", sentence)
            assert len(words) <= 40, f"{page.relative_to(ROOT)}: {sentence}"


def test_code_of_pages_is_not_cut():
    """At most 84 characters a line, which the site's column shows whole."""
    fence = re.compile(r"^ *```\w+\n(.*?)^ *```", re.DOTALL | re.MULTILINE)
    for page in (ROOT / "docs").rglob("*.md"):
        blocks = fence.findall(page.read_text())
        wide = [line for block in blocks for line in block.splitlines() if len(line) > 84]
        assert not wide, (page.name, wide)
    for notebook in NOTEBOOKS:
        cells = json.loads(notebook.read_text())["cells"]
        code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
        wide = [line for cell in code for line in cell.splitlines() if len(line) > 84]
        assert not wide, (notebook.name, wide)


def test_index_pages_say_what_each_link_leads_to():
    """One sentence a page; the reference of modules has their names."""
    for path in (ROOT / "docs").rglob("*.md"):
        text = path.read_text()
        assert ":maxdepth:" not in text or path.parent.name == "api", path
        for tree in re.findall(r"```\{toctree\}\n:hidden:\n\n(.*?)```", text, re.DOTALL):
            told = re.findall(r"^\* \{doc\}`(.*?)`: \S.*(?:\n  .*)*\.$", text, re.MULTILINE)
            assert (path.name == "index.md" and path.parent.name == "docs") or told == tree.split()
