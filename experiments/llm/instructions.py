"""Writes the instruction data of the small experiment: three tasks in words, in short rows.

    python experiments/llm/instructions.py --base runs/llm/base/checkpoint --out DIR
    python experiments/llm/instructions.py --base ... --out DIR --data sst2=DIR 20newsgroups

A row is a request and its answer, with the name of its ``task``:

* ``sst2``: is the mood of a sentence about a film positive or negative?
* ``20newsgroups``: which of six subjects has a post? The subjects are those of the data set's home
  page, 20 groups in six parts. A post is cut to its first words.
* ``semeval2010_task8``: which of nine relations, or another one, have two marked nouns? The
  direction of the relation is not asked for.

Rows of more tokens than ``--length`` are left out, such as those that list all relations.
"""

import argparse
import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

import fedjax_peft as fp
from fedjax_peft.data.instructions import as_instructions
from fedjax_peft.data.reading import Reading
from fedjax_peft.data.table import Table, label_names
from fedjax_peft.tasks.sources import load_tables

WORDS = 30
"""How many words of a text are kept."""


def subject(group: str) -> str:
    """Returns the subject of a newsgroup."""
    for part, name in SUBJECTS.items():
        if group.startswith(part):
            return name
    return group


def relation(label: str) -> str:
    """Returns a relation without its direction."""
    return label.partition("(")[0]


SUBJECTS = {
    "comp.": "computers",
    "rec.": "recreation",
    "sci.": "science",
    "misc.forsale": "for sale",
    "talk.politics.": "politics",
    "talk.religion.": "religion",
    "soc.religion.": "religion",
    "alt.atheism": "religion",
}
"""Beginning of a newsgroup's name -> its subject."""


class Request(NamedTuple):
    """How the rows of a data set become requests and answers."""

    form: str
    """The name in ``fedjax_peft.data.instructions.FORMS`` of the templates. Another name has
    general ones, which list the possible answers."""
    answer: Callable[[str], str] = str
    """A label -> the answer."""


REQUESTS = {
    "sst2": Request("sst2"),
    "20newsgroups": Request("subjects", subject),
    "semeval2010_task8": Request("semeval2010_task8", relation),
}
"""Data set -> its requests. Others have the templates and the answers of their ``FORMS``."""


def prepared(table: Table, answer: Callable[[str], str]) -> Table:
    """Returns the table with the first words of every text, and with answers as labels."""
    columns = dict(table.columns)
    columns["label"] = [answer(str(label)) for label in columns["label"]]
    for name in ("text", "text_pair"):
        if name in columns:
            columns[name] = [" ".join(text.split()[:WORDS]) for text in columns[name]]
    return dataclasses.replace(table, columns=columns)


def rows_of(name: str, source: str, split: str, tokenizer: object, length: int) -> list[dict]:
    """Returns the rows of a task that have at most ``length`` tokens, in random order."""
    entry, tables = load_tables(name, Reading(source=source, validation_share=0.1))
    request = REQUESTS.get(name, Request(name))
    labels = entry.label_names or label_names(tables["train"])
    names = list(dict.fromkeys(map(request.answer, labels)))
    table = prepared(tables[split], request.answer)
    table = as_instructions(request.form, table, names, part=split, seed=0)
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
    parser.add_argument("--data", nargs="+", default=list(REQUESTS), metavar="NAME[=DIR]")
    parser.add_argument("--length", type=int, default=96, help="largest number of tokens of a row")
    parser.add_argument("--train", type=int, default=7000, help="most rows of each task")
    parser.add_argument("--validation", type=int, default=50, help="likewise")
    parser.add_argument("--test", type=int, default=200, help="likewise")
    args = parser.parse_args(words)
    tokenizer = fp.load_tokenizer(args.base)
    sources = dict(item.split("=", 1) if "=" in item else (item, "auto") for item in args.data)
    args.out.mkdir(parents=True, exist_ok=True)
    for split in ("train", "validation", "test"):
        kept: list[dict] = []
        for name, source in sources.items():
            rows = rows_of(name, source, split, tokenizer, args.length)[: getattr(args, split)]
            print(f"{split}: {name}: {len(rows):,} rows")
            kept += rows
        lines = "".join(json.dumps(row) + "\n" for row in kept)
        (args.out / f"{split}.jsonl").write_text(lines)


if __name__ == "__main__":
    main()
