"""Several processes that run one simulation together, on one machine or on many.

Every process executes the same program with the same arguments. So it makes the same plans from the
same seed, and holds the same data. The devices of all processes share the lanes, and process 0
writes the records::

    fp.distributed.initialize()  # before the first use of a device
    run = fp.simulate(model, algorithm, clients, rounds=100, out="/shared/runs/mine")

Connections and collectives are those of ``jax.distributed``. This module adds what a run needs
besides: values that were measured by one process are used by all (:func:`agree`), and the end of
one process ends all of them with the reason (:func:`fail`).
"""

import atexit
import contextlib
import ctypes
import itertools
import json
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from fedjax_peft.engine.devices.connecting import check_arguments, meet, reason_of, try_collective
from fedjax_peft.support.errors import InputError

__all__ = ["agree", "initialize", "is_writer", "process", "processes", "whole"]

BEAT = 1.0
"""Seconds between two signs of life of a process."""
SILENCE = 20.0
"""Seconds without a sign of life after which a process counts as dead."""
_HEARTBEAT = 45
"""The same of jaxlib, in case the Python threads of a process do not run. It ends the process
without a reason, so it comes second. Both are below a minute."""
_STATUS = "fedjax_peft/processes/"
"""Prefix of the keys under which processes publish their signs of life and their failures."""
_AGREED = "fedjax_peft/agreed/"
_ASKED = "fedjax_peft/asked/"
"""Prefix of the keys under which processes publish the signals that ask them to end."""
_NETWORK = ("Gloo", "NCCL", "UNAVAILABLE", "DEADLINE_EXCEEDED", "Socket", "onnection", "barrier")
"""Words of errors that occur when another process has ended."""
_CODE = 2
"""The exit code when a process has died."""

_watch: "_Watch | None" = None
_agreements = itertools.count()
_ending = threading.Lock()


def initialize(
    coordinator: str | None = None,
    processes: int | None = None,
    process: int | None = None,
    *,
    timeout: float = 300.0,
) -> None:
    """Connects this process with the other processes of the run.

    Call it in every process, before the first use of a device. Without arguments the cluster's
    environment is used, which JAX detects: Slurm, Kubernetes, Cloud TPU, Open MPI.

    From then on the end of one process ends all: a process that fails gives the others its message
    and its exit code, and a process that was killed is noticed within a minute.

    Args:
      coordinator: ``"host:port"`` of process 0, on which it will listen.
      processes: the number of processes.
      process: the number of this process, from 0.
      timeout: seconds to wait until all processes have connected.

    Raises:
      InputError: there is no cluster, the arguments are incomplete or wrong, the coordinator cannot
        be reached, its port is in use, or JAX has been used before.
    """
    global _watch
    import jax

    if _watch is not None:
        raise InputError("fp.distributed.initialize() was called twice.")
    check_arguments(coordinator, processes, process)
    meet(coordinator, process, timeout)
    # Ends this process while it connects: jaxlib does not raise an error but aborts.
    missing = (
        f"The processes did not all connect within {timeout:g} s. Check that every process was"
        f" started, with its own number and the same coordinator"
        f" ({coordinator or 'the one of the cluster'}), and that no firewall is between them."
    )
    with _connecting(missing):
        try:
            jax.distributed.initialize(
                coordinator,
                processes,
                process,
                initialization_timeout=int(timeout),
                heartbeat_timeout_seconds=_HEARTBEAT,
            )
            try_collective()
        except (ValueError, RuntimeError) as error:
            raise InputError(reason_of(error)) from error
    _watch = _Watch()


def is_writer() -> bool:
    """Returns whether this process writes records and output; True without other processes."""
    return process() == 0


def process() -> int:
    """Returns the number of this process, from 0."""
    return int(_state().process_id)


def processes() -> int:
    """Returns the number of processes of the run; 1 without :func:`initialize`."""
    return int(_state().num_processes)


def agree(value: Any) -> Any:
    """Returns process 0's value in all processes; without other processes, the value itself.

    Decisions that depend on a clock or a disk differ between processes, and processes that decide
    differently wait for each other for ever. Every process must call this function equally often.

    Args:
      value: numbers, texts, lists and dicts. Only that of process 0 is used.
    """
    if processes() == 1:
        return value
    client, key = _state().client, f"{_AGREED}{next(_agreements)}"
    if is_writer():
        client.key_value_set(key, json.dumps(value))
        return json.loads(json.dumps(value))
    while True:
        try:
            return json.loads(client.blocking_key_value_get(key, 1000))
        except RuntimeError as error:  # a short wait, so that Ctrl-C works
            if "DEADLINE_EXCEEDED" not in str(error):
                raise


