"""What holds for every test: strict numerics, caches of its own, programs that do not pile up."""

import atexit
import gc
import os
import shutil
import signal
import tempfile

import jax
import pytest

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_legacy_prng_key", "error")

COMPILED = tempfile.mkdtemp(prefix="fedjax_peft-compiled-")
"""Where compiled programs are kept: most of the time goes into them, and many tests have the same.
A directory for each worker, for JAX does not write these files atomically."""
atexit.register(shutil.rmtree, COMPILED, ignore_errors=True)
for name, value in {
    "jax_compilation_cache_dir": COMPILED,
    "jax_persistent_cache_min_compile_time_secs": 0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}.items():
    jax.config.update(name, value)
    os.environ[name.upper()] = str(value)  # for the processes that tests start


@pytest.fixture(autouse=True)
def _private_cache(tmp_path_factory, monkeypatch, request):
    """Tests write no cache but their own; only tests marked ``assets`` share the user's."""
    if request.node.get_closest_marker("assets") is None:
        monkeypatch.setenv("FEDJAX_PEFT_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(autouse=True, scope="module")
def _release_programs(request):
    """Frees what a file compiled, also for its global models, and its ``functools`` caches.

    Each compiled program holds hundreds of memory maps, and Linux allows a process 65,530 of them:
    the whole suite needs more, and XLA then dies of a segmentation fault.
    """
    yield
    from fedjax_peft.models.base import Model

    for value in vars(request.module).values():
        if hasattr(value, "cache_clear"):
            value.cache_clear()
        if isinstance(value, Model):
            vars(value.apply).pop("_programs", None)
    jax.clear_caches()
    gc.collect()


@pytest.fixture
def interrupts():
    """Lets SIGINT raise KeyboardInterrupt, also where the tests run in the background of a shell.

    Such a process ignores SIGINT from its start.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
