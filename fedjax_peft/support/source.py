"""Names and descriptions, read from the package's source without importing it.

Importing a room takes a second or more, because it needs JAX and perhaps Flax. A command that only
prints names reads them here instead, from the same lines that Python would execute.
"""

import ast
import contextlib
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

Place = tuple[str, ast.AST]
"""(module, statement): where something is defined. For a module, the statement is its tree."""


def find(module: str, name: str) -> Place:
    """Returns the place where a name of a module is defined, following imports.

    Raises:
      LookupError: the module has no such name, or is none of this package.
    """
    for statement in _tree(module).body:
        if name not in _bound(statement):
            continue
        if not isinstance(statement, ast.ImportFrom):
            return module, statement
        origin = next(a.name for a in statement.names if name == (a.asname or a.name))
        if statement.module != module:
            return find(str(statement.module), origin)
    submodule = f"{module}.{name}"
    if _path(submodule) is None:
        raise LookupError(f"The module {module} has no name {name!r}.")
    return submodule, _tree(submodule)


class FirstLines(Mapping[str, str]):
    """The names in a module's ``__all__`` -> the first lines of their docstrings."""

    def __init__(self, module: str):
        self._module, self._names = module, strings(find(module, "__all__"))

    def __getitem__(self, name: str) -> str:
        if name not in self._names:
            raise KeyError(name)
        _, node = find(self._module, name)
        assert isinstance(node, ast.FunctionDef | ast.ClassDef), name
        return (ast.get_docstring(node) or "").split("\n")[0]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def keys(module: str, name: str) -> Mapping[str, Place]:
    """Returns the keys of a dict that a module displays -> the places of the names in its values.

    A value such as ``bert.FAMILY`` is found in the module ``bert``; one that is no name has the
    place of the dict.
    """
    place = find(module, name)
    display = getattr(place[1], "value", None)
    assert isinstance(display, ast.Dict), f"{module}.{name} is no display of a dict"
    return {
        str(ast.literal_eval(key)): _place_of(value, place)
        for key, value in zip(display.keys, display.values, strict=True)
        if key is not None
    }


def strings(place: Place) -> list[str]:
    """Returns all texts in a statement, in their order."""
    texts = (node.value for node in ast.walk(place[1]) if isinstance(node, ast.Constant))
    return [text for text in texts if isinstance(text, str)]


def called(place: Place) -> Iterator[Place]:
    """Yields the places of the package's functions that a statement calls by their names."""
    for node in ast.walk(place[1]):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            with contextlib.suppress(LookupError):
                yield find(place[0], node.func.id)


def _place_of(value: ast.expr, place: Place) -> Place:
    match value:
        case ast.Name(id=name):
            return find(place[0], name)
        case ast.Attribute(value=ast.Name(id=owner), attr=name):
            return find(find(place[0], owner)[0], name)
    return place


def _bound(statement: ast.stmt) -> Iterator[str]:
    """Yields the names that a statement defines."""
    match statement:
        case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
            yield name
        case ast.Assign(targets=targets):
            yield from (target.id for target in targets if isinstance(target, ast.Name))
        case ast.AnnAssign(target=ast.Name(id=name)):
            yield name
        case ast.ImportFrom(names=names):
            yield from (alias.asname or alias.name for alias in names)


@cache
def _tree(module: str) -> ast.Module:
    path = _path(module)
    if path is None:
        raise LookupError(f"{module} is no module of this package.")
    return ast.parse(path.read_text(encoding="utf-8"))


def _path(module: str) -> Path | None:
    """Returns the file of a module of this package; importing its packages would be slow."""
    root = Path(__file__).parents[2]
    found = root.joinpath(*module.split("."))
    choices = (found.with_suffix(".py"), found / "__init__.py")
    return next((path for path in choices if path.is_file()), None)
