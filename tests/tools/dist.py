"""Builds the wheel and the source distribution, checks both, and uses the wheel as a newcomer does.

    make dist                        # into dist/, ten minutes: libraries are installed anew
    python tests/tools/dist.py --quick  # with the libraries that are here, a minute

Both archives are built from a copy of the tracked files, so that nothing else gets into them. The
wheel is installed into a fresh environment outside the checkout. There the README's first example,
the commands and the code of a notebook run on a tiny model. In the unpacked source distribution all
quick tests run, as ``make quick`` runs them; with ``--quick`` only :data:`SOME`.
"""

import argparse
import fnmatch
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import tomllib
import venv
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MEGABYTES = {".whl": 2, ".gz": 6}
"""The largest archives, by the end of their names."""
WHEEL = ("fedjax_peft/*.py", "fedjax_peft/py.typed", "fedjax_peft/*.toml", "*/sizes.json")
WHEEL += ("fedjax_peft/deploy/files/*.txt",)
WHEEL += tuple(f"fedjax_peft/report/report.{form}" for form in ("html", "css", "js"))
"""All that a wheel has beside its metadata; ``*`` goes over folders, too."""
SOURCES = (
    *("pyproject.toml", "README.md", "CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "LICENSE"),
    *("Makefile", "MANIFEST.in", ".ci/run", "docs/conf.py", "docs/index.md", "docs/_static/*.svg"),
    *("experiments/*.toml", "experiments/*.py", "experiments/results/demo/*.svg"),
    *("notebooks/*.ipynb", "tests/conftest.py", "tests/tools/dist.py", "tests/constraints.txt"),
    *("tests/algorithms/test_*.py", "tests/fuzz/conftest.py", "tests/golden/*.safetensors"),
    *("fedjax_peft/__init__.py", "fedjax_peft/cli/demo.toml", "PKG-INFO"),
    "tests/constraints_flower.txt",
)
"""What a source distribution must have."""
UNWANTED = ("*.pyc", "*__pycache__*", "*.pt", "*.bin", "*.ckpt", "*/checkpoints/*")
UNWANTED += ("*/.venv*/*", "*/runs/*", "*metrics.jsonl", "*environment.json", "docs/_build/*")
UNWANTED += ("*.pdf", "*.png", "*.ipynb_checkpoints*", "*_cache/*", ".git/*")
"""What neither may have outside tests/golden: what runs, builds and tests leave behind."""
SOME = ("-n", "0", "tests/test_tree.py", "tests/test_toml.py")
"""The words of pytest for the tests that the source distribution runs with ``--quick``."""
QUICK = ("-n", "2", "--dist", "loadfile", "--no-loadscope-reorder", "--max-worker-restart", "0")
QUICK += ("-m", "not slow and not assets", "-o", "file_seconds=0")
"""Without ``--quick``: those of ``make quick``, without its limits of time."""
NOTEBOOK = "01_quickstart.ipynb"
"""The notebook whose code runs with the wheel."""
TINY = """
import os
from pathlib import Path
from fedjax_peft import testing
from fedjax_peft.support import assets

testing.TINY_BERT.update(max_position_embeddings=64, num_hidden_layers=1)
testing.write_tiny_checkpoint("assets/minilm-l6")
testing.write_tiny_texts("assets/20newsgroups", train=4000, test=400)
assets.fetch = Path("assets").absolute().joinpath
os.environ["FEDJAX_PEFT_NOTEBOOK_ROUNDS"] = "1"
"""
"""What runs before it: its model and data are tiny."""


# ----------------------------------------------------------------------------- building, checking


def project() -> dict:
    """Returns the table ``[project]`` of pyproject.toml."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def copy_tracked(place: Path) -> Path:
    """Copies the files that git tracks, or all but what builds leave where there is no git."""
    if not (ROOT / ".git").exists():
        ignore = shutil.ignore_patterns(".*_cache", ".venv*", "__pycache__", "runs", "_build")
        return Path(shutil.copytree(ROOT, place, ignore=ignore))
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    for name in listed.split("\0"):
        if name and (ROOT / name).exists():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, place / name)
    return place


def build_here(source: Path, out: Path) -> list[Path]:
    """Returns the two archives, built by the setuptools of this interpreter; nothing is fetched."""
    code = "import sys, setuptools.build_meta as b; out = sys.argv[1]"  # which setuptools changes
    code += "; b.build_sdist(out); b.build_wheel(out)"
    run = subprocess.run(
        [sys.executable, "-c", code, str(out)], cwd=source, capture_output=True, text=True
    )
    if run.returncode:
        raise SystemExit(f"The build failed:\n{run.stdout}{run.stderr}")
    return archives(out)


def archives(out: Path) -> list[Path]:
    """Returns [wheel, source distribution] of a folder."""
    return [*out.glob("*.whl"), *out.glob("*.tar.gz")]


def names_in(archive: Path) -> list[str]:
    """Returns the files in an archive; of a source distribution without its top folder."""
    if archive.suffix == ".whl":
        return zipfile.ZipFile(archive).namelist()
    with tarfile.open(archive) as file:
        return [m.name.partition("/")[2] for m in file.getmembers() if not m.isdir()]


def metadata_of(wheel: Path) -> Message:
    """Returns the fields of a wheel's METADATA."""
    with zipfile.ZipFile(wheel) as file:
        (name,) = [name for name in file.namelist() if name.endswith(".dist-info/METADATA")]
        return Parser().parsestr(file.read(name).decode())


def matches(name: str, patterns: tuple[str, ...]) -> bool:
    """Returns whether a name fits one of the patterns."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def problems_of_names(names: list[str], suffix: str) -> list[str]:
    """Returns what a wheel (``.whl``) or a source distribution lacks, or should not have."""
    own = [name for name in names if not name.startswith("tests/golden/")]
    found = [f"has {name}" for name in own if matches(name, UNWANTED)]
    if suffix == ".whl":
        allowed = (*WHEEL, "fedjax_peft-*.dist-info/*")
        return found + [f"has {name}" for name in names if not matches(name, allowed)]
    missing = [one for one in SOURCES if not any(fnmatch.fnmatchcase(n, one) for n in names)]
    return found + [f"has no {pattern}" for pattern in missing]


def problems(archive: Path) -> list[str]:
    """Returns what is wrong with an archive: its names or its size."""
    found = problems_of_names(names_in(archive), archive.suffix)
    megabytes = archive.stat().st_size / 1e6
    if megabytes > MEGABYTES[archive.suffix]:
        found.append(f"has {megabytes:.1f} MB, of {MEGABYTES[archive.suffix]} allowed")
    return [f"{archive.name} {problem}" for problem in dict.fromkeys(found)]


def problems_of_address(source: str, readme: str, notebooks: dict[str, str]) -> list[str]:
    """Returns what does not fit the project's address.

    Without one nothing may show a badge, whose link would lead nowhere. With one the links of the
    README must be absolute, for an index shows the page without the repository.

    Args:
      source: ``[project.urls] Source``, or the empty text.
      readme: The README's text.
      notebooks: File name -> text.
    """
    badges = {name: "colab-badge.svg" in text for name, text in notebooks.items()}
    if not source:
        return [
            f"{name} has a Colab badge without an address" for name, has in badges.items() if has
        ]
    github = source.startswith("https://github.com/")  # Colab and Kaggle read no other address
    found = [f"{name} has no Colab badge" for name, has in badges.items() if github and not has]
    links = re.findall(r"\]\(([^)]+)\)", readme)
    return found + [
        f"README.md: write {source}/blob/main/{link} (an image: /raw/main/) for {link}"
        for link in links
        if not link.startswith(("https://", "#"))
    ]


# -------------------------------------------------------------------------------- using the wheel


def say(*words: object) -> None:
    """Prints a line at once."""
    print(*words, flush=True)


def run(command: list[str | Path], place: Path, **variables: str) -> str:
    """Returns the output of a command that runs outside the checkout, or ends the script.

    Args:
      command: Its words.
      place: The folder where it runs.
      **variables: Of its environment, beside those that are here.
    """
    outside = {k: x for k, x in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    words, environment = [str(word) for word in command], outside | variables
    done = subprocess.run(words, cwd=place, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(
            f"{' '.join(words)}\nended with code {done.returncode}:\n{done.stdout}{done.stderr}"
        )
    return done.stdout


def install(wheel: Path, place: Path, quick: bool) -> Path:
    """Returns the ``bin`` of a fresh environment with the wheel.

    Args:
      wheel: The archive.
      place: Where the environment will be.
      quick: Take the libraries from the environment of this interpreter.
    """
    venv.create(place, with_pip=True)
    bin_ = place / "bin"
    if quick:
        (packages,) = place.glob("lib/python*/site-packages")
        (packages / "here.pth").write_text(sysconfig.get_path("purelib") + "\n")
    without = ["--no-deps", "--no-index"] if quick else []
    pip = [bin_ / "python", "-m", "pip", "install", "--quiet", "--no-compile"]
    # Else pip would find the installed checkout and leave it at that.
    run([*pip, *without, "--ignore-installed" if quick else "--upgrade", wheel], place.parent)
    check_import(bin_ / "python", place)
    return bin_


def check_import(python: str | Path, place: Path, **variables: str) -> None:
    """Ends the script if a Python that runs in a folder does not import the package from there."""
    code = "import fedjax_peft as f; print(f.__file__)"
    found = run([python, "-c", code], place, **variables).strip()
    if not Path(found).is_relative_to(place):
        raise SystemExit(f"{python} in {place} imports {found}.")


def use(bin_: Path, place: Path) -> None:
    """Runs the README's first example, a run of the sample table, and every command's help."""
    python, command = bin_ / "python", bin_ / "fedjax-peft"
    example = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.S | re.M)[0]
    (place / "example.py").write_text(example)
    say(run([python, "example.py"], place))
    code = "from fedjax_peft import testing; testing.write_tiny_checkpoint('encoder')"
    run([python, "-c", code], place)
    run([command, "init", "mine"], place)
    model = f"model.name={place / 'encoder'}"
    run([command, "run", "mine/config.toml", model, "rounds=2", "--out", "runs/mine"], place)
    say(run([command, "report", "runs/mine"], place))
    if not list(place.rglob("report.html")):
        raise SystemExit("`fedjax-peft report` wrote no report.html.")
    say(run([command, "list"], place))
    commands = re.findall(r"^    (\w+)", run([command, "--help"], place), re.MULTILINE)
    for name in commands:
        run([command, name, "--help"], place)
    say(f"--help of {len(commands)} commands: {' '.join(commands)}")
    version = run([command, "--version"], place).split()[-1]
    own = ROOT / "fedjax_peft" / "support" / "version.py"
    if f'__version__ = "{version}"' not in own.read_text():
        raise SystemExit(f"fedjax-peft --version says {version}, not fedjax_peft.__version__.")


def use_notebook(python: Path, place: Path) -> None:
    """Runs the code of :data:`NOTEBOOK`, which finds the wheel's package installed."""
    cells = json.loads((ROOT / "notebooks" / NOTEBOOK).read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    (place / "notebook.py").write_text("\n\n".join([TINY, *code]))
    said = run([python, "notebook.py"], place)
    if "fedjax_peft is installed." not in said or not (place / "adapter").is_dir():
        raise SystemExit(f"{NOTEBOOK} has not run to its end:\n{said}")
    say(f"The code of {NOTEBOOK} has run.")


def run_tests(archive: Path, place: Path, quick: bool) -> None:
    """Runs tests in the unpacked source distribution, with the libraries that are here.

    Args:
      archive: The source distribution.
      place: Where it is unpacked.
      quick: Run :data:`SOME` tests, not all that ``make quick`` runs.
    """
    with tarfile.open(archive) as file:
        file.extractall(place, filter="data")
    (top,) = place.iterdir()
    check_import(sys.executable, top, PYTHONPATH=str(top))  # before the installed checkout
    pytest = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider"]
    done = run([*pytest, *(SOME if quick else QUICK)], top, PYTHONPATH=str(top))
    say(done.splitlines()[-1])


def main() -> int:
    """Runs all steps, and puts the archives into ``dist/`` if nothing is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="install no library")
    quick = parser.parse_args().quick
    with tempfile.TemporaryDirectory(prefix="dist-") as directory:
        place = Path(directory)
        source, out = copy_tracked(place / "source"), place / "dist"
        say("Building the wheel and the source distribution")
        if quick:
            build_here(source, out)
        else:
            run([sys.executable, "-m", "build", "--outdir", out, source], place)
        built = archives(out)
        wrong = [problem for archive in built for problem in problems(archive)]
        notebooks = {p.name: p.read_text() for p in (source / "notebooks").glob("*.ipynb")}
        address = project().get("urls", {}).get("Source", "")
        wrong += problems_of_address(address, (source / "README.md").read_text(), notebooks)
        if wrong:
            raise SystemExit("\n".join(wrong))
        for archive in built:
            size = archive.stat().st_size / 1e6
            say(f"{archive.name}: {len(names_in(archive))} files, {size:.1f} MB")
        if not quick:
            say(run([sys.executable, "-m", "twine", "check", "--strict", *built], place))
        say("Installing the wheel into a fresh environment")
        bin_ = install(built[0], place / "environment", quick)
        (place / "work").mkdir()
        use(bin_, place / "work")
        use_notebook(bin_ / "python", place / "work")
        say(f"{'Some' if quick else 'All quick'} tests in the unpacked source distribution")
        run_tests(built[1], place / "unpacked", quick)
        if not address:
            say("pyproject.toml has no [project.urls]: an index cannot follow the README's links.")
        if not quick:
            shutil.copytree(out, ROOT / "dist", dirs_exist_ok=True)
            say(f"Wrote {', '.join('dist/' + archive.name for archive in built)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
