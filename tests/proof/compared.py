"""What two runs of a draw must agree on, and how far apart they may be."""

import json
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fedjax_peft as fp

__all__ = ["difference", "not_finite", "observed"]

FREE = (
    *("time", "lanes", "slot_utilisation", "padding_share", "privacy", "federation", "stopped"),
)
"""Fields of a row that say where and how long a run ran, or that do not change."""


def observed(run: fp.Run, clients: int) -> dict[str, np.ndarray]:
    """Returns everything that two runs must agree on: name -> array."""
    out = {f"params.{name}": np.asarray(x, np.float32) for name, x in run.params.items()}
    kept = run.client_state
    if hasattr(kept, "take") and not isinstance(kept, dict):
        kept = kept.take(range(clients)).client_state
    for name, tree in {"server": run.server, "kept": kept}.items():
        out |= {f"{name}.{i}": _plain(x) for i, x in enumerate(jax.tree.leaves(tree))}
    for row in run.metrics:
        out |= {f"row {row['round']}.{name}": value for name, value in _fields(row)}
    return out


def difference(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> tuple[float, str]:
    """Returns the largest |a - b| / (1 + |b|) and its name; infinity for other names or shapes."""
    if a.keys() != b.keys():
        return np.inf, f"only in one: {sorted(a.keys() ^ b.keys())[:4]}"
    worst = 0.0, ""
    for name, x in a.items():
        y = b[name]
        if x.shape != y.shape:
            return np.inf, f"{name}: {x.shape} and {y.shape}"
        # Accuracies are step functions of the logits.
        if x.size and "accuracy" not in name and "backdoor" not in name:
            worst = max(worst, (_distance(x, y), name), key=lambda pair: pair[0])
    return worst


def not_finite(run: fp.Run) -> list[str]:
    """Returns the names of metrics that are infinite or NaN; a null is neither."""
    return [
        f"row {row['round']}.{name}"
        for row in run.metrics
        for name, value in _fields(row, null=0.0)
        if value.dtype.kind == "f" and not np.isfinite(value).all()
    ]


def _distance(x: np.ndarray, y: np.ndarray) -> float:
    if x.dtype.kind not in "fc":
        return np.inf if (x != y).any() else 0.0
    x, y = x.astype(np.float64), y.astype(np.float64)
    with np.errstate(invalid="ignore"):
        same = (np.isnan(x) & np.isnan(y)) | (x == y)
        apart = np.where(same, 0.0, np.abs(x - y) / (1 + np.abs(y)))
    return np.inf if np.isnan(apart).any() else float(apart.max())


def _plain(x: Any) -> np.ndarray:
    if jax.dtypes.issubdtype(getattr(x, "dtype", np.float32), jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    x = np.asarray(x)
    return x.astype(np.float32) if x.dtype == jnp.bfloat16 else x


def _fields(row: dict, prefix: str = "", null: float = np.nan) -> Iterator[tuple[str, np.ndarray]]:
    for name, value in row.items():
        if not prefix and name in FREE:
            continue
        if isinstance(value, dict):
            yield from _fields(value, f"{prefix}{name}.", null)
        elif _is_number(value):
            yield prefix + name, np.float64(null if value is None else value)
        elif isinstance(value, list) and all(map(_is_number, value)):
            yield prefix + name, np.array([null if v is None else v for v in value], np.float64)
        else:
            yield prefix + name, np.frombuffer(json.dumps(value, default=str).encode(), np.uint8)


def _is_number(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float)
