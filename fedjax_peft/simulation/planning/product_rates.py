"""How fast this processor multiplies bfloat16, compared with float32, and what to write if faster.

Processors with units for products of bfloat16 (Intel's AMX) are several times as fast in it, if JAX
uses the units. A short timing says so, once for each processor and version of JAX.
"""

import contextlib
import json
import time
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_peft.support.assets import cache_dir
from fedjax_peft.support.errors import InputError
from fedjax_peft.support.files import replace_file
from fedjax_peft.support.processor import processor

FILE = "product_rates.json"
"""In the cache directory: the rates of each processor and version of ``jaxlib``."""
_SHAPE = (1024, 384, 1536)
"""Of the product that is timed: MiniLM's feed-forward layer, for 16 texts of 64 tokens."""
_SECONDS = 0.15
_FASTER = 1.5
"""The least ratio of the rates that is worth a line. A step gains less, for products are a part of
it: at 1.8 (AVX512-BF16) a step of MiniLM took .72 of the time, at 4.9 (AMX) .65."""
_USES_TILES = (0, 12)
"""The version of JAX that was seen to use AMX. Version 0.10 was seen not to."""


class Rates(NamedTuple):
    """Operations of a product in a second of a core, in units of 1e9."""

    float32: float
    bfloat16: float


def measure() -> Rates:
    """Returns the best rates of products that alternate for 150 ms, compilation apart.

    The processor's seconds count, which other load of the machine changes little.
    """
    rows, inner, columns = _SHAPE
    product: Any = jax.jit(jnp.dot)
    pairs = [
        (jnp.ones((rows, inner), dtype), jnp.ones((inner, columns), dtype))
        for dtype in Rates._fields
    ]
    for pair in pairs:
        jax.block_until_ready(product(*pair))
    best, end = [float("inf")] * len(pairs), time.process_time() + _SECONDS
    while time.process_time() < end:
        for i, pair in enumerate(pairs):
            began = time.process_time()
            jax.block_until_ready(product(*pair))
            best[i] = min(best[i], time.process_time() - began)
    return Rates(*(2e-9 * rows * inner * columns / seconds for seconds in best))


def product_rates() -> Rates | None:
    """Returns the rates of this processor; None on an accelerator, or if it has no such units.

    They are kept in the cache directory. One that cannot be read or written only costs another
    timing.
    """
    if jax.default_backend() != "cpu" or "bf16" not in " ".join(processor()["flags"]):
        return None
    key = machine()
    try:
        file = cache_dir() / FILE
    except InputError:  # no home directory
        return measure()
    known = _kept(file)
    if key not in known:
        known[key] = measure()
        with contextlib.suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            replace_file(file, json.dumps(known, indent=1).encode())
    return known[key]


def machine() -> str:
    """Returns what the rates depend on."""
    return f"{processor()['model']}, jaxlib {metadata.version('jaxlib')}"


def _kept(file: Path) -> dict[str, Rates]:
    """Returns the rates in a file; none if it is missing or damaged."""
    try:
        found = json.loads(file.read_bytes())
        return {key: Rates(*map(float, rates)) for key, rates in found.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def in_words(rates: Rates | None) -> str:
    """Returns the rates in a few words, for a bug report."""
    if rates is None:
        return "no units for bfloat16"
    return f"{rates.float32:,.0f} GFLOP/s a core in float32, {rates.bfloat16:,.0f} in bfloat16"


def advice(rates: Rates | None) -> str | None:
    """Returns the sentence that says what would be faster here; None if nothing is known to be."""
    if rates is None:
        return None
    if rates.bfloat16 >= _FASTER * rates.float32:
        return (
            f"This processor multiplies bfloat16 {rates.bfloat16 / rates.float32:.1f} times as fast"
            ' as float32. model.dtype = "bfloat16" in a config (load_model(..., dtype="bfloat16")'
            " in Python) uses it; results differ by rounding."
        )
    if "amx_bf16" in processor()["flags"] and _version("jax") < _USES_TILES:
        return (
            f"This processor has units for bfloat16 (AMX), which JAX {metadata.version('jax')} does"
            " not use. JAX 0.12 does, and needs Python 3.12 or newer: make demo PYTHON=python3.12."
        )
    return None


def notices(configs: Iterable[Mapping[str, Any]]) -> list[str]:
    """Returns the advice to runs of resolved configs, if one of them computes in float32."""
    wide = any(config["model"].get("dtype") == "float32" for config in configs)
    text = advice(product_rates()) if wide else None
    return [text] if text else []


def _version(package: str) -> tuple[int, ...]:
    return tuple(int(part) for part in metadata.version(package).split(".")[:2])
