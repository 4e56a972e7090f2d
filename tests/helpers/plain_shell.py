"""Removes what a user's shell may set and what changes results: colours, widths, JAX's numbers.

Import it before JAX and rich. ``JAX_PLATFORMS`` stays, because it chooses the device of the tests.
Bytecode is written, as in the Makefile: without it each process that a test starts compiles all
modules that it imports, which takes longer than most tests.
"""

import os
import sys

for name in ("FORCE_COLOR", "NO_COLOR", "COLUMNS", "LINES"):
    os.environ.pop(name, None)
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
for name in ("ENABLE_X64", "DEFAULT_MATMUL_PRECISION", "DEFAULT_PRNG_IMPL", "NUM_CPU_DEVICES"):
    os.environ.pop(f"JAX_{name}", None)
