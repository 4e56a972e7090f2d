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
import functools
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import federations
import optax
from printed import (
    BUDGETS,
    FEDERATIONS,
    METHODS,
    PAPER,
    STAGES,
    STEPS,
    TARGETS,
    Federation,
    Target,
    backbone,
)

from fedjax_peft import InputError, algorithms, heads, heterogeneity, peft
from fedjax_peft.config import presets
from fedjax_peft.data.sources import DATASETS
from fedjax_peft.peft.base import Method, abstract_model
from fedjax_peft.report.study import (
    Cell,
    Choice,
    Study,
    paired,
    read_study,
    summarise,
)
from fedjax_peft.report.table_files import TextTable
from fedjax_peft.simulation.cost import forecast
from fedjax_peft.simulation.summaries import series
from fedjax_peft.simulation.time_model import TimeModel

SHARES = (90, 95, 99)
"""Percentages of a target in Table 5."""
MODELS = {
    "RoBERTa": {
        "model_type": "roberta",
        "vocab_size": 50265,
        "max_position_embeddings": 514,
        "type_vocab_size": 1,
    },
    "DeBERTaV3": {
        "model_type": "deberta-v2",
        "vocab_size": 128100,
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
        "max_position_embeddings": 512,
        "type_vocab_size": 0,
        "relative_attention": True,
        "position_buckets": 256,
        "norm_rel_ebd": "layer_norm",
        "share_att_key": True,
        "pos_att_type": "p2c|c2p",
        "position_biased_input": False,
    },
}
"""The paper's models at their base sizes."""


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


def columns(study: Study, wanted: Sequence[int], metric: str) -> list[int]:
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
    header = ["Method", "Parameters", "Paper's, RoBERTa"]
    trained = {m: PAPER(number, f"RoBERTa {m}", "parameters (millions)") for m in METHODS.values()}
    rows = {name: [name, "-", f"{trained[name]}M"] for name in METHODS.values()}
    notes = ["Mean ± standard deviation over seeds; scores in percent."]
    for name in data:
        federation = FEDERATIONS[name]
        study = sweep(source, federation.sweep)
        if study is None:
            notes.append(f"{federation.label}: no sweep {federation.sweep!r} was found.")
            continue
        cells, choice = chosen(study)
        for metric, label in metrics:
            _add_scores(header, rows, cells, federation, study, metric or study.headline, label)
            _add_paper(header, rows, number, federation, label, model_name(study))
        for method, cell in cells.items():
            counts = cell.first.rows[0].get("parameters", {})
            rows[method][1] = f"{counts.get('adapter', 0):,}"
        notes += [f"{federation.label}: {settings(study)} {rates(cells)}", *study.notes]
        notes += chosen_by(federation.label, choice)
    notes.append("The paper: RoBERTa-base or DeBERTaV3-base, mean ± deviation over five seeds.")
    return TextTable(f"Table {number}: {title}", header, list(rows.values()), notes)


def _add_paper(
    header: list[str],
    rows: dict[str, list[str]],
    number: str,
    federation: Federation,
    label: str,
    model: str,
) -> None:
    """Adds the paper's scores of one metric of one data set, and its difference to FedLR.

    The paper's question answering counts as FedNLP does, so our EM and F1 have no such columns.
    """
    if federation.sweep in ("squad", "mrqa") and not label.startswith("FedNLP"):
        return
    metric = label.removeprefix("FedNLP's ")
    title = f"{federation.label} {metric}".strip()
    rounds = [f"{title} {r}" for r in federation.rounds]
    header.append(f"{model}: {title}, rounds {' / '.join(map(str, federation.rounds))}")
    header.append(f"{model}: {title} − FedLR")
    for method, row in rows.items():
        row.append(" / ".join(PAPER(number, f"{model} {method}", one) for one in rounds))
        ends = [PAPER.value(number, f"{model} {m}", rounds[-1]) for m in (method, "FedLR")]
        row.append("-" if method == "FedLR" else f"{ends[0] - ends[1]:+.2f}")


def _add_scores(
    header: list[str],
    rows: dict[str, list[str]],
    cells: dict[str, Cell],
    federation: Federation,
    study: Study,
    metric: str,
    label: str,
) -> None:
    """Adds the columns of one metric of one data set: its rounds, and the difference to FedLR."""
    title = f"{federation.label} {label}".strip()
    score = f"test_{metric}"
    shown = columns(study, federation.rounds, metric)
    header += [f"{title}, round {r}" for r in shown] + [f"{title} − FedLR [95 %]"]
    for method, row in rows.items():
        if method not in cells:
            row += ["-"] * (len(shown) + 1)
            continue
        cell = cells[method]
        row += [summarise(cell.values(score, r)).text(100) for r in shown]
        if method == "FedLR" or "FedLR" not in cells:
            row.append("-")
            continue
        difference = paired(cell.values(score, shown[-1]), cells["FedLR"].values(score, shown[-1]))
        row.append(difference.text(100))


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


# ------------------------------------------------------------------- Tables 8 and 9: the cost model


class Stage(NamedTuple):
    """A round of one method."""

    training: float
    """Seconds."""
    communication: float
    """Seconds."""
    parameters: int
    """Trained parameters without the head."""

    @property
    def total(self) -> float:
        """Seconds."""
        return self.training + self.communication


