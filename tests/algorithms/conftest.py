"""These programs are tiny and run a few times: compiling is nearly all of their cost."""

import jax
import pytest


@pytest.fixture(scope="module", autouse=True)
def _compile_quickly():
    """Compiles without most optimisations, at half the time."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
