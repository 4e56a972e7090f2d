"""The processor of this machine: its model, and the instructions that numbers can depend on."""

import platform
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_CPUINFO = Path("/proc/cpuinfo")
_RELEVANT = re.compile(
    r"sse4_2|avx|amx|fma|f16c|(feat_)?(asimd|neon|fp16|fphp|bf16|i8mm|dotprod|sve|sme(?!p))"
)


def processor() -> dict[str, Any]:
    """Returns ``model``, and ``flags``: the names of vector instructions, such as ``avx2``.

    On other systems than Linux and macOS the flags are not known.
    """
    try:
        facts = dict(_linux() if _CPUINFO.exists() else _macos())
    except (OSError, subprocess.SubprocessError):
        facts = {}
    flags = " ".join(facts.get(name, "") for name in ("flags", "features", "leaf7_features"))
    flags += "".join(f" {name}" for name, value in facts.items() if value == "1")
    return {
        "model": facts.get("model name") or platform.processor() or platform.machine(),
        "flags": sorted({flag for flag in flags.lower().split() if _RELEVANT.match(flag)}),
    }


def _linux() -> Iterator[tuple[str, str]]:
    """Yields the facts of the first core."""
    with _CPUINFO.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            if not line.strip():
                return
            name, _, value = line.partition(":")
            # On ARM the flags are "Features", and the name of a board may be all that is known.
            name = {"Features": "flags", "Model": "model name"}.get(name.strip(), name.strip())
            yield name, value.strip()


def _macos() -> Iterator[tuple[str, str]]:
    done = subprocess.run(
        ["sysctl", "machdep.cpu", "hw.optional"], capture_output=True, text=True, timeout=10
    )
    for line in done.stdout.splitlines():
        name, _, value = line.partition(":")
        name = name.rpartition(".")[2]
        yield ("model name" if name == "brand_string" else name), value.strip()