def seconds_since(began: float) -> float:
    """Returns the seconds since a time of ``time.perf_counter``, as process 0 measured them."""
    return float(agree(time.perf_counter() - began))


def whole(arrays: Any) -> Any:
    """Returns arrays that this process can read alone; without other processes, the same arrays.

    Every process must call this function. An array that the processes share in parts is gathered in
    the memory of each host, as a numpy array.
    """
    import jax
    from jax.experimental.multihost_utils import process_allgather

    def one(x: Any) -> Any:
        if not isinstance(x, jax.Array) or x.is_fully_addressable:
            return x
        if x.is_fully_replicated:
            return x.addressable_data(0)
        return process_allgather(x, tiled=True)

    return arrays if processes() == 1 else jax.tree.map(one, arrays)


def agree_on_signal(number: int) -> int:
    """Returns the signal that has asked a process to end, the same in all processes; 0 if none.

    Every process must call this function equally often.

    Args:
      number: the number of the signal that this process has received; 0 if none.
    """
    if processes() == 1:
        return number
    client = _state().client
    if number:
        client.key_value_set(f"{_ASKED}{process()}", str(number), allow_overwrite=True)
    found = client.key_value_dir_get(_ASKED) if is_writer() else []
    return int(agree(max((int(text) for _, text in found), default=0)))


def before_end(function: Callable[[], None]) -> None:
    """Registers a function that is called before another process's failure ends this process."""
    if _watch is not None:
        _watch.callbacks.append(function)


def fail(message: str, code: int) -> None:
    """Ends all processes because of an error in this one; does nothing without other processes.

    Args:
      message: the error, which this process has printed already.
      code: the exit code of all processes.
    """
    if _watch is not None:
        _watch.publish({"failed": message, "code": code})
        _end(None, code)


def await_verdict(error: BaseException) -> None:
    """Waits for the reason if an error says that a connection broke; then the reason ends this.

    A collective fails at once when another process dies, but it does not know which one. Returns if
    no process turns out to be dead, or if the error is of another kind.
    """
    if _watch is not None and any(word in str(error) for word in _NETWORK):
        time.sleep(SILENCE + 5 * BEAT)


class _Watch:
    """Publishes this process's signs of life, and ends it when another process fails or dies."""

    def __init__(self) -> None:
        state = _state()
        self._client, self.process, self._processes = state.client, state.process_id, processes()
        self.callbacks: list[Callable[[], None]] = []
        self._over = threading.Event()
        self._failed = False
        _set_abort_handler(self._on_abort)
        self._previous, sys.excepthook = sys.excepthook, self._on_exception
        threading.Thread(target=self._run, daemon=True, name="fedjax_peft.distributed").start()
        atexit.register(self._finish)  # before jax disconnects, which is registered earlier

    def publish(self, status: dict[str, Any]) -> None:
        """Publishes the status of this process; a failure is its last one."""
        if not self._failed:
            self._failed = "failed" in status
            text = json.dumps({"host": socket.gethostname(), "pid": os.getpid(), **status})
            with contextlib.suppress(RuntimeError):  # the coordinator has gone
                self._client.key_value_set(f"{_STATUS}{self.process}", text, allow_overwrite=True)

    def _run(self) -> None:
        others = [i for i in range(self._processes) if i != self.process]
        received = dict.fromkeys(others, ("", time.monotonic()))
        for beat in itertools.count():
            if self._over.wait(BEAT):
                return
            self.publish({"beat": beat})
            try:
                found = dict(self._client.key_value_dir_get(_STATUS))
            except RuntimeError:
                if self._over.is_set():
                    return
                _end(_UNREACHABLE, _CODE)
            for other in others:
                text = found.get(f"{_STATUS}{other}", "")
                self._judge(other, json.loads(text or "{}"), time.monotonic() - received[other][1])
                if text != received[other][0]:
                    received[other] = (text, time.monotonic())

    def _judge(self, other: int, status: dict[str, Any], silence: float) -> None:
        """Ends this process if another one has failed or is dead."""
        where = f" ({status['host']}, pid {status['pid']})" if status else ""
        name = f"Process {other} of {self._processes}{where}"
        if "failed" in status:
            _end(f"{name} has failed: {status['failed']}", status["code"])
        if silence > SILENCE:
            _end(_DEAD.format(name=name, silence=SILENCE), _CODE)

    def _on_abort(self) -> None:
        """Ends all processes when a library aborts this one; jaxlib does so without coordinator."""
        host, _, port = _state().coordinator_address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
        except OSError:
            _end(_UNREACHABLE, _CODE)
        status = {"failed": "a library aborted it; its output says more.", "code": _CODE}
        # A thread, because the thread that aborts may hold a lock of the connection.
        thread = threading.Thread(target=self.publish, args=[status], daemon=True)
        thread.start()
        thread.join(3 * BEAT)
        _end("A library aborted this process; the lines above say more.", _CODE)

    def _on_exception(self, kind: Any, error: BaseException, trace: Any) -> None:
        await_verdict(error)
        self._previous(kind, error, trace)
        code = 130 if isinstance(error, KeyboardInterrupt) else 1
        fail(f"{kind.__name__}: {error}", code)

    def _finish(self) -> None:
        """Waits until all processes are done, with signs of life, and then stops them."""
        with contextlib.suppress(RuntimeError):
            self._client.wait_at_barrier("fedjax_peft/end", 600_000)
        self._over.set()


