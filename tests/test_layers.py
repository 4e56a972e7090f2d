"""Which module may import what: read from the source, and seen in a fresh process."""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import fedjax_peft

ROOT = Path(fedjax_peft.__file__).parent
LAYERS = [
    {"typing", "errors", "files", "display", "nested"},
    {
        "tree",
        "random",
        "linalg",
        "memory",
        "precision",
        "assets",
        "dual_modes",
        "hub",
        "rows",
        "fields",
    },
    {"models", "peft", "data", "tasks", "aggregators", "measures"},
    {"algorithms"},
    {"engine", "inference", "report"},
    {"simulation"},
    {"config"},
    {"loading"},
    {"cli"},
    {"testing"},
]
"""A module imports from its own layer or from those above it in this list; nobody imports from the
package itself, whose names are for users."""


class Import(NamedTuple):
    module: str
    imported: str
    lazy: bool
    """Inside a function: it costs nothing until that is called."""


def statements(node: ast.AST, lazy: bool = False) -> Iterator[tuple[ast.stmt, bool]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child, lazy
        elif not (isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)):
            inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from statements(child, lazy or inside)


def read_imports() -> list[Import]:
    found = []
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        module = ".".join(p for p in parts if p != "__init__")
        for statement, lazy in statements(ast.parse(path.read_text())):
            if isinstance(statement, ast.Import):
                names = [alias.name for alias in statement.names]
            else:
                assert statement.level == 0, f"{module} has a relative import"
                names = [f"{statement.module}.{alias.name}" for alias in statement.names]
            found += [Import(module, name, lazy) for name in names]
    return found


IMPORTS = read_imports()


def importers(package: str) -> list[Import]:
    return [i for i in IMPORTS if i.imported.split(".")[0] == package]


def layer(module: str) -> int:
    top = module.split(".")[0]
    return next((n for n, names in enumerate(LAYERS) if top in names), len(LAYERS))


def test_every_module_was_read():
    assert len(IMPORTS) > 200
    modules = {i.module for i in IMPORTS}
    assert {"engine.round", "simulation.simulate", "models.hub", "tree"} <= modules


def test_layers_import_one_way():
    wrong = []
    for i in importers("fedjax_peft"):
        imported = i.imported.removeprefix("fedjax_peft.")
        if imported != "__version__" and layer(imported) > layer(i.module):
            wrong.append(f"{i.module} imports {i.imported}")
    assert wrong == []


def test_the_core_sees_plain_trees_and_functions():
    core = {
        "typing",
        "errors",
        "tree",
        "random",
        "linalg",
        "algorithms",
        "aggregators",
        "engine",
        "measures",
    }
    outside = {i.imported.split(".")[0] for i in IMPORTS if i.module.split(".")[0] in core}
    assert outside - sys.stdlib_module_names <= {"fedjax_peft", "jax", "numpy", "optax"}


@pytest.mark.parametrize(
    ("package", "homes", "lazy"),
    [
        ("transformers", ("models.hub", "data."), True),
        ("datasets", ("data.",), True),
        ("matplotlib", ("report.",), True),
        ("tensorboardX", ("simulation.",), True),
        ("pydantic", ("config.",), False),
        ("rich", ("report.", "cli."), False),
        ("orbax", ("simulation.",), False),
        ("flax", ("models.", "peft."), False),
        ("torch", (), True),
        ("pickle", (), True),
    ],
)
def test_heavy_packages_stay_at_the_rim(package, homes, lazy):
    found = importers(package)
    assert [i for i in found if not i.module.startswith(homes or "nowhere")] == []
    if lazy:
        assert [i for i in found if not i.lazy] == []


def test_what_is_really_loaded():
    script = """
import json, sys
def loaded(names):
    return [n for n in names.split() if n in sys.modules]
import fedjax_peft
package = loaded("jax flax optax transformers datasets matplotlib orbax pydantic rich torch")
import fedjax_peft.engine.program, fedjax_peft.engine.schedule, fedjax_peft.algorithms
engine = loaded("flax transformers datasets matplotlib orbax pydantic rich torch")
import fedjax_peft.simulation.simulate
loop = loaded("transformers datasets matplotlib torch pydantic")
print(json.dumps({"package": package, "engine": engine, "loop": loop}))
"""
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert json.loads(done.stdout) == {"package": [], "engine": [], "loop": []}


def test_the_engine_imports_no_algorithm():
    engine = [i for i in IMPORTS if i.module.split(".")[0] == "engine"]
    inner = ("fedjax_peft.algorithms", "fedjax_peft.aggregators", "fedjax_peft.measures")
    assert [i for i in engine if i.imported.startswith(inner)] == []
