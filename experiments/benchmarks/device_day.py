"""Measures what a lent GPU is used for, in the order of value, in some minutes.

    python experiments/benchmarks/device_day.py --minutes 9 --out DIR
    python experiments/benchmarks/device_day.py --minutes 9 --out DIR     # again: what is missing
    python experiments/benchmarks/device_day.py --out DIR --parts attention --tiny   # try on a CPU

``PARTS`` has the parts. Each is a list of items, and has a share of the time; what it leaves is the
next one's. An item is a process with a time limit, whose figures are written to ``DIR/PART.json``,
with a table beside it, as soon as it ends. So an interruption loses one item, and a second call
measures what is missing. An item that needs a library which is not installed says so. ``--tiny``
takes shapes that a CPU computes in seconds, to try the whole script.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import harness
import on_device
import opponents
from accelerators import LLAMA_8B, ROWS

Figures = dict[str, Any]


class Part(NamedTuple):
    """A part of the day."""

    share: float
    """Of the time."""
    items: Sequence[str]
    measure: Callable[[str, Path, bool], Figures]
    """(item, folder of the results, whether shapes are tiny) -> figures."""


# Equality with the CPU.

TOLERANCE = 1e-4
"""Largest difference of a leaf, over the largest change of it: two rounds in float32."""


def leaves_of(server: Any) -> dict[str, Any]:
    """Returns the server's leaves by name; LoRA's factors as products, since an SVD flips signs."""
    import jax
    import numpy as np

    flat, _ = jax.tree_util.tree_flatten_with_path(server)
    leaves = {jax.tree_util.keystr(path): np.asarray(x, np.float64) for path, x in flat}
    for first in [name for name in leaves if "lora_a" in name]:
        leaves[first] = leaves[first] @ leaves.pop(first.replace("lora_a", "lora_b"))
    return leaves


def rounds_of(item: str) -> dict[str, dict[str, Any]]:
    """Returns the server's leaves before and after two rounds."""
    import jax
    import optax

    import fedjax_peft as fp

    with jax.default_matmul_precision("highest"):
        if item == "decoder":
            session = on_device.session_of("decoder", "whole", lanes=2, steps=2)
        else:
            off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
            layers = {"layers": [-1]} if item == "reuse" else {}
            disk = {"client_state": "disk"} if item == "state on disk" else {}
            kept = {"reuse": "exact"} if item == "reuse" else {}
            make = fp.algorithms.ditto if disk else fp.algorithms.fedavg
            aggregator = {"aggregator": fp.aggregators.fra()} if item == "FRA" else {}
            session = fp.session(
                fp.attach(fp.testing.tiny_model(**off), fp.lora(rank=4, **layers)),
                make(optax.sgd(0.1), **aggregator),
                fp.partition.iid(fp.testing.tiny_dataset(64), 8, seed=0),
                clients_per_round=4,
                local_steps=2,
                batch_size=4,
                rounds=2,
                privacy=fp.privacy.central(1.0, 0.5) if item == "privacy" else None,
                placement=fp.Placement(**disk, **kept, length_buckets=1),
            )
        state = session.init(seed=0)
        before = leaves_of(state.server)
        for _ in range(2):
            state, _ = session.step(state)
        return {"before": before, "after": leaves_of(state.server)}


def on_cpu(item: str) -> dict[str, dict[str, Any]]:
    """Returns :func:`rounds_of` as another process computes it on the CPU."""
    import numpy as np

    with tempfile.TemporaryDirectory() as place:
        file = Path(place) / "leaves.npz"
        harness.ask(__file__, "--leaves", item, file, check=True, JAX_PLATFORMS="cpu")
        stored = np.load(file)
        return {
            when: {name.split("/", 1)[1]: stored[name] for name in stored if name.startswith(when)}
            for when in ("before", "after")
        }


def equality(item: str, folder: Path, tiny: bool) -> Figures:
    """Says how far a leaf after two rounds is from the CPU's."""
    import numpy as np

    here, there = rounds_of(item), on_cpu(item)
    apart = {
        name: np.abs(x - there["after"][name]).max()
        / max(np.abs(x - here["before"][name]).max(), 1e-9)
        for name, x in here["after"].items()
    }
    worst = max(apart, key=lambda name: apart[name])
    return {"apart": apart[worst], "leaf": worst, "equal": bool(apart[worst] <= TOLERANCE)}


# Rounds of models.

