"""Which axis of a leaf the devices of the mesh axis ``model`` share.

The rules are data (:data:`fedjax_peft.contracts.Splits`); each family of models has its own.
"""

import functools
import re

from fedjax_peft.contracts import Splits


def frozen_axis(name: str, shape: tuple[int, ...], splits: Splits, parts: int) -> int | None:
    """Returns the axis on which a frozen leaf is split; None for a leaf that stays whole.

    This is the axis of the first rule that matches, if it divides evenly. If it does not, or if
    there are no rules at all, it is the largest axis of a matrix that divides evenly. Leaves that
    the rules do not name stay whole.
    """
    if parts == 1:
        return None
    ruled = lane_axis(name, shape, splits, parts)
    named = not splits or _ruled(name, splits) is not None
    if ruled is not None or len(shape) < 2 or not named:
        return ruled
    even = [axis for axis, n in enumerate(shape) if n and n % parts == 0]
    return max(even, key=lambda axis: shape[axis], default=None)


def lane_axis(name: str, shape: tuple[int, ...], splits: Splits, parts: int) -> int | None:
    """Returns the axis that the rules give a leaf, if it divides evenly; otherwise None.

    The arguments are those of :func:`frozen_axis`.
    """
    axis = _ruled(name, splits)
    return axis if axis is not None and axis < len(shape) and shape[axis] % parts == 0 else None


@functools.cache
def _ruled(name: str, splits: Splits) -> int | None:
    return next((axis for pattern, axis in splits if re.fullmatch(pattern, name)), None)
