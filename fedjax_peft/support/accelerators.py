"""The accelerators that programs are planned and compiled for: a table from public specifications.

Rates are those of dense products, without sparsity. A rate of ``float32`` is that of products as
XLA computes them by default: in TensorFloat-32 from NVIDIA's Ampere on, and in one pass of bfloat16
on a TPU. GPUs before Ampere have no units for bfloat16, which is computed in float32 there.

Sources:

* NVIDIA's data sheets: "H100 Tensor Core GPU" (SXM), "H200 Tensor Core GPU", "HGX B200", "A100
  Tensor Core GPU" (SXM), "L4 Tensor Core GPU", "T4 Tensor Core GPU", "V100 Tensor Core GPU" (SXM2).
* The memory that a GPU's driver reports, and the numbers of a :class:`Chip`: OpenXLA's target
  descriptions (``xla/backends/gpu/target_config/specs``), NVIDIA's tuning guides of Turing and Ada.
* https://cloud.google.com/tpu/docs/v5e, ``v5p`` and ``v6e``, for one chip.
"""

from collections.abc import Mapping
from typing import NamedTuple

from fedjax_peft.support.errors import check_known

USABLE = 0.9
"""The share of a device's memory that is planned; the rest is for the compiler and the driver."""


class Chip(NamedTuple):
    """What the GPU compiler asks about a GPU."""

    capability: tuple[int, int]
    """The compute capability, such as (9, 0)."""
    cores: int
    """Streaming multiprocessors."""
    lanes: int
    """Units for float32 of a multiprocessor."""
    clock: float
    """GHz, boosted."""
    threads: int
    """Threads that a multiprocessor holds."""
    shared: int
    """Bytes of a multiprocessor's shared memory."""
    cache: int
    """Bytes of the second-level cache."""


class Device(NamedTuple):
    """One accelerator."""

    name: str
    title: str
    memory: float
    """Bytes."""
    bandwidth: float
    """Bytes a second, of its memory."""
    rates: Mapping[str, float]
    """Compute dtype -> operations of products a second."""
    chip: Chip | None = None
    """Of a GPU; None for a TPU."""
    topology: str = ""
    """The smallest topology that the TPU compiler knows, and its name of an instance."""
    instance: str = ""

    @property
    def platform(self) -> str:
        """``gpu`` or ``tpu``."""
        return "tpu" if self.chip is None else "gpu"

    @property
    def capability(self) -> float:
        """The compute capability as a number, such as 9.0; 0 for a TPU."""
        return 0.0 if self.chip is None else float("{}.{}".format(*self.chip.capability))


def _rates(bfloat16: float, float32: float) -> dict[str, float]:
    return {"bfloat16": bfloat16 * 1e12, "float32": float32 * 1e12}


_MI, _KI = 1 << 20, 1 << 10
_HOPPER = Chip((9, 0), 132, 128, 1.98, 2048, 228 * _KI, 50 * _MI)
_BLACKWELL = Chip((10, 0), 148, 128, 1.965, 2048, 228 * _KI, 132_644_864)
_AMPERE = Chip((8, 0), 108, 64, 1.41, 2048, 164 * _KI, 40 * _MI)
_ADA = Chip((8, 9), 58, 128, 2.04, 1536, 100 * _KI, 48 * _MI)
_TURING = Chip((7, 5), 40, 64, 1.59, 1024, 64 * _KI, 4 * _MI)
_VOLTA = Chip((7, 0), 80, 64, 1.53, 2048, 96 * _KI, 6 * _MI)

DEVICES = {
    device.name: device
    for device in (
        Device("h100", "NVIDIA H100 SXM", 84.98e9, 3.35e12, _rates(989, 495), _HOPPER),
        Device("h200", "NVIDIA H200", 151.4e9, 4.8e12, _rates(989, 495), _HOPPER),
        Device("b200", "NVIDIA B200", 191.5e9, 7.67e12, _rates(2250, 1125), _BLACKWELL),
        Device("a100-80gb", "NVIDIA A100 80GB SXM", 85.1e9, 2.04e12, _rates(312, 156), _AMPERE),
        Device("a100-40gb", "NVIDIA A100 40GB SXM", 42.3e9, 1.555e12, _rates(312, 156), _AMPERE),
        Device("l4", "NVIDIA L4", 24e9, 0.3e12, _rates(121, 60), _ADA),
        Device("t4", "NVIDIA T4", 16e9, 0.32e12, _rates(8.1, 8.1), _TURING),
        Device("v100", "NVIDIA V100 16GB SXM2", 16.9e9, 0.9e12, _rates(15.7, 15.7), _VOLTA),
        Device(
            "v5e", "Google TPU v5e", 16e9, 0.819e12, _rates(197, 197), None, "2x2", "v5litepod-4"
        ),
        Device("v5p", "Google TPU v5p", 95e9, 2.765e12, _rates(459, 459), None, "2x2x1", "v5p-8"),
        Device("v6e", "Google TPU v6e", 32e9, 1.64e12, _rates(918, 918), None, "2x2", "v6e-4"),
    )
}
"""By name, as ``fedjax-peft plan --device`` takes it."""


def lines() -> dict[str, str]:
    """Returns a line about each accelerator, by name."""
    return {
        x.name: f"{x.title}: {x.memory / 1e9:.0f} GB, {x.bandwidth / 1e9:,.0f} GB/s,"
        f" {x.rates['bfloat16'] / 1e12:,.0f} TFLOP/s in bfloat16,"
        f" {x.rates['float32'] / 1e12:,.0f} in float32"
        for x in DEVICES.values()
    }


def find_device(name: str) -> Device:
    """Returns an accelerator by its name.

    Raises:
      InputError: an unknown name.
    """
    check_known("device", name, DEVICES)
    return DEVICES[name]
