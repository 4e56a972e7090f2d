"""Bottleneck adapters in AdapterHub's file format, for ``load_adapter`` of ``adapters``.

A directory holds ``adapter_config.json`` and ``adapter.safetensors``, and for the head
``head_config.json`` and ``model_head.safetensors``. Pickle is never read.
"""

import functools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import nnx

from fedjax_peft.contracts import Key, Params
from fedjax_peft.models.base import Model
from fedjax_peft.models.checkpoint import read_json
from fedjax_peft.models.head_classes import in_order_of
from fedjax_peft.models.hub import origin
from fedjax_peft.models.layers import Residual
from fedjax_peft.models.modules import submodules
from fedjax_peft.models.registry import FAMILIES, class_name
from fedjax_peft.peft.base import Defaults, Method
from fedjax_peft.peft.bottleneck import (
    PLACEMENTS,
    AdaptedResidual,
    Bottleneck,
    Placement,
    bottleneck,
    houlsby,
    pfeiffer,
    reduction_factor,
)
from fedjax_peft.peft.io.files import (
    Tensors,
    Values,
    check_fits,
    fit_head,
    head_tensors,
    read_tensors,
    to_torch,
    write_json,
    write_tensors,
)
from fedjax_peft.support.errors import InputError, nearest


class _Names(NamedTuple):
    """The names of a model family's modules in ``adapters``."""

    layers: str
    """Path of the list of layers in ``adapters``."""
    places: Mapping[str, str]
    """Place -> path, inside a layer, of the module that holds its adapters."""
    layers_here: str = ""
    """Path of the list of layers in this library, if it differs."""


_INHERITED = {"attention": "attention.output", "feed_forward": "output"}
_OWN = {"attention": "attention_adapters", "feed_forward": "output_adapters"}
_VIT = {"attention": "attention_adapters", "feed_forward": "output.output_adapters"}
_NAMES = {
    "bert": _Names("bert.encoder.layer", _INHERITED),
    "roberta": _Names("roberta.encoder.layer", _INHERITED),
    "xlm-roberta": _Names("roberta.encoder.layer", _INHERITED),
    "deberta-v2": _Names("deberta.encoder.layer", _INHERITED),
    "distilbert": _Names("distilbert.transformer.layer", _OWN),
    "gpt2": _Names("transformer.h", _OWN),
    "llama": _Names("model.layers", _OWN),
    "mistral": _Names("model.layers", _OWN),
    "vit": _Names("vit.encoder.layer", _VIT, "vit.layers"),
}
"""By ``model_type``: the families that ``adapters`` has."""

_FIXED: dict[str, Any] = {
    "original_ln_after": True,
    "residual_before_ln": True,
    "ln_before": False,
    "ln_after": False,
    "is_parallel": False,
    "use_gating": False,
    "inv_adapter": None,
    "cross_adapter": False,
    "leave_out": [],
    "dropout": 0.0,
    "phm_layer": False,
    "stochastic_depth": 0.0,
}
"""Config fields that change the maths -> the only value that is implemented."""

_INERT: dict[str, Any] = {
    "init_weights_seed": None,
    "adapter_residual_before_ln": False,
    "inv_adapter_reduction_factor": None,
    "phm_dim": 4,
    "factorized_phm_W": True,
    "shared_W_phm": False,
    "shared_phm_rule": True,
    "factorized_phm_rule": False,
    "phm_c_init": "normal",
    "phm_init_range": 0.0001,
    "learn_phm": True,
    "hypercomplex_nonlinearity": "glorot-uniform",
    "phm_rank": 1,
    "phm_bias": True,
}
"""Config fields that have no effect beside those values -> the default of ``adapters``."""

_USED: dict[str, tuple[type, ...]] = {
    "mh_adapter": (bool,),
    "output_adapter": (bool,),
    "original_ln_before": (bool,),
    "non_linearity": (str,),
    "reduction_factor": (int, float),
    "scaling": (int, float),
    "init_weights": (str,),
}
"""The config fields that determine a method, and their types."""

_VERSION = "adapters.1.3.0"
"""Version of the format. Files without a version use other names of activations."""
_CONVERT = "save_adapter in adapters does with use_safetensors=True"
_RENAMED = {"gelu": "gelu_new", "gelu_orig": "gelu"}
"""Activation in files without a version -> its name since then."""


# ---------------------------------------------------------------------------------------- writing


