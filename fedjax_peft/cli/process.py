"""The JAX settings of a command's process."""

from fedjax_peft.cli import faults

__all__ = ["prepare_jax"]


def prepare_jax(*, cache: bool = True) -> None:
    """Checks the limits of the process, then imports JAX and sets its compilation cache.

    Args:
      cache: whether compiled programs are stored on disk, so that the next start is faster.
    """
    faults.check_limits()
    import jax

    from fedjax_peft.engine.compilation import use_compilation_cache

    if cache:
        use_compilation_cache()
    else:
        jax.config.update("jax_enable_compilation_cache", False)
