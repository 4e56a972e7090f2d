"""Reading and writing the files of an adapter: safetensors and JSON. Pickle is never read."""

import json
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from fedjax_peft.contracts import Params
from fedjax_peft.models.base import Model
from fedjax_peft.models.checkpoint import broken, only_pickle, source_name
from fedjax_peft.models.registry import FAMILIES
from fedjax_peft.numerics.linalg import is_finite
from fedjax_peft.support.errors import InputError
from fedjax_peft.support.files import replace_file

Format = Literal["peft", "adapterhub", "merged"]
FORMATS: tuple[Format, ...] = get_args(Format)
"""``peft``: for ``PeftModel.from_pretrained``; ``adapterhub``: for ``adapters`` and its
``load_adapter``; ``merged``: a plain checkpoint for ``AutoModelFor...``."""
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
    """Returns the tensors of a safetensors file in float32.

    Args:
      pickles: pattern of the files that hold the same as pickle.
      convert: what writes safetensors instead, for the error message.

    Raises:
      InputError: there is no such file, it is damaged, it holds values that are not finite, or the
        weights are only there as pickle.
    """
    try:
        # framework="flax" reads bfloat16 too, which numpy does not have.
        with safe_open(path, framework="flax") as file:
            names = list(file.keys())
            tensors = {name: np.asarray(file.get_tensor(name), np.float32) for name in names}
    except FileNotFoundError:
        if found := sorted(p.name for p in path.parent.glob(pickles)):
            raise only_pickle(path.parent, found[0], convert) from None
        raise InputError(f"{path.parent} holds no {path.name}.") from None
    except (SafetensorError, OSError) as error:
        raise broken(path, error) from None
    if damaged := [name for name, x in tensors.items() if not is_finite(x)]:
        raise InputError(
            f"{path} holds values that are not finite (NaN or infinity) in {len(damaged)}"
            f" tensors, such as {damaged[0]!r}."
        )
    return tensors
