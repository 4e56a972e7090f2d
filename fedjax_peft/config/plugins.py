"""Functions of the user's own that a config names: ``module:function`` or ``file.py:function``.

A config that names one runs the code of that file, when it is read as well as when it is run.
"""

import hashlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from fedjax_peft.display import show
from fedjax_peft.errors import InputError, nearest

__all__ = ["is_own", "load_function", "located"]


def is_own(name: Any) -> bool:
    """Returns whether a name is that of a user's function: it has a colon."""
    return isinstance(name, str) and ":" in name


def located(name: str, folder: Path) -> str:
    """Returns the name with the absolute path of its file, if the file lies in ``folder``."""
    module, _, function = name.rpartition(":")
    file = _file(module, folder)
    return name if file is None else f"{os.path.normpath(file)}:{function}"


def load_function(table: str, name: str) -> Callable[..., Any]:
    """Returns the function that a name such as ``my_module:median`` is of.

    The module is a file in the working directory, or else one that Python can import.

    Args:
      table: of the config, for the messages.
      name: the module or the path of its file, a colon, and the function.

    Raises:
      InputError: no such module or function, or a module that cannot be imported.
    """
    module_name, _, function_name = name.rpartition(":")
    if not module_name or not function_name:
        raise InputError(
            f"The {table} {show(name)} is not of the form module:function or file.py:function."
        )
    module = _module(table, module_name)
    function = getattr(module, function_name, None)
    if not callable(function):
        known = [n for n, f in vars(module).items() if callable(f) and not n.startswith("_")]
        raise InputError(
            f"The {table} {show(name)}: {show(module_name)} has no function {show(function_name)}."
            f" {nearest(function_name, known)}"
        )
    return function


def _file(module: str, folder: Path) -> Path | None:
    parts = Path(module) if module.endswith(".py") else Path(*module.split(".")).with_suffix(".py")
    file = folder.absolute() / parts.expanduser()
    return file if file.is_file() else None


def _module(table: str, name: str) -> ModuleType:
    file = _file(name, Path())
    try:
        if file is not None:
            return _execute(file.resolve())
        if not name.endswith(".py"):
            return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or name.split(".")[0] != error.name.split(".")[0]:
            raise _broken(table, name, error) from error
    except Exception as error:
        raise _broken(table, name, error) from error
    raise InputError(
        f"The {table} is of the module {show(name)}, which there is not: neither as a file in the"
        " config's folder or the working directory, nor among what Python can import."
    )


def _broken(table: str, name: str, error: Exception) -> InputError:
    where = f", line {error.lineno}" if isinstance(error, SyntaxError) else ""
    return InputError(
        f"The module {show(name)} of the {table} cannot be imported: {type(error).__name__}:"
        f" {error}{where}."
    )


def _execute(file: Path) -> ModuleType:
    """Returns the module of a file, executed once in a process."""
    # Not under its own name, which may be that of another module.
    name = f"fedjax_peft_own_{file.stem}_{hashlib.sha256(bytes(file)).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, str(file.parent))  # for modules beside it
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    finally:
        sys.path.remove(str(file.parent))
    return module