@functools.cache
def stage(method: str, size: int | None = None, model: str = "RoBERTa") -> Stage:
    """Returns a round of 20 Newsgroups at the size of one of the paper's models.

    A client has 113 documents, which are 8 steps. The paper does not send the head, so nor does
    this. The step times are those of Table 8.

    Args:
      method: the paper's name.
      size: rank of LoRA or width of adapters; None: the paper's.
      model: ``RoBERTa`` or ``DeBERTaV3``, the base sizes.
    """
    system = next(key for key, name in METHODS.items() if name == method)
    if model == "DeBERTaV3":
        system = f"federa/deberta/{system.removeprefix('federa/')}"
    settings = presets.presets()[system].settings
    made = _method(dict(settings["peft"]), size)
    shapes = abstract_model(MODELS[model], made, head=heads.classification(20))
    time = TimeModel.preset(**settings["time"], svd_seconds=0.0)
    fedavg = algorithms.fedavg(optax.sgd(1.0), head="frozen")
    cost = forecast(shapes, fedavg, clients=1, rounds=1, steps=0, time_model=time)
    return Stage(time.compute_seconds(STEPS["20News"]), cost.seconds, shapes.counts()["adapter"])


def _method(options: dict, size: int | None) -> Method:
    """Returns the PEFT method of a preset, perhaps of another size."""
    name = options.pop("name")
    if size is not None and name == "lora":
        options |= {"rank": size, "alpha": float(size)}
    elif size is not None and name == "houlsby":
        options = {"size": size}
    return getattr(peft, name)(**options)


def seconds_of_round(method: str) -> float:
    """Returns the seconds of a round of 20 Newsgroups at the size of RoBERTa-base."""
    return stage(method).total


def start_of(method: str) -> float:
    """Returns the seconds before the first round: those of the SVD."""
    return TimeModel.preset("federa").svd_seconds if method == "FeDeRA" else 0.0


def table8(source: Source) -> TextTable:
    """Returns Table 8: seconds of training and communication in a round, as the paper and here."""
    del source
    header = ["Model", "Data", "Method", "Training, paper", "Steps", "Seconds a step"]
    header += ["Communication", "Paper"]
    rows = []
    for model, data in itertools.product(MODELS, STEPS):
        for method, label in STAGES.items():
            if method == "FeDeRA":  # the paper has one column for both
                continue
            training = PAPER("8", f"{model} {data}", f"{label} training")
            cells = [training, str(STEPS[data]), f"{float(training) / STEPS[data]:.3f}"]
            cells.append(f"{stage(method, None, model).communication:.2f}")
            cells.append(PAPER("8", model, f"{label} communication"))
            rows.append([model, data, label, *cells])
    notes = [
        "Seconds of a round. FeDeRA's SVD takes 8.62 s once, for both models.",
        "The time model has the paper's communication times as measured transfers; DeBERTaV3 has"
        " them by its own bytes. The seconds of a step, which the runs use, are the paper's seconds"
        " of training over our number of steps: Table 1's examples of a client in batches of 16. A"
        " step of WNUT (64 tokens) takes as long as one of 20 Newsgroups (256).",
    ]
    return TextTable("Table 8: seconds of the stages of a round", header, rows, notes)


def table9(source: Source) -> TextTable:
    """Returns Table 9: seconds of a round by budget of trained parameters."""
    del source
    header = ["Budget (M)", "Method", "Size", "Parameters", "Training, paper"]
    header += ["Communication", "Paper"]
    rows = []
    for budget, (rank, width) in BUDGETS.items():
        column = f"{budget}M"
        sizes = [("FedAP", "width", width), ("FedLR", "rank", rank)]
        for method, word, size in ([("FedBF", "", None)] if budget == 0.1 else []) + sizes:
            one = stage(method, size)
            cells = [f"{word} {size}" if word else "-", f"{one.parameters:,}"]
            cells.append(PAPER("9", STAGES[method], f"{column} training"))
            cells += [f"{one.communication:.2f}", PAPER("9", "all", f"{column} communication")]
            rows.append([f"{budget}", STAGES[method], *cells])
    notes = [
        "Seconds, RoBERTa-base, 20 Newsgroups. The time model has the paper's communication times;"
        " paper/budget.toml has its seconds of training. Sizes are whole numbers near the budgets,"
        " so their bytes differ a little from those of the paper. FeDeRA's SVD takes 8.62 s once.",
        "The paper prints 3.22 s of LoRA's training with 1.2M here, and 3.27 s in Table 8.",
    ]
    return TextTable("Table 9: seconds of a round by budget", header, rows, notes)


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


def table6(source: Source) -> TextTable:
    """Returns Table 6: classes of WNUT 2017."""
    return examples_table(6, "wnut17", source)


def table7(source: Source) -> TextTable:
    """Returns Table 7: classes of PLONER."""
    return examples_table(7, "ploner", source)


# ---------------------------------------------------------------------------------- command line

TABLES: dict[str, Callable[[Source], TextTable]] = {
    "T1": table1,
    "T2": table2,
    "T3": table3,
    "T4": table4,
    "T5": table5,
    "T6": table6,
    "T7": table7,
    "T8": table8,
    "T9": table9,
}


def main(words: Sequence[str] | None = None) -> None:
    """Prints the tables that are named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="TABLE", help=f"of {', '.join(TABLES)}")
    parser.add_argument("--runs", type=Path, help="folder of the sweeps")
    parser.add_argument("--data", help="folder with a folder for each data set, or tiny")
    parser.add_argument("--sentences", action="store_true", help="show them in T6 and T7")
    parser.add_argument("--out", type=Path, help="folder for Markdown, CSV and LaTeX")
    given = parser.parse_args(words)
    if unknown := [name for name in given.names if name not in TABLES]:
        parser.error(f"there is no table {unknown[0]!r}; there are {', '.join(TABLES)}")
    for name in given.names or TABLES:
        table = TABLES[name](Source(given.runs, given.data, given.sentences))
        print(table.markdown())
        if given.out is not None:
            table.write(given.out / f"table_{name[1:]}")


if __name__ == "__main__":
    main()
