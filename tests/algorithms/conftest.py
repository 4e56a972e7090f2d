"""The grid over all algorithms is slow; a few of its rows are quick tests too."""

import pytest

QUICK = ("fedavg", "fedavg_fra", "fedrep")
"""Algorithms of the grid that ``make quick`` runs."""


def pytest_collection_modifyitems(items):
    """Marks the grid's other rows as slow."""
    for item in items:
        row = item.callspec.params.get("name", "fedavg") if hasattr(item, "callspec") else "fedavg"
        if item.path.name == "test_algorithms_all.py" and row not in QUICK:
            item.add_marker(pytest.mark.slow)
