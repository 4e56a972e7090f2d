"""The bound model: a pure ``apply`` with its frozen and trainable trees.

This is the only place where modules become functions. Everything downstream sees plain dicts of
arrays and ``apply``; nothing downstream imports flax.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from fedjax_peft.contracts import ApplyFn, Batch, Key, Outputs, Params, Platform, Splits
from fedjax_peft.models.attention import Attending
from fedjax_peft.models.modules import dotted, is_inside, submodules
from fedjax_peft.models.quantized import parameters
from fedjax_peft.models.sentencepiece import advice
from fedjax_peft.models.stacks import (
    Source,
    Stack,
    find_stacks,
    gathered,
    seeded,
    shortened,
    sources,
    split_axes,
    stacked,
    unstacked,
)
from fedjax_peft.numerics import tree
from fedjax_peft.support.errors import InputError, nearest


class AdapterParam(nnx.Variable):
    """A variable that a PEFT method added and that is trained."""


class AdapterConst(nnx.Variable):
    """A variable that a PEFT method added and that never changes (kind ``fixed``)."""


@dataclasses.dataclass(frozen=True, repr=False)
class Model:
    """A model as pure data: ``apply(frozen, trainable, batch, key, train) -> Outputs``.

    Made by :func:`fedjax_peft.load_model` or :func:`bind`; :func:`fedjax_peft.attach` returns a
    new one. Trained arrays are float32; ``dtype`` is the compute dtype that ``apply`` uses.
    """

    apply: ApplyFn
    frozen: Params
    """The frozen leaves; all clients share one copy."""
    trainable: Params
    """The initial values of a client's leaves."""
    kinds: dict[str, str]
    """Trainable leaf name -> ``adapter``, ``head`` or ``fixed``."""
    graph: Any
    """The module's definition, from which :meth:`module` rebuilds it; None for a model of functions
    alone."""
    head: tuple[str, ...] = ()
    """Module paths of the head."""
    fresh: tuple[str, ...] = ()
    """Those of the head that ``load_model`` gave new values: the checkpoint does not hold them, or
    new ones were asked for."""
    name: str = ""
    """The ``name`` argument of ``load_model``."""
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """The checkpoint's ``config.json``."""
    tokenizer: Any = None
    labels: tuple[str, ...] = ()
    dtype: Any = jnp.float32
    forward: Callable[[Any, Batch], Outputs] | None = None
    method: Any = None
    """The PEFT method that was attached, or None."""
    wide: frozenset[str] = frozenset()
    """Frozen leaves that a run holds in float32 whatever the compute dtype.

    A narrower dtype would round away a change that was added to them. LoRA's layers compute with
    the full value."""
    splits: Splits = ()
    """The axes on which devices share the leaves; see :data:`fedjax_peft.contracts.Splits`."""
    recipe: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """The call of ``load_model`` or ``random_model`` that made it; empty for a bound module and for
    merged weights. A run on disk makes the model again from it."""
    original: Callable[[str], Array] | None = None
    """Reads or makes a kernel as it was before it was quantised, by its leaf name, in float32; None
    where nobody can. Starts from the weights (``svd``, ``qr``, ``loftq``) need it."""

    def module(self, *, lazy: bool = False) -> nnx.Module:
        """Returns a fresh NNX module with these arrays.

        Args:
          lazy: do not copy the arrays that ``scan_layers`` has stacked: the module holds
            :class:`fedjax_peft.models.stacks.Row` until it is bound.

        Raises:
          InputError: the model was made of functions alone.
        """
        if self.graph is None:
            raise InputError(
                "This model was made of functions, without a module that a PEFT method could adapt"
                " or a file could hold: make it by fp.bind(module)."
            )
        flat = {**unstacked(self.frozen, self.graph.origins, lazy=lazy), **self.trainable}
        state = {path: flat[name] for name, path in self.graph.paths.items()}
        return nnx.merge(self.graph.eval, nnx.from_flat_state(state), self.graph.rng)

    @property
    def longest_text(self) -> int:
        """The most tokens that the model reads: its positions, without those of a soft prompt.

        A ``dynamic`` rotation is stretched for longer texts, so nothing limits these.
        """
        names = ("n_positions", "max_position_embeddings")
        found = [self.config[name] for name in names if isinstance(self.config.get(name), int)]
        rotation = self.config.get("rope_scaling") or self.config.get("rope_parameters") or {}
        if "dynamic" in (rotation.get("rope_type"), rotation.get("type")):
            found = []
        learned = sum(x.shape[0] for name, x in self.trainable.items() if name.endswith(".prompt"))
        return min(found, default=1 << 30) - learned

    def require_tokenizer(self) -> Any:
        """Returns the tokenizer."""
        if self.tokenizer is None:
            how = advice(Path(self.name))
            raise InputError(f"This model has no tokenizer, so it cannot read text.{how}")
        return self.tokenizer

    def replace(self, **changes: Any) -> "Model":
        """Returns the model with some fields replaced."""
        return dataclasses.replace(self, **changes)

    def counts(self) -> dict[str, int]:
        """Returns the numbers of parameters: ``{"adapter": n, "head": n, "frozen": n}``."""
        return self._total(tree.size) | {"frozen": parameters(self.frozen)}

    def nbytes(self) -> dict[str, int]:
        """Returns the bytes of the arrays of this model, with the keys of :meth:`counts`."""
        return self._total(tree.nbytes)

    def _total(self, measure: Callable[[Any], int]) -> dict[str, int]:
        result = {"adapter": 0, "head": 0, "frozen": measure(self.frozen)}
        for name, kind in self.kinds.items():
            if kind != "fixed":
                result[kind] += measure(self.trainable[name])
        return result

    def compute_frozen(self) -> Params:
        """Returns the frozen tree as a run holds it: matrices in the compute dtype."""
        # A model that was made without a module, from functions alone, has no graph.
        origins = {} if self.graph is None else self.graph.origins
        stacks = {x.name for x in origins.values() if x.is_stacked}
        return {
            name: _cast(x, self.dtype)
            if x.ndim - (name in stacks) > 1 and x.dtype == jnp.float32 and name not in self.wide
            else x
            for name, x in self.frozen.items()
        }

    def merge_into_frozen(self, changes: Params) -> "Model":
        """Returns the model with float32 arrays added to frozen leaves, by name.

        The sums are those that a run computes with: the leaf rounded to the compute dtype, as the
        run holds it, plus the unrounded change.
        """
        held = tree.select(self.compute_frozen(), changes)
        moved = {name: x.astype(jnp.float32) + changes[name] for name, x in held.items()}
        return self.replace(frozen={**self.frozen, **moved}, wide=self.wide | set(moved))

    def __repr__(self) -> str:
        counts = ", ".join(f"{n:,} {kind}" for kind, n in self.counts().items())
        made_of = "functions" if self.graph is None else self.graph.name
        new = f"; new values: {', '.join(self.fresh)}" if self.fresh else ""
        return f"Model({self.name or made_of!r}: {counts}{new})"


