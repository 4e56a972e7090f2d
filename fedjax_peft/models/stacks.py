"""Blocks of one form as one block with stacked arrays, for ``scan_layers``.

A model of 32 layers is compiled in the time of one of a few layers if a scan applies them. Its
frozen arrays are then held stacked, because stacking them in the program would hold them twice.

* Blocks have one form if their modules, the types of their variables and the shapes are equal. A
  pattern that repeats, such as the local and global layers of Gemma 3, is scanned by its period.
* The last block is never stacked, because some families compute it for one token only. Neither are
  the blocks that the last whole period leaves over.
* A frozen leaf of stacked blocks is one array ``[blocks, ...]``. Its name has the first and the
  last block in the place of the number, ``model.layers.0-30.mlp.up_proj.kernel``, and the step if
  it is not 1, ``model.layers.5-23-6.mlp...``.
* Trainable leaves keep the names that they have without a scan, one for each block. The program
  stacks them; they are small. Algorithms, aggregators, checkpoints and exports see no difference.
* Dropout has the same keys as without a scan, so the numbers are the same but for rounding.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from fedjax_peft.contracts import Key, Params, Splits
from fedjax_peft.models.blocks import Blocks
from fedjax_peft.models.modules import Path, dotted, replace_module, submodule
from fedjax_peft.support.errors import InputError

_LONGEST_PERIOD = 8


class Stack(NamedTuple):
    """How the blocks of one :class:`~fedjax_peft.models.blocks.Blocks` are stacked."""

    path: Path
    period: int
    groups: int

    def members(self, index: int) -> tuple[int, ...]:
        """Returns the blocks of the model for which a block of the shortened list stands."""
        done = self.period * self.groups
        if index < self.period:
            return tuple(range(index, done, self.period))
        return (index - self.period + done,)


class Source(NamedTuple):
    """Where a leaf of the module with stacked blocks comes from."""

    name: str
    """The name of the leaf, or of the stacked leaves together."""
    members: tuple[Path, ...]
    """The paths of the leaves in the whole module: one, or those of all stacked blocks."""

    @property
    def is_stacked(self) -> bool:
        """Whether the leaf stands for several."""
        return len(self.members) > 1

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the leaves in the whole module."""
        return tuple(dotted(path) for path in self.members)


# ----------------------------------------------------------------------------------------- modules


def find_stacks(module: nnx.Module) -> list[Stack]:
    """Returns how the blocks that ask for it are stacked."""
    found = [(p, x) for p, x in nnx.iter_modules(module) if isinstance(x, Blocks) and x.scan]
    return [stack for path, blocks in found if (stack := _stack(path, blocks)) is not None]


