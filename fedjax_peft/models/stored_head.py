"""Warnings of a head that starts from other values than its user may think."""

import warnings
from collections.abc import Mapping
from typing import Any

from fedjax_peft.models.family import Kind
from fedjax_peft.models.heads import Head
from fedjax_peft.models.modules import is_inside
from fedjax_peft.models.names import first_of
from fedjax_peft.support.errors import users_level


class HeadWarning(UserWarning):
    """A head starts from other values than the user may think."""


_TASK_HEADS = ("classifier", "pre_classifier", "qa_outputs", "score")
"""Modules that are trained for a task, unlike those of pretraining."""


def warn_of_head(
    name: str,
    config: Mapping[str, Any],
    kind: Kind,
    head: Head,
    plan: Mapping[str, tuple[str, bool]],
    names: Mapping[str, str],
) -> None:
    """Warns of a head that is new in part, instead of a stored one, or of another task.

    A head that is new as a whole, on a checkpoint without one, is what its user has asked for.

    Args:
      plan: from :func:`fedjax_peft.models.checkpoint.match`.
      names: as for :func:`match`.
    """
    *before, last = (m for m in kind.head if m != "second_classifier") if kind.head else [""]
    declared = [str(a) for a in config.get("architectures") or ()]
    absent = [m for m in kind.head if not any(is_inside(leaf, (m,)) for leaf in plan)]
    odd = [m for m in absent if m in before and (last not in absent or ("." in m and declared))]
    used = {key for key, _ in plan.values()}
    unused = [k for n, k in names.items() if k not in used and n.partition(".")[0] in _TASK_HEADS]
    found = []
    if odd or (unused and last in absent and not head.fresh):
        other = f" Its own head ({first_of(unused, 2)}) is not used." if unused else ""
        found.append(f"does not hold {' and '.join(absent)}, which get new random values.{other}")
    of_task = not declared or any(a.endswith(kind.architecture) for a in declared)
    if last and last not in absent and not head.fresh and not of_task:
        found.append(
            f"is a {declared[0]}: its {last} was trained for another task than that of"
            f" {kind.architecture}, and is used as the start. fresh=True starts a new one."
        )
    for text in found:
        warnings.warn(f"The checkpoint {name!r} {text}", HeadWarning, stacklevel=users_level())