@dataclasses.dataclass(frozen=True)
class _Graph:
    """Static structure of a module: its definitions, its random state, and its leaf names."""

    name: str
    train: Any
    eval: Any
    rng: Any = dataclasses.field(compare=False)  # replaced in training, not read in evaluation
    paths: dict[str, tuple]
    origins: Mapping[tuple, Source] = dataclasses.field(default_factory=dict)
    """With ``scan_layers``: where the leaves of the module with stacked blocks come from."""


def bind(
    module: nnx.Module,
    *,
    head: tuple[str, ...] = (),
    forward: Callable[[Any, Batch], Outputs] | None = None,
    **info: Any,
) -> Model:
    """Returns an NNX module as a :class:`Model`.

    Args:
      module: any NNX module. Its dropout may be ``nnx.Dropout`` or that of this library: random
        state of any kind is set from the step's key.
      head: paths of the submodules that are trained whole, such as ``("classifier",)``.
      forward: ``(module, batch) -> Outputs``; by default ``module(batch)``. A batch is a mapping of
        columns. Plain logits are accepted instead of ``Outputs``, but algorithms and measures that
        compare representations need ``Outputs`` with the hidden states.
      **info: other fields of :class:`Model`.

    Raises:
      InputError: a head path that the module does not have, or statistics that it would update.
    """
    module = nnx.clone(module)
    modules = dict(submodules(module))
    for path in head:
        if path not in modules:
            raise InputError(f"The model has no head module {path!r}. {nearest(path, modules)}")
    for path, owner in modules.items():
        _refuse_running_statistics(path, owner)

    def in_head(path: tuple, variable: Any) -> bool:
        return is_inside(dotted(path), head) and not isinstance(variable, nnx.BatchStat)

    trained = nnx.Any(AdapterParam, AdapterConst, in_head)
    train_def, eval_def, rng, trainable, frozen = _parts(module, trained)
    kinds, paths = {}, {}
    values: list[Params] = []
    for state in (trainable, frozen):
        flat = {dotted(path): (path, var) for path, var in nnx.to_flat_state(state)}
        paths.update({name: path for name, (path, _) in flat.items()})
        values.append({name: flat[name][1].get_value() for name in sorted(flat)})
        if state is trainable:
            kinds = {name: _kind(var) for name, (_, var) in sorted(flat.items())}
    graph = _Graph(type(module).__name__, train_def, eval_def, rng, paths)
    make: Make = partial(_whole, graph)
    if stacks := find_stacks(module):
        graph, make = _with_stacks(module, stacks, graph)
        values[1] = stacked(values[1], graph.origins)
        info["splits"] = split_axes(info.get("splits", ()), graph.origins)

    apply = Forward(make, forward)
    trained_values = {n: _trained(x) for n, x in values[0].items()}
    return Model(apply, values[1], trained_values, kinds, graph, head, forward=forward, **info)


