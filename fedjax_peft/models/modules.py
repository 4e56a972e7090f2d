"""Submodules by their dotted paths."""

from typing import Any

from flax import nnx

__all__ = ["replace_module", "submodule"]


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
