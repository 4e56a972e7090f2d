"""The grids over all algorithms are slow; a few of their rows are quick tests too."""

import pytest

QUICK = {
    "test_algorithms_all.py": ("fedavg", "fedavg_fra", "fedrep"),
    "test_algorithms_privacy.py": ("fedavg", "fedmcp", "fra_ffa_plateau"),
}
"""Grid -> the algorithms of it that ``make quick`` runs."""


def pytest_collection_modifyitems(items):
    """Marks the grids' other rows as slow."""
    for item in items:
        row = item.callspec.params.get("name") if hasattr(item, "callspec") else None
        if row is not None and row not in QUICK.get(item.path.name, (row,)):
            item.add_marker(pytest.mark.slow)
