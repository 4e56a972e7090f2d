"""Compares local LoRA training in our round engine with a plain torch + peft loop.

The unit is client-steps per second. Both do the same work on a BERT with random weights and random
tokens (the speed does not depend on the values): each client starts from the broadcast adapter,
pooler and classifier with a new AdamW state, makes its local steps with loss and accuracy, and is
added to the weighted mean. The two run alternately in one process, so that other load of the
machine affects both. Medians are reported, and compilation separately.

    python experiments/benchmarks/local_step_vs_torch.py                         # CPU, 2 to 5 min
    python experiments/benchmarks/local_step_vs_torch.py --dtype bfloat16 --clients 32 --steps 8

The last column is the share of a plain product's rate that our step reaches: the products of a step
(forwards, and backwards to the lowest adapter) per second, over those of a float32 ``jnp.dot`` of
the feed-forward layer's sizes, which alternates with the rounds.

With ``--dtype bfloat16`` torch runs under autocast, as usual. On CUDA, float32 products may use
TF32 in both. Needs the package's ``test`` extra (torch, peft).
"""

import argparse
import os
import time
import warnings
from functools import partial
from statistics import median

# Two frameworks share the device, so neither may reserve all of its memory.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import harness
import jax
import jax.numpy as jnp
import torch
from peft import LoraConfig, get_peft_model
from transformers import BertConfig, BertForSequenceClassification

from fedjax_peft import lora, tasks
from fedjax_peft.cli.bench import Bench, Shape
from fedjax_peft.models.heads import classification
from fedjax_peft.peft.base import abstract_model
from fedjax_peft.simulation.planning.memory_plan import example_batch
from fedjax_peft.simulation.planning.step_cost import step_flops

CLASSES = 20


class TorchLoop:
    """The same round in plain torch: a loop over clients and steps."""

    def __init__(self, a: argparse.Namespace, dropout: float):
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.clients, self.steps, self.batch, self.dtype = a.clients, a.steps, a.batch, a.dtype
        config = BertConfig(
            vocab_size=a.vocab,
            hidden_size=a.hidden,
            num_hidden_layers=a.layers,
            num_attention_heads=a.heads,
            intermediate_size=a.ffn,
            max_position_embeddings=max(a.length, 512),
            hidden_dropout_prob=dropout,
            attention_probs_dropout_prob=dropout,
            num_labels=CLASSES,
        )
        adapter = LoraConfig(
            r=a.rank,
            lora_alpha=a.rank,
            target_modules=["query", "value"],
            task_type="SEQ_CLS",
            modules_to_save=["bert.pooler", "classifier"],  # as in our model
        )
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # a warning of peft about transformers
            model = get_peft_model(BertForSequenceClassification(config), adapter)
        self.model = model.to(self.device).train()
        self.trained = [p for p in self.model.parameters() if p.requires_grad]
        self.broadcast = [p.detach().clone() for p in self.trained]
        n = a.clients * a.steps * a.batch
        self.ids = torch.randint(0, a.vocab, (n, a.length), device=self.device)
        self.mask = torch.ones_like(self.ids)
        self.labels = torch.randint(0, CLASSES, (n,), device=self.device)
        self.useful = a.clients * a.steps

    def client(self, client: int, order: torch.Tensor) -> None:
        with torch.no_grad():
            for parameter, start in zip(self.trained, self.broadcast, strict=True):
                parameter.copy_(start)
        optimizer = torch.optim.AdamW(self.trained, lr=1e-3, weight_decay=1e-4)
        for step in range(self.steps):
            rows = order[step * self.batch : (step + 1) * self.batch]
            labels = self.labels[rows]
            half = self.dtype == "bfloat16"
            with torch.autocast(self.device.type, torch.bfloat16, enabled=half):
                outputs = self.model(
                    input_ids=self.ids[rows], attention_mask=self.mask[rows], labels=labels
                )
            outputs.loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            self.loss += outputs.loss.detach()
            self.right += (outputs.logits.argmax(-1) == labels).sum()

    def round(self) -> float:
        """Runs one round and returns its seconds."""
        self.loss = torch.zeros((), device=self.device)
        self.right = torch.zeros((), device=self.device)
        self._wait()
        start_time = time.perf_counter()
        sums = [torch.zeros_like(p) for p in self.broadcast]
        examples = self.steps * self.batch
        for client in range(self.clients):
            order = client * examples + torch.randperm(examples).to(self.device)
            self.client(client, order)
            with torch.no_grad():
                for total, parameter in zip(sums, self.trained, strict=True):
                    total += parameter / self.clients
        self._wait()
        return time.perf_counter() - start_time

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


