"""FeDeRA's tables from sweeps and from the cost model, with the paper's numbers beside ours.

    python experiments/federa/tables.py T2 T3 T4 T5 --runs runs/federa/small --out DIR
    python experiments/federa/tables.py T1 T6 T7 --data DIR_OF_DATA --out DIR
    python experiments/federa/tables.py T8 T9 --out DIR

``--runs`` is the folder of the sweeps; a sweep has the name of its config (``20news``, ``semeval``,
``wnut17``, ``ploner``, ``squad``, ``mrqa``, ``time``). ``--data`` has a folder for each data set;
without it, data sets are found or downloaded as in a run. With ``--out``, each table is also
written as Markdown, CSV and LaTeX. ``--sentences`` shows the sentences in Tables 6 and 7; the
committed tables leave them out, because of the licences of the data.
"""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import federations
from printed import FEDERATIONS, METHODS, PAPER, TARGETS, Federation, Target, backbone
from stages import seconds_of_round, start_of, table8, table9

from fedjax_peft import InputError, heterogeneity
from fedjax_peft.data.catalog import DATASETS
from fedjax_peft.report.study import Cell, Choice, Study, read_study, summarise
from fedjax_peft.report.table_files import TextTable
from fedjax_peft.simulation.summaries import series

sys.path.append(str(Path(__file__).parents[1]))
import paper

SHARES = (90, 95, 99)
"""Percentages of a target in Table 5."""


class Source(NamedTuple):
    """Where tables take their numbers from."""

    runs: Path | None = None
    """The folder of the sweeps."""
    data: str | None = None
    """The folder of the data sets, or ``tiny``; None: as in a run."""
    sentences: bool = False
    """Show the sentences in Tables 6 and 7."""


# -------------------------------------------------------------------------------- reading sweeps


def sweep(source: Source, name: str) -> Study | None:
    """Returns the sweep of a config's name; None if it was not run."""
    path = None if source.runs is None else source.runs / name
    return read_study(path) if path is not None and path.is_dir() else None


def method_name(cell: Cell) -> str:
    """Returns the paper's name of a cell's method."""
    run = cell.first
    system = str(run.config.get("preset")).replace("federa/deberta/", "federa/")
    return METHODS.get(system.replace("federa/federa", "federa"), cell.name)


def model_name(study: Study) -> str:
    """Returns the paper's model whose rows stand beside a sweep."""
    run = study.cells[0].first
    return backbone(str(run.config["model"]["name"]))


def chosen(study: Study) -> tuple[dict[str, Cell], Choice]:
    """Returns the paper's name of each method -> its chosen setting, and how it was chosen."""
    choice = study.choice()
    cells = {method_name(cell): cell for cell in choice.cells.values()}
    return {name: cells[name] for name in METHODS.values() if name in cells}, choice


def rounds_of(study: Study, wanted: Sequence[int], metric: str) -> list[int]:
    """Returns the rounds of a table's columns: the wanted ones, or as many of the last tests."""
    run = study.cells[0].first
    tested = [int(r) for r in series(run.rows, "round", f"test_{metric}")[0] if r]
    return list(wanted) if set(wanted) <= set(tested) else tested[-len(wanted) :]


def settings(study: Study) -> str:
    """Returns a sentence with the settings of a sweep that a reader needs to compare."""
    config = study.cells[0].first.config
    part, model = config["partition"], Path(str(config["model"]["name"])).name
    steps = config.get("local_steps")
    work = f"{steps} local steps" if steps else f"{config.get('epochs', 1)} local epoch"
    swept = {key for cell in study.cells for key in cell.settings}
    clients = "several numbers of" if "partition.clients" in swept else part.get("clients")
    alpha = "several alphas" if "partition.alpha" in swept else f"alpha {part.get('alpha')}"
    return (
        f"{model}, {config['data']['name']}, length {config['data'].get('max_length')},"
        f" {clients} clients, {alpha},"
        f" {config.get('clients_per_round')} a round, {config['rounds']} rounds, {work}."
    )


def rates(cells: dict[str, Cell]) -> str:
    """Returns a sentence with the learning rate of each method."""
    found = []
    for name, cell in cells.items():
        config = cell.first.config
        found.append(f"{name} {config['optimizer']['learning_rate']:g}")
    return f"Learning rates: {', '.join(found)}."


# --------------------------------------------------------------------------- Tables 2, 3, 4: scores


