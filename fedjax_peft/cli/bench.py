"""The command ``bench``: the speed of the local-update engine, on random data and weights."""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
import optax

from fedjax_peft import algorithms
from fedjax_peft.config import config as configs
from fedjax_peft.config.schema import checked_values, fields_of
from fedjax_peft.data.dataset import Clients, Dataset
from fedjax_peft.models.heads import classification
from fedjax_peft.models.registry import random_model
from fedjax_peft.numerics.random import host_rng
from fedjax_peft.peft.base import attach
from fedjax_peft.peft.lora import lora
from fedjax_peft.simulation.progress import Lines
from fedjax_peft.simulation.records import Placement
from fedjax_peft.simulation.session import session
from fedjax_peft.simulation.storage.record import device_name
from fedjax_peft.support.display import show
from fedjax_peft.support.errors import InputError
from fedjax_peft.support.memory import require


class Shape(NamedTuple):
    """The sizes of the model and of a round; the default model is that of MiniLM-L6."""

    layers: int = 6
    hidden: int = 384
    heads: int = 12
    """Attention heads."""
    ffn: int = 1536
    """Width of the feed-forward layers."""
    vocab: int = 30522
    length: int = 64
    """Tokens per example."""
    batch: int = 16
    """Examples per local step."""
    clients: int = 4
    """Clients per round."""
    steps: int = 4
    """Local steps per client."""
    rank: int = 8
    """Rank of LoRA on query and value."""
    dropout: float = 0.1
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Compute dtype."""
    lanes: int | Literal["auto"] = "auto"
    """Clients that train side by side."""
    repeats: int = 5
    """Number of timed rounds."""


def print_speed(options: argparse.Namespace) -> None:
    """Prints the speed of the local-update engine."""
    given: dict[str, Any] = {}
    for text in options.overrides:
        given = configs.override(given, text)
    shape = Shape(**checked_values("", fields_of(Shape), given))
    with closing(Lines("bench", sys.stderr)) as lines:
        result = bench(shape, lines.show)
    if options.json:
        print(json.dumps(result))
        return
    for key, value in result.items():
        if key != "shape":
            print(f"{key:20} {value:,.4g}" if isinstance(value, float) else f"{key:20} {value}")


class Bench:
    """A compiled round on random data; :meth:`round` runs it and returns its seconds."""

    def __init__(self, shape: Shape):
        config = {
            "model_type": "bert",
            "vocab_size": shape.vocab,
            "hidden_size": shape.hidden,
            "num_hidden_layers": shape.layers,
            "num_attention_heads": shape.heads,
            "intermediate_size": shape.ffn,
            "max_position_embeddings": max(shape.length, 512),
        }
        head = classification(20)
        bare = random_model(config, head=head, dtype=shape.dtype, dropout=shape.dropout)
        model = attach(bare, lora(shape.rank))
        self._session = session(
            model,
            algorithms.fedavg(optax.adamw(1e-3)),
            _random_clients(shape, head.classes),
            batch_size=shape.batch,
            placement=Placement(lanes=shape.lanes, length_buckets=0),
            rounds=1,
        )
        self.plan = self._session.plan(1)
        self.parameters = sum(x.size for n, x in model.frozen.items() if n.endswith("kernel"))
        self.round()

    def round(self) -> float:
        """Runs one round and returns its seconds, without compilation."""
        state = jax.block_until_ready(self._session.init())
        compiled = self._session.compile_seconds
        start = time.perf_counter()
        jax.block_until_ready(self._session.step(state, self.plan))
        return time.perf_counter() - start - (self._session.compile_seconds - compiled)

    @property
    def compile_seconds(self) -> float:
        """Seconds of compilation so far."""
        return self._session.compile_seconds

    @property
    def peak_bytes(self) -> int:
        """Memory of the compiled round on a device in bytes, including its arguments."""
        return self._session.peak_bytes


def _random_clients(shape: Shape, classes: int) -> Clients:
    """Returns clients whose examples are random tokens and labels."""
    rng = host_rng(0, "bench")
    n = shape.clients * shape.steps * shape.batch
    require(9 * n * shape.length, f"A benchmark on {n:,} examples", "Choose smaller sizes.")
    columns = {
        "input_ids": rng.integers(0, shape.vocab, (n, shape.length)).astype(np.int32),
        "attention_mask": np.ones((n, shape.length), bool),
        "labels": rng.integers(0, classes, n).astype(np.int32),
    }
    rows = np.arange(n, dtype=np.int32).reshape(shape.clients, -1)
    return Clients(Dataset(columns, tuple(map(str, range(classes)))), tuple(rows))


def bench(shape: Shape, on_phase: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
    """Returns the speed of the local-update engine: medians over the timed rounds.

    Raises:
      InputError: a size is not positive.
    """
    sizes = shape._asdict()
    for name, value in sizes.items():
        if type(value) is int and not 1 <= value < 2**31:
            raise InputError(f"{name} = {show(value)} must be from 1 to {2**31 - 1:,}.")
    on_phase("compiling a round, and running it once")
    run = Bench(shape)
    repeats, seconds = sizes.pop("repeats"), []
    for number in range(repeats):
        on_phase(f"timing round {number + 1} of {repeats}")
        seconds.append(run.round())
    peak = (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use", run.peak_bytes)
    rate = run.plan.useful / statistics.median(seconds)
    return {
        "client_steps_per_s": rate,
        "compile_s": run.compile_seconds,
        "lanes": run.plan.lanes,
        "slot_utilisation": run.plan.slot_utilisation,
        "peak_memory_mb": peak / 1e6,
        "model_tflops": 4 * run.parameters * shape.batch * shape.length * rate / 1e12,
        "device": device_name(),
        "shape": sizes,
    }
