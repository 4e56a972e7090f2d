"""The smallest config, for tests that add or change keys; its model and data are only names."""

from typing import Any

CONFIG = {
    "rounds": 1,
    "model": {"name": "tiny"},
    "data": {"name": "here"},
    "partition": {"name": "iid", "clients": 4},
    "optimizer": {"learning_rate": 0.1},
}


def small(*without: str, **tables: Any) -> dict[str, Any]:
    """Returns the config with other tables, without some of its own."""
    return {name: x for name, x in {**CONFIG, **tables}.items() if name not in without}
