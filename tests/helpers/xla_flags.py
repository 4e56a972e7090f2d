"""XLA's flags with which the tests' programs compile quickly. Set them before JAX is imported."""

from importlib.metadata import version

__all__ = ["QUICK_TO_COMPILE"]

QUICK_TO_COMPILE = "--xla_cpu_parallel_codegen_split_count=1"
"""One module for each program, rather than one for each core, costs less in all."""

# The older code generator of XLA:CPU compiles several times faster, and what it makes runs about as
# fast. jaxlib 0.11 has it no more, and an unknown flag ends the process.
if version("jaxlib").startswith("0.10."):
    QUICK_TO_COMPILE = f"--xla_cpu_use_fusion_emitters=false {QUICK_TO_COMPILE}"