def _refuse_running_statistics(path: str, module: nnx.Module) -> None:
    """Raises InputError if the module's own variables are statistics that training would update."""
    kept = any(isinstance(x, nnx.BatchStat) for x in vars(module).values())
    if kept and not getattr(module, "use_running_average", False):
        raise InputError(
            f"The module {path!r} ({type(module).__name__}) keeps running statistics, which a run"
            " does not update: use nnx.LayerNorm or nnx.GroupNorm, or use_running_average=True with"
            " pretrained statistics."
        )


def _parts(module: nnx.Module, *filters: Any) -> list[Any]:
    """Returns the definitions in training and in evaluation, and the states by filter.

    Random state is split off first: dropout state inside the head is not a parameter.
    """
    # Not by train() and eval(), which would let norms leave their pretrained statistics.
    module.set_attributes(deterministic=False, raise_if_not_found=False)
    train_def, *states = nnx.split(module, nnx.RngState, *filters, ...)
    module.set_attributes(deterministic=True, raise_if_not_found=False)
    return [train_def, nnx.split(module, nnx.RngState, *filters, ...)[0], *states]


Make: TypeAlias = Callable[[Params, Key | None, bool], Any]
"""(arrays by name, the step's key, whether in training) -> the module of a forward pass."""


@dataclasses.dataclass(frozen=True, eq=False)
class Forward:
    """The forward pass of a bound module."""

    make: Make
    forward: Callable[[Any, Batch], Outputs] | None
    platform: Platform = Platform()

    def __call__(
        self, frozen: Params, trainable: Params, batch: Batch, key: Key | None, train: bool
    ) -> Outputs:
        """Returns the outputs for ``batch``; see :class:`fedjax_peft.contracts.ApplyFn`."""
        return self.outputs(self.make({**frozen, **trainable}, key, train), batch)

    def outputs(self, fresh: Any, batch: Batch) -> Outputs:
        """Returns the outputs of a module that ``make`` made."""
        if self.platform != Platform():
            for _, layer in submodules(fresh, Attending):
                layer.platform = self.platform
        return _outputs(fresh(batch) if self.forward is None else self.forward(fresh, batch))

    def on(self, platform: Platform) -> ApplyFn:
        """Returns the forward pass for a platform."""
        return dataclasses.replace(self, platform=platform)


def _whole(graph: _Graph, arrays: Params, key: Key | None, train: bool) -> Any:
    """Returns the module with the given arrays."""
    state = nnx.from_flat_state({path: arrays[name] for name, path in graph.paths.items()})
    random = graph.rng if key is None else _seed(graph.rng, key)
    return nnx.merge(graph.train if train else graph.eval, state, random)


def _with_stacks(module: nnx.Module, stacks: Sequence[Stack], graph: _Graph) -> tuple[_Graph, Make]:
    """Returns the graph of a module with the origins of its stacked leaves, and how to make it."""
    train_def, eval_def, rng, parameters = _parts(shortened(module, stacks))
    inner = _Graph(graph.name, train_def, eval_def, rng, {})
    order = {path: i for i, (path, _) in enumerate(nnx.to_flat_state(graph.rng))}
    leaves = sources([path for path, _ in nnx.to_flat_state(parameters)], stacks)
    keys = sources([path for path, _ in nnx.to_flat_state(rng)], stacks)

    def make(arrays: Params, key: Key | None, train: bool) -> Any:
        state = nnx.from_flat_state(dict(gathered(arrays, leaves)))
        random = seeded(inner.rng, order, keys, key)
        return nnx.merge(inner.train if train else inner.eval, random, state)

    return dataclasses.replace(graph, origins=leaves), make


def _cast(x: Any, dtype: Any) -> Any:
    """Returns an array, or the shape of one, in another dtype."""
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(x.shape, dtype)
    return x.astype(dtype)


def _trained(x: Any) -> Any:
    """Returns a trainable value as float32, in which small steps do not vanish."""
    narrow = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4
    return _cast(x, jnp.float32) if narrow else x


def _outputs(returned: Any) -> Outputs:
    """Returns a module's result as outputs; plain logits are accepted."""
    if isinstance(returned, Outputs):
        return returned
    if isinstance(returned, Array) and returned.ndim >= 2:
        return Outputs(returned)
    shape = f" of shape {returned.shape}" if isinstance(returned, Array) else ""
    raise InputError(
        f"The model returned a value of the type {type(returned).__name__}{shape}. It must return"
        " logits [batch, classes], or fp.contracts.Outputs(logits, hidden): change its __call__, or"
        " give fp.bind a forward=lambda module, batch: ... that makes them."
    )


def _kind(variable: nnx.Variable) -> str:
    if isinstance(variable, AdapterParam):
        return "adapter"
    return "fixed" if isinstance(variable, AdapterConst) else "head"


def _seed(rng: nnx.State, key: Key) -> nnx.State:
    """Returns the random state with every key derived from ``key`` and every counter at zero."""
    flat = {}
    for i, (path, variable) in enumerate(nnx.to_flat_state(rng)):
        if isinstance(variable, nnx.RngKey):
            flat[path] = jax.random.fold_in(key, i)
        else:
            flat[path] = jnp.zeros_like(variable[...])
    return nnx.from_flat_state(flat)
