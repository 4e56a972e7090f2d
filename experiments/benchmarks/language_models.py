"""Client-steps and tokens per second of LoRA rounds, beside a torch + peft loop on the same device.

    python experiments/benchmarks/language_models.py --shape llama-1b --lanes 1 4 16 64 --peak 989
    python experiments/benchmarks/language_models.py --shape tiny --lanes 1 2   # seconds, on a CPU

The weights are random, which changes no time. A client-step is one local step of one client: a
batch, forward, backward and AdamW on LoRA of rank 8. The torch loop takes the steps one client
after the other, with autocast to bfloat16 on a GPU. MFU counts 4 N operations a token: the forward
pass and the gradient by the activations; the frozen weights have no gradient of their own. The
compile time is apart, and medians are over ``--rounds`` rounds.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

import fedjax_peft as fp

LLAMA = {
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
}
"""TinyLlama's shape, 1.1 billion parameters."""
ROBERTA = {"model_type": "roberta", "vocab_size": 50265, "max_position_embeddings": 514}


class Case(NamedTuple):
    """A model and the shape of a client's batch."""

    config: dict[str, Any]
    batch: int
    length: int

    @property
    def is_decoder(self) -> bool:
        """Whether it is a language model; otherwise it classifies."""
        return self.config["model_type"] == "llama"


CASES = {
    "roberta-64": Case(ROBERTA, 16, 64),
    "roberta-256": Case(ROBERTA, 16, 256),
    "llama-1b": Case(LLAMA, 4, 512),
    "tiny": Case({**fp.testing.TINY_LLAMA, "vocab_size": 512}, 4, 32),
}


def examples(case: Case, n: int) -> fp.Dataset:
    """Returns random examples without padding."""
    rng = np.random.default_rng(0)
    shape = (n, case.length)
    ids = rng.integers(5, case.config["vocab_size"], shape).astype(np.int32)
    columns = {"input_ids": ids, "attention_mask": np.ones(shape, bool)}
    if case.is_decoder:
        return fp.Dataset({**columns, "loss_mask": np.ones(shape, bool)}, task="instruction_tuning")
    labels = rng.integers(0, 2, n).astype(np.int32)
    return fp.Dataset({**columns, "labels": labels}, ("0", "1"))


def ours(case: Case, lanes: int, rounds: int, options: dict[str, Any]) -> tuple[float, float, int]:
    """Returns (seconds of a round of one step of ``lanes`` clients, of the first one, peak)."""
    head = fp.heads.causal_lm() if case.is_decoder else fp.heads.classification(2)
    model = fp.attach(fp.random_model(case.config, head=head, **options), fp.lora(rank=8))
    data = examples(case, lanes * case.batch)
    clients = fp.partition.iid(data, clients=lanes)
    session = fp.session(
        model,
        fp.algorithms.fedavg(optax.adamw(1e-4)),
        clients,
        batch_size=case.batch,
        local_steps=1,
        placement=fp.Placement(lanes=lanes),
    )
    state, seconds = session.init(), []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        state, _ = session.step(state)
        jax.block_until_ready(jax.tree.leaves(state.server))
        seconds.append(time.perf_counter() - start)
    statistics_of_device = jax.devices()[0].memory_stats() or {}
    peak = statistics_of_device.get("peak_bytes_in_use", 0)
    return statistics.median(seconds[1:]), seconds[0], peak


def torch_loop(case: Case, rounds: int) -> Callable[[], float]:
    """Returns a function that takes the seconds of one step of one client in torch."""
    import peft
    import torch
    import transformers

    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = dict(case.config)
    made = transformers.AutoConfig.for_model(config.pop("model_type"), **config)
    kind = "AutoModelForCausalLM" if case.is_decoder else "AutoModelForSequenceClassification"
    base = getattr(transformers, kind).from_config(made)
    task = "CAUSAL_LM" if case.is_decoder else "SEQ_CLS"
    model = peft.get_peft_model(base, peft.LoraConfig(task_type=task, r=8)).to(device).train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    columns = examples(case, case.batch).columns
    ids = torch.tensor(columns["input_ids"], dtype=torch.long, device=device)
    labels = ids if case.is_decoder else torch.tensor(columns["labels"]).long().to(device)

    def step() -> None:
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            model(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if device == "cuda":
            torch.cuda.synchronize()

    def timed() -> float:
        step()
        seconds = []
        for _ in range(rounds):
            start = time.perf_counter()
            step()
            seconds.append(time.perf_counter() - start)
        return statistics.median(seconds)

    return timed


def main() -> None:
    """Prints one line for each number of lanes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=CASES, default="tiny")
    parser.add_argument("--lanes", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--dtype", default="bfloat16" if jax.default_backend() != "cpu" else None)
    parser.add_argument("--quantize", choices=("int8", "nf4"))
    parser.add_argument("--remat", choices=("none", "blocks", "dots"), default="none")
    parser.add_argument("--peak", type=float, help="TFLOP/s of the device, for MFU")
    parser.add_argument("--no-torch", action="store_true", help="without the torch loop")
    args = parser.parse_args()
    case = CASES[args.shape]
    options = {"dtype": args.dtype or "float32", "remat": args.remat, "quantize": args.quantize}
    head = fp.heads.causal_lm() if case.is_decoder else fp.heads.classification(2)
    parameters = sum(fp.count(case.config, head=head).values())
    torch_seconds = None if args.no_torch else torch_loop(case, args.rounds)()
    print(f"{args.shape}: {parameters:,} parameters, {case.batch} x {case.length}, {options}")
    print(f"device: {jax.devices()[0].device_kind}")
    if torch_seconds:
        print(f"torch + peft: {1 / torch_seconds:.2f} client-steps/s")
    for lanes in args.lanes:
        seconds, first, peak = ours(case, lanes, args.rounds, options)
        rate = lanes / seconds
        tokens = rate * case.batch * case.length
        line = f"{lanes:3} lanes: {rate:8.2f} client-steps/s, {tokens:10,.0f} tokens/s"
        if args.peak:
            line += f", MFU {4 * parameters * tokens / args.peak / 1e12:.1%}"
        if torch_seconds:
            line += f", {rate * torch_seconds:.2f} x torch"
        line += f", peak {peak / 1e9:.1f} GB" if peak else ""
        print(f"{line}; first round {first:.1f} s", flush=True)


if __name__ == "__main__":
    main()
