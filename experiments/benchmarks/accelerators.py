"""Compiles a round of known models for accelerators that are not there, and writes one table.

    pip install -e ".[compile-gpu,compile-tpu]"    # Linux, 4 GB; a new environment is best
    python experiments/benchmarks/accelerators.py                       # the cells that are missing
    python experiments/benchmarks/accelerators.py --rows minilm --devices h100 v5e --again
    python experiments/benchmarks/accelerators.py --rows minilm --devices h100 --check
    python experiments/benchmarks/accelerators.py --rows minilm --devices v5e --layers 1
    python experiments/benchmarks/accelerators.py --planned             # no compiler is needed

A cell is a round of LoRA by FedAvg with AdamW, in bfloat16, with the shapes of a model and random
weights that are never made. It says what the target's compiler plans, without a device and
so without autotuning: kernels, bytes and operations of one time step of all lanes, the round's
memory, and the least time of the step. Each cell is compiled in a process of its own, and written
to ``results/accelerators.json`` and ``.md`` at once, so that the script goes on where it stopped.
``--check`` compiles again and fails where a figure has grown by more than 10 %. ``--layers`` prints
the cells of a model that has only so many, and writes nothing. ``--planned`` computes the memory by
arithmetic again, for the cells that are there, and compiles nothing. On 2 cores: one to three
minutes for a GPU's cell, five or more for a TPU's.
"""

import argparse
import json
import sys
from typing import Any

import harness

