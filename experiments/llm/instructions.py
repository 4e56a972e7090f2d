"""Writes the instruction data of the small experiment: three tasks in words, in short rows.

    python experiments/llm/instructions.py --base runs/llm/base/checkpoint --out DIR
    python experiments/llm/instructions.py --base ... --out DIR --data sst2=DIR 20newsgroups

A row is a request and its answer, with the name of its ``task``. Posts of 20 Newsgroups are cut to
their first words. Rows of more tokens than ``--length`` are left out, such as those that list 20
possible answers. Every split has the same number of rows of each task.
"""

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import fedjax_peft as fp
from fedjax_peft.data.instructions import as_instructions
from fedjax_peft.data.sources import load_tables
from fedjax_peft.data.table import Table, label_names

DATA = ("sst2", "20newsgroups", "semeval2010_task8")
WORDS = 60
"""How many words of a text are kept."""


def short(table: Table) -> Table:
    """Returns the table with the first words of every text."""
    columns = dict(table.columns)
    for name in ("text", "text_pair"):
        if name in columns:
            columns[name] = [" ".join(text.split()[:WORDS]) for text in columns[name]]
    return dataclasses.replace(table, columns=columns)


def rows_of(name: str, source: str, split: str, tokenizer: object, length: int) -> list[dict]:
    """Returns the rows of a task that have at most ``length`` tokens, in random order."""
    entry, tables = load_tables(name, source=source, validation_share=0.1)
    names = entry.label_names or label_names(tables["train"])
    table = as_instructions(name, short(tables[split]), names, part=split, seed=0).table
    rows = [{"messages": messages, "task": name} for messages in table.columns["messages"]]
    texts = tokenizer.apply_chat_template([row["messages"] for row in rows], tokenize=False)
    sizes = [len(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]
    fitting = [row for row, size in zip(rows, sizes, strict=True) if size <= length]
    np.random.default_rng(0).shuffle(fitting)
    return fitting


def main(words: Sequence[str] | None = None) -> None:
    """Writes ``train.jsonl``, ``validation.jsonl`` and ``test.jsonl``."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="the directory to write")
    parser.add_argument("--base", required=True, help="checkpoint whose tokenizer counts tokens")
    parser.add_argument("--data", nargs="+", default=list(DATA), metavar="NAME[=DIR]")
    parser.add_argument("--length", type=int, default=128, help="largest number of tokens of a row")
    parser.add_argument("--train", type=int, default=2500, help="rows of each task")
    parser.add_argument("--held-out", type=int, default=100, help="rows of each task, both others")
    args = parser.parse_args(words)
    tokenizer = fp.load_tokenizer(args.base)
    sources = dict(item.split("=", 1) if "=" in item else (item, "auto") for item in args.data)
    args.out.mkdir(parents=True, exist_ok=True)
    for split in ("train", "validation", "test"):
        most = args.train if split == "train" else args.held_out
        kept: list[dict] = []
        for name, source in sources.items():
            rows = rows_of(name, source, split, tokenizer, args.length)[:most]
            print(f"{split}: {name}: {len(rows):,} rows")
            kept += rows
        lines = "".join(json.dumps(row) + "\n" for row in kept)
        (args.out / f"{split}.jsonl").write_text(lines)


if __name__ == "__main__":
    main()
