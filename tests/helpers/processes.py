"""Runs of several processes of this machine, as on several hosts."""

import contextlib
import os
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import NamedTuple

HELPERS = Path(__file__).parent


class Ended(NamedTuple):
    """A process that has ended."""

    code: int
    out: str
    err: str


def free_ports(number: int) -> list[int]:
    """Returns different ports of this machine that nobody listens on."""
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(number)]
        for probe in probes:
            probe.bind(("", 0))
        return [int(probe.getsockname()[1]) for probe in probes]


def free_port() -> int:
    """Returns a port of this machine that nobody listens on."""
    return free_ports(1)[0]


def run_together(commands, *, devices=1, seconds=300, expected=(0,)) -> list[Ended]:
    """Runs commands at the same time and returns how they ended.

    Args:
      commands: the words of each command.
      devices: CPU devices of each process.
      seconds: time limit for all together; then every process is killed.
      expected: the exit codes that are no failure; None for any.
    """
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
    env = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": flags,
        "PYTHONPATH": f"{HELPERS.parents[1]}:{HELPERS}",
    }
    started = [
        subprocess.Popen(
            [str(word) for word in command],
            env=env,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        for command in commands
    ]
    end, ended = time.monotonic() + seconds, []
    for process in started:
        try:
            out, err = process.communicate(timeout=max(1.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, err = process.communicate()
            err += f"\n(killed: still running after {seconds} s)"
            expected = () if expected is None else expected
        ended.append(Ended(process.returncode, out, err))
    if expected is not None:
        shown = "\n".join(
            f"--- process {i}: exit code {one.code}\n{one.out}{one.err}"
            for i, one in enumerate(ended)
        )
        assert all(one.code in expected for one in ended), shown
    return ended
