"""``fedjax-peft init``: a commented config for data of one's own, ready to run."""

import csv
import io
import os
import shlex
from itertools import product
from pathlib import Path
from typing import NamedTuple

from fedjax_peft import toml
from fedjax_peft.display import show
from fedjax_peft.errors import InputError, nearest
from fedjax_peft.files import replace_file

__all__ = ["Project", "write_project"]

_TEMPLATE = """\
# A federated fine-tuning run. The name of a table's function decides which other keys it has.
#
#   {command}
#   {command} --dry-run    # what a round costs, without training
#   {command} rounds=20 peft.rank=16
#   fedjax-peft list algorithms                   # what else a key can name
#   fedjax-peft run --explain clients_per_round   # what a key means

name = {title} #~ the run's name in tables and plots
rounds = {rounds} #~ communication rounds
clients_per_round = {per_round} #~ clients drawn in every round; without it, all of them
batch_size = 8 #~ examples in a local step
local_steps = 4 #~ local steps of a client in a round; or epochs = 1
eval_every = 1 #~ rounds between two evaluations on the test examples
seed = 0 #~ of everything random: the same seed gives the same results

[model]
name = "minilm-l6" #~ 22.7M parameters; or a Hugging Face id, or a folder with a checkpoint

[data]
# A file (csv, json, jsonl, parquet), a folder or a known data set. Paths are relative to this file.
name = {data}
{columns}test_share = 0.2 #~ the share of the rows that is held out to test on
max_length = {length} #~ tokens of a text; longer ones are cut
{test_examples}
[partition] # who has which examples
name = "dirichlet" #~ clients differ in their labels; or "iid", "quantity", "natural" ...
clients = {clients}
alpha = 1.0 #~ the smaller, the more the clients differ
{natural}
[peft] # what is trained
name = "lora" #~ or "dora", "houlsby", "bitfit", "full" ...
rank = 8 #~ directions of an adapter
# targets = ["query", "value"]   # the layers that are adapted

[algorithm]
name = "fedavg" #~ or "fedprox", "scaffold", "ditto" ...

[optimizer] # of the clients
name = "adamw" #~ or "adam", "sgd"
learning_rate = 5e-3

# Several runs from one config, compared in one table: a [methods.NAME] table each.
# [methods.fedavg]
# [methods.ditto]
# algorithm = "ditto"
"""
"""``#~`` begins a comment that is moved to a common column."""


_MANY = 2500
"""Rows of which a fifth is more than a quick evaluation takes."""


class _Columns(NamedTuple):
    """What a table looks like."""

    text: str
    label: str
    others: tuple[str, ...]
    """Columns that could name clients."""
    rows: int


class Project(NamedTuple):
    """What was written."""

    files: list[Path]
    text: str
    """The column that the texts are taken from."""
    label: str
    """The column that the labels are taken from."""


def write_project(
    directory: Path,
    *,
    data: Path | None = None,
    text: str | None = None,
    label: str | None = None,
) -> Project:
    """Writes ``config.toml``, and a small sample to try it with where no data are given.

    Args:
      directory: where to; it is made.
      data: a file of the user's, which is read for the names of its columns.
      text: the column with the texts; by default ``text``, or the one with the longest texts.
      label: the column with the labels; by default ``label``, or the one with the fewest values.

    Raises:
      InputError: there is a config already, or the file cannot be read or has no such columns.
    """
    config = directory / "config.toml"
    if config.exists():
        raise InputError(f"{config} exists already: choose another directory, or edit it.")
    if data is None and (text or label):
        raise InputError("The columns of which file? Name it with --data FILE.")
    found = None if data is None else _columns(data, text, label)
    written = [config]
    directory.mkdir(parents=True, exist_ok=True)
    sample = directory / "sample.csv"
    if data is None:
        if sample.exists():
            raise InputError(f"{sample} exists already. If it is yours, add --data {sample}.")
        replace_file(sample, _sample().encode())
        written.insert(0, sample)
        found = _Columns("review", "mood", (), _sample().count("\n") - 1)
    assert found is not None
    text_of_config = _config(config, data or sample, found, sample=data is None)
    replace_file(config, text_of_config.encode())
    return Project(written, found.text, found.label)


