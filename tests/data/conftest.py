"""What all tests of data share: no network, no bars, and the tokenizer of the stand-ins."""

import socket

import datasets
import pytest
from transformers import AutoTokenizer

import fedjax_peft as fp


@pytest.fixture(scope="session")
def stand_in_tokenizer(tmp_path_factory):
    folder = fp.testing.write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))
    return AutoTokenizer.from_pretrained(folder, eos_token="[SEP]")


@pytest.fixture(autouse=True)
def _offline(monkeypatch, request):
    """Makes every host look-up fail, so that no test can use the network."""
    if request.node.get_closest_marker("assets") is None:

        def refuse(*args, **_):
            raise AssertionError(f"network access: {args}")

        monkeypatch.setattr(socket, "getaddrinfo", refuse)
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()
