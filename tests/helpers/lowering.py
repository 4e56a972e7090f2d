"""JAX makes an MLIR context for each program that it lowers; here the programs share some.

To make one takes 4 ms, a fifth of what an operation of a new shape takes to compile, and the suite
compiles tens of thousands of those. A context keeps the types and attributes of all programs that
were lowered in it, so after :data:`PROGRAMS` of them a new one is made. Without the private
function that is replaced here, JAX makes its own contexts.
"""

from jax._src.interpreters import mlir

PROGRAMS = 200


class _Shared:
    """Hands one context out for a number of programs."""

    def __init__(self, make):
        self._make, self._left = make, 0

    def __call__(self):
        if _lowering():
            return self._make()  # the new program would become a part of the one around it
        if self._left < 1:  # below 0 where two threads have taken the last one
            self._context, self._left = self._make(), PROGRAMS
        self._left -= 1
        return self._context


def _lowering() -> bool:
    """Returns whether this thread lowers a program, whose constants may be computed by another."""
    try:
        return mlir.ir.InsertionPoint.current is not None
    except ValueError:
        return False


if hasattr(mlir, "make_ir_context"):
    mlir.make_ir_context = _Shared(mlir.make_ir_context)
