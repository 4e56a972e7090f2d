"""Measures time and peak resident memory of loading a DeBERTaV3-base checkpoint with LoRA.

The script writes a float32 checkpoint with DeBERTaV3-base's shape and random weights (735 MB) to a
temporary directory. A new process then times
``attach(load_model(directory, head=classification(2)), lora(8))`` until all arrays are ready. The
baseline is the resident memory of the process after its imports and the first operation of JAX.
Ratios are relative to the size of the checkpoint.

    python experiments/benchmarks/load_deberta.py
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx
from safetensors.numpy import save_file

from fedjax_peft.models.checkpoint import source_name
from fedjax_peft.models.heads import classification
from fedjax_peft.models.hub import load_model
from fedjax_peft.models.registry import FAMILIES, abstract_module
from fedjax_peft.peft import lora
from fedjax_peft.peft.base import attach

TARGETS = {"seconds": 15.0, "peak_over_checkpoint": 2.2}
STORED = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
CONFIG = {
    "model_type": "deberta-v2",
    "vocab_size": 128100,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "relative_attention": True,
    "position_buckets": 256,
    "norm_rel_ebd": "layer_norm",
    "share_att_key": True,
    "pos_att_type": "p2c|c2p",
    "position_biased_input": False,
}


def main() -> None:
    """Prints a table and one line of JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=3, help="number of new processes; default 3")
    parser.add_argument("--stored", choices=STORED, default="float32", help="default float32")
    parser.add_argument("--write", metavar="DIRECTORY", help="only write the checkpoint there")
    parser.add_argument("--measure", metavar="DIRECTORY", help="only load the checkpoint once")
    a = parser.parse_args()
    if a.write or a.measure:
        done = write_checkpoint(Path(a.write), a.stored) if a.write else measure(a.measure)
        print(json.dumps(done))
        return

    def run_script(*options: str) -> Any:
        """Runs this script in a new process, because a forked one inherits its parent's peak."""
        command = [sys.executable, __file__, "--stored", a.stored, *options]
        return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)

    with tempfile.TemporaryDirectory() as directory:
        size = run_script("--write", directory)
        runs = [run_script("--measure", directory) for _ in range(a.repeats)]
    for run in runs:
        run["peak_over_checkpoint"] = run["peak"] / size
        run["above_baseline_over_checkpoint"] = (run["peak"] - run["baseline"]) / size
        print(
            f"{run['seconds']:6.2f} s   peak {run['peak'] / 1e6:6.0f} MB"
            f" = {run['peak_over_checkpoint']:.2f} x the checkpoint's {size / 1e6:.0f} MB"
            f" ({run['above_baseline_over_checkpoint']:.2f} x above the baseline)"
        )
    print(f"targets: {TARGETS['seconds']} s, peak {TARGETS['peak_over_checkpoint']} x")
    environment = {
        "device": f"{jax.devices()[0].device_kind} ({jax.devices()[0].platform})",
        "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        **{name: metadata.version(name) for name in ("jax", "jaxlib", "flax", "safetensors")},
    }
    report = {"checkpoint_bytes": size, "targets": TARGETS, "runs": runs}
    print(json.dumps({"arguments": vars(a), "environment": environment, **report}))


def measure(directory: str) -> dict:
    """Returns the seconds, and the resident bytes before loading and at the peak."""
    jnp.zeros(1).block_until_ready()
    baseline = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    start = time.perf_counter()
    model = attach(load_model(directory, head=classification(2)), lora(8))
    jax.block_until_ready((model.frozen, model.trainable))
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"seconds": seconds, "baseline": baseline, "peak": peak, "counts": model.counts()}


def write_checkpoint(directory: Path, stored: str) -> int:
    """Writes random weights without a head; returns the size of the file in bytes."""
    rng = np.random.default_rng(0)
    tensors = {}
    module = abstract_module(CONFIG, classification(2))
    for path, variable in nnx.to_flat_state(nnx.state(module, nnx.Param)):
        leaf = ".".join(map(str, path))
        if leaf.startswith("deberta."):
            name, transposed = source_name(leaf, FAMILIES["deberta-v2"])
            shape = variable.shape[::-1] if transposed else variable.shape
            tensors[name] = (0.02 * rng.standard_normal(shape, np.float32)).astype(STORED[stored])
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(CONFIG))
    return (directory / "model.safetensors").stat().st_size


if __name__ == "__main__":
    main()
