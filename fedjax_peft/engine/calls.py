"""Work that calls programs, written as generators.

Such a generator yields each :class:`Call`, and is sent the call's result. :func:`alone` makes the
calls of one generator one after the other. :mod:`fedjax_peft.engine.replicas` runs several
generators in step, and makes their calls of the same program as one.
"""

from collections.abc import Generator
from typing import Any, NamedTuple, TypeAlias, TypeVar

from fedjax_peft.engine.plan import Plan
from fedjax_peft.engine.round import RoundResult
from fedjax_peft.engine.state import State

Result = TypeVar("Result")


class Call(NamedTuple):
    """A call of a program."""

    program: Any
    """Such as a :class:`fedjax_peft.engine.program.Program`."""
    state: State
    plan: Plan
    round_index: int

    def make(self) -> RoundResult:
        """Returns the result of the program."""
        result: RoundResult = self.program(self.state, self.plan, self.round_index)
        return result


Calling: TypeAlias = Generator[Call, RoundResult, Result]
"""A generator that yields calls and returns a result."""


def alone(work: Calling[Result]) -> Result:
    """Returns the result of a generator, whose calls are made at once."""
    try:
        call = next(work)
        while True:
            try:
                answer = call.make()
            except BaseException as error:  # the generator may have files to close
                call = work.throw(error)
            else:
                call = work.send(answer)
    except StopIteration as end:
        result: Result = end.value
        return result