def export_adapterhub(
    model: Model,
    params: Params,
    directory: str | Path,
    *,
    name: str = "federated",
    base_model: str | None = None,
) -> Path:
    """Writes bottleneck adapters and the head as ``adapters`` does; returns the directory.

    :func:`fedjax_peft.peft.io.export.export` checks the method and the leaves.

    In torch, on the original checkpoint with a head of the same form:
    ``adapters.init(model)``, then
    ``model.load_adapter(directory, set_active=True, use_safetensors=True)``. All leaves of the
    head, BERT's pooler included, are in the head's file and are loaded with it.

    Args:
      model: what was trained, with :func:`houlsby`, :func:`pfeiffer` or :func:`bottleneck` in all
        residual slots of their places.
      base_model: recorded as the base model's hub id or path; by default where it came from.

    Raises:
      InputError: the format cannot hold the places, or the model's family.
    """
    if model.config.get("model_type") not in _NAMES:
        raise InputError(
            "AdapterHub's format needs the module names of a Hugging Face model, and this model's"
            f" family is not among them ({', '.join(_NAMES)})."
        )
    names = _NAMES[model.config["model_type"]]
    module = model.replace(trainable=dict(params)).module()
    sites = _check_places(module)
    tensors = {
        f"{_site(names, path, site)}.adapters.{name}.{theirs}": to_torch(variable[...], True)
        for path, site in sites.items()
        for variable, theirs in _leaves(site)
    }
    width = next(iter(sites.values())).base.width
    options = model.method.options
    metadata: dict[str, Any] = {
        "model_type": model.config["model_type"],
        "model_name": origin(model) if base_model is None else base_model,
        "model_class": class_name(model),
        "hidden_size": width,
        "version": _VERSION,
    }
    config = {
        **_FIXED,
        **_INERT,
        "mh_adapter": any(site.base.place == "attention" for site in sites.values()),
        "output_adapter": any(site.base.place == "feed_forward" for site in sites.values()),
        "original_ln_before": options["after_norm"],
        "non_linearity": options["activation"],
        "reduction_factor": options["reduction_factor"] or reduction_factor(width, options["size"]),
        "scaling": options["scaling"],
        # adapters draws initial values before it reads the file, so it must know their kind.
        "init_weights": "bert" if options["init"] == "opendelta" else options["init"],
    }
    target = Path(directory)
    target.mkdir(parents=True, exist_ok=True)
    write_tensors(target / "adapter.safetensors", tensors)
    write_json(target / "adapter_config.json", {**metadata, "name": name, "config": config})
    if held := head_tensors(model, params):
        write_tensors(target / "model_head.safetensors", held)
        labels = {label: i for i, label in enumerate(model.labels)}
        extra = {"name": None, "config": None, "label2id": labels, "num_labels": len(labels)}
        write_json(target / "head_config.json", {**metadata, **extra})
    return target


def _check_places(module: nnx.Module) -> dict[str, AdaptedResidual]:
    """Returns the adapted slots by path, or raises if the format cannot hold them."""
    adapted = dict(submodules(module, AdaptedResidual))
    places = {site.base.place for site in adapted.values()}
    slots = {
        path.removesuffix(".base")
        for path, slot in submodules(module, Residual)
        if slot.place in places
    }
    adapters = {path.removesuffix(".adapter") for path, _ in submodules(module, Bottleneck)}
    if odd := sorted(slots ^ adapters):
        raise InputError(
            "AdapterHub's format has adapters in all layers, after attention, after feed-forward or"
            f" both; here {odd[0]!r} {'has none' if odd[0] in slots else 'has one'}"
            f" ({len(odd)} differences in all)."
        )
    return adapted


# ---------------------------------------------------------------------------------------- reading


def load_adapterhub(directory: str | Path) -> Method:
    """Returns the method of a directory in AdapterHub's format; attaching it sets the values.

    It has the name and the options of the method in the file, such as ``houlsby``, so an adapted
    model can be trained further and exported again.

    Args:
      directory: with ``adapter_config.json`` and ``adapter.safetensors``, and perhaps a head.

    Raises:
      InputError: files are missing, damaged, pickle or of another format; or a config field changes
        the maths in a way that is not implemented. When it is attached: the adapters or the head do
        not fit the model (all mismatches are in one message).
    """
    directory = Path(directory)
    metadata = read_json(directory / "adapter_config.json")
    kind = str(metadata.get("model_type"))
    if kind not in _NAMES:
        raise InputError(
            f"The adapter in {directory} is for the model type {kind!r}, which is not supported."
            f" {nearest(kind, _NAMES)}"
        )
    inner = _method(directory, metadata)
    tensors = read_tensors(directory / "adapter.safetensors", "pytorch_adapter.bin", _CONVERT)
    held: Tensors = {}
    names: list[str] = []
    if (directory / "head_config.json").exists():
        numbers = read_json(directory / "head_config.json").get("label2id")
        if isinstance(numbers, dict) and all(type(i) is int for i in numbers.values()):
            names = sorted(numbers, key=numbers.__getitem__)
        held = read_tensors(
            directory / "model_head.safetensors", "pytorch_model_head.bin", _CONVERT
        )

    def attach(module: nnx.Module, defaults: Defaults, key: Key, head: Sequence[str]) -> nnx.Module:
        inner.attach(module, defaults, key, head)
        found, problems = _fit(module, kind, str(metadata.get("name")), tensors)
        # A tied output layer is the base model's embedding table, which stays as it is.
        ignored = "|".join(FAMILIES[kind].ignored)
        own = {n: x for n, x in held.items() if not re.fullmatch(ignored, n)}
        more, wrong = fit_head(module, head, own)
        check_fits(f"The {kind} adapter in {directory}", problems + wrong)
        for variable, value in found + more:
            variable.set_value(jnp.asarray(value, variable.dtype))
        return module

    complete = functools.partial(in_order_of, where=str(directory), stored=names)
    return Method(inner.name, inner.options, attach, complete=complete)


