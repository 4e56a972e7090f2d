"""Checkpoints of a run: server state, private store, round number. Atomic, by orbax."""

import logging
from pathlib import Path

import jax
import orbax.checkpoint as ocp

from fedjax_peft.errors import InputError
from fedjax_peft.typing import PyTree

__all__ = ["Checkpoints"]

# Orbax reports every step at INFO through absl; a progress display should not compete with it.
logging.getLogger("absl").setLevel(logging.WARNING)


class Checkpoints:
    """The checkpoints of one run directory; the last two are kept."""

    def __init__(self, directory: Path):
        self._manager = ocp.CheckpointManager(
            directory.resolve(), options=ocp.CheckpointManagerOptions(max_to_keep=2)
        )

    @property
    def latest(self) -> int | None:
        """The round of the newest complete checkpoint."""
        return self._manager.latest_step()

    def save(self, number: int, state: PyTree) -> None:
        """Saves the state after round ``number``; returns when it is safely on disk."""
        if self.latest != number:
            self._manager.save(number, args=ocp.args.StandardSave(state))
            self._manager.wait_until_finished()

    def restore(self, like: PyTree) -> tuple[int, PyTree] | None:
        """Returns (round, state) of the newest checkpoint, None if there is none.

        Args:
          like: a state of the same structure and shapes.

        Raises:
          InputError: a checkpoint that does not fit or cannot be read.
        """
        if self.latest is None:
            return None
        abstract = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), like
        )
        try:
            return self.latest, self._manager.restore(
                self.latest, args=ocp.args.StandardRestore(abstract)
            )
        except Exception as error:  # orbax raises many kinds
            reason = str(error).strip().splitlines()[0]
            raise InputError(
                f"The checkpoint of round {self.latest} in {self._manager.directory} cannot be"
                f" restored: {reason}"
            ) from error

    def close(self) -> None:
        """Releases orbax's threads."""
        self._manager.close()
