"""Partitions: which client has which example. Pure functions of (data, settings, seed).

Every example goes to exactly one client. Only :func:`natural` and :func:`grouped` can leave
examples out, if they are asked for a part of the users. Randomness comes from the stream
``partition`` of the seed. A client's rows are in ascending order.

If ``data.meta`` has ``unit`` (the windows of one context have the same unit), all rows of a unit go
to the same client. A partition then deals out units as it deals out examples otherwise: sizes count
units, and the key of a unit is the key of its first row.
"""

from fedjax_peft.data.partition.features import feature_shift

# Not in __all__, which lists the names that a config file can give.
from fedjax_peft.data.partition.flower import from_flwr as from_flwr
from fedjax_peft.data.partition.plain import iid, pooled
from fedjax_peft.data.partition.skew import dirichlet, label_share, pathological, quantity, zipf
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
    "zipf",
]
