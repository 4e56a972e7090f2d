"""What tests of adapters' files share: a checkpoint of ``transformers``."""

import pytest
from torch_reference import saved, tiny_model

import fedjax_peft as fp


@pytest.fixture(scope="session")
def base(tmp_path_factory):
    """The directory of a tiny BERT with three classes; tests write nothing there."""
    return saved(tiny_model("bert"), tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="session")
def model(base):
    return fp.load_model(base)
