"""The command ``init``, which writes a config."""

import argparse
import contextlib
import csv
import io
import os
import random
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedjax_peft.data.formats import tabular
from fedjax_peft.data.formats.tabular import PLAIN, Csv
from fedjax_peft.support import toml
from fedjax_peft.support.display import argument, one_line, program, show
from fedjax_peft.support.errors import InputError, nearest
from fedjax_peft.support.files import replace_file

_TEMPLATE = """\
# A federated fine-tuning run. In a table with a `name`, the name determines the other keys.
#
#   {command}
#   {command} --dry-run    # the cost of a round, without training
#   {command} rounds=20 peft.rank=16
#   fedjax-peft list algorithms                   # the names that a key can have
#   fedjax-peft explain clients_per_round         # the meaning of a key

name = {title} #~ the run's name in tables and plots
rounds = {rounds} #~ communication rounds
clients_per_round = {per_round} #~ clients sampled in each round; without it, all clients
batch_size = 8 #~ examples per local step
local_steps = 4 #~ local steps per client and round; or epochs = 1
evaluation.every = 1 #~ evaluate on the test examples after every such number of rounds
seed = 0 #~ random seed; the same seed gives the same results

[model]
name = "minilm-l6" #~ 22.7M parameters; or a Hugging Face id, or a checkpoint folder

[data]
# A file (csv, json, jsonl, parquet), a folder or a known data set. Paths are relative to this file.
name = {data}
{columns}test_share = 0.2 #~ share of the rows that is held out for testing
{validation}max_length = {length} #~ tokens per text; longer texts are cut
{test_examples}
[partition] # which client has which examples
name = "dirichlet" #~ the clients' label distributions differ; or "iid", "quantity", "natural" ...
clients = {clients}
alpha = 1.0 #~ smaller values make the clients differ more
{natural}
[peft] # what is trained
name = "lora" #~ or "dora", "houlsby", "bitfit", "full" ...
rank = 8 #~ rank of each adapter
# targets = ["query", "value"]   # the layers that are adapted

[algorithm]
name = "fedavg" #~ or "fedprox", "scaffold", "ditto" ...

[optimizer] # of the clients
name = "adamw" #~ or "adam", "sgd"
learning_rate = 5e-3

# Several runs from one config, compared in one table: one [methods.NAME] table for each run.
# [methods.fedavg]
# [methods.ditto]
# algorithm = "ditto"
"""
"""``#~`` starts a comment; the comments are aligned in one column."""

_MANY = 2500
"""From this number of rows on, the test set is limited, so that an evaluation stays quick. The
validation set, a tenth of what the test leaves, is limited later."""


_FEW = 10
"""From fewer rows, none are held out for validation: a tenth of them can be less than one row."""
_VALIDATION = (
    "validation_share = 0.1 #~ share of the other rows, to choose settings by validation_accuracy\n"
)


class _Columns(NamedTuple):
    """The columns of a table."""

    text: str
    label: str
    others: tuple[str, ...]
    """Columns whose values could be clients."""
    rows: int
    form: Csv


def init(options: argparse.Namespace) -> None:
    """Writes a config for the user's data, and prints the command that runs it.

    Without data, a small sample is written too. The columns of texts and labels are those that
    ``options`` names, or the most likely ones.

    Raises:
      InputError: the config exists already, the file cannot be read, its first row seems to be no
        header, or a column does not exist or cannot be used.
    """
    directory, data = options.directory, options.data
    config, sample = directory / "config.toml", directory / "sample.csv"
    given = {key: getattr(options, key) for key in Csv._fields}
    given = {key: value for key, value in given.items() if value is not None}
    if config.exists():
        raise InputError(f"{config} exists already. Choose another directory, or edit this file.")
    if data is None and (options.text or options.label or given):
        raise InputError("Options such as --text and --sep need a file of yours: --data FILE.")
    if data is None and sample.exists():
        raise InputError(f"{sample} exists already. If it is yours, add --data {argument(sample)}.")
    form = tabular.csv_form(given)
    if data is None:
        found = _Columns("review", "mood", (), _sample().count("\n") - 1, form)
    else:
        found = _columns(data, options.text, options.label, form)
    directory.mkdir(parents=True, exist_ok=True)
    if data is None:
        replace_file(sample, _sample().encode())
        print(sample)
    text = _config(config, data or sample, found, sample=data is None)
    replace_file(config, text.encode())
    print(config)
    print(one_line(f"Text column: {found.text!r}. Label column: {found.label!r}."))
    print(f"Next: {_command(config, program())}")


def _command(config: Path, program: str = "fedjax-peft") -> str:
    """Returns the command that runs a config."""
    out = Path("runs") / config.absolute().parent.name
    return f"{program} run {argument(config)} --out {argument(out)}"


