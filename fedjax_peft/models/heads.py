"""What a backbone is asked to predict."""

from collections.abc import Sequence
from typing import NamedTuple

from fedjax_peft.errors import InputError

__all__ = ["Head", "classification"]


class Head(NamedTuple):
    """A head to put on a backbone, with Hugging Face's architecture for the model family."""

    kind: str
    labels: tuple[str, ...]
    fresh: bool = False
    """Start from random values even where the checkpoint holds a head."""

    @property
    def classes(self) -> int:
        """The number of classes."""
        return len(self.labels)


def classification(classes: int | Sequence[str], *, fresh: bool = False) -> Head:
    """Returns a sequence classification head.

    Args:
      classes: the number of classes, or their names.
      fresh: start from random values even where the checkpoint holds a classifier.

    Raises:
      InputError: fewer than two classes.
    """
    labels = (
        tuple(f"LABEL_{i}" for i in range(classes)) if isinstance(classes, int) else tuple(classes)
    )
    if len(labels) < 2:
        raise InputError(f"A classification head needs at least 2 classes, not {len(labels)}.")
    return Head("classification", labels, fresh)
