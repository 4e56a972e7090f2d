"""Functions of a user in a config: ``module:function`` or ``file.py:function``.

Reading or running such a config runs the code of the module.
"""

import hashlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from fedjax_peft.support.display import show
from fedjax_peft.support.errors import InputError, nearest

LOADED = "fedjax_peft_own_"
"""How the names of modules begin that were loaded from a file."""


def is_user_function(name: Any) -> bool:
    """Returns whether a name in a config is that of a user's function: it contains a colon."""
    return isinstance(name, str) and ":" in name


def with_absolute_path(name: Any, folder: Path) -> Any:
    """Returns a user's function with the absolute path of its file, if this is in ``folder``."""
    if not is_user_function(name):
        return name
    module, _, function = name.rpartition(":")
    file = _file(module, folder)
    return name if file is None else f"{os.path.normpath(file)}:{function}"


def known_name(name: str, known: Iterable[str]) -> str:
    """Returns the name among known ones, with absolute paths, that means the same function.

    Without one, the name is completed in the working directory.
    """
    module, _, function = name.rpartition(":")
    end = f"{os.sep}{_relative(module)}:{function}"
    return next(
        (one for one in known if one == name or one.endswith(end)),
        with_absolute_path(name, Path()),
    )


def load_function(table: str, name: str) -> Callable[..., Any]:
    """Returns the function with a name such as ``my_module:median``.

    The module is a file in the working directory; if there is none, a module that Python can
    import.

    Args:
      table: the table of the config, for messages.
      name: the module or the path of its file, a colon, and the function.

    Raises:
      InputError: the module or the function does not exist, or the module cannot be imported.
    """
    module_name, _, function_name = name.rpartition(":")
    if not module_name or not function_name:
        raise InputError(
            f"The {table} {show(name)} does not have the form module:function or file.py:function."
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
    file = folder.absolute() / _relative(module).expanduser()
    return file if file.is_file() else None


def _relative(module: str) -> Path:
    return Path(module) if module.endswith(".py") else Path(*module.split(".")).with_suffix(".py")


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
        f"The {table} is in the module {show(name)}, which does not exist: it is not a file in the"
        " config's folder or the working directory, and Python cannot import it."
    )


def _broken(table: str, name: str, error: Exception) -> InputError:
    where = f", line {error.lineno}" if isinstance(error, SyntaxError) else ""
    return InputError(
        f"The module {show(name)} of the {table} cannot be imported: {type(error).__name__}:"
        f" {error}{where}."
    )


def _execute(file: Path) -> ModuleType:
    """Returns the module of a file; the file is executed once in a process."""
    # The name must differ from the file's, which can be the name of another module.
    name = f"{LOADED}{file.stem}_{hashlib.sha256(bytes(file)).hexdigest()[:8]}"
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
