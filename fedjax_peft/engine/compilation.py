"""The cache of compiled programs on disk, which a later process reads instead of compiling."""

import os

import jax

from fedjax_peft import assets

__all__ = ["use_compilation_cache"]


def use_compilation_cache() -> None:
    """Makes JAX keep what takes a second or more to compile, in the library's cache directory.

    A directory that the user has chosen, by ``JAX_COMPILATION_CACHE_DIR`` or in ``jax.config``,
    stays; so does ``jax_enable_compilation_cache = False``.
    """
    chosen = jax.config.jax_compilation_cache_dir is not None  # type: ignore[attr-defined]
    if not chosen and "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        jax.config.update("jax_compilation_cache_dir", str(assets.cache_dir() / "xla"))
