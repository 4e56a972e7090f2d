"""Calls of the Hugging Face hub's client."""

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

__all__ = ["printed_once"]

_LOGGERS = ("huggingface_hub", "datasets")


@contextmanager
def printed_once() -> Iterator[None]:
    """Makes the hub's warnings appear once in the block.

    These libraries print through a handler of their own. absl, which orbax imports, gives the root
    logger another one, so that every message would be printed twice.
    """
    with ExitStack() as stack:
        for name in _LOGGERS:
            logger = logging.getLogger(name)
            if logger.handlers:
                stack.callback(setattr, logger, "propagate", logger.propagate)
                logger.propagate = False
        yield
