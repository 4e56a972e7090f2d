"""The places of a session's arrays. Only this file of the library uses a device mesh.

Today the clients' lanes are split over the devices and everything else is replicated: each device
holds the frozen tree, the data and the state of all clients, and sums over clients become
all-reduces. Two more places have names but are not built yet. A ``model`` axis is for a backbone
that is too large for one device: it splits the frozen matrices. ``host`` memory is for client
states or data that are too large for a device. Several hosts need ``jax.distributed``: the mesh
then spans their devices.
"""

from typing import Any, Literal, NamedTuple, TypeAlias

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from fedjax_peft.errors import InputError
from fedjax_peft.typing import PyTree

__all__ = ["Layout", "Place", "layout_over", "on_one_device"]

Place: TypeAlias = Literal["replicated", "lanes", "model", "host"]
"""``replicated``: whole on every device. ``lanes``: the leading axis split over the devices of the
mesh axis "lanes". ``model``: split over a mesh axis "model". ``host``: in host memory."""

_BUILT: dict[str, tuple[Place, ...]] = {
    "frozen": ("replicated",),
    "client_state": ("replicated",),
    "columns": ("replicated",),
    "lanes": ("lanes",),
}


class Layout(NamedTuple):
    """The devices of a session, and the place of each kind of data."""

    mesh: Mesh | None = None
    """The devices that share the lanes; None for a single device."""
    frozen: Place = "replicated"
    """The frozen tree, and the leaves that never change."""
    client_state: Place = "replicated"
    """The states of the server and of all clients."""
    columns: Place = "replicated"
    """The examples."""
    lanes: Place = "lanes"
    """The data of the lanes: batches and local states, ``[lanes, ...]``."""

    @property
    def devices(self) -> int:
        """The number of devices."""
        return 1 if self.mesh is None else self.mesh.size

    def check(self) -> None:
        """Raises InputError for a place that is not built yet."""
        for kind, built in _BUILT.items():
            place = getattr(self, kind)
            if place not in built:
                raise InputError(
                    f"The layout puts {kind!r} in the place {place!r}, which is not built yet:"
                    f" choose {' or '.join(map(repr, built))}."
                )

    def put(self, tree: PyTree) -> PyTree:
        """Returns the tree on the device, or whole on every device of the mesh."""
        return jax.device_put(tree, self.replicated)

    @property
    def replicated(self) -> NamedSharding | None:
        """The sharding of arrays that every device holds whole; None for a single device."""
        return None if self.mesh is None else NamedSharding(self.mesh, PartitionSpec())

    def split_lanes(self, tree: Any) -> Any:
        """Returns a tree of arrays ``[lanes, ...]``, split over the devices inside a program."""
        if self.mesh is None:
            return tree
        sharding = NamedSharding(self.mesh, PartitionSpec("lanes"))
        return jax.lax.with_sharding_constraint(tree, sharding)

    def check_lanes(self, lanes: int) -> None:
        """Raises InputError for a number of lanes that the devices cannot share equally."""
        if lanes % self.devices:
            raise InputError(f"lanes = {lanes} is not a multiple of {self.devices} devices.")


def layout_over(devices: int | None = None) -> Layout:
    """Returns the layout that splits the lanes over the first ``devices`` devices.

    Args:
      devices: number of devices; by default all accelerators, or one CPU.

    Raises:
      InputError: there are fewer devices.
    """
    available = jax.devices()
    if devices is None:
        devices = 1 if available[0].platform == "cpu" else len(available)
    if not 1 <= devices <= len(available):
        raise InputError(f"devices = {devices}, but there are {len(available)}.")
    if devices == 1:
        return Layout()
    mesh = jax.make_mesh(
        (devices,), ("lanes",), axis_types=(AxisType.Auto,), devices=available[:devices]
    )
    return Layout(mesh)


def on_one_device(shapes: PyTree) -> PyTree:
    """Returns the shapes with a sharding, so that their arrays are read onto the first device."""
    device = SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), shapes)
