"""Prints the memory that Llama bases of 1, 3 and 8 billion parameters need, and how many lanes fit.

    python experiments/benchmarks/llama_memory.py

No weights are needed: the shapes below are those of Llama 3.2 1B and 3B and Llama 3.1 8B. LoRA of
rank 8 on query and value, AdamW, batches of 4 x 512 tokens, activations in bfloat16. The
aggregation error is not measured (``mean(error=False)``). What the sum of the uploads needs with it
is printed at the end, for few clients (held as factors) and for many (as matrices). The figures are
the arithmetic of ``simulation/planning/memory_plan.py``; a device's compiler may need less or more.
The table is in ``docs/explanation/planned-memory.md``. Five minutes on an idle CPU core.
"""

import harness
import optax

from fedjax_peft import aggregators, algorithms, heads, lora, tasks
from fedjax_peft.peft.base import abstract_model
from fedjax_peft.simulation.planning.memory_plan import MemoryPlan, example_batch, plan_memory

BATCH, LENGTH = 4, 512
MEMORY = (16, 24, 80, 141)
"""GB of a device; nine tenths of it are planned."""
LANES = (1, 4, 16, 64)
COHORTS = (20, 10_000)
"""Clients in a round, for the sum of the uploads."""
COMMON = {
    "model_type": "llama",
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "num_key_value_heads": 8,
}


def shape(hidden: int, inner: int, layers: int, heads: int, tied: bool) -> dict:
    return COMMON | {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "tie_word_embeddings": tied,
    }


SHAPES = {
    "1B": shape(2048, 8192, 16, 32, True),
    "3B": shape(3072, 8192, 28, 24, True),
    "8B": shape(4096, 14336, 32, 32, False),
}


def plan_of(
    size: str, quantize: str | None, remat: str, error: bool = False, cohort: int = 1
) -> MemoryPlan:
    """Returns the plan of a model with these options.

    Args:
      size: a key of ``SHAPES``.
      quantize: how the frozen kernels are stored.
      remat: ``none`` or ``blocks``.
      error: whether the aggregation error is measured.
      cohort: clients in a round.
    """
    model = abstract_model(
        SHAPES[size],
        lora(8),
        head=heads.causal_lm(),
        dtype="bfloat16",
        quantize=quantize,
        remat=remat,
    )
    batch = example_batch("causal_lm", batch_size=BATCH, length=LENGTH)
    algorithm = algorithms.fedavg(optax.adamw(1e-4), aggregator=aggregators.mean(error=error))
    return plan_memory(model, algorithm, tasks.next_token(), batch, cohort=cohort)


def row(size: str, quantize: str | None, remat: str) -> str:
    """Returns a row of the table."""
    plan = plan_of(size, quantize, remat)
    cells = [size, quantize or "bfloat16", remat, f"{plan.frozen / 1e9:.1f}"]
    cells.append(f"{plan.per_lane / 1e9:.2f}")
    cells += [f"{plan.total(n) / 1e9:.1f}" for n in LANES]
    cells += [str(plan.most_lanes(0.9e9 * memory)) for memory in MEMORY]
    return harness.line(cells)


def main() -> None:
    names = ["model", "base", "`remat`", "frozen, GB", "a lane, GB"]
    names += [f"{n} lane{'s' * (n > 1)}, GB" for n in LANES]
    names += [f"lanes in {memory} GB" for memory in MEMORY]
    print(harness.heading(names))
    for size in SHAPES:
        for remat in ("none", "blocks"):
            for quantize in (None, "int8", "nf4"):
                print(row(size, quantize, remat), flush=True)
    for size in SHAPES:
        for cohort in COHORTS:
            uploads = plan_of(size, "nf4", "blocks", error=True, cohort=cohort).uploads / 1e9
            print(f"{size}: the sum of the uploads of {cohort:,} clients: {uploads:.2f} GB")


if __name__ == "__main__":
    main()
