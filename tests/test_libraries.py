"""Settings of other libraries are made in one place, at first use. For imports: test_layers."""

import importlib.util
import itertools
import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest
from huggingface_hub.utils import logging as hub_logging
from internals import Checkpoints, errors, hub, libraries, linalg, main

import fedjax_peft

VARIABLE = "OPENBLAS_NUM_THREADS"
ROOT = Path(fedjax_peft.__file__).parent


@pytest.mark.parametrize("use", [libraries.limit_blas_threads, lambda: linalg.qr(jnp.eye(2))])
def test_settings_of_the_user_are_not_changed(use, monkeypatch):
    monkeypatch.setenv(VARIABLE, "7")
    use()
    assert os.environ[VARIABLE] == "7"


def test_the_command_line_makes_all_settings_at_its_start(monkeypatch, capsys):
    names = (VARIABLE, "TRANSFORMERS_NO_ADVISORY_WARNINGS")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(SystemExit):
        main(["--version"])
    assert [os.environ.get(name) for name in names] == ["1", "1"]


def test_all_decompositions_and_all_uses_of_scipy_limit_openblas():
    decomposition = re.compile(r"jnp\.linalg\.(svd|qr|eigh?|cholesky|inv|solve|lstsq|pinv)\b")
    loads_scipy = re.compile(r"^ +(from|import) (scipy|sklearn|seqeval)\b", re.MULTILINE)
    for path in ROOT.rglob("*.py"):
        text = path.read_text()
        if path.name != "linalg.py":
            assert not decomposition.search(text), f"{path} should call fedjax_peft.numerics.linalg"
        if loads_scipy.search(text):
            assert "limit_blas_threads()" in text, path


def test_orbax_is_quiet_only_while_it_is_called(tmp_path, caplog):
    absl = logging.getLogger("absl")
    before = absl.level
    with caplog.at_level(logging.INFO):  # of the root logger, as a notebook may have it
        checkpoints = Checkpoints(tmp_path)
        checkpoints.save(1, {"x": jnp.ones(3)})
        assert checkpoints.latest == 1
        checkpoints.close()
    assert [r for r in caplog.records if r.name == "absl"] == []
    assert absl.level == before


@pytest.mark.parametrize(("own", "during"), [(0, 30), (40, 40)])
def test_log_levels_are_raised_and_restored(own, during):
    logger = logging.getLogger("some.module")
    logger.setLevel(own)
    seen = []

    @libraries.log_level("some.module", logging.WARNING)
    def fail():
        seen.append(logger.level)
        raise KeyError

    for _ in range(2):
        with pytest.raises(KeyError):
            fail()
    assert (seen, logger.level) == ([during, during], own)


def test_a_warning_of_the_hub_is_printed_once(monkeypatch, capsys):
    """The root logger also has a handler, from absl, beside that of the hub."""
    own, root = logging.StreamHandler(sys.stderr), logging.StreamHandler(sys.stderr)
    logger = hub_logging.get_logger()  # which gives it a handler
    monkeypatch.setattr(logger, "handlers", [own])
    monkeypatch.setattr(logging.getLogger(), "handlers", [root])

    def offline(*_, **__):
        logger.warning("you are not signed in")
        raise OSError("offline")

    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    with pytest.raises(errors.InputError, match="offline"):
        hub.load_tokenizer("someone/model")
    assert capsys.readouterr().err.count("you are not signed in") == 1
    assert logger.propagate, "as before"


def test_no_word_about_pytorch():
    """Nor is the user's own setting of ``transformers`` changed."""
    program = """
import os, sys
sys.modules["torch"] = None  # as if it were not installed
from fedjax_peft.data.vocabulary import SPECIAL, word_tokenizer
assert word_tokenizer([*SPECIAL, "word"])("word")["input_ids"] == [3]
assert "transformers" in sys.modules
assert "TRANSFORMERS_NO_ADVISORY_WARNINGS" not in os.environ
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT.parent)}
    environment.pop("TRANSFORMERS_NO_ADVISORY_WARNINGS", None)
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_every_import_of_transformers_is_quiet(monkeypatch):
    for path in ROOT.rglob("*.py"):
        lines = path.read_text().splitlines()
        for before, line in itertools.pairwise(lines):
            if re.match(r" *(from|import) transformers\b", line):
                assert before.strip() == "with without_advice():", path
    monkeypatch.setenv("TRANSFORMERS_NO_ADVISORY_WARNINGS", "0")
    with libraries.without_advice():
        pass
    assert os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] == "0"


@pytest.mark.parametrize(
    ("made", "has_pip", "command"),
    [
        ("home = /usr\nuv = 0.9.1\nversion_info = 3.12\n", False, "uv pip"),
        ("uv = 0.9.1\n", True, "pip"),  # uv venv --seed
        ("home = /uv\n", False, "pip"),  # another program's, of which we know nothing
        (None, False, "pip"),
    ],
)
def test_an_environment_of_uv_has_no_pip(made, has_pip, command, tmp_path, monkeypatch):
    if made is not None:
        (tmp_path / "pyvenv.cfg").write_text(made)
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: has_pip or None)
    assert libraries.install("h5").startswith(f"{command} install '")
    monkeypatch.setattr(libraries.metadata, "requires", lambda name: [])
    assert libraries.install("h5") == f"{command} install -e '.[h5]' in a checkout"
