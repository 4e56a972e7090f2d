"""Lanes over several devices: frozen tree replicated, lane axis split, accumulators all-reduced."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from fedjax_peft.errors import InputError
from fedjax_peft.typing import PyTree

__all__ = ["lane_mesh", "replicate", "replicated", "split_lanes"]


def lane_mesh(devices: int | None = None) -> jax.sharding.Mesh | None:
    """Returns a mesh over the first ``devices`` devices, None for a single one.

    Args:
      devices: how many; by default all accelerators, or one CPU.

    Raises:
      InputError: more devices than there are.
    """
    available = jax.devices()
    if devices is None:
        devices = 1 if available[0].platform == "cpu" else len(available)
    if not 1 <= devices <= len(available):
        raise InputError(f"devices = {devices}, but there are {len(available)}.")
    if devices == 1:
        return None
    return jax.make_mesh(
        (devices,), ("lanes",), axis_types=(AxisType.Auto,), devices=available[:devices]
    )


def replicate(tree: PyTree, mesh: jax.sharding.Mesh | None) -> PyTree:
    """Returns the tree on the device, or whole on every device of the mesh."""
    return jax.device_put(tree, replicated(mesh))


def replicated(mesh: jax.sharding.Mesh | None) -> NamedSharding | None:
    """Returns the sharding of what every device holds whole."""
    return None if mesh is None else NamedSharding(mesh, PartitionSpec())


def split_lanes(mesh: jax.sharding.Mesh | None) -> Callable[[Any], Any] | None:
    """Returns the constraint that splits leading lane axes over the mesh."""
    if mesh is None:
        return None
    sharding = NamedSharding(mesh, PartitionSpec("lanes"))
    return lambda tree: jax.lax.with_sharding_constraint(tree, sharding)