def score_table(
    source: Source,
    number: str,
    title: str,
    data: Sequence[str],
    metrics: Sequence[tuple[str, str]],
) -> TextTable:
    """Returns a table of scores: a row for each method, columns by data set, metric and round.

    After the last round of each data set stands the paired difference to FedLR with its 95 %
    interval, then the paper's scores in the rounds of its columns, and its difference to FedLR.

    Args:
      source: of the sweeps.
      number: of the paper's table.
      title: the paper's caption, in our words.
      data: data sets.
      metrics: (name in the rows, name in the heading); None of the name takes the task's headline.
    """
    parameters: dict[str, str] = {}
    columns: dict[str, paper.Column] = {
        "Parameters": lambda method, cell: parameters.get(method, "-"),
        "Paper's, RoBERTa": lambda method, cell: (
            PAPER(number, f"RoBERTa {method}", "parameters (millions)") + "M"
        ),
    }
    notes = ["Mean ± standard deviation over seeds; scores in percent."]
    for name in data:
        federation = FEDERATIONS[name]
        study = sweep(source, federation.sweep)
        if study is None:
            notes.append(f"{federation.label}: no sweep {federation.sweep!r} was found.")
            continue
        cells, choice = chosen(study)
        for metric, label in metrics:
            columns |= scores(cells, federation, study, metric or study.headline, label)
            columns |= paper_scores(number, federation, label, model_name(study))
        for method, cell in cells.items():
            counts = cell.first.rows[0].get("parameters", {})
            parameters[method] = f"{counts.get('adapter', 0):,}"
        notes += [f"{federation.label}: {settings(study)} {rates(cells)}", *study.notes]
        notes += chosen_by(federation.label, choice)
    notes.append("The paper: RoBERTa-base or DeBERTaV3-base, mean ± deviation over five seeds.")
    methods = {name: name for name in METHODS.values()}
    return paper.table(f"Table {number}: {title}", methods, {}, columns, notes, "Method")


def paper_scores(
    number: str, federation: Federation, label: str, model: str
) -> dict[str, paper.Column]:
    """Returns the paper's scores of one metric of one data set, and its difference to FedLR.

    The paper's question answering counts as FedNLP does, so our EM and F1 have no such columns.
    """
    if federation.sweep in ("squad", "mrqa") and not label.startswith("FedNLP"):
        return {}
    metric = label.removeprefix("FedNLP's ")
    title = f"{federation.label} {metric}".strip()
    rounds = [f"{title} {r}" for r in federation.rounds]

    def minus(method: str, cell: Cell | None) -> str:
        ends = [PAPER.value(number, f"{model} {m}", rounds[-1]) for m in (method, "FedLR")]
        return "-" if method == "FedLR" else f"{ends[0] - ends[1]:+.2f}"

    return {
        f"{model}: {title}, rounds {' / '.join(map(str, federation.rounds))}": (
            lambda method, cell: " / ".join(PAPER(number, f"{model} {method}", r) for r in rounds)
        ),
        f"{model}: {title} − FedLR": minus,
    }


def scores(
    cells: Mapping[str, Cell], federation: Federation, study: Study, metric: str, label: str
) -> dict[str, paper.Column]:
    """Returns the columns of one metric of one data set: its rounds, the difference to FedLR."""
    title = f"{federation.label} {label}".strip()
    score = f"test_{metric}"
    shown = rounds_of(study, federation.rounds, metric)
    found = {f"{title}, round {r}": paper.score(score, r) for r in shown}
    found[f"{title} − FedLR [95 %]"] = paper.minus(
        "FedLR", cells, lambda cell: cell.values(score, shown[-1])
    )
    return {head: paper.among(cells, column) for head, column in found.items()}


def chosen_by(label: str, choice: Choice) -> list[str]:
    """Returns sentences on what chose the learning rates, with a warning if it was the test."""
    if choice.metric is None:
        return [f"{label}: one learning rate for each method; nothing was chosen."]
    return [f"{label}: {note}" for note in choice.notes]


def table2(source: Source) -> TextTable:
    """Returns Table 2: accuracy in text classification."""
    title = "text classification, accuracy after three numbers of rounds"
    data = ("20newsgroups", "semeval2010_task8")
    return score_table(source, "2", title, data, [("accuracy", "")])


def table3(source: Source) -> TextTable:
    """Returns Table 3: F1 in tagging."""
    title = "named entities, F1 after three numbers of rounds"
    return score_table(source, "3", title, ("wnut17", "ploner"), [("f1", "")])


