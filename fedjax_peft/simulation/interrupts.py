"""Ctrl-C and SIGTERM during a run: it ends at the next safe place, with a checkpoint.

Python raises ``KeyboardInterrupt`` wherever the main thread is. Between two files of a checkpoint
it leaves half of it, and inside JAX's callback of the garbage collector it is printed and lost.
SIGTERM, which schedulers send some time before they kill a job, ends a process at once. During a
run, both are noted only, and the loop asks for them where nothing is lost.
"""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import NoReturn


class Terminated(SystemExit):
    """SIGTERM has ended a run. Uncaught, it ends the process with the code 143, as shells expect.

    The argument is advice for the user.
    """

    def __init__(self, advice: str = ""):
        super().__init__(143)
        self.advice = advice

    def __str__(self) -> str:
        return self.advice


class Request:
    """The signal that asks a run to end."""

    number = 0
    """The number of the signal; 0 if none has arrived."""

    def check(self) -> None:
        """Raises ``KeyboardInterrupt`` or :class:`Terminated` if a signal has arrived."""
        if self.number:
            end(self.number)


def end(number: int) -> NoReturn:
    """Raises the exception of a signal."""
    raise Terminated if number == signal.SIGTERM else KeyboardInterrupt


@contextlib.contextmanager
def noted(notes: Mapping[int, bytes] | None = None) -> Iterator[Request]:
    """Yields the request that notes Ctrl-C and SIGTERM; a second signal raises at once.

    A signal that no :meth:`Request.check` has raised is raised at the end of the block. Only the
    main thread receives signals; in other threads nothing is noted. Handlers that the program has
    set itself stay, and so do those of an outer block.

    Args:
      notes: number of a signal -> what is printed; by default, that the run ends after its round.
    """
    request = Request()

    def note(number: int, frame: FrameType | None) -> None:
        if request.number:
            end(number)
        request.number = number
        with contextlib.suppress(OSError):  # print could wait for a lock that this thread holds
            os.write(2, (notes or _NOTED)[number])

    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    ours = {}
    if threading.current_thread() is threading.main_thread():
        ours = {n: f for n, f in usual.items() if signal.getsignal(n) is f}
    for number in ours:
        signal.signal(number, note)
    try:
        yield request
    finally:
        for number, handler in ours.items():
            signal.signal(number, handler)
    request.check()


_NOTED: dict[int, bytes] = {
    signal.SIGINT: b"\nfedjax_peft: Ctrl-C: the run ends after this round, with a checkpoint if it"
    b" has a directory. Ctrl-C again ends it at once.\n",
    signal.SIGTERM: b"\nfedjax_peft: SIGTERM: the run ends after this round, with a checkpoint if"
    b" it has a directory.\n",
}