RESULTS = harness.RESULTS / "accelerators.json"
LLAMA = {
    "model_type": "llama",
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "num_key_value_heads": 8,
    "num_attention_heads": 32,
}
BERT = {"model_type": "bert", "vocab_size": 30522, "max_position_embeddings": 512}
MINILM = {**BERT, "hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12}
MINILM["intermediate_size"] = 1536
ROBERTA = {"model_type": "roberta", "vocab_size": 50265, "max_position_embeddings": 514}
ROBERTA |= {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12}
ROBERTA |= {"intermediate_size": 3072, "type_vocab_size": 1, "pad_token_id": 1}
LLAMA_1B = {**LLAMA, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16}
LLAMA_1B["tie_word_embeddings"] = True
LLAMA_8B = {**LLAMA, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
LLAMA_8B["tie_word_embeddings"] = False

# name -> (config, head, options, lanes, batch size, tokens; 0: images)
ROWS: dict[str, tuple[dict, str, dict, int, int, int]] = {
    "minilm": (MINILM, "classes", {}, 8, 16, 64),
    "minilm without dropout": (MINILM, "classes", {"dropout": 0.0}, 8, 16, 64),
    "roberta-base": (ROBERTA, "classes", {}, 4, 16, 128),
    "vit-base": ({"model_type": "vit"}, "classes", {}, 4, 16, 0),
    "gpt2": ({"model_type": "gpt2"}, "words", {"dropout": 0.0}, 4, 8, 256),
    "llama-1b": (LLAMA_1B, "words", {"quantize": "int8", "remat": "blocks"}, 1, 16, 512),
    "llama-8b": (
        LLAMA_8B,
        "words",
        {"quantize": "nf4", "remat": "blocks", "scan_layers": True},
        1,
        4,
        1024,
    ),
}
DEVICES = ("h100", "a100-80gb", "t4", "v5e")
CHECKED = ("kernels", "nbytes", "flops", "temporary", "memory")
"""The figures that ``--check`` compares."""


def round_of(row: str, attention: str, layers: int | None = None) -> tuple[Any, ...]:
    """Returns model, algorithm, task and batch of a row, as shapes.

    Args:
      layers: other layers than the row has.
    """
    import optax

    import fedjax_peft as fp
    from fedjax_peft import heads, tasks
    from fedjax_peft.peft.base import abstract_model
    from fedjax_peft.simulation.planning.memory_plan import example_batch

    config, kind, options, _, size, length = ROWS[row]
    config = config if layers is None else {**config, "num_hidden_layers": layers}
    words = kind == "words"
    head = heads.causal_lm() if words else heads.classification(20)
    options = {"dtype": "bfloat16", "attention": attention, **options}
    adapter = fp.lora(**options.pop("lora", {"rank": 8}))
    model = abstract_model(config, adapter, head=head, **options)
    shape = {"length": length} if length else {"image": (3, 224, 224)}
    batch = example_batch(head.kind, batch_size=size, **shape)
    task = tasks.next_token() if words else tasks.classification()
    return model, fp.algorithms.fedavg(optax.adamw(1e-4)), task, batch


def planned_parts(
    row: str, device: str, attention: str, layers: int | None = None
) -> tuple[tuple[Any, ...], Any]:
    """Returns a cell's model, algorithm, task and batch for its device; and their memory plan."""
    from fedjax_peft.simulation.planning.devices import planned_on, target_platform
    from fedjax_peft.simulation.planning.memory_plan import plan_memory
    from fedjax_peft.support.accelerators import find_device

    target = find_device(device)
    model, *rest = round_of(row, attention, layers)
    parts = (planned_on(target, model), *rest)
    return parts, plan_memory(*parts, platform=target_platform(target))


def planned_bytes(row: str, device: str, attention: str) -> int:
    """Returns the memory of a cell's round by arithmetic."""
    return planned_parts(row, device, attention)[1].total(ROWS[row][3])


def measure(row: str, device: str, attention: str, layers: int | None = None) -> dict[str, Any]:
    """Returns the figures of one cell, of a model with so many layers if a number is given."""
    from fedjax_peft.simulation.planning.devices import asked, plan_on
    from fedjax_peft.support.accelerators import find_device

    parts, memory = planned_parts(row, device, attention, layers)
    planned = plan_on(find_device(device), parts, memory, ROWS[row][3])
    found = asked(planned, parts)
    assert found.compiled is not None
    limits = found.limits
    return {
        "kernels": found.compiled.kernels,
        "nbytes": found.nbytes,
        "flops": found.flops,
        "temporary": found.compiled.temporary,
        "memory": found.compiled.memory,
        "planned": planned.needed,
        "seconds": found.seconds,
        "limit": max(limits, key=lambda name: limits[name]),
        "share of the arithmetic peak": limits["arithmetic"] / found.seconds,
        "calls": dict(found.compiled.calls),
        "program": found.compiled.program,
        "compile seconds": round(found.compiled.seconds),
    }


def key_of(row: str, device: str, attention: str) -> str:
    return f"{row} | {device} | {attention}"


def ask(key: str, limit: float, layers: int | None) -> dict[str, Any] | str:
    """Returns the figures of a cell, or why there are none."""
    more = [] if layers is None else ["--layers", layers]
    return harness.ask(
        *(__file__, "--cell", *key.split(" | "), *more), limit=limit, JAX_PLATFORMS="cpu"
    )


def grown(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Returns the figures that are more than 10 % above the committed ones, in words."""
    return [
        f"{name}: {new[name]:,} is more than 1.1 x {old[name]:,}"
        for name in CHECKED
        if new[name] > 1.1 * old[name]
    ]


def table(found: dict[str, Any]) -> str:
    """Returns the table in Markdown."""
    names = ["round", "device", "attention", "kernels", "GB", "GFLOP", "temporary, GB"]
    names += ["memory, GB", "planned / memory", "least step, ms", "limit", "of the peak"]
    names += ["program, MB", "compile, s"]
    rows = []
    order = {key_of(r, d, a): 0 for r in ROWS for d in DEVICES for a in ("whole", "auto")}
    for key in [key for key in order if key in found]:
        cells, x = key.split(" | "), found[key]
        if isinstance(x, str):
            rows.append([*cells, x] + [""] * (len(names) - 4))
            continue
        cells += [f"{x['kernels']:,}", f"{x['nbytes'] / 1e9:.2f}", f"{x['flops'] / 1e9:,.0f}"]
        cells += [f"{x[name] / 1e9:.2f}" for name in ("temporary", "memory")]
        cells += [f"{x['planned'] / x['memory']:.2f}", f"{1e3 * x['seconds']:.2f}", x["limit"]]
        cells.append(f"{x['share of the arithmetic peak']:.0%}")
        cells += [f"{x['program'] / 1e6:.0f}" if x["program"] else "", str(x["compile seconds"])]
        rows.append(cells)
    return harness.markdown(names, rows)


def main() -> int:
    """Compiles the missing cells, or compares; returns the exit code."""
    parser = harness.arguments(__doc__)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--devices", nargs="+", choices=DEVICES, default=list(DEVICES))
    parser.add_argument("--attention", nargs="+", choices=["auto", "whole"], default=["auto"])
    parser.add_argument("--limit", type=float, default=1800, help="seconds of a cell")
    parser.add_argument("--again", action="store_true", help="also compile cells that are known")
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    parser.add_argument("--layers", type=int, help="other layers; print, and write nothing")
    parser.add_argument("--planned", action="store_true", help="only the arithmetic, again")
    parser.add_argument("--cell", nargs=3, help=argparse.SUPPRESS)
    a = parser.parse_args()
    if a.cell:
        print(json.dumps(measure(*a.cell, a.layers)))
        return 0
    found = harness.known(RESULTS)
    if a.planned:
        for key in [key for key, cell in found.items() if isinstance(cell, dict)]:
            found[key]["planned"] = planned_bytes(*key.split(" | "))
        harness.write(RESULTS, found, table(found))
        return 0
    faults = []
    for key in [key_of(r, d, t) for r in a.rows for d in a.devices for t in a.attention]:
        known = isinstance(found.get(key), dict) and a.layers is None
        if (a.check and not known) or (known and not a.check and not a.again):
            continue
        new = ask(key, a.limit, a.layers)
        print(f"{key}: {new}", flush=True)
        if a.layers is not None:
            continue
        if a.check:
            faults += [
                f"{key}: {x}" for x in ([new] if isinstance(new, str) else grown(found[key], new))
            ]
            continue
        found[key] = new
        harness.write(RESULTS, found, table(found))
    print("\n".join(faults), end="\n" if faults else "")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
