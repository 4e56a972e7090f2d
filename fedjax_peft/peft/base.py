"""Attaching a PEFT method to a model: target rules, counting and merging."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from flax import nnx

from fedjax_peft.errors import InputError, nearest
from fedjax_peft.models.base import AdapterParam, Model, bind
from fedjax_peft.models.heads import Head
from fedjax_peft.models.registry import default_targets, module_builder, parse_config
from fedjax_peft.random import stream
from fedjax_peft.typing import Key, Params

__all__ = [
    "Adapted",
    "Defaults",
    "Method",
    "Targets",
    "abstract_model",
    "attach",
    "attach_module",
    "count",
    "find",
    "merge",
    "replace_module",
    "submodule",
]

Targets = str | Sequence[str] | None
"""Which submodules to adapt, as in Hugging Face PEFT: a list of names (the path equals one or ends
in ``.name``), one string (a regular expression that the whole path must match), or None for the
defaults of the model family."""


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


class Adapted(nnx.Module):
    """A submodule with which a method replaced another one; the other one is its ``base``."""

    base: Any

    def merged(self) -> nnx.Module:
        """Returns ``base`` with the trained values merged into its own parameters.

        Raises:
          InputError: the method is not of the base's form.
        """
        raise InputError(
            f"{type(self).__name__} cannot be merged: it is not of the form of the module that it"
            " adapts."
        )


def attach(model: Model, method: Method, *, seed: int = 0) -> Model:
    """Returns the model with a PEFT method attached.

    Only the method's leaves and the head are trained.

    Args:
      model: from ``load_model`` or ``bind``.
      method: such as ``lora(rank=8)``.
      seed: of the adapters' initial values.

    Raises:
      InputError: the model already has a method, or the method does not fit it.
    """
    if model.method is not None:
        raise InputError(f"The model already has {model.method.name!r} attached.")
    defaults = default_targets(model.config)
    module = attach_module(model.module(), method, defaults, head=model.head, seed=seed)
    return _rebound(module, model, method)


def count(
    config: Mapping[str, Any],
    method: Method | None = None,
    *,
    head: Head,
    in_bytes: bool = False,
) -> dict[str, int]:
    """Returns ``Model.counts()`` for a ``config.json``, without allocating a model.

    Args:
      config: such as ``{"model_type": "roberta", ...}``.
      method: what to attach; without one only the head is trained.
      head: what to predict.
      in_bytes: count bytes (float32) instead of parameters.

    Raises:
      InputError: as loading and attaching would.
    """
    model = abstract_model(config, method, head=head)
    return model.nbytes() if in_bytes else model.counts()


def abstract_model(config: Mapping[str, Any], method: Method | None = None, *, head: Head) -> Model:
    """Returns the model of a ``config.json`` with shapes instead of arrays.

    Args:
      config: such as ``{"model_type": "roberta", ...}``.
      method: what to attach; without one only the head is trained.
      head: what to predict.

    Raises:
      InputError: as loading and attaching would.
    """
    build, paths = module_builder(config, head)
    family, _ = parse_config(config)
    bound: list[Model] = []

    def make() -> tuple[Params, Params]:
        model = bind(build(), head=paths, config=config, splits=family.splits)
        bound.append(model if method is None else attach(model, method))
        return bound[0].frozen, bound[0].trainable

    frozen, trainable = jax.eval_shape(make)
    return bound[0].replace(frozen=frozen, trainable=trainable)


def merge(model: Model, params: Params | None = None) -> Model:
    """Returns a plain model whose weights include everything that was trained.

    The weights are float32. A plain model that computes in bfloat16 rounds them, which loses most
    of a change that is below 0.2 % of its weight.

    Args:
      model: with a method attached.
      params: the trained leaves, such as ``Run.params``; by default the model's own.

    Raises:
      InputError: the method cannot be merged (bottleneck adapters, prompts, prefixes).
    """
    if params is not None:
        model = model.replace(trainable=dict(params))
    module = model.module()
    adapted = {p: m for p, m in _named(module, Adapted) if not re.search(r"\.base(\.|$)", p)}
    for path, site in adapted.items():
        replace_module(module, path, site.merged())
    # Parameters that a method only marked as trained, such as biases, become ordinary ones again.
    for _, owner in nnx.iter_modules(module):
        for name, value in list(vars(owner).items()):
            if isinstance(value, AdapterParam):
                setattr(owner, name, nnx.Param(value[...]))
    return _rebound(module, model, None)


def _rebound(module: nnx.Module, model: Model, method: Method | None) -> Model:
    return bind(
        module,
        head=model.head,
        forward=model.forward,
        name=model.name,
        config=model.config,
        tokenizer=model.tokenizer,
        labels=model.labels,
        dtype=model.dtype,
        method=method,
        splits=model.splits,
        recipe={} if method is None else model.recipe,  # merged weights have no recipe
    )


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
    module: nnx.Module,
    targets: Targets,
    kinds: type | tuple[type, ...],
    head: Sequence[str] = (),
) -> dict[str, Any]:
    """Returns the submodules that a target rule names: path -> submodule.

    As in Hugging Face PEFT, submodules of the head are left out.

    Args:
      module: where to look.
      targets: the rule, see :data:`Targets`.
      kinds: only submodules of these types.
      head: module paths of the head.

    Raises:
      InputError: there is no rule, or it matches nothing; the closest names are listed.
    """
    inside = tuple(f"{path}." for path in head)
    candidates = {p: m for p, m in _named(module, kinds) if not f"{p}.".startswith(inside)}
    if not targets:
        raise InputError(
            "No submodule to adapt is named, and this model has no default ones: pass"
            f" targets=[...]. {nearest('', _suffixes(candidates))}"
        )
    found: dict[str, Any] = {}
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


def submodule(module: nnx.Module, path: str) -> Any:
    """Returns the submodule at a dotted path (``module`` itself if the path is empty)."""
    found: Any = module
    for part in path.split(".") if path else ():
        found = found[int(part)] if part.isdigit() else getattr(found, part)
    return found


def replace_module(module: nnx.Module, path: str, new: nnx.Module) -> None:
    """Puts ``new`` at a dotted path of ``module``."""
    parent, _, last = path.rpartition(".")
    owner = submodule(module, parent)
    if last.isdigit():
        owner[int(last)] = new
    else:
        setattr(owner, last, new)


def _named(module: nnx.Module, kinds: type | tuple[type, ...]) -> Iterator[tuple[str, Any]]:
    for path, submodule in nnx.iter_modules(module):
        if isinstance(submodule, kinds) and path:
            yield ".".join(map(str, path)), submodule


def _suffixes(paths: Mapping[str, Any]) -> list[str]:
    return sorted({p.rpartition(".")[2] for p in paths} | set(paths))
