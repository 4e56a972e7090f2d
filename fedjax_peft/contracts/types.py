"""The names of the data: trees of arrays, keys, batches and metrics."""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from jax import Array

PyTree: TypeAlias = Any

Key: TypeAlias = Array
"""A typed JAX random key (``jax.random.key``), never a raw uint32 pair."""

Params: TypeAlias = dict[str, Array]
"""Named arrays: dotted module path -> array. Frozen and trainable trees both have this form, so
leaves are selected by rules about names."""

Splits: TypeAlias = tuple[tuple[str, int], ...]
"""(leaf name, axis): the axis on which several devices share a leaf; the first full match of the
regular expression counts. Each family of models has its own."""

Batch: TypeAlias = Mapping[str, Array]
"""Columns of one batch, each ``[batch, ...]``. ``mask`` (bool ``[batch]``) marks real examples."""

Metrics: TypeAlias = dict[str, tuple[Array, Array]]
"""Metric name -> (sum, count), two float32 scalars. Sums and counts of parts can be added."""

RateSchedule: TypeAlias = Callable[[Array], Array]
"""round (int32 scalar, from 1, traced) -> the factor of the learning rate in this round, a scalar.
"""

Diagnosis: TypeAlias = Callable[[Params, Params, Params], dict[str, Array]]
"""(shared leaves before a round, after it, fixed leaves) -> float32 scalars."""
