"""A part knows its call: which function made it, with which arguments.

A part is what a factory returns, such as an algorithm, an aggregator or an optimizer. It consists
of functions, which cannot be compared or written to a file. Its call can::

    call = fp.call_of(fp.algorithms.fedprox(fp.optimizers.adamw(1e-3), mu=0.1))
    call           # fp.algorithms.fedprox(fp.optimizers.adamw(learning_rate=0.001), mu=0.1)
    call.flat()    # {"": "algorithms.fedprox", ..., "mu": 0.1, ...}

So a run directory holds the calls of its parts, and ``fp.load_run`` makes them again.
A user's own factory becomes one of these with the same decorator, :func:`part`.
"""

import copy
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import jax
import numpy as np

from fedjax_peft.contracts.arguments import strict
from fedjax_peft.contracts.names import factory_of, name_of
from fedjax_peft.support.display import show
from fedjax_peft.support.errors import InputError, nearest

Factory = TypeVar("Factory", bound=Callable[..., Any])

OWN = "not_recorded"
"""The key of a table that stands for a value which a file cannot hold."""


_FUNCTION = "function"
"""The key for the name of a factory which has an argument ``name`` itself."""


@dataclass(frozen=True)
class Unknown:
    """The place of a value that a file could not hold."""

    text: str
    """What was there, for messages."""


@dataclass(frozen=True, repr=False, eq=False)
class Call:
    """The name of a factory and its arguments, of which some are calls themselves.

    Calls with equal names and arguments of equal types are equal. ``repr`` is the Python code of
    the call, without the arguments that have their defaults.
    """

    name: str
    """``room.function`` for a part of the library; for others ``module:function``, or
    ``path/of/file.py:function`` where the module cannot be imported by its name."""
    arguments: tuple[tuple[str, Any], ...]
    """(name, value) in the order of the signature, the defaults included, but for None where it is
    the default. The values of parts are their calls, and lists are tuples."""

    def flat(self, prefix: str = "") -> dict[str, Any]:
        """Returns dotted name -> value; the name of a factory stands at the place of its part.

        Args:
          prefix: of the names, such as ``algorithm``.
        """
        found: dict[str, Any] = {prefix: self.name}
        for key, value in self.arguments:
            found |= _flat(f"{prefix}.{key}" if prefix else key, value)
        return found

    def table(self) -> dict[str, Any]:
        """Returns what a TOML or JSON file holds; :meth:`read` is the inverse.

        A value that a file cannot hold, such as a function, becomes a table with the key
        :data:`OWN`; :meth:`unknown` finds these places.
        """
        found = {key: written(value) for key, value in self.arguments}
        return {_FUNCTION if "name" in found else "name": self.name, **found}

    @classmethod
    def read(cls, table: Mapping[str, Any]) -> "Call":
        """Returns the call that :meth:`table` has written."""
        head = _FUNCTION if _FUNCTION in table else "name"
        options = {key: _read(value) for key, value in table.items() if key != head}
        return cls(table[head], tuple(options.items()))

    def factory(self) -> Callable[..., Any]:
        """Returns the function; importing a user's module runs its code.

        Raises:
          InputError: there is no such function any more.
        """
        return factory_of(self.name, "")

    def constants(self, prefix: str) -> Iterator[str]:
        """Yields the dotted names of numbers that cannot be run-time values: they decide shapes."""
        for at, call in _calls(prefix, self):
            yield from (f"{at}.{name}" for name in getattr(call.factory(), "constants", ()))

    def is_known(self) -> bool:
        """Returns whether the call says all: its functions are of the library, its values fixed."""
        try:
            hash(self)
        except TypeError:
            return False
        return not any(":" in call.name for _, call in _calls("", self))

    def unknown(self) -> dict[str, str]:
        """Returns dotted name -> what was there, for the values that a file could not hold."""
        read = {name: _read(written(value)) for name, value in self.flat().items()}
        return {name: value.text for name, value in read.items() if isinstance(value, Unknown)}

    def build(self, values: Mapping[str, Any] | None = None, at: str = "") -> Any:
        """Returns the part.

        Args:
          values: dotted name -> what to give in place of the recorded value: a number, which may be
            traced inside a compiled program, or a part.
          at: the place of this part, for messages, such as ``algorithm``.

        Raises:
          InputError: the factory cannot be imported or has no such argument, or a value is missing.
        """
        factory, values = factory_of(self.name, at), values or {}
        signature = inspect.signature(factory)
        given = dict(self.arguments)
        heads = dict.fromkeys(name.partition(".")[0] for name in values)
        for key in dict.fromkeys([*given, *heads]):
            if key not in signature.parameters:
                known = nearest(key, signature.parameters)
                raise InputError(f"{self.name} has no argument {key!r}. {known}")
            own = dict(below(key, values))
            given[key] = _built(given.get(key), own, f"{at}.{key}" if at else key)
        # In the order of the signature, in which *arguments come first.
        ordered = {name: given[name] for name in signature.parameters if name in given}
        bound = inspect.BoundArguments(signature, cast(Any, ordered))
        return factory(*bound.args, **bound.kwargs)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Call) and _typed(self) == _typed(other)

    def __hash__(self) -> int:
        return hash(_typed(self))

    def __repr__(self) -> str:
        try:
            parameters: Mapping[str, Any] = inspect.signature(self.factory()).parameters
        except InputError:
            parameters = {}
        texts: list[str] = []
        for place, (key, value) in enumerate(self.arguments):
            known = parameters.get(key, _UNKNOWN)
            if known.kind is known.VAR_POSITIONAL:
                texts += map(repr, value)
            elif type(value) is not type(known.default) or value != known.default:
                first = known.kind is known.POSITIONAL_OR_KEYWORD and len(texts) == place
                alone = first and isinstance(value, Call)
                texts.append(repr(value) if alone else f"{key}={value!r}")
        name = f"fp.{self.name}" if ":" not in self.name else self.name.rpartition(":")[2]
        return f"{name}({', '.join(texts)})"


