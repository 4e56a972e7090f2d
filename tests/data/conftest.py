"""What all tests of data share: no network, and no bars."""

import socket

import datasets
import pytest


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
