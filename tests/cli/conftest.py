"""What all tests of the command line share: the quick encoder, a small project, a finished run."""

import pytest
from shallow import shallow, shallow_encoder
from tiny_project import CONFIG

from fedjax_peft import testing
from fedjax_peft.cli import main as cli

__all__ = ["shallow_encoder"]


@pytest.fixture(scope="session")
def project(tmp_path_factory):
    """A folder with a tiny model, tiny texts and a config."""
    root = tmp_path_factory.mktemp("project")
    with shallow():
        testing.write_tiny_checkpoint(root / "model")
    testing.write_tiny_texts(root / "data", train=80, test=40)
    (root / "config.toml").write_text(CONFIG.format(root=root))
    return root


@pytest.fixture(scope="session")
def finished(project):
    """The directory of a finished run of the config; tests may only add a report."""
    assert cli.main(["run", str(project / "config.toml"), "--out", str(project / "run")]) == 0
    return project / "run"