_UNKNOWN = inspect.Parameter("unknown", inspect.Parameter.KEYWORD_ONLY, default=...)


def part(factory: Factory) -> Factory:
    """Decorates a function that returns a part, such as an algorithm of your own.

    The part then knows its call (:func:`call_of`): runs record it, compare it when they are
    resumed, and make it again when they are loaded. Without the decorator everything runs as well;
    a run then says of the part that it cannot be made again::

        @fp.part
        def halved(aggregator, share=0.5):
            ...

    Arguments are checked by the types of the signature: a number by its range
    (``Annotated[float, Gt(0)]``, with the bounds of annotated-types), a word by its choices
    (``Literal``).

    The function must return the same for equal arguments. Its result is a (named) tuple or
    something with attributes. A part that is changed by ``_replace`` has no call.
    """
    return _decorated(factory, _plain)


def data_part(factory: Factory) -> Factory:
    """Decorates a function that returns data or a model, or several of them in a dict or tuple.

    Their calls hold no arrays: an argument that a file cannot hold, such as data without a call,
    becomes :class:`Unknown`. Each of several results has the call of :func:`item`.
    """
    return _decorated(factory, _light)


def item(of: Any, key: Any) -> Any:
    """Returns one of several results, such as a split of ``fp.load_dataset(...)``."""
    return of[key]


item.__dict__["part"] = "contracts.item"


def _decorated(factory: Factory, recorded: Callable[[Any], Any]) -> Factory:
    """Returns a factory whose results know their calls.

    Args:
      recorded: value of an argument -> what the call holds.
    """
    signature, checked = inspect.signature(factory), strict(factory)
    name = name_of(factory)

    @functools.wraps(factory)
    def make(*arguments: Any, **options: Any) -> Any:
        made = checked(*arguments, **options)
        bound = signature.bind(*arguments, **options)
        bound.apply_defaults()
        values = [
            (key, recorded(value))
            for key, value in bound.arguments.items()
            if value is not None or signature.parameters[key].default is not None
        ]
        if recorded is _plain and _has_tracer([value for _, value in values]):
            return made  # a run-time value of a program has no number
        return tagged(made, Call(name, tuple(values)))

    make.__dict__["part"] = name
    return cast(Factory, make)


