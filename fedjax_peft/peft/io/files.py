"""The files of an adapter, safetensors and JSON, and their fit to a model. Pickle is never read."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import save

from fedjax_peft.contracts import Params
from fedjax_peft.models.base import Model
from fedjax_peft.models.checkpoint import Safetensors, only_pickle
from fedjax_peft.models.modules import is_inside, leaves, submodules
from fedjax_peft.models.names import first_of, source_name, unwrapped
from fedjax_peft.models.quantized import QuantizedKernel
from fedjax_peft.models.registry import FAMILIES
from fedjax_peft.support.errors import InputError
from fedjax_peft.support.files import replace_file

Format = Literal["peft", "adapterhub", "merged"]
FORMATS: tuple[Format, ...] = get_args(Format)
"""``peft``: for ``PeftModel.from_pretrained``; ``adapterhub``: for ``adapters`` and its
``load_adapter``; ``merged``: a plain checkpoint for ``AutoModelFor...``."""
LABELS = "labels.json"
"""The file with the names of the classes beside an adapter of Hugging Face PEFT."""
Tensors = dict[str, np.ndarray]
"""By the names in the file, in torch's order of axes."""


def to_torch(value: Any, transposed: bool = False) -> np.ndarray:
    """Returns an array as float32 in C order, transposed on request."""
    array = np.asarray(value, np.float32)
    return np.ascontiguousarray(array.T if transposed else array)


def head_tensors(model: Model, params: Params) -> Tensors:
    """Returns the trained leaves of the head."""
    family, tensors = FAMILIES[model.config["model_type"]], {}
    for leaf, kind in model.kinds.items():
        if kind == "head":
            theirs, transposed = source_name(leaf, family)
            tensors[theirs] = to_torch(params[leaf], transposed)
    return tensors


def write_tensors(path: Path, tensors: Tensors) -> None:
    """Writes a safetensors file as torch's libraries do."""
    replace_file(path, save(tensors, metadata={"format": "pt"}))


def write_json(path: Path, value: Any) -> None:
    """Writes indented JSON with sorted keys."""
    replace_file(path, (json.dumps(value, indent=2, sort_keys=True) + "\n").encode())


def read_tensors(path: Path, pickles: str, convert: str) -> Tensors:
    """Returns the tensors of a safetensors file in float32; names are without torch's wrappers.

    Args:
      pickles: pattern of the files that hold the same as pickle.
      convert: what writes safetensors instead, for the error message.
    """
    if not path.is_file():
        if found := sorted(p.name for p in path.parent.glob(pickles)):
            raise only_pickle(path.parent, found[0], convert)
        raise InputError(f"{path.parent} holds no {path.name}.")
    stored = Safetensors([path])
    names = unwrapped(stored.shapes, str(path))
    return {plain: np.asarray(stored.read(name, False)) for name, plain in names.items()}


# -------------------------------------------------------------------------------------------- fit


Values = list[tuple[nnx.Variable, np.ndarray]]
"""Variables of a module, and the arrays that they get."""


def fit_head(
    module: nnx.Module, head: Sequence[str], tensors: Mapping[str, np.ndarray]
) -> tuple[Values, list[str]]:
    """Returns the head's variables with their values, and what does not fit.

    The layers of a head are dense ones (or norms), whose kernels torch has transposed. A module of
    the head may be absent from the file, but not in part. Copies of the model's weights are
    left out.
    """
    modules = dict(submodules(module))
    tied = getattr(module, "tied", None)
    values: Values = []
    filled, problems = set(), []
    for name, x in tensors.items():
        stem, _, last = name.rpartition(".")
        path = resolved(stem.removesuffix(".base_layer"), modules)
        path = tied if path == "lm_head" and tied else path
        layer = modules.get(path)
        names = ("kernel", "scale", "embedding") if last == "weight" else (last,)
        leaf = next((n for n in names if hasattr(layer, n)), last)
        variable = getattr(layer, leaf, None)
        if not isinstance(variable, nnx.Variable | QuantizedKernel):
            problems.append(f"{name} {list(x.shape)} has no place in the model")
        elif not is_inside(path, head):
            problems += _difference(name, x, _held(layer, leaf))
        elif x.shape != variable.shape[::-1]:
            needs = list(variable.shape[::-1])
            problems.append(f"{name} is {list(x.shape)}, the model's head needs {needs}")
        elif isinstance(variable, nnx.Variable) and _difference(name, x, variable[...]):
            values.append((variable, x.T))
        filled.add(f"{path}.{leaf}")
    for part in head:
        needed = {leaf for leaf in leaves(module) if is_inside(leaf, (part,))}
        if needed & filled:
            problems += [f"a tensor for {leaf} is missing" for leaf in sorted(needed - filled)]
    return values, problems


def _held(layer: Any, leaf: str) -> Any:
    """Returns a frozen weight of a layer, as it was before it was quantised."""
    original = getattr(layer, "original", None) if leaf == "kernel" else None
    return getattr(layer, leaf)[...] if original is None else original()


def _difference(name: str, copy: np.ndarray, held: Any) -> list[str]:
    """Returns what is wrong with a tensor that should be a copy of a frozen weight.

    Either may have been rounded to a half type, and the copy transposed.
    """
    if sorted(copy.shape) != sorted(held.shape):
        return [f"{name} is {list(copy.shape)}, and that of the model is {list(held.shape[::-1])}"]
    if isinstance(held, jax.core.Tracer):  # a model of shapes
        return []
    weight = np.asarray(held, np.float32)
    with np.errstate(over="ignore"):
        narrow = [t for t in (jnp.bfloat16, np.float16) if (copy.astype(t) == copy).all()]
    types = [t for t in (held.dtype, *narrow[:1]) if t != np.float32]
    bound = sum(float(jnp.finfo(t).eps) / 2 for t in types) * (abs(weight) + 1e-4)
    if any(x.shape == weight.shape and (abs(x - weight) <= bound).all() for x in (copy, copy.T)):
        return []
    return [f"{name} was trained whole, and is not part of the model's head"]


_OUTER = re.compile(r"(?:base_model|model)\.")
"""Modules that peft, or a model around it, puts around a model."""


def resolved(name: str, modules: Iterable[str]) -> str:
    """Returns the path of a name in the file.

    Names of a bare encoder lack the prefix; others have those of modules around the model.
    """
    known, inner = set(modules), name
    while inner not in known and (outer := _OUTER.match(inner)):
        inner = inner[outer.end() :]
    ends = [path for path in known if path.endswith(f".{inner}")]
    return ends[0] if inner not in known and len(ends) == 1 else inner


def check_fits(what: str, problems: Sequence[str], remedy: str = "") -> None:
    """Raises InputError if there are problems, with their number and the first ones."""
    if problems:
        raise InputError(
            f"{what} does not fit this model ({len(problems)} mismatches):"
            f" {first_of(problems, 4)}.{remedy}"
        )
