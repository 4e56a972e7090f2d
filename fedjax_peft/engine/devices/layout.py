"""The places of a session's arrays. Only this file of the library names the axes of a device mesh.

The mesh has two axes, ``lanes`` x ``model``. What lies where:

====================  =============================================================================
frozen matrices       split over ``model``
client state          split over all devices by owner, ``[clients, ...]``; no device has it whole
a cohort's rows       split over all devices by slot, ``[slots, ...]``
large data            split over all devices by example
batches, lanes        split over the lane devices, ``[lanes, ...]``
everything else       whole on every device: the server's state, the plan, small data
====================  =============================================================================

There are two forms of ``model_sharding``:

* ``tensor``: a device computes with its part of every matrix (Shoeybi et al. 2019, section 3). The
  devices of one row of the mesh work on the same lanes. The lane devices are the axis ``lanes``.
* ``gather``: a matrix is gathered just before its use, and dropped after it (the third stage of
  ZeRO, Rajbhandari et al. 2020). Every device has lanes of its own. All devices are lane devices.

Sums over clients become all-reduces. The compiler inserts all transfers (GSPMD).
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from fedjax_peft.contracts import ApplyFn, Params, Platform, PyTree, Splits, on_platform
from fedjax_peft.engine.devices.gather_at_use import gather_at_use
from fedjax_peft.engine.devices.sharding import frozen_axis, lane_axis
from fedjax_peft.numerics import tree as trees
from fedjax_peft.support.checks import check_choice
from fedjax_peft.support.errors import InputError

ModelSharding: TypeAlias = Literal["tensor", "gather"]
"""How devices share the frozen matrices. ``tensor``: each computes with its part. ``gather``: each
stores a part, and a matrix is put together just before its use."""

_WHOLE_COLUMNS = 1 << 30
"""Bytes of a data set that every device holds whole."""


class Layout(NamedTuple):
    """The devices of a session, and the places of its arrays on them."""

    mesh: Mesh | None = None
    """The devices, ``lanes`` x ``model``; None for a single device."""
    model_sharding: ModelSharding = "tensor"
    """How the devices of the axis ``model`` share the frozen matrices."""
    whole_columns: int = _WHOLE_COLUMNS
    """A data set of more bytes is split over the devices."""
    platform: Platform = Platform()
    """What the programs are compiled for."""

    @property
    def devices(self) -> int:
        """The number of devices."""
        return 1 if self.mesh is None else self.mesh.size

    @property
    def model_devices(self) -> int:
        """The number of devices that share one copy of the frozen matrices."""
        return 1 if self.mesh is None else self.mesh.shape["model"]

    @property
    def lane_devices(self) -> int:
        """The number of parts that the lanes are split into, of one or more lanes each."""
        shared = 1 if self.model_sharding == "gather" else self.model_devices
        return self.devices // shared

    def rows(self, count: int) -> int:
        """Returns the next multiple of the devices: the rows of an array that they share."""
        return -(-count // self.devices) * self.devices

    def lanes(self, count: int) -> int:
        """Returns the next multiple of the lane devices: a number of lanes that they can share."""
        return -(-count // self.lane_devices) * self.lane_devices

    def on(self, devices: Sequence[Any]) -> "Layout":
        """Returns the same layout over other devices, which need not be there to compile for."""
        platform = platform_of(devices[0])
        if self.mesh is None:
            return self._replace(platform=platform)
        grid = np.reshape(np.asarray(devices, object), self.mesh.devices.shape)
        mesh = Mesh(grid, self.mesh.axis_names, axis_types=self.mesh.axis_types)
        return self._replace(mesh=mesh, platform=platform)

    def put(self, tree: PyTree) -> PyTree:
        """Returns the tree on the device, or whole on every device of the mesh."""
        if self.mesh is None and all(
            isinstance(x, np.ndarray | np.generic) for x in jax.tree.leaves(tree)
        ):
            return jax.device_put(tree)  # one call for a plan's arrays takes half as long as nine
        return jax.tree.map(lambda x: _place(x, self.whole), tree)

    def put_frozen(self, leaves: Params, splits: Splits = ()) -> Params:
        """Returns the frozen leaves, the matrices split over the axis ``model``.

        Args:
          splits: the axes of the family's leaves; see :data:`fedjax_peft.contracts.Splits`. A
            matrix that they do not split evenly is split on its largest axis that divides evenly;
            so is every matrix in the ``gather`` form, and of a model without rules. Every other
            leaf is whole on every device.
        """
        return {name: _place(x, self.of_frozen(name, x, splits)) for name, x in leaves.items()}

    def put_clients(self, tree: PyTree) -> PyTree:
        """Returns a tree of arrays ``[clients, ...]``, split by owner over the devices.

        Rows of zeros are added until :meth:`rows` is reached; nothing reads them.
        """
        return jax.tree.map(lambda x: _place(self._filled(x), self.by_row), tree)

    def repeat_for_clients(self, tree: PyTree, clients: int) -> PyTree:
        """Returns a copy of the tree for every client, placed as :meth:`put_clients` does.

        A device makes only its own clients' copies.
        """
        if self.mesh is None:
            return trees.broadcast(tree, clients)

        def repeat(one: PyTree) -> PyTree:
            return trees.broadcast(one, self.rows(clients))

        return jax.jit(repeat, out_shardings=self.by_row)(self.put(tree))

    def put_columns(self, columns: Params) -> Params:
        """Returns the columns of a data set, ``[examples, ...]``.

        Small data are whole on every device. Data of more than ``whole_columns`` bytes are split by
        example over the devices, with rows of zeros at the end, which no plan reads.
        """
        large = sum(np.prod(x.shape) * x.dtype.itemsize for x in columns.values())
        split = self.devices > 1 and large > self.whole_columns
        return self.put_clients(columns) if split else self.put(columns)

    @property
    def whole(self) -> NamedSharding | None:
        """The sharding of arrays that every device holds whole; None for a single device."""
        return self._sharding(PartitionSpec())

    @property
    def by_row(self) -> NamedSharding | None:
        """The sharding of arrays whose rows all devices share; None for a single device."""
        return self._sharding(PartitionSpec(("lanes", "model")))

    def stacked(self, sharding: NamedSharding) -> NamedSharding:
        """Returns the sharding of several arrays with this sharding, stacked on a new axis."""
        return NamedSharding(sharding.mesh, PartitionSpec(None, *sharding.spec))

    def of_frozen(self, name: str, leaf: Any, splits: Splits = ()) -> NamedSharding | None:
        """Returns the sharding of a frozen leaf (or of its shape); see :meth:`put_frozen`."""
        rules = splits if self.model_sharding == "tensor" else ()
        axis = frozen_axis(name, leaf.shape, rules, self.model_devices)
        return self._sharding(_on_axis(axis, "model"))

    def forward(self, apply: ApplyFn, splits: Splits = ()) -> ApplyFn:
        """Returns a forward pass that uses the frozen leaves where they are.

        In the ``gather`` form, it gathers each matrix just before its use. The gradient gathers it
        again, so that no device ever stores all matrices between the two passes. In the ``tensor``
        form it does so with a matrix that the rules cannot split, such as a table of 30,522 tokens
        on four devices. Its other axis, on which it is split, would be that of all activations.
        """
        apply = on_platform(apply, self.platform)
        if self.model_devices == 1:
            return apply
        places = partial(self.of_frozen, splits=splits)

        def whole(x: Array) -> Array:
            return jax.lax.with_sharding_constraint(x, self.whole)

        def run(frozen: Params, trainable: Params, batch: Any, key: Any, train: bool) -> Any:
            # Where an algorithm adds to frozen leaves, the sums lie as the leaves do.
            frozen = {
                name: jax.lax.with_sharding_constraint(x, places(name, x))
                for name, x in frozen.items()
            }
            late = {name for name, x in frozen.items() if places(name, x) != self.whole}
            if self.model_sharding == "tensor":
                ruled = partial(lane_axis, splits=splits, parts=self.model_devices)
                late = {n for n in late if splits and ruled(n, frozen[n].shape) is None}
            if not late:
                return apply(frozen, trainable, batch, key, train)
            return gather_at_use(
                lambda frozen, trainable, batch: apply(frozen, trainable, batch, key, train),
                frozen,
                (trainable, dict(batch)),
                whole,
                late.__contains__,
            )

        return run

    def split_lanes(self, tree: Any, splits: Splits = ()) -> Any:
        """Returns a tree of arrays ``[lanes, ...]``, split over the lane devices inside a program.

        In the ``tensor`` form, adapters follow their kernels over the axis ``model``, and so does
        everything in ``tree`` under an adapter's name, such as the moments of its optimizer.
        """
        if self.mesh is None:
            return tree
        rules = splits if self.model_sharding == "tensor" and self.model_devices > 1 else ()

        def one(path: tuple, x: Array) -> Array:
            axis = lane_axis(trees.leaf_name(path), x.shape[1:], rules, self.model_devices)
            rest = _on_axis(axis, "model")
            if rules and axis is None:
                rest = PartitionSpec(*[PartitionSpec.UNCONSTRAINED] * (x.ndim - 1))
            spec = PartitionSpec(self._lane_axes, *rest)
            return jax.lax.with_sharding_constraint(x, self._sharding(spec))

        return jax.tree_util.tree_map_with_path(one, tree)

    def split_rows(self, tree: Any) -> Any:
        """Returns a tree of arrays ``[slots, ...]``, split over the devices inside a program.

        An array with another number of rows than :meth:`rows` gives is left as it is.
        """
        if self.mesh is None:
            return tree

        def one(x: Array) -> Array:
            even = self.rows(len(x)) == len(x)
            return jax.lax.with_sharding_constraint(x, self.by_row) if even else x

        return jax.tree.map(one, tree)

    def check_lanes(self, lanes: int) -> None:
        """Raises InputError for a number of lanes that the devices cannot share equally."""
        if lanes % self.lane_devices:
            raise InputError(f"lanes = {lanes} is not a multiple of {self.lane_devices} devices.")

    @property
    def _lane_axes(self) -> tuple[str, ...]:
        return ("lanes", "model") if self.model_sharding == "gather" else ("lanes",)

    def _sharding(self, spec: PartitionSpec) -> NamedSharding | None:
        return None if self.mesh is None else NamedSharding(self.mesh, spec)

    def _filled(self, x: Any) -> Any:
        """Returns an array with rows of zeros after it, so that the devices can share it."""
        missing = self.rows(len(x)) - len(x)
        if not missing:
            return x
        pad = jnp.pad if isinstance(x, Array) else np.pad
        return pad(x, [(0, missing)] + [(0, 0)] * (x.ndim - 1))


def layout_over(
    devices: int | None = None, model_parallel: int = 1, model_sharding: ModelSharding = "tensor"
) -> Layout:
    """Returns the layout over the first ``devices`` devices, as a mesh ``lanes`` x ``model``.

    Args:
      devices: number of devices; by default all accelerators, or one CPU. Several processes share
        all their devices.
      model_parallel: how many devices share one copy of the frozen matrices; it divides
        ``devices``.
    """
    available = jax.devices()
    if devices is None:
        alone = available[0].platform == "cpu" and jax.process_count() == 1
        devices = 1 if alone else len(available)
    if not 1 <= devices <= len(available):
        raise InputError(f"devices = {devices}, but there are {len(available)}.")
    if jax.process_count() > 1 and devices != len(available):
        raise InputError(
            f"devices = {devices}, but {jax.process_count()} processes share all"
            f" {len(available)} devices: leave devices out."
        )
    check_choice("model_sharding", model_sharding, get_args(ModelSharding))
    if model_parallel < 1 or devices % model_parallel:
        raise InputError(
            f"model_parallel = {model_parallel} does not divide devices = {devices}: each copy of"
            " the frozen matrices is shared by this number of devices. Choose a divisor, or"
            " another number of devices."
        )
    if devices == 1:
        return Layout(platform=platform_of(available[0]))
    mesh = jax.make_mesh(
        (devices // model_parallel, model_parallel),
        ("lanes", "model"),
        axis_types=(AxisType.Auto, AxisType.Auto),
        devices=available[:devices],
    )
    return Layout(mesh, model_sharding, platform=platform_of(available[0]))


def platform_of(device: Any) -> Platform:
    """Returns the platform of a device, or of one that a program is only compiled for."""
    name = {"cuda": "gpu", "rocm": "gpu"}.get(device.platform, device.platform)
    try:  # other makers' GPUs have names
        return Platform(name, float(getattr(device, "compute_capability", 0.0)))
    except ValueError:
        return Platform(name)


def on_one_device(shapes: PyTree) -> PyTree:
    """Returns the shapes with a sharding, so that their arrays are read onto the first device."""
    device = SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), shapes)


def _place(x: Any, sharding: NamedSharding | None) -> Any:
    """Returns one array with a sharding; None keeps it on its device. All puts come through here.

    An array that already has the sharding is returned as it is. All processes hold the same array,
    and each copies its own part; ``jax.device_put`` would first send the array over the network to
    compare it.
    """
    if isinstance(x, jax.ShapeDtypeStruct):  # a program that is compiled without its arrays
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    if sharding is None or sharding.is_fully_addressable:
        return jax.device_put(x, sharding)
    if isinstance(x, Array) and not x.is_fully_addressable:
        return jax.device_put(x, sharding)
    host = np.asarray(x)
    host = host.astype(jax.dtypes.canonicalize_dtype(host.dtype), copy=False)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def _on_axis(axis: int | None, name: str) -> PartitionSpec:
    """Returns the spec that splits one axis of an array; no axis for None."""
    return PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, name)