def made(value: Any, at: str) -> Any:
    """Returns the value of a table, with the parts that the tables in it name.

    Args:
      at: its dotted name, for messages.
    """
    return _built(_read(value), {}, at)


def call_of(value: Any) -> Call | None:
    """Returns the call that made a part; None for a changed part, and for anything else."""
    own = getattr(value, "__dict__", {})
    if "_state" in own and own["_state"] != _state(value):
        return None
    return own.get("_call")


def has_parts(value: Any) -> bool:
    """Returns whether a value is a part, or a dict or sequence that holds one."""
    if isinstance(value, Call) or call_of(value) is not None:
        return True
    if isinstance(value, dict):
        return any(map(has_parts, value.values()))
    return (isinstance(value, list) or type(value) is tuple) and any(map(has_parts, value))


def tagged(made: Any, call: Call, *, mutable: bool = False) -> Any:
    """Returns what a call made, which knows the call.

    Args:
      mutable: whether ``made`` is a tokenizer, which can be changed in place. It then has no call.
    """
    if type(made) is dict:
        return {key: tagged(one, item_of(call, key)) for key, one in made.items()}
    if type(made) is tuple:
        return tuple(tagged(one, item_of(call, key)) for key, one in enumerate(made))
    if isinstance(made, tuple) and not hasattr(made, "__dict__"):
        made = _with_room(type(made))(*made)
    elif call_of(made) is not None:  # an inner factory made it, and may give it to others
        made = copy.copy(made)
    if hasattr(made, "__dict__"):
        object.__setattr__(made, "_call", call)
        if isinstance(made, tuple) and call.is_known():
            object.__setattr__(made, "_known", call)
        if mutable:
            object.__setattr__(made, "_state", _state(made))
    return made


def item_of(call: Call, key: Any) -> Call:
    """Returns the call of one of several results."""
    return Call("contracts.item", (("of", call), ("key", key)))


def _state(tokenizer: Any) -> tuple[str, ...]:
    """Returns what users change of a tokenizer."""
    return repr(tokenizer), str(getattr(tokenizer, "chat_template", None))


@functools.cache
def _with_room(kind: Any) -> type:
    """Returns the class of named tuples that know their calls, under the same name.

    Parts of equal calls of the library are equal, though their functions are not: so a program that
    was compiled for one is found again for the other.
    """

    def equal(one: Any, other: Any) -> Any:
        mine, its = (getattr(x, "__dict__", {}).get("_known") for x in (one, other))
        return kind.__eq__(one, other) if mine is None or its is None else mine == its

    def hashed(one: Any) -> int:
        # The same for equal calls and for equal fields; no global name, as Python's end needs it.
        return hash(tuple([x for x in one if isinstance(x, str)]))

    names = ("__module__", "__qualname__", "__doc__")
    own = {"__eq__": equal, "__ne__": object.__ne__, "__hash__": hashed}
    return type(kind.__name__, (kind,), {name: getattr(kind, name) for name in names} | own)


def _typed(value: Any) -> Any:
    """Returns a value that is equal to another one only if their types are: 1 is not 1.0."""
    if isinstance(value, Call):
        return value.name, tuple((key, _typed(x)) for key, x in value.arguments)
    return tuple(map(_typed, value)) if type(value) is tuple else (type(value), value)


def _has_tracer(values: Any) -> bool:
    leaves = jax.tree.leaves(values, is_leaf=lambda value: isinstance(value, Call))
    return any(isinstance(leaf, jax.core.Tracer) for leaf in leaves)


def _plain(value: Any) -> Any:
    """Returns a part as its call, and a list as a tuple, so that calls can be compared."""
    if (call := call_of(value)) is not None:
        return call
    if isinstance(value, list) or type(value) is tuple:
        return tuple(map(_plain, value))
    return str(value) if isinstance(value, Path) else value


