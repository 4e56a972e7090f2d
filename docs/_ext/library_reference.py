"""What the reference pages take from the package, so that they cannot differ from it.

``.. public-names:: MODULE`` documents every name in ``MODULE.__all__``. ``.. config-keys::`` lists
the keys of a config, read off the signatures that a config calls. Short examples come from
``reference/examples.py``.

A public name without a docstring, a public name that no page documents, and a reference to a name
that does not exist are warnings, which ``make docs`` turns into errors.
"""

import ast
import functools
import importlib
import importlib.util
import inspect
import pkgutil
import re
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.pycode import ModuleAnalyzer
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective
from sphinx.util.nodes import make_refnode

PACKAGE = "fedjax_peft"
logger = logging.getLogger(__name__)


def public_modules() -> list[str]:
    """Returns the modules of the public API: the package, and the modules in its ``__all__``."""
    package = importlib.import_module(PACKAGE)
    found = [getattr(package, name) for name in package.__all__]
    return [PACKAGE, *(x.__name__ for x in found if isinstance(x, types.ModuleType))]


def public_names(module: Any) -> list[str]:
    """Returns the names in ``__all__`` that are no modules.

    Where there is no ``__all__``: the classes and functions that the module defines, and the
    variables with a docstring below them.
    """
    names = getattr(module, "__all__", None)
    if names is None:
        below = {name for _, name in ModuleAnalyzer.for_module(module.__name__).find_attr_docs()}
        names = [
            name
            for name, value in vars(module).items()
            if not name.startswith("_")
            and (name in below or getattr(value, "__module__", None) == module.__name__)
        ]
    return [name for name in names if not isinstance(getattr(module, name), types.ModuleType)]


def undocumented(module: Any) -> Iterator[str]:
    """Yields the public names of a module, and methods of its classes, that have no docstring."""
    for name in public_names(module):
        value = getattr(module, name)
        dotted = f"{module.__name__}.{name}"
        if not inspect.isclass(value) and not inspect.isfunction(value):
            if not _below(module, name):
                yield dotted
            continue
        if not (value.__doc__ or "").strip():
            yield dotted
        if inspect.isclass(value):
            yield from (f"{dotted}.{method}" for method in _undocumented_methods(value))


def _undocumented_methods(owner: type) -> Iterator[str]:
    for name, value in vars(owner).items():
        function = getattr(value, "__func__", getattr(value, "fget", value))
        if name.startswith("_") or not inspect.isfunction(function):
            continue
        if not (function.__doc__ or "").strip():
            yield name


def _below(module: Any, name: str) -> str | None:
    """Returns the module in which a docstring stands below a variable; None: there is none."""
    inside = [m for m in vars(module).values() if isinstance(m, types.ModuleType)]
    if hasattr(module, "__path__"):
        inside += [
            importlib.import_module(f"{module.__name__}.{info.name}")
            for info in pkgutil.iter_modules(module.__path__)
        ]
    for place in (module, *inside):
        if place.__name__.startswith(PACKAGE) and hasattr(place, name):
            documented = ModuleAnalyzer.for_module(place.__name__).find_attr_docs()
            if ("", name) in documented:
                return place.__name__
    return None


def documented_name(module: Any, name: str) -> str:
    """Returns the dotted name under which the reference has a public name.

    A variable is documented where its docstring stands, everything else where it is public.
    """
    value = getattr(module, name)
    plain = inspect.isclass(value) or inspect.isfunction(value)
    place = None if plain else _below(module, name)
    return f"{place or module.__name__}.{name}"


EXAMPLES = Path(__file__).parents[1] / "reference" / "examples.py"


@functools.cache
def examples() -> dict[str, str]:
    """Returns the short examples of the reference: public name, such as ``fp.lora`` -> lines."""
    parts = re.split(r"^# (fp\.[\w.]+)\n", EXAMPLES.read_text(), flags=re.MULTILINE)[1:]
    return {name: lines.strip() for name, lines in zip(parts[::2], parts[1::2], strict=True)}


def short_name(dotted: str) -> str:
    """Returns the name by which users reach a public name: ``fp.lora``, ``fp.peft.ia3``."""
    module, _, name = dotted.rpartition(".")
    return f"fp.{name}" if module == PACKAGE else f"fp.{module.rpartition('.')[2]}.{name}"


@functools.cache
def short_names() -> dict[str, str]:
    """Returns dotted name in the reference -> short name, for all public names."""
    modules = map(importlib.import_module, public_modules())
    return {
        documented_name(module, name): short_name(f"{module.__name__}.{name}")
        for module in modules
        for name in public_names(module)
    }


