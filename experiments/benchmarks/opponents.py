"""Compares rounds of this library with the strongest ways to do the same in PyTorch.

    python experiments/benchmarks/opponents.py                     # MiniLM with 8 and 32 clients
    python experiments/benchmarks/opponents.py --models roberta-base --clients 2 --rows ours vmap
    python experiments/benchmarks/opponents.py --python flower=DIR/bin/python pfl=DIR/bin/python

A round is FedAvg of LoRA (rank 8, query and value) and the head, by AdamW, with all clients: ours;
torch + peft with one client at a time; ``torch.func.vmap`` over stacked adapters; the same under
``torch.compile``; Flower with ``--actors`` actors; and pfl-research. Each row is a process of its
own with the same weights and examples, and without dropout. The rounds of all rows alternate, after
one that compiles. A row counts only if the losses of all its rounds equal those of the first row to
1e-3 (float32) or 3e-2 (bfloat16), relatively. ``--python`` names the interpreter of a row, such as
one that has Flower (``peers.py --install DIR``, then torch's peft and transformers beside it).

``results/opponents.csv`` has the rows: medians of the seconds of a round and of the processor's
seconds of it, which other load of the machine changes less, and the medians of the ratios to ours
of the same turns. A row that could not run is named with the reason, and is not in the file.
"""

import csv
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import harness
from accelerators import MINILM, ROBERTA

FILE = harness.RESULTS / "opponents.csv"
TORCH = Path(__file__).with_name("opponents_torch.py")
MODELS: dict[str, tuple[dict[str, Any], int, int]] = {
    "minilm": (MINILM, 16, 64),
    "roberta-base": (ROBERTA, 16, 128),
}
"""Name -> config, examples of a batch and tokens of an example."""
ROWS = {
    "ours": "fedjax_peft",
    "one by one": "torch + peft, one client at a time",
    "vmap": "torch.func.vmap over stacked LoRA",
    "vmap compiled": "the same under torch.compile",
    "flower": "Flower",
    "pfl": "pfl-research",
}
TOLERANCES = {"float32": 1e-3, "bfloat16": 3e-2}
KEYS = ("device", "processor", "model", "clients", "steps", "dtype", "row")
FIELDS = (
    *KEYS,
    *("wall_s", "cpu_s", "wall_to_ours", "cpu_to_ours", "first_round_s", "peak_mb"),
    *("loss_difference", "rounds", "cores", "load_average", "python", "jax", "torch"),
)


