"""Compiles a round of Llama 3.1 8B for four accelerators that are not there: what they exchange.

    pip install -e ".[compile-gpu,compile-tpu]"    # Linux, 4 GB; a new environment is best
    python experiments/benchmarks/collectives.py                    # about ten minutes on two cores

Both forms of ``model_sharding``, in nf4 and bfloat16, with the shapes of the model and weights that
are never made. ``tensor``: two lanes of 2 x 1,024 tokens, which all four devices compute together.
``gather``: four lanes, one on each device. The collectives of one time step, their bytes on a
device, and a device's memory are written to ``results/collectives.json`` and ``.md``.
"""

import os
from typing import Any

import harness

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4"
)

from accelerators import LLAMA_8B

RESULTS = harness.RESULTS / "collectives.json"
LANES = {"tensor": 2, "gather": 4}
DEVICES = ("v5e", "h100")


def measure(device: str, form: str) -> dict[str, Any]:
    """Returns the figures of a round."""
    import optax

    import fedjax_peft as fp
    from fedjax_peft.peft.base import abstract_model
    from fedjax_peft.simulation.planning.compiled_step import compile_step, target_devices
    from fedjax_peft.simulation.planning.devices import planned_on
    from fedjax_peft.simulation.planning.memory_plan import example_batch, lowered_round
    from fedjax_peft.support.accelerators import find_device

    options = {"dtype": "bfloat16", "quantize": "nf4", "remat": "blocks", "scan_layers": True}
    model = abstract_model(LLAMA_8B, fp.lora(rank=8), head=fp.heads.causal_lm(), **options)
    target = find_device(device)
    lowered = lowered_round(
        planned_on(target, model),
        fp.algorithms.fedavg(optax.adamw(1e-4)),
        fp.tasks.next_token(),
        example_batch("causal_lm", batch_size=2, length=1024),
        fp.Placement(lanes=LANES[form], model_parallel=4, model_sharding=form),
        target_devices(target, 4),
    )
    found = compile_step(lowered)
    frozen = sum(x.size * x.dtype.itemsize for x in model.frozen.values())
    return {
        "memory": found.memory,
        "frozen": frozen,
        "calls": {name: found.calls[name] for name in found.exchanged},
        "exchanged": dict(found.exchanged),
        "compile seconds": round(found.seconds),
    }


def table(found: dict[str, Any]) -> str:
    """Returns the table in Markdown."""
    names = ["devices", "model_sharding", "lanes", "memory of a device, GB"]
    names += ["collectives of a step: GB"]
    rows = []
    for key, x in found.items():
        device, form = key.split(" | ")
        moved = ", ".join(
            f"{x['calls'][n]} {n}: {x['exchanged'][n] / 1e9:.2f}" for n in x["exchanged"]
        )
        memory = f"{x['memory'] / 1e9:.2f}"
        rows.append([f"4 x {device}", form, LANES[form], memory, moved or "none"])
    return harness.markdown(names, rows)


def main() -> None:
    """Compiles the rounds."""
    parser = harness.arguments(__doc__)
    parser.add_argument("--devices", nargs="+", choices=DEVICES, default=list(DEVICES))
    parser.add_argument("--forms", nargs="+", choices=LANES, default=list(LANES))
    given = parser.parse_args()
    found = harness.known(RESULTS)
    for device in given.devices:
        for form in given.forms:
            found[f"{device} | {form}"] = measure(device, form)
            print(device, form, found[f"{device} | {form}"], flush=True)
            harness.write(RESULTS, found, table(found))


if __name__ == "__main__":
    main()
