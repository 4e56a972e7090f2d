"""What tests of adapters' files share: a checkpoint of ``transformers``."""

import pytest
from torch_reference import saved, tiny_model

from fedjax_peft.models.hub import load_model


@pytest.fixture(scope="session")
def base(tmp_path_factory):
    """The directory of a tiny BERT with three classes; tests write nothing there."""
    return saved(tiny_model("bert"), tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="session")
def model(base):
    return load_model(base)