class Row:
    """A process that runs a round whenever it is asked."""

    def __init__(self, name: str, folder: Path, python: str):
        script = __file__ if name == "ours" else TORCH
        words = ["--row", str(folder)] if name == "ours" else [name, str(folder)]
        self._errors = (folder / f"{name}.txt").open("w+")
        self._process = subprocess.Popen(
            [python, str(script), *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        self.rounds: list[dict[str, float]] = []

    def finish(self) -> str | None:
        """Waits for the end of the present round; returns why there is none, if so."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith('{"wall"'):
                self.rounds.append(json.loads(line))
                return None
        self._process.wait()
        self._errors.seek(0)
        return harness.fault(self._errors.read())

    def run(self) -> float:
        """Runs a round and returns its seconds."""
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        if why := self.finish():
            raise RuntimeError(why)
        return self.rounds[-1]["wall"]

    def close(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._errors.close()


def our_rounds(folder: Path) -> None:
    """Runs our rounds until the parent closes its pipe."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from opponents_torch import DECAY, RATE, Turns

    import fedjax_peft as fp

    shape, turns = json.loads((folder / "shape.json").read_text()), Turns()
    bare = fp.load_model(folder / "model", dtype=shape["dtype"])
    model = fp.attach(bare, fp.lora(rank=shape["rank"]))
    start = {f"{place}.lora_a": a.T for place, a in np.load(folder / "adapter.npz").items()}
    assert start.keys() <= model.trainable.keys()
    given = {name: jnp.asarray(a) for name, a in start.items()}
    model = model.replace(trainable={**model.trainable, **given})
    stored = np.load(folder / "examples.npz")
    ids, labels = stored["input_ids"], stored["labels"]
    columns = {"input_ids": ids.reshape(-1, ids.shape[-1]), "labels": labels.reshape(-1)}
    columns["attention_mask"] = np.ones(columns["input_ids"].shape, bool)
    data = fp.Dataset(columns, tuple(map(str, range(shape["classes"]))), "random")
    rows = np.arange(labels.size, dtype=np.int32).reshape(labels.shape)
    session = fp.session(
        *(model, fp.algorithms.fedavg(optax.adamw(RATE, weight_decay=DECAY))),
        fp.Clients(data, tuple(rows)),
        batch_size=shape["batch"],
        local_steps=shape["steps"],
        rounds=1,
        placement=fp.Placement(length_buckets=0),
    )
    state = session.init(seed=0)
    while True:
        state, info = session.step(state)
        jax.block_until_ready(state)
        total, count = info.sums["loss"]
        turns.end(np.sum(total) / np.sum(count))


def shape_of(
    model: str, clients: int, steps: int, dtype: str, actors: int, tiny: bool
) -> dict[str, Any]:
    """Returns what all rows are given."""
    config, batch, length = MODELS[model]
    if tiny:
        config, batch, length = {**config, **TINY}, 2, 8
    shape = {"config": config, "classes": 20, "rank": 8, "clients": clients, "batch": batch}
    return {**shape, "length": length, "steps": steps, "dtype": dtype, "actors": actors}


def compare(
    shape: dict[str, Any], rows: Sequence[str], repeats: int, pythons: Mapping[str, str]
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Returns what is written of each row that ran, and why the others did not."""
    missing: dict[str, str] = {}
    ready: dict[str, Row] = {}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "shape.json").write_text(json.dumps(shape))
        maker = pythons.get("one by one", sys.executable)
        subprocess.run([maker, TORCH, "make", folder], check=True)
        for name in rows:
            row = Row(name, folder, pythons.get(name, sys.executable))
            why = row.finish()
            if why is None:
                ready[name] = row
            else:
                missing[name] = why
                row.close()
        load = os.getloadavg()[0]
        harness.turns({name: row.run for name, row in ready.items()}, repeats, warm=0)
        for row in ready.values():
            row.close()
    found = {name: figures(name, ready, load) for name in ready}
    for name in [
        n for n, x in found.items() if not x["loss_difference"] <= TOLERANCES[shape["dtype"]]
    ]:
        missing[name] = f"its losses differ by {found.pop(name)['loss_difference']:.2g}"
    return list(found.values()), missing


def figures(name: str, ready: dict[str, Row], load: float) -> dict[str, Any]:
    """Returns what is written of a row."""
    found, first = ready[name].rounds, next(iter(ready.values())).rounds
    losses = [(x["loss"], y["loss"]) for x, y in zip(found, first, strict=True)]
    apart = max(abs(x - y) / abs(y) for x, y in losses)
    result = {"row": name, "loss_difference": apart, "rounds": len(found) - 1}
    result |= {"first_round_s": found[0]["wall"], "peak_mb": max(x["peak"] for x in found)}
    for clock in ("wall", "cpu"):
        own = [x[clock] for x in found[1:]]
        result[f"{clock}_s"] = statistics.median(own)
        if "ours" in ready:
            ours = [x[clock] for x in ready["ours"].rounds[1:]]
            result[f"{clock}_to_ours"] = harness.ratio(own, ours)
    return {**result, "load_average": load}


def written(file: Path, new: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Adds rows to a file, in place of those with the same keys; returns all of them."""
    known = []
    if file.exists():
        with file.open(newline="") as stream:
            known = list(csv.DictReader(stream))
    new = [
        {k: f"{x:.4g}" if isinstance(x, float) else str(x) for k, x in one.items()} for one in new
    ]
    same = [tuple(one[key] for key in KEYS) for one in new]
    rows = [one for one in known if tuple(one[key] for key in KEYS) not in same] + new
    with file.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, FIELDS, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Returns the rows as a Markdown table."""
    names = [
        "model",
        "clients",
        "dtype",
        "row",
        "round, s",
        "processor, s",
        "x ours",
        "x ours (CPU)",
    ]
    fields = ("model", "clients", "dtype", "row", "wall_s", "cpu_s", "wall_to_ours", "cpu_to_ours")
    return harness.markdown(
        names,
        ([ROWS.get(x[f], x[f]) if f == "row" else x[f] for f in fields] for x in rows),
    )


def main() -> None:
    """Measures, and writes the file and its table."""
    parser = harness.arguments(__doc__, steps=1, repeats=3, actors=min(8, os.cpu_count() or 1))
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["minilm"])
    parser.add_argument("--clients", nargs="+", type=int, default=[8, 32])
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--dtype", choices=TOLERANCES, default="float32")
    parser.add_argument("--python", nargs="+", default=[], metavar="ROW=PATH")
    parser.add_argument("--file", type=Path, default=FILE)
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, to try the script")
    parser.add_argument("--row", type=Path, metavar="FOLDER", help="run our rounds: internal")
    a = parser.parse_args()
    if a.row:
        our_rounds(a.row)
        return
    pythons = dict(pair.split("=", 1) for pair in a.python)
    for name in a.models:
        for clients in a.clients:
            shape = shape_of(name, clients, a.steps, a.dtype, a.actors, a.tiny)
            rows, missing = compare(shape, a.rows, a.repeats, pythons)
            for row, why in missing.items():
                print(f"{ROWS[row]}: no row, {why}", file=sys.stderr, flush=True)
            facts = {"model": name, "clients": clients, "steps": a.steps, "dtype": a.dtype}
            facts |= machine()
            found = written(a.file, [{**facts, **row} for row in rows])
            a.file.with_suffix(".md").write_text(table(found))
            print(table([one for one in found if one["model"] == name]), flush=True)


TINY = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
TINY |= {"intermediate_size": 64, "vocab_size": 100}


def machine() -> dict[str, Any]:
    """Returns the facts of the machine that each row has."""
    from importlib import metadata

    found = harness.machine()
    facts = {name: found[name] for name in ("device", "processor", "jax")}
    facts["cores"] = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()
    try:
        facts["torch"] = metadata.version("torch")
    except metadata.PackageNotFoundError:
        facts["torch"] = ""
    return {**facts, "python": sys.version.split()[0]}


if __name__ == "__main__":
    main()
