"""The steps by which processes connect: their arguments, the coordinator, and errors in words."""

import socket
import time

from fedjax_peft.support.errors import InputError


def check_arguments(coordinator: str | None, processes: int | None, process: int | None) -> None:
    """Raises InputError for arguments of ``initialize`` that are incomplete or wrong."""
    given = {"coordinator": coordinator, "processes": processes, "process": process}
    absent = [name for name, value in given.items() if value is None]
    if 0 < len(absent) < 3:
        raise InputError(
            f"coordinator, processes and process belong together, but {' and '.join(absent)}"
            " is missing. Give all three, or none of them in a cluster that JAX detects."
        )
    if processes is not None and process is not None and not 0 <= process < processes:
        raise InputError(f"process = {process} is not one of 0 to {processes - 1}.")
    if coordinator is not None and not coordinator.rpartition(":")[2].isdigit():
        raise InputError(f"coordinator = {coordinator!r} is not of the form HOST:PORT.")


def meet(coordinator: str | None, process: int | None, timeout: float) -> None:
    """Checks the coordinator's port (process 0), or waits until it answers (other processes)."""
    if coordinator is None:
        return
    host, _, port = coordinator.rpartition(":")
    if process == 0:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", int(port)))
            except (OSError, OverflowError) as error:
                raise InputError(
                    f"Process 0 cannot listen on port {port}: {error}. Choose another port for"
                    " the coordinator, the same in all processes."
                ) from None
        return
    end = time.monotonic() + timeout
    while True:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
            return
        except (OSError, OverflowError) as error:
            if time.monotonic() > end:
                raise InputError(
                    f"The coordinator {coordinator} did not answer within {timeout:g} s: {error}."
                    " Check the address, that process 0 was started, and the firewall."
                ) from None
        time.sleep(0.2)


def reason_of(error: Exception) -> str:
    """Returns an error of ``jax.distributed.initialize`` in words for users."""
    text = str(error)
    if "should be defined" in text or "must be defined" in text:
        return (
            "No cluster was found: JAX detects Slurm, Kubernetes, Cloud TPU and Open MPI. Elsewhere"
            " give every process --coordinator HOST:PORT --processes N --process I (in Python,"
            " coordinator, processes and process)."
        )
    if "before any JAX" in text.replace("\n", " "):
        return (
            "JAX has been used already: call fp.distributed.initialize() first, before models and"
            " data are made."
        )
    return f"The processes cannot connect: {text.splitlines()[0]}"


def try_collective() -> None:
    """Sums over all devices, so that devices that cannot reach each other are noticed at once."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec

    devices = jax.make_mesh((jax.device_count(),), ("devices",))
    split = NamedSharding(devices, PartitionSpec("devices"))
    ones = np.ones(jax.device_count(), np.float32)
    shared = jax.make_array_from_callback(ones.shape, split, lambda part: ones[part])
    jax.jit(jnp.sum)(shared).block_until_ready()
