"""Runs the numeric tests as other processors would, and lists what is near its tolerance.

    make portable                      # all settings, about 45 minutes on two cores
    python tests/tools/portable.py --only sse4.2 -- tests/aggregators

Each setting limits the instructions that XLA and the libraries of the references (OpenBLAS, oneDNN,
NumPy, PyTorch) may use, or changes threads and optimisation; the last two imitate a processor that
sums in another order (``reordering.py``). Every asserted closeness records its error over its
tolerance (``closeness.py``). The list at the end has each place that used more than .3 of it under
any setting, and the exit code is 1 if there is one or if a test failed.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
SHARE = 0.3
NUMERIC = (
    *("aggregators", "algorithms", "asynchronous", "attacks", "engine", "models", "peft"),
    *("privacy", "report", "simulation", "tasks", "transforms"),
    *(f"cli/test_cli_{name}.py" for name in ("export", "hub")),
    *(f"config/test_config_{name}.py" for name in ("schedules", "starts")),
    *(f"data/test_data_{name}.py" for name in ("heterogeneity", "packing")),
    "test_experiments_minimal.py",
    *(f"test_{name}.py" for name in ("clustering", "differentiable", "generation", "lm_eval")),
    *(f"test_{name}.py" for name in ("precision", "random", "schedules", "tree")),
)
"""The tests whose results are floating-point numbers."""


def numpy_without(*kept: str) -> str:
    """Returns all features of processors that NumPy can turn off, without ``kept``.

    The names come from NumPy, because a release may rename them, and it only warns of unknown ones.
    """
    names = np._core._multiarray_umath.__cpu_dispatch__
    if unknown := set(kept).difference(names):
        raise SystemExit(f"NumPy {np.__version__} knows {names}, not {sorted(unknown)}.")
    return " ".join(name for name in names if name not in kept)


def libraries(openblas: str, onednn: str, torch: str, numpy_without: str) -> dict[str, str]:
    """Returns the environment that limits the libraries of the reference implementations."""
    return {
        "OPENBLAS_CORETYPE": openblas,
        "ONEDNN_MAX_CPU_ISA": onednn,
        "ATEN_CPU_CAPABILITY": torch,
        "NPY_DISABLE_CPU_FEATURES": numpy_without,
    }


ONE_THREAD = {"NPROC": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
SETTINGS: dict[str, dict[str, str]] = {
    "sse4.2, one thread": {
        **libraries("Nehalem", "SSE41", "default", numpy_without()),
        **ONE_THREAD,
        "XLA_FLAGS": "--xla_cpu_max_isa=SSE4_2",
    },
    "avx, eigen without threads": {
        **libraries("Sandybridge", "AVX", "default", numpy_without()),
        "XLA_FLAGS": "--xla_cpu_max_isa=AVX --xla_cpu_multi_thread_eigen=false",
    },
    "avx2, one thread, optimisation level 1": {
        **ONE_THREAD,
        **libraries("Haswell", "AVX2", "avx2", numpy_without("X86_V3")),
        "XLA_FLAGS": "--xla_cpu_max_isa=AVX2 --xla_backend_optimization_level=1",
    },
    "avx512, sums reordered": {"XLA_FLAGS": "--xla_cpu_max_isa=AVX512", "REORDERED_SUMS": "1"},
    "other sums reordered": {"REORDERED_SUMS": "2"},
}


def check(setting: dict[str, str]) -> None:
    """Ends the program if NumPy uses a feature that a setting turns off."""
    off = setting.get("NPY_DISABLE_CPU_FEATURES", "").split()
    program = (
        "from numpy._core._multiarray_umath import __cpu_features__ as known\n"
        f"print(*(name for name in {off} if known[name]))"
    )
    command = [sys.executable, "-W", "error::ImportWarning", "-c", program]
    child = subprocess.run(command, env={**os.environ, **setting}, text=True, capture_output=True)
    if child.returncode or child.stdout.strip():
        raise SystemExit(f"NumPy cannot do without {off}: {child.stdout}{child.stderr}")


def run(setting: dict[str, str], chosen: list[str], folder: Path) -> int:
    """Returns the exit code of the tests under a setting; records go to a folder."""
    folder.mkdir()
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "loadfile"]
    command += ["--no-loadscope-reorder", "--no-header", "-p", "no:cacheprovider"]
    command += ["-o", "file_seconds=0", *chosen]
    known = {name: value for name, value in setting.items() if value}
    return subprocess.run(
        command, cwd=ROOT, env={**os.environ, **known, "CLOSENESS": str(folder)}
    ).returncode


def near(folder: Path) -> dict[tuple[str, str], float]:
    """Returns the largest shares of a setting: (place, test) -> share, above :data:`SHARE`."""
    largest: dict[tuple[str, str], float] = {}
    for file in folder.glob("*.jsonl"):
        for line in file.read_text().splitlines():
            record = json.loads(line)
            if record["share"] > SHARE:
                key = (record["place"], record["test"])
                largest[key] = max(record["share"], largest.get(key, 0.0))
    return largest


def main() -> int:
    """Runs the settings and prints the list; returns 1 if it is not empty or a test failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="settings whose name contains this")
    parser.add_argument("tests", nargs="*", help="instead of all numeric ones")
    given = parser.parse_args()
    chosen = given.tests or [f"tests/{name}" for name in NUMERIC]
    failed, largest = [], {}
    with tempfile.TemporaryDirectory(prefix="closeness-") as directory:
        for i, (name, setting) in enumerate(SETTINGS.items()):
            if given.only not in name:
                continue
            print(f"\n=== {name}", flush=True)
            folder = Path(directory) / str(i)
            check(setting)
            if run(setting, chosen, folder):
                failed.append(name)
            for key, share in near(folder).items():
                if share > largest.get(key, (0.0, ""))[0]:
                    largest[key] = (share, name)
    print(f"\n{len(largest)} comparisons used more than {SHARE} of their tolerance:")
    for (place, test), (share, name) in sorted(largest.items(), key=lambda x: -x[1][0]):
        print(f"{share:8.2f}  {place}  {test}  ({name})")
    print("Failed under: " + ("; ".join(failed) or "no setting"))
    return 1 if failed or largest else 0


if __name__ == "__main__":
    sys.exit(main())
