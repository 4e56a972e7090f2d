"""Time an epoch over instruction data: padded to the longest, in length buckets, and packed.

    python experiments/benchmarks/packing.py

The examples have random tokens. Their lengths are log-normal, clipped to 512 tokens, with a median
that is given: short answers to labelled texts (40), instructions (90), and long conversations
(300). The clients do one epoch with about the same number of tokens in a local step. The model is a
GPT-2 of 2 layers, 128 wide. Prints one line for each median and form.
"""

import harness
import numpy as np
import optax

import fedjax_peft as fp
from fedjax_peft import tasks
from fedjax_peft.models.heads import causal_lm

LENGTH, CLIENTS, EXAMPLES, BATCH = 512, 2, 48, 8
CONFIG = {"vocab_size": 1000, "n_positions": LENGTH, "n_embd": 128, "n_layer": 2, "n_head": 4}


def examples(median: float) -> fp.Dataset:
    """Returns examples whose second half is the answer."""
    rng = np.random.default_rng(0)
    n = CLIENTS * EXAMPLES
    sizes = np.clip(rng.lognormal(np.log(median), 0.6, n), 8, LENGTH).astype(int)[:, None]
    at = np.arange(LENGTH)
    columns = {
        "input_ids": rng.integers(1, 1000, (n, LENGTH)).astype(np.int32),
        "attention_mask": at < sizes,
        "loss_mask": (at < sizes) & (at >= sizes // 2),
    }
    return fp.Dataset(columns, name="made up", task=tasks.instruction_tuning())


def epoch(model: fp.Model, clients: fp.Clients, batch: int, buckets: int) -> tuple[float, float]:
    """Returns the seconds of a round of one epoch, the best of three, and the share of padding."""
    session = fp.session(
        model,
        fp.algorithms.fedavg(optax.adam(1e-3)),
        clients,
        batch_size=batch,
        placement=fp.Placement(lanes=1, length_buckets=buckets),
    )
    state = session.init(seed=0)
    plan = session.plan(1)

    def step() -> object:
        nonlocal state
        state, _ = session.step(state)
        return state

    harness.timed(step)  # compiles
    return min(harness.timed(step) for _ in range(3)), session.padding_share(plan) or 0.0


def main() -> None:
    """Prints the table."""
    model = fp.random_model({"model_type": "gpt2", **CONFIG}, head=causal_lm())
    model = fp.attach(model, fp.lora(rank=8))
    for median in (40, 90, 300):
        data = examples(median)
        clients = fp.partition.iid(data, CLIENTS, seed=0)
        packed = clients.pack(LENGTH)
        tokens = int(data.columns["attention_mask"].sum())
        rows = max(1, round(BATCH * tokens / len(data) / LENGTH))
        forms = {
            "padded to 512": (clients, BATCH, 0),
            "buckets (default)": (clients, BATCH, 4),
            f"packed, {rows} rows a step": (packed, rows, 0),
        }
        for name, (form, batch, buckets) in forms.items():
            took, padding = epoch(model, form, batch, buckets)
            line = f"{took:6.2f} s, padding {100 * padding:4.1f} %"
            print(f"median {median:3d}  {name:26s} {line}", flush=True)


if __name__ == "__main__":
    main()