def _config(path: Path, data: Path, found: _Columns, *, sample: bool) -> str:
    """Returns the text of a config for a table."""
    folder = path.absolute().parent
    clients = max(2, min(10 if sample else 20, found.rows // 8))
    mapping = {"text": found.text, "label": found.label}
    columns = ", ".join(
        f"{name} = {toml.literal(column)}" for name, column in mapping.items() if name != column
    )
    natural = "# Or a client for each value of a column: name = 'natural', by = {}\n"
    out = Path("runs") / folder.name
    filled = _TEMPLATE.format(
        command=f"fedjax-peft run {shlex.quote(str(path))} --out {shlex.quote(str(out))}",
        title=toml.literal(folder.name),
        rounds=8 if sample else 10,
        per_round=max(1, clients // 2),
        data=toml.literal(os.path.relpath(data.absolute(), folder)),
        columns=f"columns = {{ {columns} }} #~ our name = the file's\n" if columns else "",
        length=32 if sample else 128,
        test_examples=""
        if found.rows < _MANY
        else "test_examples = 500 #~ evaluate on this many only; without it, on all\n",
        clients=clients,
        natural="".join(natural.format(toml.literal(name)) for name in found.others[:1]),
    )
    lines = (line.split(" #~ ") for line in filled.split("\n"))
    return "\n".join(f"{code:30} # {why[0]}" if why else code for code, *why in lines)


def _columns(data: Path, text: str | None, label: str | None) -> _Columns:
    """Returns the columns of a file: those that are named, or the likely ones."""
    from fedjax_peft.data.formats import tabular

    if not data.exists():
        raise InputError(f"There is no file {str(data)!r}.")
    if data.is_dir() or tabular.kind(data) is None:
        raise InputError(
            f"{data} is not one of the files that can be read here: {', '.join(tabular.ENDINGS)}."
        )
    columns = tabular.read_file(data, alone=True).columns
    for wanted in (text, label):
        if wanted is not None and wanted not in columns:
            raise InputError(f"{data} has no column {wanted!r}. {nearest(wanted, columns)}")
    texts = {n: sum(map(len, v)) for n, v in columns.items() if all(isinstance(x, str) for x in v)}
    kinds = {n: len(set(v)) for n, v in columns.items() if all(isinstance(x, str | int) for x in v)}
    text = text or ("text" if "text" in texts else max(texts, key=texts.__getitem__, default=None))
    likely = {name: count for name, count in kinds.items() if name != text and count > 1}
    label = label or (
        "label" if "label" in kinds else min(likely, key=likely.__getitem__, default=None)
    )
    if text is None or label is None:
        raise InputError(
            f"{data} needs a column of texts and one of labels, but it has only"
            f" {', '.join(map(show, columns))}."
        )
    rows = len(columns[text])
    if kinds.get(label, 0) > max(rows // 2, 10):
        raise InputError(
            f"The column {label!r} of {data} has {kinds[label]:,} values in {rows:,} rows;"
            " these are no classes. Name the column of the labels with --label."
        )
    others = tuple(n for n, count in kinds.items() if n not in (text, label) and 2 <= count < rows)
    return _Columns(text, label, others, rows)


def _sample() -> str:
    """Returns 160 short reviews and their moods, as csv."""
    things = ["phone", "kettle", "lamp", "chair", "film", "book", "tent", "radio", "soup", "bag"]
    good = ["I love this {}", "The {} works very well", "A wonderful {}", "Best {} I ever had"]
    bad = ["I hate this {}", "The {} broke at once", "A terrible {}", "Worst {} I ever had"]
    ends = [", really.", " so far."]
    rows = [
        (form.format(thing) + end, mood)
        for thing, end in product(things, ends)
        for forms, mood in ((good, "good"), (bad, "bad"))
        for form in forms
    ]
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows([("review", "mood"), *rows])
    return file.getvalue()
