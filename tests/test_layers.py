"""What importing loads and sets, and where; import-linter holds the rules between rooms."""

import ast
import functools
import graphlib
import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import grimp
import pytest

import fedjax_peft
from fedjax_peft.support.rooms import above

ROOT = Path(fedjax_peft.__file__).parent


class Import(NamedTuple):
    module: str
    imported: str
    lazy: bool
    """Inside a function: it costs nothing until that is called."""


def statements(node: ast.AST, *, lazy: bool = False) -> Iterator[tuple[ast.stmt, bool]]:
    """Yields (import statement, lazy), without those for type checkers."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child, lazy
            continue
        for_types = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
        if not for_types:
            inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from statements(child, lazy=lazy or inside)


def read_modules() -> dict[str, Path]:
    """Returns the files by module name; a package name stands for its ``__init__.py``."""
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(p for p in parts if p != "__init__")] = path
    return found


@functools.cache
def imports() -> tuple[Import, ...]:
    """Returns all imports of the package."""
    found: list[Import] = []
    for module, path in read_modules().items():
        for statement, lazy in statements(ast.parse(path.read_text())):
            if isinstance(statement, ast.Import):
                names = [alias.name for alias in statement.names]
            else:
                assert statement.level == 0, f"{module} has a relative import"
                names = [f"{statement.module}.{alias.name}" for alias in statement.names]
            found += [Import(module, name, lazy) for name in names]
    return tuple(found)


def importers(package: str) -> list[Import]:
    return [i for i in imports() if i.imported.split(".")[0] == package]


def test_every_module_was_read():
    assert len(imports()) > 200
    modules = {i.module for i in imports()}
    assert {"engine.round", "simulation.simulate", "models.hub", "numerics.tree"} <= modules


def test_no_file_imports_itself_in_a_circle():
    """Also by imports in functions, and by those for type checkers."""
    graph = grimp.build_graph("fedjax_peft")
    found = {name: graph.find_modules_directly_imported_by(name) for name in graph.modules}
    graphlib.TopologicalSorter(found).prepare()  # raises CycleError, which names a circle


def test_only_methods_of_a_run_call_rooms_above():
    """import-linter does not see calls by name, so here they all are."""
    calls = {
        (module, name)
        for module, path in read_modules().items()
        for name in re.findall(r"above\(\"(.+?)\"\)", path.read_text())
    }
    names = {"report.plots.plot", "report.hub.write_run", "report.hub.push_run"}
    assert calls == {("simulation.run", name) for name in names}
    assert all(callable(above(name)) for name in names)


def test_the_engine_is_made_of_small_functions():
    """At most eight parameters, 60 lines and, in a file, 450 lines."""
    for path in (ROOT / "engine").rglob("*.py"):
        text = path.read_text()
        assert len(text.splitlines()) <= 450, path.name
        functions = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef)]
        for function in functions:
            given = function.args
            count = len(given.posonlyargs + given.args + given.kwonlyargs)
            body = function.body[1:] if ast.get_docstring(function) else function.body
            lines = function.end_lineno - (body[0].lineno if body else function.end_lineno)
            assert count <= 8, f"{path.name}: {function.name} has {count} parameters"
            assert lines < 60, f"{path.name}: {function.name} has {lines} lines"


@pytest.mark.parametrize(
    ("package", "homes", "lazy"),
    [
        ("transformers", ("models.hub", "models.gguf", "data."), True),
        ("datasets", ("data.",), True),
        ("matplotlib", ("report.",), True),
        ("tensorboardX", ("simulation.trackers.",), True),
        ("mlflow", ("simulation.trackers.",), True),
        ("wandb", ("simulation.trackers.",), True),
        ("optuna", ("report.tune",), True),
        ("pydantic", ("config.",), False),
        ("rich", ("report.", "cli."), False),
        ("orbax", ("simulation.storage.",), False),
        ("flax", ("models.", "peft."), False),
        ("torch", (), True),
        ("pickle", ("report.executors",), True),  # messages to own workers, and no files
    ],
)
def test_heavy_packages_stay_at_the_rim(package, homes, lazy):
    found = importers(package)
    assert [i for i in found if not i.module.startswith(homes or "nowhere")] == []
    if lazy:
        assert [i for i in found if not i.lazy] == []


IMPORTS = """
import json, logging, os, sys
def loaded(names):
    return [n for n in names.split() if n in sys.modules]
import fedjax_peft
package = loaded("jax flax optax transformers datasets matplotlib orbax pydantic rich torch")
import fedjax_peft.tasks.sources
reading = loaded("optax flax transformers datasets sklearn seqeval")
import fedjax_peft.engine.program, fedjax_peft.engine.schedule, fedjax_peft.algorithms
engine = loaded("flax transformers datasets matplotlib orbax pydantic rich torch")
import fedjax_peft.simulation.simulate
loop = loaded("transformers datasets matplotlib torch pydantic")
seen = {"loaded": [package, reading, engine, loop]}

from threadpoolctl import threadpool_info
import fedjax_peft.simulation.storage.checkpoint, fedjax_peft.models.hub
from fedjax_peft.numerics import linalg
import jax
seen["imported"] = os.environ.get("OPENBLAS_NUM_THREADS")
seen["absl"] = logging.getLogger("absl").level
jax.jit(linalg.svd)(jax.numpy.eye(3))
seen["used"] = os.environ.get("OPENBLAS_NUM_THREADS")
seen["scipy"] = [x["num_threads"] for x in threadpool_info() if "scipy.libs" in x["filepath"]]
print(json.dumps(seen))
"""


@pytest.fixture(scope="module")
def seen():
    """What a new process saw that imported one part of the package after the other."""
    environment = {k: v for k, v in os.environ.items() if k != "OPENBLAS_NUM_THREADS"}
    command = [sys.executable, "-c", IMPORTS]
    options = {"capture_output": True, "text": True, "timeout": 120, "check": True}
    return json.loads(subprocess.run(command, env=environment, **options).stdout)


def test_modules_loaded_in_a_new_process(seen):
    assert seen["loaded"] == [[], [], [], []]


def test_imports_set_no_variable_and_the_first_decomposition_limits_openblas(seen):
    assert (seen["imported"], seen["absl"]) == (None, logging.NOTSET)
    assert seen["used"] == "1"
    assert all(threads == 1 for threads in seen["scipy"])
