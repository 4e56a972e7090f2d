"""Compares every backbone with torch: seconds of a forward pass and of a LoRA training step.

The models have base size, random weights and a classifier of 20 classes; the inputs are random
tokens or pixels. (The speed does not depend on the values.) The forward pass is in evaluation mode.
A step is loss, gradient and AdamW on the LoRA factors and the head, with the config's dropout.
Several steps follow each other, as in a client's local update: here in one program, as in the round
engine, and in torch in a Python loop. Torch runs transformers and peft with fused attention. The
two run alternately in one process. Medians are reported, and compilation separately.

    python experiments/benchmarks/backbones_vs_torch.py                  # CPU, about 15 minutes
    python experiments/benchmarks/backbones_vs_torch.py --families bert gpt2 --repeats 3

Needs the package's ``test`` extra (torch, peft).
"""

import argparse
import functools
import json
import os
import statistics
import time
import warnings
from collections.abc import Callable
from importlib import metadata

# Two frameworks share the device, so neither may reserve all of its memory.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
import transformers
from peft import LoraConfig, get_peft_model

import fedjax_peft as fp
from fedjax_peft.contracts import ClientContext
from fedjax_peft.models.registry import default_targets, random_model

CLASSES, RANK = 20, 8
TRANSFORMERS = {
    "bert": ("Bert", {}),
    "roberta": ("Roberta", {"max_position_embeddings": 514}),
    "distilbert": ("DistilBert", {}),
    "deberta-v2": (
        "DebertaV2",
        {
            "vocab_size": 128100,
            "hidden_size": 768,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "intermediate_size": 3072,
            "relative_attention": True,
            "position_buckets": 256,
            "max_relative_positions": -1,
            "pos_att_type": ["p2c", "c2p"],
            "share_att_key": True,
            "norm_rel_ebd": "layer_norm",
            "position_biased_input": False,
            "type_vocab_size": 0,
            "layer_norm_eps": 1e-7,
        },
    ),
    "gpt2": ("GPT2", {"pad_token_id": 0}),
    "vit": ("ViT", {}),
}


