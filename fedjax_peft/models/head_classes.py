"""The classes of a head that a file holds, in the order of a model's classes."""

import warnings
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from fedjax_peft.contracts import Params
from fedjax_peft.data.classes import class_numbers, has_names
from fedjax_peft.models.base import Model
from fedjax_peft.models.modules import is_inside
from fedjax_peft.support.errors import InputError, users_level


def stored_numbers(
    where: str, stored: Sequence[str], labels: Sequence[str], *, rename: bool = False
) -> np.ndarray | None:
    """Returns the number of each of a model's classes in a stored head; None: numbers agree.

    Args:
      where: the file or directory of the head, for messages.
      stored: the names of its classes; empty: it does not have any.
      labels: those of the model.
      rename: allow names of which the head has none: they are new names, with a warning.

    Raises:
      InputError: a class of the model is not one of the head.
    """
    if not stored or len(stored) != len(labels):
        return None  # other checks compare the shapes
    try:
        return class_numbers(stored, labels, "The model", f"the head in {where}", remedy=_REMEDY)
    except InputError:
        if not rename or {*stored} & {*labels}:
            raise
    warnings.warn(
        f"The head in {where} has the classes {', '.join(stored)}, which get the names"
        f" {', '.join(labels)} in this order. If these are other classes, start from a new head:"
        " fresh=True, in a config fresh_head = true of [model].",
        stacklevel=users_level(),
    )
    return None


_REMEDY = (
    "Pass the names of the stored head; to train other classes, start from a new one:"
    " head=heads.classification(names, fresh=True), in a config fresh_head = true of [model]."
)


def named_by(labels: Sequence[str], stored: Sequence[str]) -> tuple[str, ...]:
    """Returns the labels of a model, which are those of its stored head if it has numbers only."""
    numbers_only = len(stored) == len(labels) and not has_names(labels)
    return tuple(stored if numbers_only else labels)


def reordered(where: str, leaves: Params, head: Sequence[str], numbers: np.ndarray) -> Params:
    """Returns leaves whose classes are in another order: class i was the class ``numbers[i]``.

    Args:
      head: module paths of the head. Classes are the last axis of an output layer, which is in the
        last module as wide as there are classes, or in FedMCP's second classifier.

    Raises:
      InputError: another layer of such a module is as wide as there are classes.
    """
    n, moved = len(numbers), dict(leaves)
    wide = {k: x for k, x in leaves.items() if is_inside(k, head) and x.shape[-1] == n}
    *_, last = ("", *(m for m in head if any(is_inside(k, (m,)) for k in wide)))
    for module in (last, "second_classifier"):
        own = {k: x for k, x in wide.items() if is_inside(k, (module,))}
        matrices = [x for x in own.values() if x.ndim > 1]
        if len(matrices) > 1 or any(x.shape[0] == n for x in matrices):
            raise InputError(
                f"The head in {where} has its {n} classes in another order than the model, and"
                f" layers of the width {n}, so its output layer cannot be told from them. Pass the"
                " names in the order of the stored head."
            )
        moved |= {k: jnp.take(x, numbers, axis=-1) for k, x in own.items()}
    return moved


def in_order_of(model: Model, where: str, stored: Sequence[str]) -> Model:
    """Returns a model whose head was just filled from a file, with its own order of classes.

    A model that knows numbers only gets the names of the stored head.

    Raises:
      InputError: a class of the model is not one of the head.
    """
    labels = named_by(model.labels, stored)
    numbers = stored_numbers(where, stored, labels)
    if numbers is not None:
        own = reordered(where, model.trainable, model.head, numbers)
        model = model.replace(trainable=own)
    return model if labels == model.labels else model.replace(labels=labels)