def add_example(
    app: Sphinx, what: str, name: str, value: Any, options: Any, lines: list[str]
) -> None:
    """Adds the example of a name below the first line of its docstring, where there is one."""
    example = examples().get(short_names().get(name, short_name(name)))
    if example:
        first = lines.index("") + 1 if "" in lines else len(lines)
        block = [".. code-block:: python", "", *(f"   {x}" for x in example.splitlines()), ""]
        lines[first:first] = block if first < len(lines) else ["", *block]


class PublicNames(SphinxDirective):
    """``.. public-names:: MODULE``: the documentation of every public name of a module."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Returns the parsed ``auto...`` directives."""
        module = importlib.import_module(self.arguments[0])
        place = self.get_location()
        for name in undocumented(module):
            logger.warning("the public name %s has no docstring", name, location=place)
        lines = []
        for name in public_names(module):
            value = getattr(module, name)
            kind = "data"
            if inspect.isclass(value):
                kind = "exception" if issubclass(value, Exception) else "class"
            elif inspect.isfunction(value):
                kind = "function"
            lines += [f".. auto{kind}:: {documented_name(module, name)}", ""]
        return self.parse_text_to_nodes("\n".join(lines))


def check_complete(app: Sphinx, env: BuildEnvironment) -> None:
    """Warns of public names that no page documents."""
    documented = env.get_domain("py").data["objects"]
    for module in map(importlib.import_module, public_modules()):
        for name in public_names(module):
            if documented_name(module, name) not in documented:
                logger.warning("no page documents the public name %s.%s", module.__name__, name)


def resolve(
    app: Sphinx, env: BuildEnvironment, node: pending_xref, content: nodes.TextElement
) -> nodes.Node | None:
    """Returns a link to a name under which an object is documented, or plain text.

    Docstrings name an object by where it is defined, or by its last name. What the reference does
    not document, such as another library's class, becomes plain text if it exists.
    """
    if node.get("refdomain") != "py":
        return None
    target = node["reftarget"]
    documented = env.get_domain("py").data["objects"]
    last = target.rpartition(".")[2]
    same = [name for name in documented if name.rpartition(".")[2] == last]
    if "." in target and not any(name.endswith(f".{target}") for name in same):
        found = _find(target)
        same = [name for name in same if found is not None and _find(name) is found]
    if same:
        page = documented[min(same, key=len)]
        return make_refnode(
            app.builder, node["refdoc"], page.docname, page.node_id, content, target
        )
    return content if _exists(target) else None


@functools.cache
def _find(dotted: str) -> Any:
    """Returns the object of a dotted name; None if there is none."""
    parts = dotted.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:cut]))
            for part in parts[cut:]:
                found = getattr(found, part)
        except (ImportError, AttributeError):
            continue
        return found
    return None


@functools.cache
def _modules() -> list[types.ModuleType]:
    """Returns all modules of the package."""
    found = pkgutil.walk_packages(importlib.import_module(PACKAGE).__path__, f"{PACKAGE}.")
    return [importlib.import_module(info.name) for info in found]


@functools.cache
def _exists(name: str) -> bool:
    """Returns whether a dotted name, or a last name somewhere in the package, exists."""
    top, dot, _ = name.partition(".")
    if dot and top != PACKAGE and importlib.util.find_spec(top) is not None:
        return True  # another library's, which may name it otherwise than by where it is
    if dot:
        return _find(name) is not None or _find(f"{PACKAGE}.{name}") is not None
    return any(hasattr(module, name) for module in _modules())


class ConfigKeys(SphinxDirective):
    """``.. config-keys::``: the tables of a config and their keys, each with its meaning."""

    def run(self) -> list[nodes.Node]:
        """Returns a section for each table, with a table of its keys."""
        from fedjax_peft.cli import explain
        from fedjax_peft.config import config
        from fedjax_peft.contracts.arguments import in_words

        rows: dict[str, dict[tuple[str, ...], list[str]]] = {}
        for key in config.all_keys():
            meaning = explain.meaning(key)
            if not meaning:
                place = self.get_location()
                logger.warning("the config key %s has no meaning", key.dotted, location=place)
            kind, default = in_words(key.kind), explain.default_text(key)
            owners = rows.setdefault(key.table, {})
            row = (f"``{key.name}``", kind, default, meaning)
            owners.setdefault(row, []).extend(key.functions)
        sections = []
        for table, found in rows.items():
            named = table in config.NAMESPACES
            header = ["key", *(["of"] if named else []), "type", "default", "meaning"]
            cells = [
                [row[0], *([", ".join(owners)] if named else []), *row[1:]]
                for row, owners in found.items()
            ]
            title = f"[{table}]" if table else "Top level"
            text = {"": "arguments of simulate, and the run's own keys", **explain.TABLES}.get(
                table
            )
            if text is None:
                logger.warning("cli.explain.TABLES does not say what [%s] is for", table)
                text = "of this table"
            sections.append(_section(title, f"{text[0].upper()}{text[1:]}.", _table(header, cells)))
        return sections


