"""Errors for functions of a user that return something of another form than they must."""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from fedjax_peft.contracts import PyTree
from fedjax_peft.support.errors import InputError


def check_type(what: str, value: Any, kind: type) -> None:
    """Raises InputError for a result of another type.

    Args:
      what: names the function, such as ``"The function 'finish' of 'mine'"``.
    """
    if not isinstance(value, kind):
        wanted = f"fp.contracts.{kind.__name__}({', '.join(getattr(kind, '_fields', ()))})"
        raise InputError(f"{what} must return a {wanted}, and returns {_named(value)}.")


def check_pair(what: str, value: Any, parts: str) -> None:
    """Raises InputError for a result that is no pair."""
    if not isinstance(value, tuple) or len(value) != 2:
        raise InputError(f"{what} must return a pair ({parts}), and returns {_named(value)}.")


def check_form(what: str, value: PyTree, wanted: PyTree, *, dtypes: bool = False) -> None:
    """Raises InputError for a tree of other entries, or with arrays of other shapes.

    Args:
      what: names the tree and says what it must look like; the differences follow it.
      dtypes: whether the dtypes must be the same too.
    """
    found = [*_differences(value, wanted, dtypes)]
    if found:
        more = f", and {len(found) - 3} more" if len(found) > 3 else ""
        raise InputError(f"{what}. It differs: {'; '.join(found[:3])}{more}.")


def check_scalars(what: str, metrics: Any) -> None:
    """Raises InputError for metrics that are not numbers by name."""
    if not isinstance(metrics, dict):
        raise InputError(f"{what} must be a dict of scalars, and are {_named(metrics)}.")
    for name, value in metrics.items():
        if _form(value, dtypes=False) != "[]":
            raise InputError(f"{what} must be scalars, and {name!r} is {_form(value)}.")


def _differences(value: PyTree, wanted: PyTree, dtypes: bool) -> Iterator[str]:
    given, right = _leaves(value), _leaves(wanted)
    yield from (f"{name} is missing" for name in right if name not in given)
    yield from (f"{name} is not expected" for name in given if name not in right)
    for name in right:
        if name in given and _form(given[name], dtypes) != _form(right[name], dtypes):
            yield f"{name} is {_form(given[name])}, not {_form(right[name])}"
    structures: list[Any] = [jax.tree.structure(x) for x in (value, wanted)]
    if given.keys() == right.keys() and structures[0] != structures[1]:
        yield f"the structure is {structures[0]}, not {structures[1]}"


def _leaves(tree: PyTree) -> dict[str, Any]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path) or "the whole": x for path, x in leaves}


def _form(x: Any, dtypes: bool = True) -> str:
    """Returns a shape with its dtype, such as ``float32[4, 2]``; the type of what is no array."""
    if not hasattr(x, "dtype") and not isinstance(x, bool | int | float | complex):
        return _named(x)
    dtype = x.dtype if hasattr(x, "dtype") else jax.dtypes.result_type(x)
    return f"{dtype if dtypes else ''}{list(np.shape(x))}"


def _named(value: Any) -> str:
    return "None" if value is None else f"a value of the type {type(value).__name__}"
