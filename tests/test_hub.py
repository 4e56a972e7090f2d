"""The hub's client, as we call it."""

import logging
import sys

import pytest
from huggingface_hub.utils import logging as hub_logging

from fedjax_peft import errors
from fedjax_peft.models import hub


def test_a_warning_of_the_hub_is_printed_once(monkeypatch, capsys):
    """Although absl has given the root logger a handler beside the hub's own."""
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
