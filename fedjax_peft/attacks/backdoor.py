"""Backdoor with a trigger (BadNets, Gu et al. 2017; in federations, Bagdasaryan et al. 2020).

    a share of every batch of a hostile client:   x ← trigger(x),   y ← target
    Δ ← γ · Δ                                     model replacement, with scale γ > 1

The model is to predict the target for every input with the trigger, and to stay right without it.
The success rate is the share of test examples of other classes that are predicted as the target
when they have the trigger.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from annotated_types import Ge, Le, MinLen
from jax import Array

from fedjax_peft.attacks.common import (
    check_class,
    check_labels,
    make_attack,
    on_batches,
    on_uploads,
)
from fedjax_peft.contracts import Algorithm, Attack, Batch, Federation, Key, Params, PyTree, Wrapped
from fedjax_peft.contracts.arguments import FromZero, NotNegative, Share
from fedjax_peft.contracts.part import part
from fedjax_peft.numerics.hyperparameters import is_traced
from fedjax_peft.support.errors import InputError

_MOST = 2**31 - 1
"""The largest number of an int32."""

Token: TypeAlias = Annotated[int, Ge(0), Le(_MOST)]


@part
def backdoor(
    share: Share,
    target: FromZero,
    *,
    token: Token | None = None,
    positions: Annotated[Sequence[Token], MinLen(1)] = (1,),
    patch: Annotated[int, Ge(1), Le(_MOST)] | None = None,
    value: Annotated[int, Ge(0), Le(255)] = 255,
    fraction: Share = 0.5,
    scale: NotNegative = 1.0,
    seed: FromZero = 0,
) -> Attack:
    """Hostile clients teach the model to predict ``target`` for every input with a trigger.

    The trigger is a token of a text (``token``) or a square of an image (``patch``). Evaluated
    rounds of ``simulate`` have the metric ``test_backdoor_success``; ``attack.triggered(dataset)``
    returns the examples that measure it.

    Args:
      share: the share of hostile clients, ``round(share * clients)`` of them.
      target: the class that the trigger is to cause.
      token: the id of the token that is the trigger. A rare token hides best.
      positions: where the token replaces what is there; 1 is the place after ``[CLS]``.
      patch: the side of the square that is the trigger, in pixels, in the lower right corner.
      value: brightness of the square.
      fraction: the share of a hostile client's batch that gets the trigger and the target: the
        first ``round(fraction * examples)``.
      scale: length of the sent change in lengths of the learned one; see :func:`scaled`.
      seed: chooses the hostile clients.

    Raises:
      InputError: not one of ``token`` and ``patch``; on use, examples without labels, of another
        kind, or a class or a token that does not exist.
    """
    trigger = _trigger(token, positions, patch, value)

    def change(batch: Batch, hostile: Array) -> Batch:
        real = batch["mask"]
        poisoned = hostile & real & (jnp.cumsum(real) <= jnp.round(fraction * jnp.sum(real)))
        new = trigger(batch)
        labels = batch["labels"]
        new["labels"] = jnp.full_like(labels, target)
        return dict(batch) | {
            n: jnp.where(poisoned.reshape(-1, *[1] * (x.ndim - 1)), x, batch[n])
            for n, x in new.items()
        }

    def wrap(algorithm: Algorithm, federation: Federation, who: Array) -> Wrapped:
        _check_examples(federation, target, token, positions, patch)
        poisoned = on_batches(algorithm, who, change)
        if not is_traced(scale) and scale == 1:
            return poisoned

        def longer(learned: PyTree, key: Key) -> PyTree:
            return jax.tree.map(lambda x: scale * x, learned)

        return on_uploads("backdoor", poisoned.algorithm, who, longer)

    def triggered(data: Any) -> Any:
        others = data.take(np.flatnonzero(data.labels != target))
        columns = {name: np.asarray(x) for name, x in trigger(others.columns).items()}
        columns["labels"] = np.full_like(others.labels, target)
        return replace(others, columns={**others.columns, **columns})

    least_length = max(positions) + 1 if patch is None else 0
    return make_attack("backdoor", share, seed, wrap, triggered, least_length)


def _trigger(token: int | None, positions: Sequence[int], patch: int | None, value: int) -> Any:
    """Returns the function columns -> the columns that the trigger changes, with the trigger.

    Raises:
      InputError: not one of ``token`` and ``patch``.
    """
    if (token is None) == (patch is None):
        raise InputError(
            "The trigger of backdoor is a token of a text or a square of an image: give either"
            " token or patch."
        )
    places = np.array(positions)

    def with_token(columns: Batch) -> Params:
        def put(name: str, value: Any) -> Array:
            x = jnp.asarray(columns[name])
            return x.at[:, places].set(jnp.asarray(value, x.dtype))

        new = {"input_ids": put("input_ids", token)}
        return new | {n: put(n, 1) for n in columns if n == "attention_mask"}

    def with_square(columns: Batch) -> Params:
        assert patch is not None
        pixels = jnp.asarray(columns["pixel_values"])
        square = jnp.asarray(value, pixels.dtype)
        return {"pixel_values": pixels.at[..., -patch:, -patch:].set(square)}

    return with_token if patch is None else with_square


def _check_examples(
    federation: Federation,
    target: int,
    token: int | None,
    positions: Sequence[int],
    patch: int | None,
) -> None:
    """Raises InputError for examples that cannot have the trigger or the target."""
    check_labels("backdoor", federation)
    check_class("backdoor", "target", target, federation)
    shapes = dict(federation.columns)
    if shapes["labels"]:
        raise InputError(
            "The attack 'backdoor' needs one label for each example, and these examples have a"
            " label for each token. Use 'label_flip'."
        )
    column, kind = ("input_ids", "token") if patch is None else ("pixel_values", "patch")
    if column not in shapes:
        raise InputError(
            f"The trigger {kind} = {token if patch is None else patch} of backdoor needs"
            f" examples with the column {column!r}, and these have {', '.join(shapes)}."
        )
    room = shapes[column][-1] if patch is None else min(shapes[column][-2:])
    largest = max(positions) + 1 if patch is None else patch
    if largest > room:
        raise InputError(
            f"The trigger of backdoor needs {largest} tokens or pixels in a row, and the examples"
            f" have {room}."
        )
