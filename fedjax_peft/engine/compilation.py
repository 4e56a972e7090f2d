"""The cache of compiled programs on disk. A later process reads it instead of compiling."""

import os

import jax

from fedjax_peft.support import assets

__all__ = ["use_compilation_cache"]


def use_compilation_cache() -> None:
    """Makes JAX cache programs in the library's cache directory.

    JAX caches programs that take a second or more to compile. A directory that the user has chosen
    (with ``JAX_COMPILATION_CACHE_DIR`` or in ``jax.config``) is not replaced, and
    ``jax_enable_compilation_cache = False`` stays in force.
    """
    chosen = jax.config.jax_compilation_cache_dir is not None  # type: ignore[attr-defined]
    if not chosen and "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        jax.config.update("jax_compilation_cache_dir", str(assets.cache_dir() / "xla"))