LANES = 4
ROWS["nemo"] = (
    LLAMA_8B,
    "words",
    {"remat": "blocks", "scan_layers": True, "lora": {"rank": 16, "targets": "all-linear"}},
    *(1, 2, 4096),
)
"""What NVIDIA publishes of its NeMo AutoModel: LoRA of rank 16 on all projections in bfloat16."""
ROWS["1b, one lane"] = ROWS["llama-1b"]
ROWS["1b, four lanes"] = (*ROWS["llama-1b"][:3], LANES, ROWS["llama-1b"][4] // LANES, 512)
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
SMALL |= {"num_key_value_heads": 2, "intermediate_size": 64, "vocab_size": 500}
ROWS["decoder"] = ({**LLAMA_8B, **SMALL}, "words", {"dtype": "float32"}, 2, 2, 16)


def shrunk(row: str) -> None:
    """Makes a row one that a CPU computes in seconds."""
    config, kind, options, lanes, _, length = ROWS[row]
    kept = {name: x for name, x in options.items() if name in ("dropout", "lora")}
    ROWS[row] = ({**config, **SMALL}, kind, kept, min(lanes, 2), 2, 16 if length else 0)


def model_round(item: str, folder: Path, tiny: bool) -> Figures:
    """Returns the figures of a row of ``on_device.py``, with its tokens or examples a second."""
    if tiny:
        shrunk(item)
    lanes, size, length = ROWS[item][3:]
    steps, repeats = (2, 1) if tiny else (on_device.steps_for(item, lanes), 5)
    found = on_device.measure(item, "auto", lanes, steps, repeats)
    rate = lanes * size / found["step"]
    return {**found, "examples/s": rate, "tokens/s": rate * length}


def against_opponents(item: str, folder: Path, tiny: bool) -> Figures:
    """Returns the rows of ``opponents.py``."""
    model, clients = item.split(", ")
    shape = opponents.shape_of(model, int(clients), 2, "bfloat16", actors=8, tiny=tiny)
    pythons = {"flower": os.environ.get("PEERS"), "pfl": os.environ.get("PEERS")}
    given = {name: path for name, path in pythons.items() if path}
    rows, missing = opponents.compare(shape, list(opponents.ROWS), 1 if tiny else 5, given)
    return {"rows": rows, "missing": missing}


# Forms of attention.


def attention(item: str, folder: Path, tiny: bool) -> Figures:
    """Returns the time and memory of an attention with its gradient, and if its bits repeat."""
    import statistics

    import jax
    import jax.numpy as jnp
    import numpy as np

    form, causal = item.split(", ")[0], "causal" in item
    batch, length, heads, width = (
        (2, 16, 2, 8) if tiny else (4, 2048, 32, 64) if causal else (128, 64, 12, 32)
    )
    if form == "tokamax":
        import tokamax

    def attend(query: Any, key: Any, value: Any) -> Any:
        if form == "tokamax":
            return tokamax.dot_product_attention(query, key, value, is_causal=causal)
        chosen = "xla" if form == "whole" else form
        return jax.nn.dot_product_attention(
            query, key, value, is_causal=causal, implementation=chosen
        )

    def gradient(query: Any, key: Any, value: Any, change: Any) -> Any:
        result, pull = jax.vjp(attend, query, key, value)
        return result, pull(change)

    keys = jax.random.split(jax.random.key(0), 4)
    shape = (batch, length, heads, width)
    given = [jax.random.normal(key, shape, jnp.bfloat16) for key in keys]
    program = jax.jit(gradient).lower(*given).compile()
    first, second = (jax.tree.leaves(program(*given)) for _ in range(2))
    seconds = [harness.timed(lambda: program(*given)) for _ in range(3 if tiny else 20)]
    return {
        "ms": 1e3 * statistics.median(seconds),
        "memory_mb": program.memory_analysis().temp_size_in_bytes / 1e6,
        "same bits": all(map(np.array_equal, first, second)),
    }


# The papers' length.


def long_runs(item: str, folder: Path, tiny: bool) -> Figures:
    """Runs one method at one alpha with five seeds as replicas of a sweep; it can be continued."""
    import tomli_w

    from fedjax_peft.cli.main import main as main_of_library

    method, alpha = item.split(", ")
    config: dict[str, Any] = {
        "rounds": 1000,
        "clients_per_round": 10,
        "batch_size": 16,
        "local_steps": 4,
        "evaluation": {"every": 50},
        "records": {"checkpoint_every": 50},
        "model": {"name": "minilm-l6", "dtype": "bfloat16", "dropout": 0.0},
        "data": {"name": "20newsgroups", "max_length": 64, "test_examples": 2000, "seed": 0},
        "partition": {"name": "dirichlet", "clients": 100, "alpha": float(alpha.split()[1])},
        "peft": {"name": "lora", "rank": 8, "init": "svd" if method == "FeDeRA" else "kaiming"},
        "optimizer": {"name": "adamw", "learning_rate": 3e-3},
        "aggregator": {"name": "fra" if method == "FRA" else "mean"},
    }
    if tiny:
        import fedjax_peft as fp

        model = fp.testing.write_tiny_checkpoint(folder / "tiny" / "model")
        data = fp.testing.write_tiny_texts(folder / "tiny" / "data", train=64, test=16)
        config |= {"rounds": 1, "clients_per_round": 2, "local_steps": 1}
        config |= {"model": {"name": str(model)}, "data": {"name": str(data), "max_length": 8}}
        config["partition"]["clients"], config["peft"]["rank"] = 4, 2
    name = f"{method}-{alpha}".replace(" ", "-")
    file, out = folder / "runs" / f"{name}.toml", folder / "runs" / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(tomli_w.dumps(config))
    again = ["--resume"] if (out / "sweep.toml").exists() else []
    seeds = f"seed={','.join(map(str, range(2 if tiny else 5)))}"
    # In this process, so that a time limit ends it too. The last checkpoints are continued.
    if code := main_of_library(["sweep", str(file), seeds, "--out", str(out), *again]):
        sys.exit(code)
    last = [
        json.loads(rows.read_text().splitlines()[-1]) for rows in sorted(out.rglob("metrics.jsonl"))
    ]
    return {"accuracies": [row["test_accuracy"] for row in last], "rounds": config["rounds"]}


ALPHAS = ("alpha 0.1", "alpha 1", "alpha 10")
METHODS = ("FedLR", "FeDeRA", "FRA")
SIX = ("encoder", "decoder", "FRA", "privacy", "reuse", "state on disk")
MODELS = ("minilm", "roberta-base", "gpt2", "vit-base", "llama-1b", "llama-8b")
ATTENTION = [
    f"{form}, {m}" for m in ("causal", "whole text") for form in ("whole", "cudnn", "tokamax")
]
PARTS = {
    "equality": Part(0.10, SIX, equality),
    "models": Part(0.25, MODELS, model_round),
    "opponents": Part(0.20, ("minilm, 8", "minilm, 32", "roberta-base, 8"), against_opponents),
    "nemo": Part(0.10, ("nemo",), model_round),
    "lanes": Part(0.10, ("1b, one lane", "1b, four lanes"), model_round),
    "attention": Part(0.05, ATTENTION, attention),
    "papers": Part(0.20, [f"{m}, {a}" for a in ALPHAS for m in METHODS], long_runs),
}
"""In the order of value. FedLR is FedAvg over LoRA: the baseline of FeDeRA and of FRA."""

Ask = Callable[[str, str, float], "Figures | str"]
"""(part, item, seconds at most) -> the figures of an item, or why there are none."""


def measure(names: Sequence[str], seconds: float, folder: Path, ask: Ask) -> None:
    """Measures the missing items of parts, and writes each at once."""
    began, due = time.monotonic(), 0.0
    folder.mkdir(parents=True, exist_ok=True)
    whole = sum(PARTS[name].share for name in names)
    for name in names:
        part, file = PARTS[name], folder / f"{name}.json"
        due += part.share / whole * seconds
        found = harness.known(file)
        for item in [x for x in part.items if not isinstance(found.get(x), dict)]:
            left = due - (time.monotonic() - began)
            found[item] = ask(name, item, left) if left > 0 else "no time was left"
            harness.write(file, found, table(found))
            print(f"{name}: {item}: {found[item]}", flush=True)


def table(found: dict[str, Any]) -> str:
    """Returns the items of a part in Markdown, without their lists and long texts."""
    names = dict.fromkeys(n for x in found.values() if isinstance(x, dict) for n in x)
    short = [
        n
        for n in names
        if not any(
            isinstance(x, dict) and isinstance(x.get(n), list | dict) for x in found.values()
        )
    ]

    def cell(x: Any) -> str:
        return f"{x:.4g}" if isinstance(x, float) else str(x)

    rows = [
        [item, *(cell(x.get(n, "")) for n in short)]
        if isinstance(x, dict)
        else [item, x, *[""] * (len(short) - 1)]
        for item, x in found.items()
    ]
    return harness.markdown(["item", *(short or [""])], rows)


def main() -> None:
    """Measures, or runs one item for the process that asked."""
    parser = harness.arguments(__doc__)
    parser.add_argument("--minutes", type=float, default=9)
    parser.add_argument("--out", type=Path, default=Path("device_day"))
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--tiny", action="store_true", help="shapes of a CPU, to try the script")
    parser.add_argument("--item", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--leaves", nargs=2, help=argparse.SUPPRESS)
    a = parser.parse_args()
    if a.leaves:
        import numpy as np

        found = rounds_of(a.leaves[0])
        flat = {f"{when}/{name}": x for when, own in found.items() for name, x in own.items()}
        np.savez(a.leaves[1], **flat)
        print("true")
        return
    if a.item:
        part, item = a.item
        print(json.dumps(PARTS[part].measure(item, a.out, a.tiny)))
        return
    more = ["--tiny"] if a.tiny else []

    def ask(part: str, item: str, limit: float) -> Figures | str:
        return harness.ask(__file__, "--item", part, item, "--out", a.out, *more, limit=limit)

    measure(a.parts, 60 * a.minutes, a.out, ask)


if __name__ == "__main__":
    main()