class Product:
    """A plain float32 product of the feed-forward layer's sizes."""

    def __init__(self, a: argparse.Namespace):
        x = jax.random.normal(jax.random.key(0), (a.batch * a.length, a.hidden))
        y = jax.random.normal(jax.random.key(1), (a.hidden, a.ffn))
        self.run = partial(jax.jit(jnp.dot), x, y)
        self.flops = 2 * a.batch * a.length * a.hidden * a.ffn

    def rate(self, times: int = 20) -> float:
        """Returns the operations a second."""
        began = time.perf_counter()
        for _ in range(times):
            jax.block_until_ready(self.run())
        return times * self.flops / (time.perf_counter() - began)


def our_flops(a: argparse.Namespace, dropout: float) -> int:
    """Returns the operations of the products of our step, from shapes."""
    config = {"model_type": "bert", "vocab_size": a.vocab, "hidden_size": a.hidden}
    config |= {"num_hidden_layers": a.layers, "num_attention_heads": a.heads}
    config |= {"intermediate_size": a.ffn, "max_position_embeddings": max(a.length, 512)}
    head = classification(CLASSES)
    model = abstract_model(config, lora(a.rank), head=head, dropout=dropout)
    batch = example_batch(head.kind, batch_size=a.batch, length=a.length)
    return step_flops(model, tasks.classification(), batch)


def compare(a: argparse.Namespace, dropout: float) -> dict:
    """Returns the two speeds and their ratio for one dropout rate."""
    sizes = {name: getattr(a, name) for name in Shape._fields if name != "dropout"}
    ours = Bench(Shape(**sizes, dropout=dropout))
    theirs, product = TorchLoop(a, dropout), Product(a)
    assert ours.plan.useful == theirs.useful
    programs = {"product": product.rate, "ours": ours.round, "torch": theirs.round}
    seconds = harness.turns(programs, a.repeats)
    rates, flops = seconds.pop("product"), theirs.useful * our_flops(a, dropout)
    speed = {name: theirs.useful / median(s) for name, s in seconds.items()}
    return {
        "dropout": dropout,
        "ours_client_steps_per_s": speed["ours"],
        "torch_client_steps_per_s": speed["torch"],
        # Ratios of consecutive runs, which have the same load of the machine; then their median.
        "ratio": harness.ratio(seconds["torch"], seconds["ours"]),
        "product_gflops": median(rates) / 1e9,
        "share_of_product": harness.ratio([flops / s for s in seconds["ours"]], rates),
        "lanes": ours.plan.lanes,
        "compile_s": ours.compile_seconds,
        "seconds": seconds,
    }


def main() -> None:
    """Measures and prints a table and one line of JSON."""
    parser = harness.arguments(
        __doc__,
        **{"layers": 6, "hidden": 384, "heads": 12, "ffn": 1536, "vocab": 30522, "length": 64},
        **{"batch": 16, "rank": 8, "clients": 4, "steps": 4, "repeats": 5},
    )
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--lanes", type=lambda x: x if x == "auto" else int(x), default="auto")
    parser.add_argument("--dropout", type=float, nargs="+", default=[0.1, 0.0])
    a = parser.parse_args()
    # The default of JAX: TF32 on devices that have it.
    torch.set_float32_matmul_precision("high")

    print(f"{a.layers} layers, width {a.hidden}, batch {a.batch}, length {a.length}, {a.dtype}")
    print(f"{'dropout':>8} {'ours':>8} {'torch':>8} {'ratio':>7} {'of dot':>7}  client-steps/s")
    results = []
    for dropout in a.dropout:
        r = compare(a, dropout)
        results.append(r)
        ours, theirs = r["ours_client_steps_per_s"], r["torch_client_steps_per_s"]
        note = f"  lanes {r['lanes']}, compiled in {r['compile_s']:.1f} s"
        shares = f"{r['ratio']:7.2f} {r['share_of_product']:7.0%}"
        print(f"{dropout:8} {ours:8.2f} {theirs:8.2f} {shares}{note}", flush=True)
    torch_device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    torch_facts = {"torch_device": torch_device, "torch_threads": torch.get_num_threads()}
    harness.print_json(a, ("torch", "peft", "transformers"), results=results, **torch_facts)


if __name__ == "__main__":
    main()
