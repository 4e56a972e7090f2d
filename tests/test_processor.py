"""The processor's model and its vector instructions, as systems name them."""

import subprocess
from types import SimpleNamespace

import pytest
from internals import processor

INTEL = """processor\t: 0
model name\t: Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz
flags\t\t: fpu smep avx2 avx512f avx512_bf16 amx_bf16 amx_tile fma sse2 sse4_2

processor\t: 1
model name\t: another
flags\t\t: avx9
"""
GRAVITON = "processor : 0\nFeatures : fp asimd asimddp sve bf16 i8mm crc32\nCPU part : 0xd40\n\n"
PI = "processor : 0\nFeatures : fp asimd\n\nprocessor : 1\n"
MAC = """machdep.cpu.brand_string: Apple M2
hw.optional.arm.FEAT_BF16: 1
hw.optional.arm.FEAT_SME: 0
hw.optional.neon: 1
"""
OLD_MAC = """machdep.cpu.brand_string: Intel(R) Core(TM) i7
machdep.cpu.features: FPU SSE4.2 FMA AVX1.0
machdep.cpu.leaf7_features: SMEP AVX2
"""


@pytest.mark.parametrize(
    ("text", "model", "flags"),
    [
        (INTEL, "Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz",
         "amx_bf16 amx_tile avx2 avx512_bf16 avx512f fma sse4_2"),
        (GRAVITON, "arm", "asimd asimddp bf16 i8mm sve"),
        (PI, "arm", "asimd"),
        ("", "arm", ""),
    ],
)  # fmt: skip
def test_linux(text, model, flags, tmp_path, monkeypatch):
    """The first core's; the names of other systems' architecture where a model has no name."""
    (tmp_path / "cpuinfo").write_text(text)
    monkeypatch.setattr(processor, "_CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr("platform.processor", lambda: "")
    monkeypatch.setattr("platform.machine", lambda: "arm")
    assert processor.processor() == {"model": model, "flags": flags.split()}


@pytest.mark.parametrize(
    ("text", "model", "flags"),
    [
        (MAC, "Apple M2", "feat_bf16 neon"),
        (OLD_MAC, "Intel(R) Core(TM) i7", "avx1.0 avx2 fma"),
        (FileNotFoundError("sysctl"), "chip", ""),
        (subprocess.TimeoutExpired("sysctl", 10), "chip", ""),
    ],
)
def test_other_systems(text, model, flags, tmp_path, monkeypatch):
    def run(command, **options):
        if isinstance(text, Exception):
            raise text
        return SimpleNamespace(stdout=text)

    monkeypatch.setattr(processor, "_CPUINFO", tmp_path / "none")
    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr("platform.processor", lambda: "chip")
    assert processor.processor() == {"model": model, "flags": flags.split()}
