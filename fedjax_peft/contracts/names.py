"""The names of factories: by them another process finds the functions that make parts again."""

import importlib
import sys
from collections.abc import Callable
from typing import Any, cast

from fedjax_peft.support import plugins
from fedjax_peft.support.display import show
from fedjax_peft.support.errors import InputError, check_known, nearest
from fedjax_peft.support.rooms import ROOMS, TABLES

LIBRARY = {
    **{room: TABLES[table] for table, room in ROOMS.items()},
    "contracts": "fedjax_peft.contracts",
    "heads": "fedjax_peft.models.heads",
}
"""Room -> its module. The parts of the library have names such as ``algorithms.fedprox``, and
``load_model`` of a function that is public itself."""


def name_of(factory: Callable[..., Any]) -> str:
    """Returns the name of a factory, by which :func:`factory_of` finds it in another process."""
    module = factory.__module__ or "__main__"  # of code that exec runs
    rooms = [room for room, home in LIBRARY.items() if f"{module}.".startswith(f"{home}.")]
    if rooms and not module.endswith(_NO_PARTS):
        return f"{rooms[0]}.{factory.__name__}"
    if module.startswith(f"{_PACKAGE}.") and _is_public(factory.__qualname__):
        return factory.__qualname__
    file = getattr(sys.modules.get(module), "__file__", None)
    own = file if file and module.startswith(plugins.LOADED) else module
    return f"{own}:{factory.__qualname__}"


def factory_of(name: str, at: str) -> Callable[..., Any]:
    """Returns the function of a name; importing a user's module runs its code.

    Raises:
      InputError: there is no such function, or it is not decorated with :func:`part`.
    """
    place, _, function = name.rpartition(":")
    if not place:
        known = _of_library(name, at)
    elif place in sys.modules:  # such as the script or the notebook that runs
        known = getattr(sys.modules[place], function, None)
    elif place == "__main__" or "<" in function:
        known = None
    else:
        known = plugins.load_function(at or "part", name)
    if not _is_factory(known):
        raise InputError(
            f"{at or 'A part'} was made by {show(name)}, which is not there any more as a function"
            " with the decorator fp.part. Functions of a script, of a notebook or inside another"
            " function can only be found while that runs: put them into a module of their own."
        )
    return cast(Callable[..., Any], known)


def _of_library(name: str, at: str) -> Any:
    room, _, function = name.partition(".")
    if room in LIBRARY:
        module = importlib.import_module(LIBRARY[room])
        parts = [n for n in vars(module) if _is_factory(vars(module)[n])]
        check_known(f"part fp.{room}", function, parts)
        return getattr(module, function)
    if not _is_public(name):
        raise InputError(f"{at or 'A part'} is {show(name)}. {nearest(room, LIBRARY)}")
    known: Any = importlib.import_module(_PACKAGE)
    for own in name.split("."):
        known = getattr(known, own, None)
    return known


_PACKAGE = "fedjax_peft"
_NO_PARTS = (".base", ".sources")
"""Modules in rooms of parts whose functions have names of their own in ``fp``."""


def _is_public(name: str) -> bool:
    """Returns whether a name is in ``fp``, itself or as that of a method of a class there."""
    return name.partition(".")[0] in importlib.import_module(_PACKAGE).__all__


def _is_factory(value: Any) -> bool:
    return hasattr(value, "part") and callable(value)
