"""The compilations of this process, for tests that count them."""

import jax

__all__ = ["compilations"]

compilations: list[float] = []
"""The seconds of every backend compilation so far; a test may clear the list."""


def _note(event: str, seconds: float, **_: object) -> None:
    if event == "/jax/core/compile/backend_compile_duration":
        compilations.append(seconds)


jax.monitoring.register_event_duration_secs_listener(_note)