def _config(path: Path, data: Path, found: _Columns, *, sample: bool) -> str:
    """Returns the text of a config for a table."""
    folder = path.absolute().parent
    clients = max(2, min(10 if sample else 20, found.rows // 8))
    mapping = {"text": found.text, "label": found.label}
    columns = ", ".join(
        f"{name} = {toml.literal(column)}" for name, column in mapping.items() if name != column
    )
    usual = PLAIN._asdict()
    written = {key: x for key, x in found.form._asdict().items() if x != usual[key]}
    form = ", ".join(f"{key} = {toml.literal(value)}" for key, value in written.items())
    natural = "# In their place, one client for each value of a column: name = 'natural', by = {}\n"
    filled = _TEMPLATE.format(
        command=_command(path),
        title=toml.literal(folder.name),
        rounds=8 if sample else 10,
        per_round=max(1, clients // 2),
        data=toml.literal(os.path.relpath(data.absolute(), folder)),
        columns=(f"csv = {{ {form} }} #~ how the file is written\n" if form else "")
        + (f"columns = {{ {columns} }} #~ name here = name in the file\n" if columns else ""),
        validation=_VALIDATION if found.rows >= _FEW else "",
        length=32 if sample else 128,
        test_examples="".join(
            f"{split}_examples = 500 #~ evaluate on this number only; without it, on all\n"
            for split, least in (("test", _MANY), ("validation", 4 * _MANY))
            if found.rows >= least
        ),
        clients=clients,
        natural="".join(natural.format(toml.literal(name)) for name in found.others[:1]),
    )
    lines = (line.split(" #~ ") for line in filled.split("\n"))
    return "\n".join(f"{code:30} # {why[0]}" if why else code for code, *why in lines)


def _columns(data: Path, text: str | None, label: str | None, form: Csv) -> _Columns:
    """Returns the columns of texts and labels: the given names, or the most likely columns."""
    if not data.exists():
        raise InputError(f"There is no file {str(data)!r}.")
    kind = None if data.is_dir() else tabular.kind(data)
    if kind is None:
        raise InputError(
            f"{data} is not a table that can be read. The name must end in one of"
            f" {tabular.endings_advice(data)}"
        )
    if kind != "csv" and form != PLAIN:
        raise InputError(
            f"Options such as --sep and --no-header are for csv files, not for {data}."
        )
    columns = tabular.read_file(data, alone=True, form=form).columns
    for name in (text, label):
        if name is not None and name not in columns:
            raise InputError(f"{data} has no column {name!r}. {nearest(name, columns)}")
    if kind == "csv" and form.header and text is None and label is None:
        _check_header(data, columns)
    sizes = {n: sum(map(len, v)) for n, v in columns.items() if all(isinstance(x, str) for x in v)}
    text = text or _choose(data, "texts", "--text", _text_candidates(sizes))
    faults = {n: _label_fault(values) for n, values in columns.items() if n != text}
    likely = {n: len(set(columns[n])) for n, fault in faults.items() if fault is None}
    label = label or _choose(data, "labels", "--label", _label_candidates([*faults], likely))
    if text is None or label is None or label == text:
        reasons = "; ".join(f"{show(n)} {fault}" for n, fault in faults.items())
        raise InputError(
            f"{data} needs a column of texts and one of labels, and has the columns"
            f" {', '.join(map(show, columns))}." + (f" As labels, {reasons}." if reasons else "")
        )
    if faults[label]:
        raise InputError(
            f"The column {label!r} of {data} cannot be the labels: it {faults[label]}. Labels are"
            " texts or whole numbers, each the name of a class. Name another column with --label."
        )
    rows = len(columns[text])
    others = tuple(n for n, count in likely.items() if n != label and count < rows)
    return _Columns(text, label, others, rows, form)


_TEXT_NAMES = (
    *("text", "sentence", "message", "review", "content", "body", "comment", "tweet", "post"),
    *("document", "utterance", "question", "description"),
)
_LABEL_NAMES = (
    *("label", "class", "category", "target", "intent", "sentiment", "emotion", "mood", "topic"),
    *("rating", "stars", "genre"),
)


def _named(columns: Collection[str], known: Sequence[str]) -> list[str]:
    """Returns the columns with a known name; without one, those with a known word in the name."""
    words = {n: re.findall("[A-Z]?[^\\W\\d_A-Z]+|[A-Z]+", n) for n in columns}
    plain = {n: {word.lower().removesuffix("s") for word in words[n]} for n in columns}
    roots = [name.removesuffix("s") for name in known]
    first = [n for n in columns if n.lower() == known[0]]
    exact = [n for n in columns if len(words[n]) == 1 and plain[n] & {*roots}]
    return first or exact or [n for n in columns if plain[n] & {*roots}]


def _text_candidates(sizes: Mapping[str, int]) -> dict[str, str]:
    """Returns the columns that could be the texts, and what speaks for each."""
    among = _named(sizes, _TEXT_NAMES) or [*sizes]
    longest = max((sizes[n] for n in among), default=0)
    return {n: f"{sizes[n]:,} characters" for n in among if 2 * sizes[n] >= longest}


def _label_candidates(columns: Sequence[str], likely: Mapping[str, int]) -> dict[str, str]:
    """Returns the columns that could be the labels, and what speaks for each."""
    among = _named(columns, _LABEL_NAMES)
    usable = [n for n in among if n in likely]
    # One of such a name is meant, also if it has a fault, which is then said.
    among = usable or among[:1] or [*likely]
    return {n: f"{likely[n]} values" if n in likely else "" for n in among}


def _choose(data: Path, what: str, option: str, candidates: Mapping[str, str]) -> str | None:
    """Returns the one candidate, or the one that the user chooses; None if there is none.

    Raises:
      InputError: several candidates, and nobody at a terminal to ask.
    """
    if len(candidates) < 2:
        return next(iter(candidates), None)
    names = [*candidates]
    if sys.stdin.isatty() and sys.stdout.isatty():
        print(one_line(f"Which column of {data} has the {what}?"))
        for number, (name, note) in enumerate(candidates.items(), 1):
            print(one_line(f"{number}. {name} ({note})"))
        with contextlib.suppress(EOFError):
            while (answer := input(f"Number (or {option} COLUMN next time): ").strip()) != "":
                if answer in names:
                    return answer
                if answer.isdecimal() and 1 <= int(answer) <= len(names):
                    return names[int(answer) - 1]
    listed = ", ".join(f"{show(name)} ({note})" for name, note in candidates.items())
    raise InputError(
        f"Several columns of {data} could be the {what}: {listed}. Name the one that is meant:"
        f" {option} {argument(names[0])}, for example."
    )


def _check_header(data: Path, columns: Mapping[str, Sequence[Any]]) -> None:
    """Raises InputError if the names of the columns look like a row of data."""
    for name, values in columns.items():
        number = re.fullmatch(r"[-+]?\d+([.,]\d+)?", name.strip())
        if number or len(name.split()) > 5 or (name and name in values):
            raise InputError(
                f"The first row of {data} looks like data, not like names of columns: it has"
                f" {show(name)}. If the file has no header, add --no-header. If it has one, name"
                " the columns with --text and --label."
            )


def _label_fault(values: Sequence[Any]) -> str | None:
    """Returns why values cannot be the labels of a classifier, as a predicate; None if they can."""
    for row, value in enumerate(values, 1):
        if value is None or value == "":
            return f"has no value in row {row}"
        if isinstance(value, float):
            return f"has numbers with a fraction, such as {value} (a class can be 1, not 1.0)"
        if isinstance(value, bool) or not isinstance(value, str | int):
            return f"has values such as {show(value, 40)}"
    count = len(set(values))
    if count < 2:
        return f"has only one value, {show(values[0], 40)}, and a classifier needs two or more"
    if count > max(len(values) // 2, 10):
        return (
            f"has {count:,} different values in {len(values):,} rows, such as"
            f" {show(values[0], 40)}, too many for classes"
        )
    return None


_THINGS = ("phone", "kettle", "lamp", "chair", "film", "book", "tent", "radio", "soup", "bag")
_PRAISE = (
    *("works well", "feels solid", "came early", "is worth it", "made me smile", "looks lovely"),
    *("was a bargain", "beats the old one", "is easy to love", "never lets me down"),
    *("has real charm", "was well packed"),
)
_BLAME = (
    *("broke at once", "feels cheap", "came late", "is too dear", "made me angry", "looks awful"),
    *("was a waste", "is worse than before", "is hard to like", "lets me down a lot"),
    *("has no charm", "was badly packed"),
)


def _sample() -> str:
    """Returns 240 short reviews, with the mood of each as its label, as csv.

    A review says three things, and its mood is that of most of them, but for a tenth of the
    reviews. So the accuracy rises over several rounds, and stays below 100 %.
    """
    draw = random.Random(0).random  # equal in all versions of Python

    def choose(values: Sequence[Any], count: int) -> list[Any]:
        left = list(values)
        return [left.pop(int(draw() * len(left))) for _ in range(count)]

    rows = [("review", "mood")]
    for number in range(240):
        praised = number % 4
        places = choose(range(len(_PRAISE)), 3)
        signs = choose([n < praised for n in range(3)], 3)
        says = [(_PRAISE if good else _BLAME)[n] for good, n in zip(signs, places, strict=True)]
        good = (praised > 1) != (draw() < 0.1)
        (thing,) = choose(_THINGS, 1)
        mood = "good" if good else "bad"
        rows.append((f"The {thing} {says[0]}, {says[1]} and {says[2]}.", mood))
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows(rows)
    return file.getvalue()
