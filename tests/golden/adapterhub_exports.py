"""Writes adapters in AdapterHub's format, for ``adapters_golden.py --check-export`` to read back.

python tests/golden/adapterhub_exports.py DIR
"""

import shutil
import sys
from pathlib import Path

import jax
import numpy as np
from internals import attach, bottleneck, export_adapterhub, houlsby, load_model, pfeiffer
from safetensors.numpy import load_file, save_file

HERE = Path(__file__).parent / "adapters"
METHODS = {
    "houlsby": houlsby(4),
    "pfeiffer": pfeiffer(size=3, scaling=1.5, init="opendelta"),
    "bottleneck": bottleneck(2.5, places=["attention"], after_norm=True, activation="gelu_new"),
}


def write(directory: Path) -> None:
    """Writes a folder for every family and method: base checkpoint, adapter and our outputs."""
    for family in sorted(p for p in HERE.iterdir() if p.is_dir()):
        for name, method in METHODS.items():
            model = attach(load_model(family), method)
            rng = np.random.default_rng(1)
            # The head too, and whatever else is trained with it.
            params = {
                leaf: (x + rng.normal(0, 0.2, x.shape)).astype(np.float32)
                for leaf, x in model.trainable.items()
            }
            folder = directory / f"{family.name}-{name}"
            shutil.rmtree(folder, ignore_errors=True)
            (folder / "base").mkdir(parents=True)
            for file in ("config.json", "model.safetensors"):
                shutil.copy(family / file, folder / "base")
            export_adapterhub(model, params, folder / "adapter")
            batch = load_file(family / "inputs.safetensors")
            apply = jax.jit(model.apply, static_argnums=4)
            outputs = apply(model.frozen, params, batch, None, False)
            columns = {f"inputs.{column}": x for column, x in batch.items()}
            states = {f"states.{i}": np.asarray(x) for i, x in enumerate(outputs.states)}
            expected = {**columns, "logits": np.asarray(outputs.logits), **states}
            save_file(expected, folder / "expected.safetensors")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
