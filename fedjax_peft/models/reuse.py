"""The hidden states below the lowest trained leaf, which are the same in every round.

If only upper blocks and the head are trained, the blocks below always give the same hidden states
for an example. :func:`split` finds the highest block such that all trained leaves lie in it or
above. The states before this block are computed once for each example and become a column of the
data, ``STORED``. The forward pass of the upper part begins with them. Only the frozen leaves that
it uses remain: the embeddings and the blocks below do not, but a table that is also the head does.

The traced forward pass shows which results depend on which leaves. So every family with
:class:`~fedjax_peft.models.blocks.Blocks` is served, and no method is known here by name.
"""

import dataclasses
import shutil
import tempfile
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.interpreters import partial_eval

from fedjax_peft.contracts import Batch, Key, Outputs, Params
from fedjax_peft.models.base import Forward, Model
from fedjax_peft.models.blocks import Blocks
from fedjax_peft.models.modules import submodules
from fedjax_peft.numerics import tree
from fedjax_peft.support.errors import InputError
from fedjax_peft.support.memory import gigabytes, require

Reuse: TypeAlias = Literal["none", "exact", "bfloat16"]
"""What is kept of the blocks below all trained leaves. ``none``: nothing, they are computed in
every step. ``exact``: their result for each example, in the compute dtype. ``bfloat16``: the same
in bfloat16, half of float32."""
STORED = "stored_states"
"""The column with the hidden states, ``[examples, length, width]``."""
_ROWS = 64
"""Examples whose states are computed together."""
Columns: TypeAlias = Mapping[str, Any]


class Split(NamedTuple):
    """A model in two parts; see :func:`split`."""

    above: Model
    """The upper part, whose batches need the column ``STORED``."""
    below: int
    """The number of blocks of the lower part."""
    blocks: int
    """The number of all blocks."""
    state: jax.ShapeDtypeStruct
    """The shape of an example's hidden states, ``[length, width]``, in the compute dtype."""
    states: Callable[[Params, Batch], Array]
    """(frozen and trainable leaves of the whole model, batch) -> ``[batch, length, width]``."""


@dataclasses.dataclass(frozen=True, eq=False)
class _Above(Forward):
    """The forward pass from given hidden states on."""

    below: int = 0
    dtype: Any = jnp.float32
    absent: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """The shapes of the leaves that are not used. Zeros stand for them, which a compiler drops."""

    def __call__(
        self, frozen: Params, trainable: Params, batch: Batch, key: Key | None, train: bool
    ) -> Outputs:
        """Returns the outputs for a batch with the column ``STORED``."""
        zeros = {name: jnp.zeros(x.shape, x.dtype) for name, x in self.absent.items()}
        fresh = self.make({**zeros, **frozen, **trainable}, key, train)
        for _, blocks in submodules(fresh, Blocks):
            blocks.below, blocks.given = self.below, batch[STORED].astype(self.dtype)
        return self.outputs(fresh, batch)


def split(model: Model, columns: Columns) -> Split:
    """Returns a model in two parts, of which only the upper one has trained leaves.

    Args:
      model: arrays or shapes.
      columns: of examples, arrays or shapes ``[examples, ...]``.
    """
    apply = model.apply
    if not isinstance(apply, Forward):
        raise InputError(
            "placement.reuse needs a model of this library or of fp.bind, and the forward pass of"
            " this one is another function. Leave reuse out."
        )
    leaves = tree.shapes({**model.frozen, **model.trainable})
    batch = {
        name: jax.ShapeDtypeStruct((1, *x.shape[1:]), jax.dtypes.canonicalize_dtype(x.dtype))
        for name, x in columns.items()
    }
    place = tuple((name, x.shape) for name, x in sorted(batch.items()))
    known = _KNOWN.setdefault(apply, {})
    if place not in known:  # a copy, because what is kept here must not keep the key alive
        known[place] = _parts(dataclasses.replace(apply), leaves, batch, {*model.trainable})
    above, rest = known[place]
    frozen = {name: x for name, x in model.frozen.items() if name not in above.absent}
    return Split(model.replace(apply=above, frozen=frozen), *rest)


_KNOWN: Any = weakref.WeakKeyDictionary()
"""Forward pass -> its parts, so that sessions of one model share their compiled programs."""