def batch_of(family: str, config: object, size: int, length: int) -> dict[str, np.ndarray]:
    """Returns random examples; for ViT, the number of tokens is that of the image patches."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, CLASSES, size).astype(np.int32)
    if family == "vit":
        shape = (size, config.num_channels, config.image_size, config.image_size)
        return {"pixel_values": rng.normal(size=shape).astype(np.float32), "labels": labels}
    ids = rng.integers(5, config.vocab_size, (size, length)).astype(np.int32)
    return {"input_ids": ids, "attention_mask": np.ones_like(ids), "labels": labels}


class Ours:
    """The forward pass and the local steps of our model, each as one compiled program."""

    def __init__(self, config: dict, batch: dict, device_dtype: str, steps: int):
        model = random_model(config, head=fp.heads.classification(CLASSES), dtype=device_dtype)
        model = fp.attach(model, fp.lora(RANK))
        fixed = {n: x for n, x in model.trainable.items() if model.kinds[n] == "fixed"}
        trained = {n: x for n, x in model.trainable.items() if n not in fixed}
        optimizer = optax.adamw(1e-3)
        frozen = jax.device_put(model.compute_frozen())
        self.batch = jax.device_put(batch)
        self.key = jax.random.key(0)
        self.params, self.state = trained, optimizer.init(trained)

        def forward(frozen, params, batch):
            return model.apply(frozen, {**fixed, **params}, batch, None, False).logits

        def step(frozen, params, state, batch, key):
            """One local step."""

            def apply(p, batch, key, train):
                return model.apply(frozen, {**fixed, **p}, batch, key, train)

            context = ClientContext(apply, fp.tasks.classification(), fixed, jnp.int32(1))
            loss = functools.partial(context.objective, batch=batch, key=key)
            grads, metrics = jax.grad(loss, has_aux=True)(params)
            updates, state = optimizer.update(grads, state, params)
            return optax.apply_updates(params, updates), state, metrics["loss"][0]

        def train(frozen, params, state, batch, key):
            def body(i, carry):
                params, state, total = carry
                key_i = jax.random.fold_in(key, i)
                params, state, loss = step(frozen, params, state, batch, key_i)
                return params, state, total + loss

            return jax.lax.fori_loop(0, steps, body, (params, state, 0.0))

        self.frozen = frozen
        start = time.perf_counter()
        self._forward = jax.jit(forward).lower(frozen, self.params, self.batch).compile()
        arguments = (frozen, self.params, self.state, self.batch, self.key)
        self._train = jax.jit(train, donate_argnums=(1, 2)).lower(*arguments).compile()
        self.compile_s = time.perf_counter() - start

    def forward(self) -> None:
        jax.block_until_ready(self._forward(self.frozen, self.params, self.batch))

    def train(self) -> None:
        self.params, self.state, _ = jax.block_until_ready(
            self._train(self.frozen, self.params, self.state, self.batch, self.key)
        )


class Torch:
    """The same model with transformers and peft."""

    def __init__(self, name: str, config: object, batch: dict, dtype: str, steps: int):
        self.steps = steps
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        kind = "ForImageClassification" if name == "ViT" else "ForSequenceClassification"
        model = getattr(transformers, name + kind)(config)
        targets = list(default_targets(config.to_dict())["lora"])
        save = [n for n in ("classifier", "pre_classifier", "score") if hasattr(model, n)]
        save += ["pooler"] if hasattr(model, "bert") or hasattr(model, "pooler") else []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a warning of peft about transformers
            lora = LoraConfig(r=RANK, lora_alpha=RANK, target_modules=targets, modules_to_save=save)
            self.model = get_peft_model(model, lora).to(self.device)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-3, weight_decay=1e-4)
        self.half = dtype == "bfloat16"
        self.batch = {k: torch.tensor(v, device=self.device) for k, v in batch.items()}
        for key in ("input_ids", "attention_mask", "labels"):
            if key in self.batch:
                self.batch[key] = self.batch[key].long()

    def _autocast(self):
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.half)

    def forward(self) -> None:
        self.model.eval()
        inputs = {k: v for k, v in self.batch.items() if k != "labels"}
        with torch.inference_mode(), self._autocast():
            self.model(**inputs)
        self._wait()

    def train(self) -> None:
        self.model.train()
        total = torch.zeros((), device=self.device)
        for _ in range(self.steps):
            with self._autocast():
                loss = self.model(**self.batch).loss
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            total += loss.detach()
        self._wait()

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def seconds(function: Callable[[], None]) -> float:
    """Returns the seconds of one call."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def compare(family: str, a: argparse.Namespace) -> dict:
    """Returns the median seconds of both programs, and the median ratio of consecutive runs."""
    name, fields = TRANSFORMERS[family]
    config = getattr(transformers, f"{name}Config")(num_labels=CLASSES, **fields)
    batch = batch_of(family, config, a.batch, a.length)
    ours = Ours(config.to_dict(), batch, a.dtype, a.steps)
    theirs = Torch(name, config, batch, a.dtype, a.steps)
    result: dict = {"family": family, "compile_s": ours.compile_s}
    for what, n in {"forward": 1, "train": a.steps}.items():
        jax_call, torch_call = getattr(ours, what), getattr(theirs, what)
        jax_call(), torch_call()  # warm-up
        pairs = [(seconds(jax_call) / n, seconds(torch_call) / n) for _ in range(a.repeats)]
        result[what] = {
            "ours_s": statistics.median(p[0] for p in pairs),
            "torch_s": statistics.median(p[1] for p in pairs),
            "ratio": statistics.median(p[1] / p[0] for p in pairs),
        }
    return result


def main() -> None:
    """Measures and prints a table and one line of JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = list(TRANSFORMERS)
    parser.add_argument("--families", nargs="+", choices=known, default=known, metavar="NAME")
    for option, default in {"batch": 16, "length": 128, "steps": 4, "repeats": 3}.items():
        parser.add_argument(f"--{option}", type=int, default=default, help=f"default {default}")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    a = parser.parse_args()
    torch.set_float32_matmul_precision("high")  # the default of JAX: TF32 on devices that have it

    print(f"batch {a.batch}, length {a.length}, {a.dtype}, LoRA r={RANK}; seconds, medians")
    print(f"{'':12}{'forward':^26}{'LoRA step':^26}")
    print(f"{'':12}" + f"{'ours':>8}{'torch':>8}{'ratio':>8}  " * 2 + "compile")
    results = []
    for family in a.families:
        r = compare(family, a)
        results.append(r)
        cells = [
            f"{r[w]['ours_s']:8.2f}{r[w]['torch_s']:8.2f}{r[w]['ratio']:8.2f}  "
            for w in ("forward", "train")
        ]
        print(f"{family:12}" + "".join(cells) + f"{r['compile_s']:7.1f}", flush=True)
    environment = {
        "jax_device": f"{jax.devices()[0].device_kind} ({jax.devices()[0].platform})",
        "torch_device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "load_average": os.getloadavg()[0],
        **{n: metadata.version(n) for n in ("jax", "flax", "torch", "peft", "transformers")},
    }
    print(json.dumps({"arguments": vars(a), "environment": environment, "results": results}))


if __name__ == "__main__":
    main()