def _stack(path: Path, blocks: Blocks) -> Stack | None:
    """Returns the stack of a list of blocks; None if it is too short to have one."""
    body = len(blocks) - 1
    if body < 2:
        return None
    forms = [_form(block) for block in blocks]
    for period in range(1, min(_LONGEST_PERIOD, body // 2) + 1):
        groups = body // period
        if all(forms[i] == forms[i % period] for i in range(period * groups)):
            return Stack(path, period, groups)
    other = next(i for i, form in enumerate(forms) if form != forms[0])
    raise InputError(
        f"scan_layers needs blocks of one form, or a short pattern of forms that repeats, but"
        f" {dotted(path)}.{other} differs from {dotted(path)}.0 in its structure, its settings, or"
        " the shapes or kinds of its parameters. Adapt all layers alike, with one rank, or use"
        " scan_layers = False."
    )


def _form(block: Any) -> tuple[Any, ...]:
    graph, state = nnx.split(block)
    leaves = [
        (path, type(variable), variable.get_value().shape, variable.get_value().dtype)
        for path, variable in nnx.to_flat_state(state)
    ]
    return graph, leaves


def shortened(module: nnx.Module, stacks: Sequence[Stack]) -> nnx.Module:
    """Returns a copy of the module in which one block stands for each stack of blocks."""
    module = nnx.clone(module)
    for stack in stacks:
        blocks = submodule(module, dotted(stack.path))
        done = stack.period * stack.groups
        short = Blocks([*blocks[: stack.period], *blocks[done:]])
        short.remat, short.period, short.groups = blocks.remat, stack.period, stack.groups
        replace_module(module, dotted(stack.path), short)
    return module


def sources(paths: Sequence[Path], stacks: Sequence[Stack]) -> dict[Path, Source]:
    """Returns where each leaf of a shortened module comes from."""
    return {path: _source(path, stacks) for path in paths}


def _source(path: Path, stacks: Sequence[Stack]) -> Source:
    for stack in stacks:
        depth = len(stack.path)
        if path[:depth] == stack.path:
            index = stack.members(path[depth])
            rest = path[depth + 1 :]
            members = tuple((*stack.path, i, *rest) for i in index)
            if len(members) == 1:
                return Source(dotted(members[0]), members)
            step = "" if stack.period == 1 else f"-{stack.period}"
            return Source(dotted((*stack.path, f"{index[0]}-{index[-1]}{step}", *rest)), members)
    return Source(dotted(path), (path,))


# ------------------------------------------------------------------------------------------ arrays


class Row:
    """A row of a stacked array as the value of a variable; it is taken when it is read.

    A module whose blocks are rows can be changed and stacked again without a copy of its arrays.
    """

    def __init__(self, array: Any, index: int):
        self.array, self.index = array, index
        self.shape, self.dtype = array.shape[1:], array.dtype

    def __getitem__(self, index: Any) -> Array:
        """Returns the row, or a part of it."""
        row: Array = self.array[self.index][index]
        return row


def stacked(values: Mapping[str, Any], origins: Mapping[Path, Source]) -> dict[str, Any]:
    """Returns frozen leaves with those of stacked blocks under their common name."""
    result = {}
    for source in origins.values():
        if source.names[0] in values:
            given = [values[name] for name in source.names]
            result[source.name] = _joined(given) if source.is_stacked else _array(given[0])
    return dict(sorted(result.items()))


def _joined(values: Sequence[Any]) -> Any:
    """Returns values on a new axis; rows of one array are that array."""
    rows = [x for x in values if isinstance(x, Row)]
    if len(rows) == len(values) == len(rows[0].array):
        whole = rows[0].array
        if all(x.array is whole and x.index == i for i, x in enumerate(rows)):
            return whole
    return jnp.stack([_array(x) for x in values])


def _array(value: Any) -> Any:
    return value[...] if isinstance(value, Row) else value


def unstacked(
    frozen: Mapping[str, Any], origins: Mapping[Path, Source], *, lazy: bool = False
) -> dict[str, Any]:
    """Returns frozen leaves with one leaf for each block, by name.

    Args:
      frozen: from :func:`stacked`.
      origins: as for :func:`stacked`.
    """
    result = dict(frozen)
    for source in origins.values():
        if source.is_stacked and source.name in result:
            whole = result.pop(source.name)
            for i, name in enumerate(source.names):
                result[name] = Row(whole, i) if lazy else whole[i]
    return result


def gathered(arrays: Params, origins: Mapping[Path, Source]) -> Iterator[tuple[Path, Any]]:
    """Gives the path and the value of every leaf of the shortened module.

    Args:
      arrays: frozen leaves, stacked, and trainable leaves, one for each block.
      origins: as for :func:`stacked`.
    """
    for path, source in origins.items():
        if not source.is_stacked or source.name in arrays:
            yield path, arrays[source.name]
        else:
            yield path, jnp.stack([arrays[name] for name in source.names])


def seeded(
    rng: nnx.State, order: Mapping[Path, int], origins: Mapping[Path, Source], key: Key | None
) -> nnx.State:
    """Returns the random state of the shortened module.

    Args:
      rng: its state, of which the stacked leaves are those of the first block.
      order: the place of each leaf of the random state of the whole module.
      key: from which the keys are derived; None: every block has the key of the first.
    """
    flat = {}
    for path, variable in nnx.to_flat_state(rng):
        source, value = origins[path], variable[...]
        places = np.array([order[member] for member in source.members], np.uint32)
        if key is None:
            new = jnp.stack([value] * len(places))
        elif isinstance(variable, nnx.RngKey):
            new = jax.vmap(jax.random.fold_in, (None, 0))(key, places)
        else:
            new = jnp.zeros((len(places), *value.shape), value.dtype)
        flat[path] = new if source.is_stacked else new[0]
    return nnx.from_flat_state(flat)


def split_axes(splits: Splits, origins: Mapping[Path, Source]) -> Splits:
    """Returns the axes on which devices share the leaves, with those of stacked leaves first."""
    extra = []
    for source in origins.values():
        if source.is_stacked:
            axis = next((a for rule, a in splits if re.fullmatch(rule, source.names[0])), None)
            if axis is not None:
                extra.append((re.escape(source.name), axis + 1))
    return (*extra, *splits)