_RESUME = "--resume continues the run, on the same or another number of processes."
_DEAD = (
    "{name} has given no sign of life for {silence:g} s: it was killed, or its machine or network"
    f" has failed. So all processes end. {_RESUME}"
)
_UNREACHABLE = (
    "Process 0, the coordinator, cannot be reached: it was killed, or its machine or network has"
    f" failed. So all processes end. {_RESUME}"
)


def _end(message: str | None, code: int) -> NoReturn:
    """Ends this process at once, because another one has ended and no collective can complete."""
    if not _ending.acquire(blocking=False):  # another thread does it already
        time.sleep(60)
        os._exit(code)
    if message is not None:
        with contextlib.suppress(OSError, ValueError):
            print(f"fedjax-peft: {message}", file=sys.stderr, flush=True)
    for callback in () if _watch is None else _watch.callbacks:
        with contextlib.suppress(Exception):
            callback()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    if _watch is not None and _watch.process == 0:
        time.sleep(3 * BEAT)  # the others read the reason from the coordinator, which is here
    os._exit(code)


def _state() -> Any:
    # JAX has no public name for its key-value store, through which orbax talks as well.
    from jax._src.distributed import global_state

    return global_state


def _set_abort_handler(function: Callable[[], None]) -> None:
    """Has a function called when a library aborts this process.

    jaxlib ends a process by abort() when it cannot connect or when the coordinator has gone, and
    the callback that it offers instead throws std::bad_cast (jaxlib 0.10). A handler of Python's
    signal module runs too late, after the thread that aborts has returned to Python.
    """
    if os.name != "posix":
        return
    handler = _HANDLER(lambda _: function())
    _handlers.append(handler)  # it must live as long as the process
    ctypes.CDLL(None).signal(signal.SIGABRT, handler)


_HANDLER = ctypes.CFUNCTYPE(None, ctypes.c_int)
_handlers: list[Any] = []


@contextlib.contextmanager
def _connecting(message: str) -> Iterator[None]:
    """Hides the logs of libraries; prints only the message if one aborts inside the block."""
    sys.stdout.flush()
    sys.stderr.flush()
    saved = {descriptor: os.dup(descriptor) for descriptor in (1, 2)}

    def restore() -> None:
        for descriptor, copy in saved.items():
            os.dup2(copy, descriptor)

    def on_abort() -> None:
        restore()
        _end(message, _CODE)

    with tempfile.TemporaryFile() as log:
        for descriptor in saved:
            os.dup2(log.fileno(), descriptor)
        _set_abort_handler(on_abort)
        try:
            yield
        finally:
            sys.stderr.flush()
            restore()
            for copy in saved.values():
                os.close(copy)
        log.seek(0)
        lines = log.read().decode(errors="replace").splitlines(keepends=True)
        sys.stderr.writelines(line for line in lines if not line.startswith("[Gloo]"))