def table4(source: Source) -> TextTable:
    """Returns Table 4: exact match and F1 in question answering, by both ways of counting."""
    title = "question answering, exact match and F1 after two numbers of rounds"
    metrics = [
        ("exact_match", "EM"),
        ("f1", "F1"),
        ("raw_exact_match", "FedNLP's EM"),
        ("raw_f1", "FedNLP's F1"),
    ]
    return score_table(source, "4", title, ("squad", "mrqa"), metrics)


# -------------------------------------------------------------------------- Table 5: time to target


class Reached(NamedTuple):
    """What one run spent until its first test at or above a threshold."""

    round: float
    bytes: float
    seconds: float


def reached(cell: Cell, metric: str, threshold: float) -> list[Reached | None]:
    """Returns, for each seed, what the run spent until the threshold, or None if it never was."""
    found = []
    for run in cell.runs.values():
        scores = series(run.rows, "round", metric)[1]
        first = next((i for i, score in enumerate(scores) if score >= threshold), None)
        axes = ("round", "bytes", "simulated_seconds")
        at = [] if first is None else [series(run.rows, x, metric)[0][first] for x in axes]
        found.append(Reached(*at) if at else None)
    return found


def table5(source: Source) -> TextTable:
    """Returns Table 5: rounds, bytes and time to 90, 95 and 99 percent of the targets.

    The time is that of the run's own time model. The last column multiplies the mean number of
    rounds by the seconds of a round at the size of RoBERTa-base (Table 8), plus the SVD of FeDeRA.
    """
    header = ["Target", "%", "Method", "Reached", "Rounds", "MB", "Hours"]
    header += ["Hours at RoBERTa-base's size", "Paper's hours, RoBERTa", "DeBERTaV3"]
    rows, notes = [], []
    for target in TARGETS:
        of_time = sweep(source, "time") if target.sweep == "20news" else None
        study = of_time or sweep(source, target.sweep)
        if study is None:
            notes.append(f"{target.label}: no sweep {target.sweep!r} was found.")
            continue
        cells, choice = chosen(study)
        value, note = target_value(target, cells)
        rows += _target_rows(target, value, cells)
        every = study.cells[0].first.config["evaluation"]["every"]
        note += f" It was tested every {every} rounds. {settings(study)} {rates(cells)}"
        notes += [note, *chosen_by(target.label, choice)]
    notes += [
        "Means over the seeds that got there; - where not all did. The paper prints - where a"
        " method does not reach the target.",
    ]
    return TextTable("Table 5: cost of reaching a target", header, rows, notes)


def target_value(target: Target, cells: dict[str, Cell]) -> tuple[float, str]:
    """Returns the target, and a sentence on it.

    This is the paper's target if the best PEFT method reaches 90 percent of it, and otherwise the
    best final mean of these methods.
    """
    score = f"test_{target.metric}"
    finals = [summarise(cells[name].values(score)).mean for name in cells if name != "FedFT"]
    best = max((final for final in finals if final is not None), default=0.0)
    if best >= SHARES[0] / 100 * target.value:
        return target.value, f"{target.label}: the paper's target, {100 * target.value:g} %."
    return best, (
        f"{target.label}: no PEFT method came near the paper's target of {100 * target.value:g} %,"
        f" so the target is their best final mean, {100 * best:.1f} %."
    )


def _target_rows(target: Target, value: float, cells: dict[str, Cell]) -> list[list[str]]:
    rows = []
    for share in SHARES:
        for method, cell in cells.items():
            runs = reached(cell, f"test_{target.metric}", share / 100 * value)
            got = [one for one in runs if one is not None]
            cells_of = ["-"] * 4
            if got and len(got) == len(runs):
                rounds = summarise([one.round for one in got])
                hours = summarise([one.seconds / 3600 for one in got])
                large = rounds.mean * seconds_of_round(method) + start_of(method)
                cells_of = [
                    rounds.text(1, 0),
                    summarise([one.bytes / 1e6 for one in got]).text(1, 1),
                    hours.text(1, 3),
                    f"{large / 3600:.2f}",
                ]
            key = f"{target.label} {share}"
            paper = [PAPER("5", f"{model} {method}", key) for model in ("RoBERTa", "DeBERTaV3")]
            rows.append(
                [target.label, f"{share}", method, f"{len(got)} of {len(runs)}", *cells_of, *paper]
            )
    return rows


# --------------------------------------------------------------- Tables 1, 6, 7: data and partition