def _section(title: str, text: str, content: nodes.Node) -> nodes.section:
    section = nodes.section(ids=[nodes.make_id(f"table-{title}")])
    section += [nodes.title(text=title), nodes.paragraph(text=text), content]
    return section


def _table(header: list[str], rows: list[list[str]]) -> nodes.table:
    """Returns a table of plain texts, in which double backquotes mark code."""
    group = nodes.tgroup(cols=len(header))
    group += [nodes.colspec(colwidth=1) for _ in header]
    head, body = nodes.thead(), nodes.tbody()
    head += _row(header)
    body += [_row(row) for row in rows]
    group += [head, body]
    table = nodes.table()
    table += group
    return table


def _row(cells: list[str]) -> nodes.row:
    row = nodes.row()
    for cell in cells:
        paragraph = nodes.paragraph()
        for i, part in enumerate(cell.split("``")):
            paragraph += nodes.literal(text=part) if i % 2 else nodes.Text(part)
        entry = nodes.entry()
        entry += paragraph
        row += entry
    return row


_DEFAULTS = {
    r"<factory>": "...",
    r"<function [^ ]*<lambda>[^>]*>": "...",
    r"<function (?:\w+\.)*(\w+)(?: at \w+)?>": r"\1",
    r"<class '(?:\w+\.)*(\w+)'>": r"\1",
}
"""What Python shows of a default value that is no literal -> its name."""


def readable(signature: str) -> str:
    """Returns a signature with plain types, whose defaults are names, so that Sphinx can read it.

    Of one that it cannot read, Sphinx prints the text as it is, with types by their whole paths.

    Raises:
      SyntaxError: it is no signature in Python.
    """
    for shown, name in _DEFAULTS.items():
        signature = re.sub(shown, name, signature)
    tree = _WithoutRanges().visit(ast.parse(f"def f{signature}: ..."))
    return ast.unparse(tree).removeprefix("def f").removesuffix(":\n    ...")


class _WithoutRanges(ast.NodeTransformer):
    """Replaces ``~typing.Annotated[float, ...]`` by ``float``; the ranges stand in the text."""

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        self.generic_visit(node)
        match node.operand:
            case ast.Subscript(ast.Attribute(attr="Annotated"), ast.Tuple([plain, *_])):
                return plain
        return node


def process_signature(
    app: Sphinx, what: str, name: str, value: Any, options: Any, signature: str | None, result: Any
) -> tuple[str | None, Any]:
    """Returns the readable signature and the type of the result; warns of one that is not."""
    if signature:
        try:
            signature = readable(signature)
        except SyntaxError:
            logger.warning("the signature of %s cannot be read: %s", name, signature)
    return signature, result


def add_ranges(
    app: Sphinx, what: str, name: str, value: Any, options: Any, lines: list[str]
) -> None:
    """Writes the range of an argument in front of its description."""
    for argument, words in _ranges(value).items():
        for i, line in enumerate(lines):
            lines[i] = line.replace(f":param {argument}: ", f":param {argument}: *{words}*: ")


def _ranges(function: Any) -> dict[str, str]:
    """Returns argument -> its type with its range in words, for types that have one."""
    from fedjax_peft.contracts.arguments import in_words, kinds_of

    kinds = kinds_of(function) if inspect.isfunction(function) else {}
    return {name: in_words(kind) for name, kind in kinds.items() if "Annotated[" in repr(kind)}


class Verbatim:
    """Keeps attributes from Napoleon, which takes the first colon of their text for a type."""

    def __init__(self, app: Sphinx):
        """Stands before and behind Napoleon, whose priority is 500."""
        self._lines: list[str] = []
        app.connect("autodoc-process-docstring", self._save, priority=400)
        app.connect("autodoc-process-docstring", self._restore, priority=600)

    def _save(self, app: Sphinx, what: str, *rest: Any) -> None:
        self._lines = [*rest[-1]]

    def _restore(self, app: Sphinx, what: str, *rest: Any) -> None:
        if what in ("attribute", "data", "property"):
            rest[-1][:] = self._lines


def setup(app: Sphinx) -> dict[str, bool]:
    """Registers the directives and the checks."""
    app.add_directive("public-names", PublicNames)
    app.add_directive("config-keys", ConfigKeys)
    app.connect("env-check-consistency", check_complete)
    app.connect("missing-reference", resolve)
    app.connect("autodoc-process-signature", process_signature)
    app.connect("autodoc-process-docstring", add_ranges, priority=650)  # after Napoleon
    app.connect("autodoc-process-docstring", add_example, priority=700)  # after Napoleon
    Verbatim(app)
    return {"parallel_read_safe": True}
