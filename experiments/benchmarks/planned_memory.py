"""Compares the memory that ``fedjax-peft plan`` computes with what the compiler plans and a round
takes.

    python experiments/benchmarks/planned_memory.py                        # all cases
    python experiments/benchmarks/planned_memory.py --models llama --lanes 1

Every case is a process. *Planned* is the arithmetic of ``simulation/planning/memory_plan.py``,
*compiler* the analysis of the compiled round, and *measured* the peak of resident memory during the
second round, minus the resident memory after all arrays were deleted: the frozen weights, what
server and clients keep, the examples and the activations, but not Python and not the compiler.
Linux only (``/proc/self/clear_refs`` resets the peak).
"""

import ctypes
import json
import statistics
import time
from pathlib import Path

import harness

MODELS = {
    "bert": {
        "model_type": "bert",
        "vocab_size": 30522,
        "hidden_size": 384,
        "num_hidden_layers": 6,
        "num_attention_heads": 12,
        "intermediate_size": 1536,
        "max_position_embeddings": 512,
    },
    "gpt2": {
        "model_type": "gpt2",
        "vocab_size": 50257,
        "n_embd": 384,
        "n_layer": 6,
        "n_head": 6,
        "n_positions": 512,
    },
    "llama": {
        "model_type": "llama",
        "vocab_size": 32000,
        "hidden_size": 512,
        "intermediate_size": 1376,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
    },
}
WEIGHTS = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "nf4": {"dtype": "float32", "quantize": "nf4"},
}
REMAT = {"none": {}, "blocks": {"remat": "blocks", "scan_layers": True}}
LENGTH, STEPS = 128, 2
BATCH = {1: 16, 4: 4}
"""Lanes -> examples in a batch: the same number of tokens at work."""
# Freed arrays go back to the system at once.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


def measure(name: str, weights: str, remat: str, lanes: int) -> dict[str, int]:
    """Returns the planned, compiled and measured bytes of one case."""
    import jax
    import numpy as np
    import optax

    import fedjax_peft as fp
    from fedjax_peft import heads, tasks
    from fedjax_peft.peft.base import abstract_model
    from fedjax_peft.simulation.planning.memory_plan import example_batch, plan_memory

    size = BATCH[lanes]
    if name == "bert":
        head, task = heads.classification(20), tasks.classification()
    else:
        head, task = heads.causal_lm(), tasks.next_token()
    options = {"head": head, **WEIGHTS[weights], **REMAT[remat]}
    method, algorithm = fp.lora(rank=8), fp.algorithms.fedavg(optax.adamw(1e-4))
    batch = example_batch(head.kind, batch_size=size, length=LENGTH)
    examples = lanes * size * STEPS
    plan = plan_memory(
        abstract_model(MODELS[name], method, **options), algorithm, task, batch, examples=examples
    )

    rng = np.random.default_rng(0)
    columns = {
        "input_ids": rng.integers(1000, 30000, (examples, LENGTH)).astype(np.int32),
        "attention_mask": np.ones((examples, LENGTH), bool),
    }
    if name == "bert":
        columns["labels"] = rng.integers(0, 20, examples).astype(np.int32)
    else:
        columns["loss_mask"] = np.ones((examples, LENGTH), bool)
    data = fp.Dataset(columns, tuple(map(str, range(20))), "random", task=task)
    model = fp.attach(fp.random_model(MODELS[name], **options), method)
    session = fp.session(
        model,
        algorithm,
        fp.partition.iid(data, lanes, seed=0),
        batch_size=size,
        placement=fp.Placement(lanes=lanes),
        task=task,
    )
    state, _ = session.step(session.init(seed=0))  # compiles
    jax.block_until_ready(state.server)
    compiled = session.program(session.plan(2)).peak_bytes
    time.sleep(1)
    trim()
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    state, _ = session.step(state)
    jax.block_until_ready(state.server)
    time.sleep(1)  # the round's memory is freed a little later than its results are there
    peak = resident("VmHWM")
    for x in jax.live_arrays():  # the session and its programs stay
        x.delete()
    trim()
    return {
        "frozen": plan.frozen,
        "planned": plan.total(lanes),
        "compiler": compiled,
        "measured": peak - resident("VmRSS"),
        "round": peak - before,
    }


def resident(field: str) -> int:
    """Returns a field of the process's memory, such as ``VmHWM``, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def trim() -> None:
    """Gives freed memory back to the system."""
    ctypes.CDLL("libc.so.6").malloc_trim(0)


def row(case: tuple, found: dict[str, int]) -> str:
    """Returns a row of the table."""
    cells = [str(x) for x in case]
    cells += [f"{found[key] / 1e6:.0f}" for key in ("frozen", "planned", "compiler", "measured")]
    cells += [f"{found['planned'] / found[key]:.2f}" for key in ("compiler", "measured")]
    return harness.line(cells)


def main() -> None:
    """Measures and prints a table and one line of JSON."""
    parser = harness.arguments(__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--weights", nargs="+", choices=WEIGHTS, default=list(WEIGHTS))
    parser.add_argument("--remat", nargs="+", choices=REMAT, default=list(REMAT))
    parser.add_argument("--lanes", nargs="+", type=int, choices=BATCH, default=list(BATCH))
    parser.add_argument("--case", nargs=4, help="measures one case in this process")
    a = parser.parse_args()
    if a.case:
        *words, lanes = a.case
        print(json.dumps(measure(*words, int(lanes))))
        return
    names = ["model", "weights", "`remat` and scan", "lanes", "frozen, MB", "planned, MB"]
    names += ["compiler, MB", "measured, MB", "planned / compiler", "planned / measured"]
    print(harness.heading(names))
    results = []
    cases = [(m, w, r, n) for m in a.models for w in a.weights for r in a.remat for n in a.lanes]
    for case in cases:
        found = harness.ask(__file__, "--case", *case, check=True, **MALLOC)
        print(row(case, found), flush=True)
        results.append({"case": case, **found})
    for key in ("compiler", "measured"):
        ratios = [x["planned"] / x[key] for x in results]
        print(
            f"planned / {key}: {min(ratios):.2f} to {max(ratios):.2f},"
            f" median {statistics.median(ratios):.2f}"
        )
    harness.print_json(a, results=results)


if __name__ == "__main__":
    main()
