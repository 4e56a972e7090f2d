"""``make`` checks the version of Python before it installs, and replaces a .venv of another one."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def make(tmp_path):
    """Returns a function that lists what ``make demo`` would do, with Pythons of some versions."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / "pyproject.toml").touch()

    def python(path, version):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\necho {version}\n")
        path.chmod(0o755)

    def run(given, venv=None, **named):
        python(tmp_path / "python", given)
        if venv is not None:
            python(tmp_path / ".venv/bin/python", venv)
            if named.get("installed", True):
                (tmp_path / ".venv/bin/pip").touch()
                (tmp_path / ".venv/.base").touch()
        path = f"PYTHON={tmp_path / 'python'}" if named.get("asked", True) else "-R"
        # A make above this test (`make test`) would hand down its options and its variables.
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS"))}
        done = subprocess.run(
            ["make", "-n", "demo", path, *named.get("more", ())],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
        )
        return done.returncode, done.stdout + done.stderr

    return run


@pytest.mark.parametrize("venv", [None, "Python-3.10"])
def test_an_old_python_is_refused_in_a_sentence(make, venv):
    code, said = make("Python-3.10", venv)
    assert code == 2
    assert "needs Python 3.11 or newer" in said
    assert "Python 3.10" in said
    assert "make demo PYTHON=" in said
    assert "pip install" not in said


@pytest.mark.parametrize("found", ["Python-3.10", "3.11", "''"])
def test_a_venv_of_another_python_is_made_anew(make, tmp_path, found):
    code, said = make("3.12", venv=found)
    assert code == 0
    assert "-m venv .venv" in said
    assert not (tmp_path / ".venv").exists()


def test_a_venv_of_the_same_python_stays(make, tmp_path):
    code, said = make("3.12", venv="3.12")
    assert (code, said.split()) == (0, [".venv/bin/fedjax-peft", "demo"])
    assert (tmp_path / ".venv/.base").exists()


def test_a_venv_of_a_newer_python_stays_if_none_is_asked_for(make, tmp_path):
    code, said = make("3.11", venv="3.99", asked=False)
    assert (code, said.split()) == (0, [".venv/bin/fedjax-peft", "demo"])


def test_a_venv_without_pip_gets_it(make, tmp_path):
    """As one of `uv venv`; it stays."""
    (tmp_path / ".venv/bin").mkdir(parents=True)
    code, said = make("3.12", venv="3.12", installed=False)
    assert code == 0
    assert "-m venv" not in said
    assert said.index(".venv/bin/python -m ensurepip") < said.index("pip install")


@pytest.mark.parametrize("extra", ["cuda", "tpu"])
def test_the_demo_takes_an_accelerators_jax(make, extra):
    """A .venv with JAX for the CPU alone is not taken for one with the accelerator's."""
    code, said = make("3.12", venv="3.12", more=[f"EXTRA={extra}"])
    assert code == 0
    assert f"--editable '.[{extra}]'" in said
    assert said.split()[-2:] == [".venv/bin/fedjax-peft", "demo"]


def test_the_demo_without_an_extra_installs_the_package_alone(make):
    assert "--editable '.'\n" in make("3.12")[1]


@pytest.mark.parametrize("extra", ["gpu", "cuda12", "cuda h5"])
def test_an_unknown_build_of_jax_is_refused(make, extra):
    code, said = make("3.12", venv="3.12", more=[f"EXTRA={extra}"])
    assert code == 2
    assert f"EXTRA={extra} is none of" in said
    assert "cuda, tpu" in said
