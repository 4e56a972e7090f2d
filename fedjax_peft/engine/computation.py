"""How a session computes its rounds; the results do not depend on it, but for rounding."""

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import jax

from fedjax_peft.engine.devices.layout import Layout
from fedjax_peft.engine.lanes import Lanes
from fedjax_peft.engine.program import Program
from fedjax_peft.engine.reference import ReferenceProgram
from fedjax_peft.engine.stores.client_store import ClientPlace
from fedjax_peft.engine.streaming import ExamplesPlace
from fedjax_peft.support.checks import check_choice
from fedjax_peft.support.errors import InputError

Engine: TypeAlias = Literal["compiled", "reference"]
"""``compiled``: a round is one XLA program. ``reference``: a round is a Python loop over clients,
one at a time and without jit; it is slow, but easy to read and to debug. The results of both are
equal up to float32 rounding."""
ENGINES: dict[str, Any] = {"compiled": Program, "reference": ReferenceProgram}


class Computation(NamedTuple):
    """The engine of a session, its lanes, and where its arrays are between rounds."""

    lanes: Lanes = "auto"
    """The number of clients that run side by side."""
    rounds: int = 100
    """Plans have room for the largest cohort of this many rounds. A later round that needs more
    room is compiled again."""
    engine: Engine | Callable[..., Any] = "compiled"
    """See :data:`Engine`; or a function that makes programs in the place of
    :class:`fedjax_peft.engine.program.Program`, with the same arguments, for runs side by side."""
    client_state: ClientPlace = "device"
    """Where the state of all clients is between rounds."""
    examples: ExamplesPlace = "device"
    """Where the examples are."""
    complete: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda columns: columns
    """Adds to the columns of any examples what the forward pass reads beside them."""
    read: Callable[[Any], Any] = lambda data: data
    """Returns examples with the numbers of classes that the model has."""

    @property
    def make(self) -> Callable[..., Any]:
        """Makes the round programs."""
        return self.engine if callable(self.engine) else ENGINES[self.engine]

    def check(self, layout: Layout) -> None:
        """Raises InputError for unknown places and engines, or lanes that do not fit."""
        check_choice("client_state", self.client_state, get_args(ClientPlace))
        check_choice("examples", self.examples, get_args(ExamplesPlace))
        if not callable(self.engine):
            check_choice("engine", self.engine, ENGINES)
        if self.lanes != "auto":
            layout.check_lanes(self.lanes)
        if callable(self.engine) and self.examples != "device":
            raise InputError(
                "Runs side by side share examples on the device: examples = 'host' does not work"
                f" with them.{_ONE_BY_ONE}"
            )
        several = callable(self.engine) or jax.process_count() > 1
        if several and self.client_state != "device":
            what = "Runs side by side" if callable(self.engine) else "Several processes"
            raise InputError(
                f"{what} keep the clients' state on the device: client_state ="
                f" {self.client_state!r} does not work with them."
                f"{_ONE_BY_ONE if callable(self.engine) else ''}"
            )


_ONE_BY_ONE = " Run the sweep's points one after the other: --replicas 1 (Python: replicas=1)."
