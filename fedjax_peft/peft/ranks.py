"""Clients of different LoRA ranks in one stacked pytree at the largest rank.

A client of rank r_k owns the first r_k directions of every adapter. The other directions have scale
0 for it: they add nothing to the output, get no gradient, and are uploaded as they were received.
"""

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from fedjax_peft.contracts import Params
from fedjax_peft.models.base import Model
from fedjax_peft.support.errors import InputError

_AXES = {"lora_a": 1, "lora_b": 0, "lora_scale": 0}
"""The axis of the directions, by the last part of a leaf's name."""


def rank_masks(model: Model, ranks: Sequence[int], clients: int) -> dict[str, np.ndarray]:
    """Returns which entries of the LoRA leaves each client owns, bool ``[clients, ...]``.

    Every axis but that of the directions has length 1. A layer whose rank is below that of a client
    is owned completely by it.
    """
    leaves = _low_rank(model.trainable)
    if not leaves:
        raise InputError("client_ranks needs a model with LoRA attached.")
    if model.method is not None and model.method.start_shapes_frozen:
        raise InputError(
            "client_ranks cannot be used with an SVD start, or another start from the weights: the"
            " frozen weights then lack what the directions hold, so a client without some of them"
            " would have another model."
        )
    if not 1 <= len(ranks) <= clients:
        raise InputError(f"client_ranks has {len(ranks)} entries for {clients} clients.")
    ranks = cycle_ranks(ranks, clients)
    most = max(model.trainable[name].shape[axis] for name, axis in leaves.items())
    for rank in ranks:
        if not 1 <= rank <= most:
            raise InputError(f"client_ranks has {rank}, which is not from 1 to the rank {most}.")
    masks = {}
    for name, axis in leaves.items():
        leaf = model.trainable[name]
        shape = [1] * leaf.ndim
        shape[axis] = leaf.shape[axis]
        rank_mask = np.arange(leaf.shape[axis])[None] < np.asarray(ranks)[:, None]
        masks[name] = rank_mask.reshape(clients, *shape)
    return masks


def of_client(params: Params, ranks: Sequence[int] | None, client: int) -> Params:
    """Returns a client's leaves with the scale of the directions that it does not own set to 0."""
    if not ranks:
        return params
    rank = ranks[client % len(ranks)]
    return {
        name: x.at[rank:].set(0) if name.endswith(".lora_scale") else x
        for name, x in params.items()
    }


def cycle_ranks(ranks: Sequence[Any], clients: int) -> list[Any]:
    """Returns one rank for each client, by repeating the given ranks."""
    return [ranks[c % len(ranks)] for c in range(clients)]


def owned_shares(trainable: Params, rank: int) -> dict[str, Fraction]:
    """Returns the share of every LoRA leaf that a client of the given rank owns."""
    sizes = {name: trainable[name].shape[axis] for name, axis in _low_rank(trainable).items()}
    return {name: Fraction(min(rank, n), n) for name, n in sizes.items()}


def _low_rank(trainable: Params) -> dict[str, int]:
    """Returns the LoRA leaves: name -> axis of the directions."""
    kinds = {name: name.rpartition(".")[2] for name in trainable}
    return {name: _AXES[kind] for name, kind in kinds.items() if kind in _AXES}
