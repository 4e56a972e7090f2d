"""Partitions: who owns which example. Pure functions of (data, settings, seed).

Every example goes to exactly one client; only :func:`natural` and :func:`grouped` can leave some to
nobody, where they are told to take a part of the clients. Randomness comes from the stream
``partition`` of the seed. A client's rows are in ascending order.

Where ``data.meta`` has ``unit``, as for the windows that a long context was cut into, all rows of a
unit go to the same client: units are dealt out as examples are elsewhere (their key is that of the
first row), and "examples" below, sizes too, are units.
"""

from fedjax_peft.data.partition.features import feature_shift
from fedjax_peft.data.partition.plain import iid, pooled
from fedjax_peft.data.partition.skew import (
    dirichlet,
    label_share,
    pathological,
    quantity,
)
from fedjax_peft.data.partition.users import grouped, natural

__all__ = [
    "dirichlet",
    "feature_shift",
    "grouped",
    "iid",
    "label_share",
    "natural",
    "pathological",
    "pooled",
    "quantity",
]