def _parts(apply: Forward, leaves: Any, batch: Any, trained: set[str]) -> tuple[_Above, tuple]:
    """Returns the forward pass of the upper part, and the other fields of :class:`Split`."""
    traced = _Traced(lambda *xs: _in_training(apply, *xs).states, leaves, batch)
    blocks = len(traced.results) - 1
    if blocks < 1:
        raise InputError("placement.reuse needs a transformer: this model has no blocks.")
    below = next((i for i in range(blocks - 1, 0, -1) if not traced.used(i)[0] & trained), 0)
    if not below:
        lowest = next(iter(sorted(traced.used(min(1, blocks))[0] & trained)), "the only block")
        raise InputError(
            "placement.reuse keeps what lies below all trained leaves, and nothing does:"
            f" {lowest!r} is trained in the first block or before it. Adapt upper blocks alone,"
            " such as with layers = [-2, -1] in [peft], or leave reuse out."
        )
    if traced.used(below)[1]:
        raise InputError(
            f"placement.reuse keeps the hidden states after {below} of {blocks} blocks, and the"
            " dropout in these blocks or in the embeddings would change them in every step. Load"
            " the model without dropout (model.dropout = 0; that of an adapter may stay), or leave"
            " reuse out."
        )
    state = traced.results[below]
    above = _Above(apply.make, apply.forward, apply.platform, below, state.dtype)
    upper = _Traced(lambda *xs: _in_training(above, *xs), leaves, {**batch, STORED: state})
    kept = upper.used()[0] | trained
    absent = {name: x for name, x in leaves.items() if name not in kept}

    @jax.jit
    def states(leaves: Params, batch: Batch) -> Array:
        return apply(leaves, {}, batch, None, False).states[below]

    one = jax.ShapeDtypeStruct(state.shape[1:], state.dtype)
    return dataclasses.replace(above, absent=absent), (below, blocks, one, states)


def _in_training(apply: Forward, leaves: Params, batch: Batch, key: Key) -> Outputs:
    return apply(leaves, {}, batch, key, True)


class _Traced:
    """A traced function of leaves, a batch and a key."""

    def __init__(self, function: Callable[..., Any], leaves: Any, batch: Any):
        key = jax.eval_shape(lambda: jax.random.key(0))
        made, shapes = jax.make_jaxpr(function, return_shape=True)(leaves, dict(batch), key)
        self._jaxpr, self._names = made.jaxpr, sorted(leaves)
        self.results: Sequence[Any] = jax.tree.leaves(shapes)

    def used(self, *results: int) -> tuple[set[str], bool]:
        """Returns the leaves that some results depend on, and whether they depend on the key.

        Args:
          *results: the numbers of the results; none: all.
        """
        wanted = [not results or i in results for i in range(len(self.results))]
        needed = partial_eval.dce_jaxpr(self._jaxpr, wanted)[1]
        return {name for name, x in zip(self._names, needed, strict=False) if x}, needed[-1]


def storing(
    parts: Split, model: Model, reuse: Reuse, *, on_disk: bool
) -> Callable[[Columns], Columns]:
    """Returns a function that adds the hidden states of examples to their columns.

    It computes those of the same columns once.

    Args:
      parts: of ``model``.
      reuse: gives the dtype of the states.
      on_disk: keep them in a temporary file that is mapped into memory.
    """
    known: dict[int, tuple[Columns, Columns]] = {}

    def complete(columns: Columns) -> Columns:
        if id(columns) not in known:  # stored with the columns, so that their id stays unique
            leaves = {**model.compute_frozen(), **model.trainable}
            examples = len(next(iter(columns.values())))
            # Test texts may be padded to another length than those that ``parts`` was made with.
            one = {name: x[:1] for name, x in columns.items()}
            shape = jax.eval_shape(parts.states, leaves, one).shape[1:]
            found = _empty((examples, *shape), dtype_of(parts, reuse), on_disk)
            rows = min(_ROWS, examples)
            for start in range(0, examples, rows):
                some = np.minimum(np.arange(start, start + rows), examples - 1)
                batch = {name: jnp.asarray(x[some]) for name, x in columns.items()}
                computed = np.asarray(parts.states(leaves, batch))
                found[start : start + rows] = computed[: examples - start]
            known[id(columns)] = columns, {**columns, STORED: found}
        return known[id(columns)][1]

    return complete


def dtype_of(parts: Split, reuse: Reuse) -> np.dtype:
    """Returns the dtype in which hidden states are stored."""
    return np.dtype(jnp.bfloat16 if reuse == "bfloat16" else parts.state.dtype)


def _empty(shape: tuple[int, ...], dtype: np.dtype, on_disk: bool) -> np.ndarray:
    """Returns an array without values, in memory or in a file that disappears with it."""
    size = int(np.prod(shape)) * dtype.itemsize
    if not on_disk:
        require(size, "placement.reuse", "With placement.examples = 'host' they are in a file.")
        return np.empty(shape, dtype)
    free = shutil.disk_usage(tempfile.gettempdir()).free
    if size > free:
        raise InputError(
            f"placement.reuse needs {gigabytes(size)} for hidden states, and {gigabytes(free)} are"
            f" free in {tempfile.gettempdir()}. Set TMPDIR to a directory on a larger disk."
        )
    with tempfile.TemporaryFile() as file:
        return np.memmap(file, dtype, "w+", shape=shape)