def _light(value: Any) -> Any:
    """Returns a value as a file can hold it. Of rows of data, only the first is looked at."""
    if (call := call_of(value)) is not None:
        return call
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        found: Any = {key: _light(one) for key, one in value.items()}
        odd = any(isinstance(one, Unknown) for one in found.values())
    elif isinstance(value, list) or type(value) is tuple:
        kinds = {*map(type, value)}  # of perhaps a million names
        if all(issubclass(kind, bool | int | float | str) for kind in kinds):
            return tuple(value)
        odd = not all(issubclass(kind, list | tuple) for kind in kinds)
        found = () if odd else tuple(map(_light, value))
        odd = odd or any(isinstance(one, Unknown) for one in found)
    else:
        return _read(written(str(value) if isinstance(value, Path) else value))
    return Unknown(_kind(value)) if odd else found


def _calls(at: str, value: Any) -> Iterator[tuple[str, Call]]:
    """Yields the dotted name and the call of every part in a value, its own first."""
    items: Iterable[tuple[Any, Any]] = enumerate(value) if type(value) is tuple else ()
    if isinstance(value, Call):
        yield at, value
        items = value.arguments
    for key, one in items:
        yield from _calls(f"{at}.{key}", one)


def _flat(name: str, value: Any) -> dict[str, Any]:
    if isinstance(value, Call):
        return value.flat(name)
    if type(value) is tuple and has_parts(value):
        return {k: x for i, one in enumerate(value) for k, x in _flat(f"{name}.{i}", one).items()}
    return {name: value}


def written(value: Any) -> Any:
    """Returns an argument of a call as a file holds it."""
    if isinstance(value, Call):
        return value.table()
    if isinstance(value, Unknown):
        return {OWN: value.text}
    if type(value) is tuple or isinstance(value, list):
        return [written(one) for one in value]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: written(one) for key, one in value.items()}
    if isinstance(value, np.integer):
        return int(value)
    if isinstance(value, bool | int | float | str):
        return value
    return {OWN: "None" if value is None else _kind(value)}


def unrecorded(value: Any, at: str = "") -> dict[str, str]:
    """Returns dotted name -> what was there, for what a table lacks because no file can hold it."""
    if isinstance(value, list | tuple):
        value = dict(enumerate(value))
    if not isinstance(value, Mapping):
        return {}
    found: dict[str, str] = {}
    for key, one in value.items():
        if key == OWN:
            found |= {} if one == "None" else {at: str(one)}
        else:
            found |= unrecorded(one, f"{at}.{key}" if at else str(key))
    return found


def _kind(value: Any) -> str:
    return getattr(value, "__qualname__", None) or f"a {type(value).__name__}"


def _read(value: Any) -> Any:
    if isinstance(value, Mapping):
        if isinstance(value.get(_FUNCTION, value.get("name")), str):
            return Call.read(value)
        if value.keys() == {OWN}:  # TOML has no None
            return None if value[OWN] == "None" else Unknown(str(value[OWN]))
        return {key: _read(one) for key, one in value.items()}
    return tuple(map(_read, value)) if isinstance(value, list | tuple) else value


def _built(value: Any, own: Mapping[str, Any], at: str) -> Any:
    """Returns the value of an argument, with what is given in its place or in places inside it."""
    if "" in own:
        return own[""]
    if isinstance(value, Call):
        return value.build(own, at)
    if isinstance(value, Unknown):
        raise InputError(
            f"{at} is not recorded: it was {value.text}, which no file can hold. Give it again, or"
            " make it with a function that has the decorator fp.part."
        )
    if type(value) is tuple:
        return tuple(
            _built(one, dict(below(str(i), own)), f"{at}.{i}") for i, one in enumerate(value)
        )
    if own:
        raise InputError(
            f"{at}.{next(iter(own))} has no place: {at} is {show(value, 60)}, which does not know"
            " the call that made it. The optimizers of fp.optimizers do, those of optax do not."
        )
    return value


def below(at: str, values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields the values of the places in ``at``, by their names from there; its own has ``""``."""
    for name, value in values.items():
        head, _, rest = name.partition(".")
        if head == at:
            yield rest, value
