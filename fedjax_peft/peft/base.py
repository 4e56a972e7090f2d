"""Attaching a PEFT method to a model: target rules, counting and merging."""

import contextlib
import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from fedjax_peft.contracts import Key, Params
from fedjax_peft.contracts.part import data_part
from fedjax_peft.models.attention import AttentionForm
from fedjax_peft.models.base import AdapterParam, Model, bind
from fedjax_peft.models.blocks import Blocks, Remat, set_options, unset_scan
from fedjax_peft.models.heads import Head
from fedjax_peft.models.modules import is_inside, replace_module, submodules
from fedjax_peft.models.quantized import (
    Quantization,
    QuantizedLinear,
    dequantized,
    is_code,
    quantized,
)
from fedjax_peft.models.registry import Dtype, default_targets, module_shapes, parse_config
from fedjax_peft.numerics.random import stream
from fedjax_peft.support.errors import InputError, nearest

Targets = str | Sequence[str] | None
"""Which submodules to adapt, as in Hugging Face PEFT: a list of names (the path equals one or ends
in ``.name``), one string (a regular expression that the whole path must match), ``"all-linear"``
(every linear layer but the head), or None for the defaults of the model family."""

ALL_LINEAR = "all-linear"
_OUTPUT = "lm_head"
"""The output layer of a language model, which ``all-linear`` leaves out as the head of another."""

Defaults = Mapping[str, Sequence[str]]
"""Method -> targets of the model family (``models.family.Family.targets``)."""


class Method(NamedTuple):
    """A PEFT method with its options bound."""

    name: str
    options: Mapping[str, Any]
    """The arguments of the function that made it; recorded in runs and exports."""
    attach: Callable[[nnx.Module, Defaults, Key, Sequence[str]], nnx.Module]
    """(module, defaults, key, head) -> the adapted module (changed in place and returned).

    ``defaults`` are the model family's targets by method. Nothing inside the module paths of the
    ``head`` is adapted, because a head is trained whole."""
    start_shapes_frozen: bool = False
    """Whether the frozen tree depends on the adapters' initial values; clients then need both."""
    complete: Callable[[Model], Model] | None = None
    """model with the adapted module -> model, for a method that is more than its modules; it may
    wrap ``Model.apply`` and add leaves. None: nothing."""
    start_missing: Callable[[Params], str | None] = lambda trainable: None
    """trainable leaves -> a sentence for the user if a start of the method was left out, else
    None."""


class Adapted(nnx.Module):
    """A submodule with which a method replaced another one; the other one is its ``base``."""

    base: Any

    def with_kernel(self, kernel: Array) -> nnx.Module:
        """Returns ``base`` with another kernel, in the dtype that its kernel had."""
        self.base.kernel.set_value(kernel.astype(self.base.kernel[...].dtype))
        module: nnx.Module = self.base
        return module

    def merged(self) -> nnx.Module:
        """Returns ``base`` with the trained values merged into its own parameters."""
        raise InputError(
            f"{type(self).__name__} cannot be merged: it is not of the form of the module that it"
            " adapts."
        )


class Layout(NamedTuple):
    """How a file of Hugging Face PEFT holds a method of which each layer has its own tensors."""

    peft_type: str
    tensors: Mapping[str, tuple[str, str]]
    """End of a tensor's name -> (leaf, axes in the file). The leaf has the same axes in reverse.
    Axes ``in`` and ``out`` are the layer's, a number is a size, and others are free."""
    options: Mapping[str, tuple[str, Any]]
    """Field of the config -> (option of the method, PEFT's default, of the same type)."""
    constant: Mapping[str, Any] = {}
    """Fields that a file must have with these values, because others are not implemented."""
    shared: tuple[str, ...] = ()
    """The tensors of which all layers have a part: the file has one for the model."""
    in_conv1d: bool = False
    """Whether PEFT can attach it to GPT-2's layers too, which store their kernels ``[in, out]``."""


@data_part
def quantize(model: Model, how: Quantization) -> Model:
    """Returns the model with the kernels of its frozen linear layers in 8 or 4 bits.

    ``load_model(..., quantize=...)`` does the same leaf by leaf, so that it needs less memory. A
    model that has LoRA with ``init="svd"`` attached is given the quantised residual of its weights
    (QPiSSA, Meng et al. 2024).

    Args:
      model: with or without a PEFT method.
      how: ``int8`` or ``nf4``, see :mod:`fedjax_peft.models.quantized`.

    Raises:
      InputError: an unknown ``how``, or the model has no such layer, or it is quantised already.
    """
    if any(map(is_code, model.frozen)):
        raise InputError("The model is quantised already.")
    module = quantized(model.module(), how, model.head)
    changes: dict[str, Any] = {"original": model.original}
    if model.recipe:
        changes["recipe"] = {**model.recipe, "quantize": how}
    return _rebound(module, model, model.method).replace(**changes)


