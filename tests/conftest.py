"""Strict numerics for the whole suite: what a user could trip over fails here first."""

import gc

import jax
import pytest

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_legacy_prng_key", "error")


@pytest.fixture(autouse=True)
def _private_cache(tmp_path_factory, monkeypatch, request):
    """Tests write no cache but their own; only tests marked ``assets`` share the user's."""
    if request.node.get_closest_marker("assets") is None:
        monkeypatch.setenv("FEDJAX_PEFT_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(autouse=True, scope="module")
def _release_programs():
    """Frees what a file compiled.

    Each compiled program holds some memory maps, and Linux allows a process 65,530 of them: the
    whole suite needs more, and XLA then dies of a segmentation fault.
    """
    yield
    jax.clear_caches()
    gc.collect()
