"""FedMCP and its eight baselines on six GLUE tasks, one task for each client (Table I).

    python experiments/fedmcp/glue.py --data DIR --out table.md

``DIR`` has a folder for each task (``rte``, ``mrpc``, ``sst2``, ``qnli``, ``qqp``, ``mnli``) with
the files that ``load_dataset("glue_silo")`` reads; ``hub`` downloads them from the Hugging Face
hub. All six clients take part in every round, with one local epoch (FedRep has two: one for its
head, one for its adapters) and private heads. The accuracy is that of the last round; no round is
selected by validation accuracy.

Splits: ``6:2:2`` is the split in the paper's text (train and validation sets together, at most as
many examples as MRPC has). ``fedpetuning`` is the split that its numbers suggest: GLUE's train sets
cut to MRPC's 3668 examples, and halves of the validation sets cut to 204 examples. All cuts are
stratified by label.
"""

import argparse
import time
from pathlib import Path

import numpy as np
import optax

import fedjax_peft as fp
from fedjax_peft import algorithms, heads, peft, tree
from fedjax_peft.data import Clients
from fedjax_peft.data.catalog import DATASETS
from fedjax_peft.roles import assign_roles

TASKS = DATASETS["glue_silo"].parts
DUAL, TWO = peft.dual(size=16), heads.two_classifiers
PAPER = {
    "FedAvg (PEFT)": ("1.16", "1.16", "83.62"),
    "Local": ("1.16", "–", ""),
    "FedLR": ("0.58", "0.58", ""),
    "FedAP": ("0.58", "0.58", ""),
    "MOON": ("1.16", "1.16", ""),
    "FedRep": ("1.16", "1.16", ""),
    "FedMatch": ("1.16", "1.16", ""),
    "FedMCP": ("1.16", "0.58", "85.11"),
}
"""Trained %, communicated % and average accuracy in the paper, on RoBERTa-base."""


def methods(a: argparse.Namespace) -> dict[str, tuple]:
    """Returns name -> (PEFT method, algorithm, epochs, head)."""
    adam, low = optax.adam(a.lr), optax.adam(a.full_lr)
    private = {"head": "private", "weights": "uniform"}
    one = heads.classification
    return {
        "FedAvg (full)": (peft.full(), algorithms.fedavg(low, **private), 1, one),
        "Local": (DUAL, algorithms.local(adam), 1, one),
        "FedAvg (PEFT)": (DUAL, algorithms.fedavg(adam, **private), 1, one),
        "FedLR": (peft.lora(rank=16), algorithms.fedavg(adam, **private), 1, one),
        "FedAP": (peft.opendelta(size=16), algorithms.fedavg(adam, **private), 1, one),
        "MOON": (DUAL, algorithms.moon(adam, **private), 1, one),
        "FedRep": (DUAL, algorithms.fedrep(adam, **private), 2, one),
        "FedMatch": (DUAL, algorithms.fedmatch(adam), 1, one),
        "FedMCP": (DUAL, algorithms.fedmcp(adam, gamma=a.gamma, mu=a.mu), 1, TWO),
    }


def load(a: argparse.Namespace, tokenizer) -> tuple[Clients, Clients]:
    """Returns the clients of the training examples and those of the test examples."""
    data = fp.load_dataset(
        "glue_silo",
        tokenizer=tokenizer,
        max_length=a.length,
        source=a.data,
        seed=a.seed,
        train_examples=a.cap,
        split=a.split,
    )
    train, test = (fp.partition.natural(data[x], "task", names=TASKS) for x in ("train", "test"))
    return train, test


def main() -> None:
    """Runs the methods, and writes the table after each one."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", required=True, help="a folder of tasks, or hub")
    parser.add_argument("--out", required=True, help="file for the table, in Markdown")
    parser.add_argument("--model", default="minilm-l6", help="as for load_model")
    parser.add_argument("--split", choices=["6:2:2", "fedpetuning"], default="6:2:2")
    parser.add_argument("--cap", type=int, help="most training examples per task")
    options = {"rounds": 25, "length": 128, "batch": 64, "seed": 0}
    rates = {"lr": 5e-4, "full_lr": 5e-5, "gamma": 0.5, "mu": 0.05}
    for name, default in {**options, **rates}.items():
        flag, kind = f"--{name.replace('_', '-')}", type(default)
        parser.add_argument(flag, type=kind, default=default, help=f"default {default}")
    parser.add_argument("--only", nargs="+", help="names of methods")
    a = parser.parse_args()

    train, test = load(a, fp.load_tokenizer(a.model))
    head = "| method | " + " | ".join(TASKS) + " | average | trained % | sent % | s per round"
    lines = [f"{head} | paper: average | trained % | sent % |", "|" + "---|" * (len(TASKS) + 8)]
    known = methods(a)
    for name in a.only or known:
        method, algorithm, epochs, kind = known[name]
        plain = fp.load_model(a.model, head=kind(train.data.label_names, fresh=True), seed=a.seed)
        model = fp.attach(plain, method, seed=a.seed)
        start = time.perf_counter()
        run = fp.simulate(
            model,
            algorithm,
            train,
            rounds=a.rounds,
            clients_per_round=len(train),
            batch_size=a.batch,
            epochs=epochs,
            seed=a.seed,
            client_test=test,
            eval_every=a.rounds,
            diagnostics=["clients"],
            on_round=lambda row: print(row["round"], row.get("train_accuracy"), flush=True),
        )
        backbone = plain.counts()["frozen"]
        shared = assign_roles(model.kinds, algorithm.roles)["shared"]
        sent = tree.size(tree.select(model.trainable, shared)) / backbone
        seconds = np.median([row["time"]["train_s"] for row in run.metrics[1:]])
        scores = [100 * x for x in run.metrics[-1]["client_tests"]["accuracy"]]
        scores = [*scores, float(np.mean(scores))]
        paper = PAPER.get(name, ("", "", ""))
        cells = [f"{x:.2f}" for x in scores]
        cells += [f"{100 * model.counts()['adapter'] / backbone:.3f}", f"{100 * sent:.3f}"]
        cells += [f"{seconds:.1f}", paper[2], paper[0], paper[1]]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
        print(lines[-1], f"{time.perf_counter() - start:.0f} s", flush=True)
        settings = ", ".join(f"{k} {v}" for k, v in vars(a).items() if k not in ("data", "out"))
        Path(a.out).write_text("\n".join([*lines, "", f"Settings: {settings}.", ""]))


if __name__ == "__main__":
    main()