@data_part
def attach(model: Model, method: Method, *, seed: int = 0) -> Model:
    """Returns the model with a PEFT method attached.

    Only the method's leaves and the head are trained.

    Args:
      model: from ``load_model`` or ``bind``.
      method: such as ``lora(rank=8)``.
      seed: the seed of the adapters' initial values.

    Raises:
      InputError: the model already has a method, or the method does not fit it.
    """
    if model.method is not None:
        raise InputError(f"The model already has {model.method.name!r} attached.")
    defaults, module = default_targets(model.config), model.module(lazy=True)
    with _originals(module, model):
        module = attach_module(module, method, defaults, head=model.head, seed=seed)
    bound = _rebound(module, model, method)
    return bound if method.complete is None else method.complete(bound)


@contextlib.contextmanager
def _originals(module: nnx.Module, model: Model) -> Iterator[None]:
    """Lets quantised layers read their kernels as they were before."""
    read, layers = model.original, dict(submodules(module, QuantizedLinear))
    for path, layer in layers.items():
        layer.original = read and functools.partial(read, f"{path}.kernel")
    try:
        yield
    finally:
        for layer in layers.values():
            layer.original = None


def count(config: Mapping[str, Any], method: Method | None = None, *, head: Head) -> dict[str, int]:
    """Returns ``Model.counts()`` for a ``config.json``, without allocating a model.

    Args:
      config: such as ``{"model_type": "roberta", ...}``.
      method: what to attach; without one only the head is trained.
      head: what to predict.
    """
    return abstract_model(config, method, head=head).counts()


def abstract_model(
    config: Mapping[str, Any],
    method: Method | None = None,
    *,
    head: Head,
    dtype: Dtype = "float32",
    dropout: float | None = None,
    quantize: Quantization | None = None,
    remat: Remat = "none",
    scan_layers: bool = False,
    attention: AttentionForm = "auto",
) -> Model:
    """Returns the model of a ``config.json`` with shapes instead of arrays.

    The other arguments are those of :func:`fedjax_peft.random_model`.

    Args:
      config: such as ``{"model_type": "roberta", ...}``.
    """
    definition, shapes, paths = module_shapes(config, head, dtype=dtype, dropout=dropout)
    family, _ = parse_config(config)
    bound: list[Model] = []

    def make(state: nnx.State) -> tuple[Params, Params]:
        module = quantized(nnx.merge(definition, state), quantize, paths)
        set_options(module, remat, scan_layers, attention)
        model = bind(
            module, head=paths, config=config, splits=family.splits, dtype=jnp.dtype(dtype)
        )
        model = model.replace(frozen=model.compute_frozen())
        bound.append(model if method is None else attach(model, method))
        return bound[0].frozen, bound[0].trainable

    frozen, trainable = jax.eval_shape(make, shapes)
    return bound[0].replace(frozen=frozen, trainable=trainable)


def merge(model: Model, params: Params | None = None) -> Model:
    """Returns a plain model whose weights include everything that was trained.

    The weights are float32, also where those of the model are bfloat16 or quantised. A plain model
    that computes in bfloat16 rounds them, which loses most of a change that is below 0.2 % of its
    weight.

    Args:
      model: a model with a method attached.
      params: the trained leaves, such as ``Run.params``; by default the model's own.

    Raises:
      InputError: the method cannot be merged (bottleneck adapters, prompts, prefixes).
    """
    if params is not None:
        model = model.replace(trainable=dict(params))
    module = dequantized(model.replace(frozen=_widened(model.frozen)).module())
    unset_scan(module)
    adapted = {p: m for p, m in submodules(module, Adapted) if not re.search(r"\.base(\.|$)", p)}
    for path, site in adapted.items():
        replace_module(module, path, site.merged())
    # Parameters that a method only marked as trained, such as biases, become ordinary ones again.
    for _, owner in nnx.iter_modules(module):
        for name, value in list(vars(owner).items()):
            if isinstance(value, AdapterParam):
                setattr(owner, name, nnx.Param(value[...]))
    return _rebound(module, model, None)


def _rebound(module: nnx.Module, model: Model, method: Method | None) -> Model:
    kept = {name: getattr(model, name) for name in _KEPT}
    if method is not None:  # merged weights have no recipe
        kept |= {"method": method, "recipe": model.recipe, "original": model.original}
    return bind(module, **kept)


_KEPT = ("head", "fresh", "forward", "name", "config", "tokenizer", "labels", "dtype", "splits")
"""The fields of a model that do not depend on its PEFT method."""


def _widened(leaves: Params) -> Params:
    """Returns the leaves, those of a narrower floating-point dtype in float32."""
    narrow = {name for name, x in leaves.items() if x.dtype in (jnp.bfloat16, jnp.float16)}
    return {name: x.astype(jnp.float32) if name in narrow else x for name, x in leaves.items()}


def attach_module(
    module: nnx.Module,
    method: Method,
    defaults: Defaults | None = None,
    *,
    head: Sequence[str] = (),
    seed: int = 0,
) -> nnx.Module:
    """Attaches a method to any NNX module, in place, and returns the module."""
    return method.attach(module, defaults or {}, stream(seed, "adapter"), head)


