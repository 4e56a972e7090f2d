"""A round compiled for an accelerator that need not be there, by the accelerator's own compiler.

XLA's compilers for GPUs and TPUs run on any machine with Linux. Without the device they cannot try
several kernels and take the fastest one (autotuning), and nothing can be run.
"""

import importlib.util
import os
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

from fedjax_peft.simulation.planning.compiled_text import step_traffic
from fedjax_peft.support.accelerators import Device
from fedjax_peft.support.errors import InputError, first_line
from fedjax_peft.support.libraries import install


class CompiledStep(NamedTuple):
    """What a target's compiler made of a round."""

    memory: int
    """Bytes that the round needs on the device, its arguments included."""
    temporary: int
    """Those of them that are neither arguments nor results."""
    kernels: int
    """Kernels of a step of all lanes."""
    nbytes: int
    """Bytes that these kernels read and write."""
    calls: Mapping[str, int]
    """Library kernels and collectives of a step: name -> how many."""
    exchanged: Mapping[str, int]
    """Collectives of a step -> the bytes of their results."""
    program: int
    """Bytes of the program."""
    seconds: float
    """The time to compile, on this machine."""


def compile_step(lowered: Any, options: dict[str, bool] | None = None) -> CompiledStep:
    """Compiles a round that was lowered by :mod:`fedjax_peft.simulation.planning.memory_plan`.

    Args:
      options: of the compiler.
    """
    began = time.perf_counter()
    compiled = _compiled(lowered, options)
    seconds = time.perf_counter() - began
    traffic = step_traffic(compiled.as_text())
    a = compiled.memory_analysis()
    results = a.output_size_in_bytes - a.alias_size_in_bytes
    return CompiledStep(
        a.argument_size_in_bytes + a.temp_size_in_bytes + results,
        a.temp_size_in_bytes,
        traffic.kernels,
        traffic.nbytes,
        traffic.calls,
        traffic.exchanged,
        a.generated_code_size_in_bytes,
        seconds,
    )


def _compiled(lowered: Any, options: dict[str, bool] | None) -> Any:
    try:
        return lowered.compile(compiler_options=options)
    except jax.errors.JaxRuntimeError as error:
        if "tile sizes" not in str(error):
            raise
        # Without a device to try kernels on, XLA takes Triton's for all products, and has none for
        # some shapes. With a device it would take the library's for these.
        options = {**(options or {}), "xla_gpu_enable_triton_gemm": False}
        return lowered.compile(compiler_options=options)


def target_devices(device: Device, count: int = 1) -> list[Any]:
    """Returns devices of JAX that programs can be compiled for, and not be run on.

    Args:
      count: of devices in one machine; of a TPU at most 4.

    Raises:
      InputError: the compiler is not installed, or does not know the device.
    """
    from jax.experimental import topologies

    _check_installed(device)
    try:
        if device.chip is None:
            for name, value in {**_TPU, "TPU_ACCELERATOR_TYPE": device.instance}.items():
                os.environ.setdefault(name, value)
            name = f"{device.name}:{device.topology}"
            return topologies.get_topology_desc(name, "tpu").devices[:count]
        facts = {"target_config": describe_gpu(device), "topology": f"1x1x{count}"}
        return topologies.get_topology_desc("", "cuda", **facts).devices
    except (jax.errors.JaxRuntimeError, RuntimeError, ValueError) as error:
        raise InputError(
            f"The compiler for {device.title} cannot be started: {first_line(error)}. Start Python"
            " with the environment variable JAX_PLATFORMS=cpu. If that does not help, the version"
            f" does not suit that of JAX: {install(f'compile-{device.platform}')}."
        ) from error


_TPU = {"TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost"}
_OLDEST = (7, 5)
"""The oldest compute capability that CUDA 13 compiles for."""


def _check_installed(device: Device) -> None:
    """Raises InputError if the target's compiler is missing."""
    package = "libtpu" if device.chip is None else "jax_cuda13_plugin"
    if importlib.util.find_spec(package) is None:
        size = ".2 GB" if device.chip is None else "3.4 GB"
        raise InputError(
            f"The compiler for {device.title} is not installed ({package}, {size} on Linux):"
            f" {install(f'compile-{device.platform}')}. Without --compile the plan needs nothing."
        )
    if device.chip is not None and device.chip.capability < _OLDEST:
        major, minor = device.chip.capability
        raise InputError(
            f"{device.title} has the compute capability {major}.{minor}, and CUDA 13 compiles from"
            f" {_OLDEST[0]}.{_OLDEST[1]} on. Plan without --compile, or compile for t4."
        )


def describe_gpu(device: Device) -> str:
    """Returns the description of a GPU that its compiler reads (``GpuTargetConfigProto``)."""
    chip = device.chip
    assert chip is not None
    major, minor = chip.capability
    # The driver keeps 1 KB of a block's shared memory from Ampere on.
    optional = chip.shared - (1024 if major >= 8 else 0)
    special = "ACCELERATED_FEATURES" if major >= 9 else "NONE"
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {chip.shared}
  threads_per_core_limit: {chip.threads}
  core_count: {chip.cores}
  fpus_per_core: {chip.lanes}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {device.bandwidth:.0f}
  l2_cache_size: {chip.cache}
  clock_rate_ghz: {chip.clock}
  device_memory_size: {device.memory:.0f}
  shared_memory_per_block_optin: {optional}
  cuda_compute_capability {{
    major: {major}
    minor: {minor}
    feature_extension: {special}
  }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{
  major: 9
  minor: 12
}}
device_description_str: "{device.title}"
"""
