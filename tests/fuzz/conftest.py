"""Settings of all fuzzers: warnings are not errors, and memory is bounded."""

import resource
import warnings

import pytest

GROWTH = 1 << 30
"""Bytes that the peak of a fuzzer's memory may lie above where it began."""


@pytest.fixture(autouse=True)
def _no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.fixture(autouse=True, scope="module")
def _bounded_memory():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert (after - before) * 1024 < GROWTH
