"""Submodules by their dotted paths."""

from collections.abc import Iterator, Sequence
from typing import Any

from flax import nnx

Path = tuple[Any, ...]
"""As flax has it: attribute names and list indices."""


def dotted(path: Path) -> str:
    """Returns the name of a path."""
    return ".".join(map(str, path))


def submodules(
    module: nnx.Module, kinds: type | tuple[type, ...] = nnx.Module
) -> Iterator[tuple[str, Any]]:
    """Yields (dotted path, module) of every module of these types; a module's own path is empty."""
    for path, found in nnx.iter_modules(module):
        if isinstance(found, kinds):
            yield dotted(path), found


def leaves(module: nnx.Module, kind: type = nnx.Param) -> dict[str, Any]:
    """Returns the variables of a type, by leaf name."""
    return {dotted(path): x for path, x in nnx.to_flat_state(nnx.state(module, kind))}


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


def is_inside(path: str, modules: Sequence[str]) -> bool:
    """Returns whether a leaf or a module (dotted path) is one of the modules or inside one."""
    return f"{path}.".startswith(tuple(f"{module}." for module in modules))