def _method(directory: Path, metadata: Mapping[str, Any]) -> Method:
    """Returns the method of an ``adapter_config.json``, without values."""
    config = metadata.get("config")
    if not isinstance(config, dict):
        raise InputError(f"{directory}/adapter_config.json has no table 'config'.")
    for field, value in config.items():
        if field not in (*_FIXED, *_INERT, *_USED):
            raise InputError(
                f"The adapter in {directory} has {field} = {value!r}, which is not a field of a"
                f" bottleneck adapter. {nearest(field, [*_FIXED, *_USED])}"
            )
        if field in _FIXED and value != _FIXED[field]:
            raise InputError(
                f"The adapter in {directory} has {field} = {value!r}, which is not implemented"
                f" (only {_FIXED[field]!r} is)."
            )
    defaults = {"original_ln_before": False, "scaling": 1.0, "init_weights": "bert"}
    used: dict[str, Any] = {**defaults, **config}
    for field, types in _USED.items():
        if type(used.get(field)) not in types:
            raise InputError(
                f"The adapter in {directory} has {field} = {used.get(field)!r}, which is not"
                f" implemented (only a value of type {types[-1].__name__} is)."
            )
    activation = used["non_linearity"].lower()
    if "version" not in metadata:
        activation = _RENAMED.get(activation, activation)
    given = {"mh_adapter": "attention", "output_adapter": "feed_forward"}
    places = tuple(place for field, place in given.items() if used[field])
    placement = Placement(places, used["original_ln_before"])
    options = {
        "reduction_factor": used["reduction_factor"],
        "activation": activation,
        "scaling": used["scaling"],
        "init": used["init_weights"],
    }
    for name, make in (("houlsby", houlsby), ("pfeiffer", pfeiffer)):
        if placement == PLACEMENTS[name]:
            return make(**options)
    return bottleneck(**placement._asdict(), **options)


def _fit(
    module: nnx.Module, kind: str, name: str, tensors: Mapping[str, np.ndarray]
) -> tuple[Values, list[str]]:
    """Returns the adapters' variables with their values, and what does not fit."""
    names = _NAMES[kind]
    wanted: dict[str, nnx.Variable] = {}
    found: Values = []
    problems = []
    for path, site in submodules(module, AdaptedResidual):
        if path.startswith(f"{names.layers_here or names.layers}."):
            place = f"{_site(names, path, site)}.adapters.{name}"
            wanted |= {f"{place}.{theirs}": variable for variable, theirs in _leaves(site)}
        else:
            problems.append(f"{path} is not a place of a {kind} model")
    for tensor, variable in wanted.items():
        shape = variable.shape[::-1]
        if tensor not in tensors:
            problems.append(f"{tensor} {list(shape)} is missing")
        elif tensors[tensor].shape != shape:
            has = list(tensors[tensor].shape)
            problems.append(f"{tensor} is {has}, the model needs {list(shape)}")
        else:
            found.append((variable, tensors[tensor].T))
    strange = sorted(tensors.keys() - wanted.keys())
    problems += [f"{n} {list(tensors[n].shape)} has no place in the model" for n in strange]
    return found, problems


# ------------------------------------------------------------------------------------------ sites


def _leaves(site: AdaptedResidual) -> list[tuple[nnx.Variable, str]]:
    """Returns a site's variables and their names in ``adapters``."""
    down, up = site.adapter.down, site.adapter.up
    return [
        (down.kernel, "adapter_down.0.weight"),
        (down.bias, "adapter_down.0.bias"),
        (up.kernel, "adapter_up.weight"),
        (up.bias, "adapter_up.bias"),
    ]


def _site(names: _Names, path: str, site: AdaptedResidual) -> str:
    """Returns the path in ``adapters`` of the module that holds a site's adapters."""
    layer = next(part for part in path.split(".") if part.isdigit())
    return f"{names.layers}.{layer}.{names.places[site.base.place]}"
