"""Measures the speed of the local-update engine, with random data and random weights."""

import statistics
import time
from collections.abc import Callable
from typing import Any, Literal

import jax
import numpy as np
import optax

from fedjax_peft import algorithms
from fedjax_peft.data.dataset import Clients, Dataset
from fedjax_peft.models.heads import classification
from fedjax_peft.models.registry import random_model
from fedjax_peft.numerics.random import host_rng
from fedjax_peft.peft.base import attach
from fedjax_peft.peft.lora import lora
from fedjax_peft.simulation.record import device_name
from fedjax_peft.simulation.records import Placement
from fedjax_peft.simulation.session import session
from fedjax_peft.support.display import show
from fedjax_peft.support.errors import InputError
from fedjax_peft.support.memory import require

__all__ = ["Bench", "bench"]


class Bench:
    """A compiled round on random data; :meth:`round` runs it and returns its seconds."""

    def __init__(
        self,
        *,
        layers: int,
        hidden: int,
        heads: int,
        ffn: int,
        vocab: int,
        length: int,
        batch: int,
        clients: int,
        steps: int,
        rank: int,
        dropout: float,
        dtype: Literal["float32", "bfloat16"],
        lanes: int | Literal["auto"],
    ):
        config = {
            "model_type": "bert",
            "vocab_size": vocab,
            "hidden_size": hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "intermediate_size": ffn,
            "max_position_embeddings": max(length, 512),
        }
        head = classification(20)
        model = attach(random_model(config, head=head, dtype=dtype, dropout=dropout), lora(rank))
        algorithm = algorithms.fedavg(optax.adamw(1e-3))
        rng = host_rng(0, "bench")
        n = clients * steps * batch
        require(9 * n * length, f"A benchmark on {n:,} examples", "Choose smaller sizes.")
        columns = {
            "input_ids": rng.integers(0, vocab, (n, length)).astype(np.int32),
            "attention_mask": np.ones((n, length), bool),
            "labels": rng.integers(0, head.classes, n).astype(np.int32),
        }
        rows = np.arange(n, dtype=np.int32).reshape(clients, -1)
        names = tuple(str(label) for label in range(head.classes))
        self._session = session(
            model,
            algorithm,
            Clients(Dataset(columns, names), tuple(rows)),
            batch_size=batch,
            placement=Placement(lanes=lanes, length_buckets=0),
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


def bench(
    *,
    layers: int = 6,
    hidden: int = 384,
    heads: int = 12,
    ffn: int = 1536,
    vocab: int = 30522,
    length: int = 64,
    batch: int = 16,
    clients: int = 4,
    steps: int = 4,
    rank: int = 8,
    dropout: float = 0.1,
    dtype: Literal["float32", "bfloat16"] = "float32",
    lanes: int | Literal["auto"] = "auto",
    repeats: int = 5,
    on_phase: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Returns the speed of the local-update engine: medians over ``repeats`` rounds.

    Args:
      layers: layers of the BERT backbone; the default shape is that of MiniLM-L6.
      hidden: width of the backbone.
      heads: attention heads.
      ffn: width of the feed-forward layers.
      vocab: size of the vocabulary.
      length: tokens per example.
      batch: examples per local step.
      clients: clients per round.
      steps: local steps per client.
      rank: rank of LoRA on query and value.
      dropout: dropout rate everywhere in the model.
      dtype: compute dtype.
      lanes: clients that train side by side.
      repeats: number of timed rounds.
      on_phase: called with a description of each phase when it starts.
    """
    shape: dict[str, Any] = {
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "ffn": ffn,
        "vocab": vocab,
        "length": length,
        "batch": batch,
        "clients": clients,
        "steps": steps,
        "rank": rank,
        "dropout": dropout,
        "dtype": dtype,
        "lanes": lanes,
    }
    for name, value in {**shape, "repeats": repeats}.items():
        if type(value) is int and not 1 <= value < 2**31:
            raise InputError(f"{name} = {show(value)} must be from 1 to {2**31 - 1:,}.")
    on_phase("compiling a round, and running it once")
    run = Bench(**shape)
    seconds = []
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
        "model_tflops": 4 * run.parameters * batch * length * rate / 1e12,
        "device": device_name(),
        "shape": shape,
    }