def table1(source: Source) -> TextTable:
    """Returns Table 1: sizes, partition and lengths, counted from the data, and the paper's."""
    header = ["Data set", "Train / test", "Paper", "Classes", "Paper", "Clients", "Per round"]
    header += ["Alpha", "Length", "Rounds", "Mean JS distance"]
    rows, notes = [], []
    for name, federation in FEDERATIONS.items():
        preset = DATASETS[name].settings
        part = preset.partition or {}
        try:
            corpus = federations.read(name, source.data)
        except InputError as error:
            notes.append(str(error).splitlines()[0])
            counted, classes, distance = "not at hand", "-", "-"
        else:
            counted = f"{corpus.train:,} / {corpus.test:,}"
            classes = f"{len(corpus.names)}"
            if len(corpus.all_names) > len(corpus.names):
                classes += f" ({len(corpus.all_names)} with test)"
            table = federations.distances(corpus, part["clients"], part["alpha"])
            distance = f"{heterogeneity.mean_pairwise(table):.3f}"
        rows.append(
            [
                *(federation.label, counted, f"{federation.train} / {federation.test}"),
                *(classes, f"{federation.classes}"),
                *(f"{part['clients']}", f"{preset.clients_per_round}", f"{part['alpha']:g}"),
                *(f"{preset.max_length}", ", ".join(map(str, federation.rounds)), distance),
            ]
        )
    notes += [
        "Clients, clients per round, alpha, length and rounds are those of the paper and of"
        ' `partition = "paper"`. Where counts differ, the files at hand are a part of the data.',
        "The paper's 34.7k test examples of SQuAD are its gold answers, of 10,570 questions.",
        "The distance is the mean Jensen-Shannon divergence (base 2) of all pairs of clients.",
    ]
    return TextTable("Table 1: data sets and partitions", header, rows, notes)


def examples_table(number: int, name: str, source: Source) -> TextTable:
    """Returns Table 6 or 7: how the class of a tagged sentence is made."""
    title = f"Table {number}: classes of {FEDERATIONS[name].label}'s sentences"
    header = ["Tags", "Class in the paper's form", "Class here", "Training sentences"]
    notes = [
        "The paper's form has the tags in the order of the sentence, O for none. Here, a class is"
        " the sorted set of entity types (`by`), which gives WNUT the paper's 37 classes."
    ]
    try:
        found = federations.tagged_sentences(name, source.data)
    except InputError as error:
        return TextTable(title, header, [], [*notes, str(error).splitlines()[0]])
    rows = []
    for one in found:
        cells = [_cut(one.tags, 60), one.paper_class, one.class_here, f"{one.examples:,}"]
        rows.append([*cells, _cut(one.text, 60)] if source.sentences else cells)
    return TextTable(title, [*header, *(["Sentence"] if source.sentences else [])], rows, notes)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


# ---------------------------------------------------------------------------------- command line

TABLES: dict[str, Callable[[Source], TextTable]] = {
    "T1": table1,
    "T2": table2,
    "T3": table3,
    "T4": table4,
    "T5": table5,
    "T6": lambda source: examples_table(6, "wnut17", source),
    "T7": lambda source: examples_table(7, "ploner", source),
    "T8": lambda source: table8(),
    "T9": lambda source: table9(),
}


def command(
    words: Sequence[str] | None, doc: str, known: Mapping[str, Callable], out: bool
) -> tuple[list[str], argparse.Namespace]:
    """Returns the names of the tables or figures that the command line wants, and its options.

    A name such as ``F7`` stands for all that begin with it and an underscore.
    """
    parser = paper.arguments(doc, out=out)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(known)}")
    parser.add_argument("--runs", type=Path, help="folder of the sweeps")
    parser.add_argument("--data", help="folder with a folder for each data set, or tiny")
    parser.add_argument("--sentences", action="store_true", help="show them in T6 and T7")
    given = parser.parse_args(words)
    found = []
    for name in given.names or known:
        own = [full for full in known if full == name or full.startswith(f"{name}_")]
        found += own or parser.error(f"there is no {name!r}; there are {', '.join(known)}")
    return found, given


def main(words: Sequence[str] | None = None) -> None:
    """Prints the tables that are named on the command line."""
    names, given = command(words, __doc__, TABLES, out=False)
    for name in names:
        table = TABLES[name](Source(given.runs, given.data, given.sentences))
        paper.write(table, given.out and given.out / f"table_{name[1:]}")


if __name__ == "__main__":
    main()
