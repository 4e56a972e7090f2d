"""Settings of all tests: strict numerics, quick compilation, separate caches, bounded memory.

Tracing and compiling decide the time of this suite: its programs are tiny, and each runs a few
times. A new test is quick when it shares a program with its neighbours: the same ``toy.model()``,
algorithm, shapes and lanes in one file, a cached factory, more rounds rather than more runs.
"""

import atexit
import gc
import itertools
import os
import shutil
import signal
import tempfile
from collections import Counter
from fnmatch import fnmatchcase

import plain_shell  # noqa: F401
from xla_flags import QUICK_TO_COMPILE

os.environ["XLA_FLAGS"] = f"{QUICK_TO_COMPILE} {os.environ.get('XLA_FLAGS', '')}".strip()

import jax
import lowering  # noqa: F401
import memory
import pytest
import reordering  # noqa: F401

from fedjax_peft.engine import lengths
from fedjax_peft.simulation.planning import product_rates

COMPILED = tempfile.mkdtemp(prefix="fedjax_peft-compiled-")
"""Where compiled programs are kept, for many tests have the same.
A directory for each worker, for JAX does not write these files atomically."""
atexit.register(shutil.rmtree, COMPILED, ignore_errors=True)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_legacy_prng_key", "error")
UNOPTIMISED = "xla_backend_optimization_level" not in os.environ["XLA_FLAGS"]
for name, value in {
    "jax_disable_most_optimizations": UNOPTIMISED,
    "jax_traceback_in_locations_limit": 0,  # nobody reads them, and compiling carries them
    "jax_compilation_cache_dir": COMPILED,
    "jax_persistent_cache_min_compile_time_secs": 0.3,  # to store a quick one takes longer
    "jax_persistent_cache_min_entry_size_bytes": -1,
}.items():
    jax.config.update(name, value)
    os.environ[name.upper()] = str(value)  # for the processes that tests start

GAIN, lengths._GAIN = lengths._GAIN, 1.0
"""What another padded length must save, which here none does: a round has a copy of the local step
for each of them, so with one it compiles in half of the time."""

os.fsync = lambda file: None
"""No test loses power, and waiting for the disk takes longer than most tests."""

pytest_plugins = ["timing"]


def pytest_addoption(parser):
    parser.addoption("--exhaustive", action="store_true", help="run the full products too")


def pytest_collection_modifyitems(config, items):
    """Leaves full products out, and runs slow files first, so that all workers end together."""
    for item in items:
        sample = item.get_closest_marker("sample")
        if sample and not any(fnmatchcase(item.callspec.id, one) for one in sample.args):
            item.add_marker(pytest.mark.exhaustive)
    if not config.getoption("exhaustive"):
        out = [item for item in items if item.get_closest_marker("exhaustive")]
        config.hook.pytest_deselected(items=out)
        items[:] = [item for item in items if not item.get_closest_marker("exhaustive")]
    load = Counter()
    for item in items:
        # A test of a real model takes as long as dozens of others.
        weights = {"slow": 1, "assets": 50}
        load[item.path] += sum(w for name, w in weights.items() if item.get_closest_marker(name))
    items.sort(key=lambda item: -load[item.path])


def pytest_collection_finish(session):
    """Excludes imported objects from garbage collection, and collects less often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)


@pytest.fixture(autouse=True)
def _optimised_programs_for_real_models(monkeypatch, request):
    """Turns on XLA's optimisations for models of real size, which run longer than they compile.

    Unless a test runs its model ``once``.
    """
    marker = request.node.get_closest_marker("assets")
    if marker is None or marker.kwargs.get("once"):
        yield
        return
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "false")
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", UNOPTIMISED)


@pytest.fixture(autouse=True)
def _several_padded_lengths(monkeypatch, request):
    """Lets rounds have several padded lengths in tests of these, and with models of real size."""
    if any(map(request.node.get_closest_marker, ("assets", "lengths"))):
        monkeypatch.setattr(lengths, "_GAIN", GAIN)


@pytest.fixture(scope="session")
def _caches(tmp_path_factory):
    """Yields new directories; ``mktemp`` would list all earlier ones each time."""
    root = tmp_path_factory.mktemp("caches")
    return (root / str(number) for number in itertools.count())


@pytest.fixture(autouse=True)
def _private_cache(_caches, monkeypatch, request):
    """Gives tests a separate cache directory; only tests marked ``assets`` use the user's."""
    if request.node.get_closest_marker("assets") is None:
        cache = next(_caches)
        cache.mkdir()
        monkeypatch.setenv("FEDJAX_PEFT_CACHE", str(cache))


@pytest.fixture(autouse=True)
def _equal_rates(monkeypatch):
    """Times no products, so that no test is told what is faster on its processor."""
    monkeypatch.setattr(product_rates, "measure", lambda: product_rates.Rates(1.0, 1.0))


@pytest.fixture(autouse=True, scope="module")
def _release_programs(request):
    """Frees the programs that a file compiled for its global models, and its ``functools`` caches.

    What JAX compiled for single operations stays for the next files, while there is room.
    """
    yield
    from fedjax_peft.engine.compilation import programs
    from fedjax_peft.models.base import Model

    for value in vars(request.module).values():
        if hasattr(value, "cache_clear"):
            value.cache_clear()
        if isinstance(value, Model):
            programs.clear(value.apply)
    memory.release()


@pytest.fixture
def interrupts():
    """Makes SIGINT raise KeyboardInterrupt, also if the tests run in the background of a shell.

    Such a process ignores SIGINT from its start.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
