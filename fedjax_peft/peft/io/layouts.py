"""The tensors of Hugging Face PEFT's files that belong to one layer: their leaves and shapes."""

from collections.abc import Callable, Mapping, Sequence

from flax import nnx

from fedjax_peft.models.modules import submodules
from fedjax_peft.peft.base import Layout, Method
from fedjax_peft.peft.hira import LAYOUT as HIRA
from fedjax_peft.peft.hira import hira
from fedjax_peft.peft.io.files import Tensors, resolved
from fedjax_peft.peft.miss import LAYOUT as MISS
from fedjax_peft.peft.miss import miss
from fedjax_peft.peft.oft import LAYOUT as OFT
from fedjax_peft.peft.oft import oft
from fedjax_peft.peft.shira import LAYOUT as SHIRA
from fedjax_peft.peft.shira import shira
from fedjax_peft.peft.vera import LAYOUT as VERA
from fedjax_peft.peft.vera import vera

LAYOUTS: dict[str, tuple[Layout, Callable[..., Method]]] = {
    "hira": (HIRA, hira),
    "miss": (MISS, miss),
    "oft": (OFT, oft),
    "shira": (SHIRA, shira),
    "vera": (VERA, vera),
}
"""Name of a method -> its layout, and the function that makes it."""

TENSORS = {
    "lora_A.weight": ("lora_a", "r in"),
    "lora_B.weight": ("lora_b", "out r"),
    "lora_magnitude_vector": ("lora_magnitude", "out"),
    "ia3_l": ("ia3_l", "out 1"),  # or [1, in]
    **{kind: leaf for layout, _ in LAYOUTS.values() for kind, leaf in layout.tensors.items()},
}
"""The end of a tensor's name -> the leaf, which is its transpose, and its axes."""
SHARED = {kind for layout, _ in LAYOUTS.values() for kind in layout.shared}
"""Tensors of which each layer has a part."""


def fit_sites(module: nnx.Module, sites: Mapping[str, Tensors]) -> tuple[dict[str, str], list[str]]:
    """Returns the paths of the module's layers by the names of the sites, and what does not fit."""
    modules = dict(submodules(module))
    found: dict[str, str] = {}
    problems = []
    for name, tensors in sites.items():
        path = resolved(name, modules)
        layer = modules.get(path)
        if not isinstance(layer, nnx.Linear):
            tied = path == "lm_head" and getattr(module, "tied", None)
            why = f" (it is {tied}, as the model's config ties them)" if tied else ""
            problems.append(f"there is no linear layer {name}{why}")
            continue
        problems += _mismatches(name, tensors, layer.kernel.shape)
        found[name] = path
    return found, problems


def _mismatches(name: str, tensors: Tensors, shape: Sequence[int]) -> list[str]:
    """Returns what is wrong with the tensors of a layer.

    Args:
      name: the layer's, in the file.
      tensors: by kind, a key of ``TENSORS``.
      shape: of the layer's kernel, ``[in, out]``.
    """
    sizes, problems = {"in": shape[0], "out": shape[1]}, []
    for kind, x in tensors.items():
        axes = TENSORS[kind][1].split()
        if kind == "ia3_l" and x.shape[:1] == (1,):
            axes = ["1", "in"]
        if x.ndim == len(axes):  # an axis of a free size has that of the first tensor with it
            for axis, size in zip(axes, x.shape, strict=True):
                sizes.setdefault(axis, int(axis) if axis.isdigit() else size)
        needed = [sizes.get(axis, 0) for axis in axes]
        fits = x.ndim == len(axes) and all(
            n == m or (kind in SHARED and n > m) for n, m in zip(x.shape, needed, strict=True)
        )
        if not fits:
            problems.append(f"{name}.{kind} is {list(x.shape)}, the model needs {needed}")
        elif kind == "shira_indices" and (x.max(axis=1) >= (shape[1], shape[0])).any():
            problems.append(f"{name}.{kind} has places outside of the layer")
    return problems
