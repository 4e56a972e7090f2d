"""TensorBoard: an event file with the numbers of a run."""

import time
from pathlib import Path

from fedjax_peft.simulation.rows import Row
from fedjax_peft.simulation.trackers.base import TrackedRun, Tracker, built, scalars
from fedjax_peft.support.files import naming


@built("tensorboardX")
def tensorboard(*, folder: str = "tensorboard") -> Tracker:
    """TensorBoard: event files in the run directory, for ``tensorboard --logdir runs``.

    A resumed run adds a file, which hides the points that older files have from its first round on.

    Args:
      folder: of the event files; a relative path is in the run directory.

    Raises:
      InputError: the package ``tensorboardX`` is missing.
    """

    def take(row: Row, run: TrackedRun, /) -> None:
        step = row["round"]
        writer = run.opened(lambda: EventWriter(run.path(folder), step), EventWriter.close)
        for name, value in scalars(row).items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return take


class EventWriter:
    """Writes scalars to a new event file, in the caller's thread.

    ``tensorboardX.SummaryWriter`` is not used because it writes in another thread. When a disk is
    full, that thread dies, and the writer waits for it forever.
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
            several = f".{len([*folder.iterdir()])}"  # files of one second need different names
            self._writer = EventsWriter(str(folder / "events"), several)
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
