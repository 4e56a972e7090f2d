"""A TensorBoard event file with the numbers of a run."""

import time
from pathlib import Path

from fedjax_peft.support.files import naming

_PREFIXES = (
    *("global_test", "test", "client_validation", "client"),
    *("global_validation", "validation", "train"),
)
_MACHINE = ("steps", "lanes", "slot_utilisation", "padded_utilisation", "padding_share")
_GROUPS = {
    **dict.fromkeys(("bytes_up", "bytes_down"), "comm"),
    "simulated_seconds": "time",
    **dict.fromkeys(_MACHINE, "engine"),
    **dict.fromkeys(("epsilon", "delta"), "privacy"),
}


class EventWriter:
    """Writes scalars to a new event file, in the caller's thread.

    ``tensorboardX.SummaryWriter`` is not used because it writes in another thread. When a disk is
    full, that thread dies, and the run waits for it forever.
    """

    def __init__(self, folder: Path, first_step: int):
        """Opens a new event file in ``folder``.

        TensorBoard hides the points of older files in the folder from ``first_step`` on. An
        interrupted run may have written such points after the checkpoint from which it is resumed.

        Raises:
          OSError: the folder or the file cannot be written.
        """
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        self._folder = folder
        with naming(folder):
            folder.mkdir(parents=True, exist_ok=True)
            self._writer = EventsWriter(str(folder / "events"))
            self._writer.write_event(Event(step=first_step, file_version="brain.Event:2"))
            start = SessionLog(status=SessionLog.START)
            self._writer.write_event(Event(step=first_step, session_log=start))

    def add_scalar(self, name: str, value: float, step: int) -> None:
        """Adds one number."""
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.summary import scalar

        event = Event(wall_time=time.time(), step=step, summary=scalar(name, value))
        with naming(self._folder):
            self._writer.write_event(event)

    def flush(self) -> None:
        """Writes all numbers to disk, and returns after that."""
        with naming(self._folder):
            self._writer.flush()

    def close(self) -> None:
        """Flushes and closes the file."""
        with naming(self._folder):
            try:
                self._writer.flush()
            finally:  # EventsWriter.close leaves the file open when the flush fails
                self._writer._py_recordio_writer.close()


def tag(field: str) -> str:
    """Returns the tag of a row's field, such as ``test/accuracy`` or ``comm/bytes_up``.

    Fields in no other group, which mostly describe the update, are in the group ``update``, such
    as ``update/update_norm`` and ``update/aggregation_error``.
    """
    for prefix in _PREFIXES:
        if field.startswith(f"{prefix}_"):
            return f"{prefix}/{field.removeprefix(f'{prefix}_')}"
    return f"{_GROUPS.get(field, 'update')}/{field}"