def find(
    module: nnx.Module, targets: Targets, kinds: type | tuple[type, ...], head: Sequence[str] = ()
) -> dict[str, Any]:
    """Returns the submodules that a target rule names: path -> submodule.

    As in Hugging Face PEFT, submodules of the head are left out.
    """
    candidates = {p: m for p, m in submodules(module, kinds) if p and not is_inside(p, head)}
    if not targets:
        raise InputError(
            "No submodule to adapt is named, and this model has no default ones: pass"
            f" targets=[...]. {nearest('', _suffixes(candidates))}"
        )
    found: dict[str, Any] = {}
    if targets == ALL_LINEAR:
        found = {
            path: m
            for path, m in candidates.items()
            if isinstance(m, nnx.Linear) and path.rpartition(".")[2] != _OUTPUT
        }
        if not found:
            raise InputError("The model has no linear layer outside its head.")
        return found
    if isinstance(targets, str):
        found = {path: m for path, m in candidates.items() if re.fullmatch(targets, path)}
        if not found:
            # The user more likely means a name, which a list would find, than a full path.
            names = _suffixes(candidates)
            advice = nearest(targets, names)
            if targets in names:
                advice = f'For the submodules of that name write targets = ["{targets}"].'
            raise InputError(
                f"The target {targets!r} is a text, so it is a pattern for whole paths, and it"
                f" matches no submodule that can be adapted. {advice}"
            )
        return found
    for target in targets:
        hits = {p: m for p, m in candidates.items() if p == target or p.endswith(f".{target}")}
        if not hits:
            raise InputError(
                f"The target {target!r} matches no submodule that can be adapted."
                f" {nearest(target, _suffixes(candidates))}"
            )
        found |= hits
    return dict(sorted(found.items()))


def find_linear(
    module: nnx.Module,
    targets: Targets,
    defaults: Defaults,
    head: Sequence[str],
    method: str = "lora",
) -> dict[str, Any]:
    """Returns the linear layers to adapt: path -> layer.

    Args:
      targets: the rule, see :data:`Targets`; None: the model family's for ``method``.
      method: whose targets are the default.
    """
    where = defaults.get(method) if targets is None else targets
    sites = find(module, where, (nnx.Linear, Adapted), head)
    for path, site in sites.items():
        if isinstance(site, Adapted) or ".base" in path:
            raise InputError(f"The submodule {path!r} is already adapted.")
    return sites


def layer_method(
    name: str,
    options: Mapping[str, Any],
    layer: Callable[[str, Any, Key], nnx.Module],
    **more: Any,
) -> Method:
    """Returns the method that puts ``layer(path, linear layer, key)`` at every target.

    Args:
      options: with ``targets``, as :func:`listed` returns them.
      layer: ``key`` is the model's.
      **more: other fields of :class:`Method`.
    """

    def attach(module: nnx.Module, defaults: Defaults, key: Key, head: Sequence[str]) -> nnx.Module:
        for path, site in find_linear(module, options["targets"], defaults, head).items():
            replace_module(module, path, layer(path, site, key))
        return module

    return Method(name, options, attach, **more)


def in_layers(
    module: nnx.Module, sites: dict[str, Any], layers: Sequence[int] | None
) -> dict[str, Any]:
    """Returns the sites in blocks with these numbers; negative ones count from the end.

    Args:
      sites: path -> layer.
      layers: None: all sites.
    """
    if layers is None:
        return sites
    blocks = {path: len(found) for path, found in submodules(module, Blocks)}
    for number in layers:
        if not any(-count <= number < count for count in blocks.values()):
            raise InputError(
                f"layers has {number}, and the model has {max(blocks.values(), default=0)} blocks,"
                " which count from 0, or from -1 down at the end."
            )
    chosen = [f"{path}.{number % n}" for path, n in blocks.items() for number in layers]
    found = {path: site for path, site in sites.items() if is_inside(path, chosen)}
    if not found:
        raise InputError(f"layers = {[*layers]} leaves no layer to adapt.")
    return found


def listed(targets: Targets, option: str = "targets") -> str | tuple[str, ...] | None:
    """Returns a target rule as the value of an option, checked: a list becomes a tuple."""
    if isinstance(targets, str):
        check_pattern(option, targets, f"{option}=[...]")
    return targets if targets is None or isinstance(targets, str) else tuple(targets)


def check_pattern(option: str, pattern: str, names: str, form: str = "{}") -> None:
    """Raises InputError for a text that is no regular expression.

    Args:
      option: the name of the option.
      names: how names are written instead.
      form: the expression that the rule makes of it.
    """
    try:
        re.compile(form.format(pattern))
    except re.error as error:
        raise InputError(
            f"{option} has {pattern!r}, which is not a regular expression ({error.msg}). A text is"
            f" one, so any characters are .* there; for a name write {names}."
        ) from None


def _suffixes(paths: Mapping[str, Any]) -> list[str]:
    return sorted({p.rpartition(".")[2] for p in paths} | set(paths))
