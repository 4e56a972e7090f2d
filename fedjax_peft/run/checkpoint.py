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
_log = logging.getLogger(__name__)


class Checkpoints:
    """The checkpoints of one run directory; the last two are kept."""

    def __init__(self, directory: Path):
        self._manager = ocp.CheckpointManager(
            directory.resolve(),
            options=ocp.CheckpointManagerOptions(max_to_keep=2),
            item_handlers=ocp.StandardCheckpointHandler(),
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

    def restore(self, like: PyTree, last: int) -> tuple[int, PyTree] | None:
        """Returns (round, state) of the newest checkpoint that can be read, None if there is none.

        Newer ones, which cannot be read, are removed: orbax saves nothing below its newest round.

        Args:
          like: a state of the same structure and shapes.
          last: the last round whose metrics are known; a checkpoint after it is of no use.

        Raises:
          InputError: there are checkpoints, but none fits or can be read.
        """
        steps = sorted(self._manager.all_steps(), reverse=True)
        if not steps:
            return None
        abstract = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), like
        )
        reasons = []
        for number in steps:
            try:
                if number > last:
                    raise ValueError(f"the metrics end at round {last}")
                self._check_shapes(number, abstract)
                state = self._manager.restore(number, args=ocp.args.StandardRestore(abstract))
            except InputError:
                raise
            except Exception as error:  # orbax raises many kinds
                reason = (str(error).strip() or repr(error)).splitlines()[0].partition(". ")[0]
                reasons.append(f"round {number}: {reason}")
                continue
            for newer in steps[: steps.index(number)]:
                self._manager.delete(newer)
            if reasons:
                _log.warning("Resumed from round %d; checkpoints skipped: %s", number, reasons)
            return number, state
        raise InputError(
            f"No checkpoint in {self._manager.directory} can be restored: {'; '.join(reasons)}"
        )

    def _check_shapes(self, number: int, like: PyTree) -> None:
        # Before orbax reads a byte: it gives up in the middle, and its message has no name.
        stored = self._manager.item_metadata(number).tree
        shapes = {leaf.name: tuple(leaf.shape) for leaf in jax.tree.leaves(stored)}
        for path, leaf in jax.tree.leaves_with_path(like):
            name = jax.tree_util.keystr(path, simple=True, separator=".")
            if shapes.get(name, leaf.shape) != leaf.shape:
                raise InputError(
                    f"The checkpoint of round {number} in {self._manager.directory} holds"
                    f" {name.partition('.')[2]!r} with shape {shapes[name]}, but this run has"
                    f" {leaf.shape}: it is of another model or other clients."
                )

    def close(self) -> None:
        """Releases orbax's threads."""
        self._manager.close()
