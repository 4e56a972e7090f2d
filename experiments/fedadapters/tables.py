"""FedAdapters' tables and figures from sweeps and the cost model, beside the paper's numbers.

    python experiments/fedadapters/tables.py runs/fedadapters/small/shakespeare_natural --out DIR
    python experiments/fedadapters/tables.py --costs --out DIR

For each sweep: the table of accuracies (2 to 9), training times (10 and 11, GPT-2), the curves
(Figures 2 to 9) and the study of learning rates (Figures 10 to 13). ``--costs`` makes Tables 1 and
12 and the traffic of Equations 1 and 2, which need no runs. Tables are written as Markdown, CSV and
LaTeX, figures as PNG, SVG and PDF with their data as CSV; the names of the files begin with those
of the table or figure and of the sweep's folder.
"""

import functools
import sys
from pathlib import Path
from typing import Any, NamedTuple

import optax
from printed import FEDERATIONS, LABELS, METHODS, PAPER, SIZES, TIMES, TRAFFIC, Federation

from fedjax_peft import algorithms, heads, peft
from fedjax_peft.config import presets
from fedjax_peft.models.base import Model
from fedjax_peft.peft.base import abstract_model
from fedjax_peft.report.study import Cell, Study, paired, read_study, summarise
from fedjax_peft.report.table_files import TextTable
from fedjax_peft.simulation.cost import Forecast, forecast
from fedjax_peft.simulation.time_model import TimeModel

sys.path.append(str(Path(__file__).parents[1]))
import paper

TEST = "test_accuracy"
STAND_INS = {"cifar10": "cifar100", "fashion_mnist": "emnist"}
"""Data set of ours -> the paper's, in whose place it stands."""
CLIENTS = {"nine_of_27": "natural", "merged_from_27": "grouped"}
RATE = "optimizer.learning_rate"


class Sweep(NamedTuple):
    """A sweep and the paper's table that it belongs to."""

    name: str
    """The name of its folder."""
    study: Study
    data: str
    """The paper's data set."""
    clients: str
    """``natural``, ``grouped`` or ``iid``."""
    title: str

    @property
    def paper(self) -> Federation:
        """The paper's table; for IID clients the one that the paper calls IID."""
        return FEDERATIONS[self.data, "grouped" if self.clients == "iid" else self.clients]

    @property
    def chosen(self) -> dict[str, Cell]:
        """Method -> the learning rate chosen on validation, in the order of the paper's rows."""
        cells = self.study.chosen()
        return {name: cells[name] for name in METHODS if name in cells}


def read_sweep(path: Path) -> Sweep:
    """Returns a sweep of one of the configs here."""
    study = read_study(path)
    config = study.cells[0].first.config
    own = str(config["data"]["name"])
    data = STAND_INS.get(own, own)
    name = str(config["partition"]["name"]).rpartition(":")[2]
    clients = CLIENTS.get(name, name)
    shown = LABELS[data] if own == data else f"{own} in place of {LABELS[data]}"
    kind = {"natural": "natural clients", "grouped": "merged clients (the paper's IID)"}
    title = f"{shown}, {kind.get(clients, 'clients that are IID (not in the paper)')}"
    return Sweep(path.resolve().name, study, data, clients, title)


def rate(cell: Cell) -> str:
    """Returns the learning rate of a cell."""
    return f"{cell.learning_rate:g}"


# ------------------------------------------------------------------------------ tables of accuracy


def accuracy_table(sweep: Sweep) -> TextTable:
    """Returns Table 2 to 9: a row for each method, the paper's number beside ours."""
    study, paper = sweep.study, sweep.paper
    choice, best = study.choice(), study.choice(TEST, "best")
    base = study.baseline if study.baseline in choice.cells else None
    header = ["Method", "Paper %", "Its rate", "Ours %", "n", "Untrained %", "Rate"]
    header += [f"Minus {METHODS[base]}, 95 %"] if base else []
    header += ["Best on test %", "Rate of the best"]
    rows = []
    for name, cell in sweep.chosen.items():
        values = cell.values(TEST)
        label = METHODS[name]
        row = [label, *(PAPER(str(paper.table), label, x) for x in ("accuracy", "learning rate"))]
        row += [summarise(values).text(100)]
        row += [str(len(values)), summarise(cell.values(TEST, 0)).text(100), rate(cell)]
        if base:
            minus = paired(values, choice.cells[base].values(TEST))
            row += ["" if name == base else minus.text(100) + ("" if minus.separated else " n.s.")]
        at_best = best.cells.get(name)
        shown = "-" if at_best is None else summarise(at_best.values(TEST, "best")).text(100)
        rows.append([*row, shown, "-" if at_best is None else rate(at_best)])
    notes = [
        "Ours: test accuracy after the last round, mean ± standard deviation over n seeds."
        " Untrained: before the first round.",
        *choice.notes,
        "Best on test: the best rate and the best round on test data, as in the paper; optimistic.",
        *(["n.s.: 0 is in the 95 % interval of Student's t or of the bootstrap."] if base else []),
        settings([cell.first.config for cell in sweep.chosen.values()]),
        *study.notes,
    ]
    return TextTable(f"Table {paper.table}: {sweep.title}", header, rows, notes)


def settings(configs: list[dict[str, Any]]) -> str:
    """Returns sentences with the settings that a reader needs to compare."""
    config = configs[0]
    steps = config.get("local_steps")
    work = f"{steps} local steps" if steps else f"{config['epochs']} local epochs"
    text = f"{config['rounds']} rounds, {work}, batch {config['batch_size']}."
    based = [one["model"].get("config") for one in configs if one["peft"]["name"] != "head_only"]
    if not based:
        return text
    weights = "pretrained" if None in based else "random"
    scratch = " RNN, LSTM and CNN start from random ones." if weights == "pretrained" else ""
    return f"{text} GPT-2 and ViT start from {weights} weights.{scratch}"


def time_table(sweep: Sweep) -> TextTable | None:
    """Returns seconds of training on this machine, over full fine-tuning (Tables 10 and 11)."""
    table = TIMES.get((sweep.data, sweep.clients), "")
    seconds = {
        name: {seed: trained(run.rows) for seed, run in cell.runs.items()}
        for name, cell in sweep.chosen.items()
    }
    if "full" not in seconds:
        return None
    rows = []
    for name, found in seconds.items():
        both = found.keys() & seconds["full"].keys()
        ratios = [found[seed] / seconds["full"][seed] for seed in both]
        ratio = summarise(ratios).text(digits=2)
        label = METHODS[name]
        printed = [PAPER(table, label, x) for x in ("seconds", "over full fine-tuning")]
        rows.append([label, summarise(found).text(), ratio, *printed])
    notes = [
        "Seconds of all clients' training in a run, without compilation and evaluation, mean ±"
        " standard deviation over seeds. Runs side by side slow each other.",
        "The paper has the times of GPT-2 on Stack Overflow (Table 10) and Shakespeare (Table 11),"
        " non-IID. In Table 11 it prints .65 for LoRA and Houlsby; its seconds give .63 and .62.",
    ]
    header = ["Method", "Seconds", "Over full fine-tuning", "Paper: seconds", "Paper: over full"]
    title = f"Table {table}: training time" if table else "Training time (no table of the paper)"
    return TextTable(f"{title}, {sweep.title}", header, rows, notes)


def trained(rows: list[dict[str, Any]]) -> float:
    """Returns the seconds of training in a run."""
    return sum(row.get("time", {}).get("train_s", 0.0) for row in rows)


# ------------------------------------------------------------------------------------------ figures


def draw_curves(sweep: Sweep, stem: Path) -> None:
    """Draws Figure 2 to 9: test accuracy against the round, at the chosen learning rates."""
    curves = {}
    for name, cell in sweep.chosen.items():
        found = cell.series(TEST)
        xs = max((x for x, _ in found.values()), key=len)
        ys = {seed: [100 * y for y in values] for seed, (_, values) in found.items()}
        curves[METHODS[name]] = xs, ys
    draw(sweep, curves, "Communication round", None, stem)


def draw_rates(sweep: Sweep, stem: Path) -> None:
    """Draws Figure 10 to 13: test accuracy after the last round against the learning rate."""
    curves = {}
    for name in [name for name in METHODS if name in sweep.study.methods]:
        cells = {float(c.settings[RATE]): c.values(TEST) for c in sweep.study.methods[name]}
        xs = sorted(cells)
        curves[METHODS[name]] = xs, paper.by_seed(cells[x] for x in xs)
    draw(sweep, curves, "Learning rate", "log", stem)


def draw(sweep: Sweep, curves: dict, xlabel: str, ticks: str | None, stem: Path) -> None:
    """Draws the test accuracy of each method."""
    look = {"xlabel": xlabel, "ylabel": "Test accuracy (%)", "title": sweep.title}
    paper.draw(stem, [paper.Panel(curves, look, ticks=ticks)], legend="inside")


# ---------------------------------------------------------------------------- costs without any run

GPT2 = {"model_type": "gpt2", "vocab_size": 50257, "n_embd": 768, "n_layer": 12, "n_head": 12}
VIT = {
    "model_type": "vit",
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "image_size": 224,
    "patch_size": 16,
}
OWN = {"rnn": {"vocab_size": 54_175}, "lstm": {"vocab_size": 54_175}}
OWN |= {"cnn": {"channels": [16, 96, 256]}}
"""What the presets leave open: the size implies V; the CNN's channels are one choice of many."""
MIB = 2**20


@functools.cache
def abstract(name: str) -> tuple[Model, TimeModel]:
    """Returns shapes and time model of a preset: of GPT-2, ViT (100 classes) or from scratch."""
    settings = presets.presets()[f"fedadapters/{name}"].settings
    options = dict(settings["peft"])
    method = getattr(peft, options.pop("name"))(**options)
    part, role = name.split("/")
    own = settings.get("model", {}).get("config")
    config = (GPT2 if part == "text" else VIT) if own is None else {**own, **OWN[role]}
    classes = 62 if role == "cnn" else 100
    head = heads.causal_lm() if part == "text" else heads.classification(classes)
    return abstract_model(config, method, head=head), TimeModel.preset(**settings["time"])


def costs(
    name: str, clients: int, rounds: int, *, whole: bool = False, head: bool = False
) -> Forecast:
    """Returns bytes and seconds of transfers.

    Args:
      name: of the preset.
      clients: in every round.
      rounds: how many.
      whole: the whole checkpoint goes both ways.
      head: a head is sent beside adapters, as in our runs; the paper counts none.
    """
    model, time = abstract(name)
    beside = not (whole or head) and model.counts()["adapter"] and model.counts()["head"]
    algorithm = algorithms.fedavg(optax.sgd(1.0), head="frozen" if beside else "shared")
    options = {"clients": clients, "rounds": rounds, "steps": 0, "time_model": time}
    return forecast(model, algorithm, **options, whole=whole)


def size_table() -> TextTable:
    """Returns Table 12: sizes in MiB, cut after two decimals as in the paper."""
    rows = []
    for name, (label, row) in SIZES.items():
        part, role = name.split("/")
        if role == "full":  # the paper's "base" is the whole checkpoint and a LoRA adapter
            counted = abstract(f"{part}/lora")[0].nbytes()
            size = costs(f"{part}/lora", 1, 1, whole=True).bytes_up
            alone = counted["frozen"] + counted["head"]
        else:
            counted = abstract(name)[0].nbytes()
            size = alone = counted["adapter"] or counted["head"]
        rows.append([label, PAPER("12", row, "MB"), f"{size / MIB:.3f}", f"{alone / MIB:.3f}"])
    head = abstract("images/lora")[0].nbytes()["head"] / MIB
    notes = [
        "float32, in MiB (the paper writes MB, and cuts most sizes after two decimals).",
        "The paper's GPT-2 contains 12 causal masks and a LoRA adapter; its ViT contains a pooler"
        " and a LoRA adapter. The last column is without these.",
        "The adapters' rows are without a head. GPT-2's head is its embedding and is never sent."
        f" ViT's head of 100 classes has {head:.3f} MiB and is sent.",
        "RNN and LSTM: 54,175 words and an embedding of 256 (the text says 768, the sizes say 256)."
        " The CNN's channels are not printed: [16, 96, 256] is one of many choices.",
    ]
    header = ["Model", "Paper MiB", "Ours MiB", "Parameters MiB"]
    return TextTable("Table 12: sizes of models and adapters", header, rows, notes)


def traffic_table() -> TextTable:
    """Returns the traffic of Equations 1 and 2 and its time, for 9 clients."""
    rows = []
    for part in ("text", "images"):
        own = ("rnn", "lstm") if part == "text" else ("cnn",)
        for role in (*own, "full", "pfeiffer", "lora", "houlsby"):
            name = f"{part}/{role}"
            rounds = presets.presets()[f"fedadapters/{name}"].settings["rounds"]
            pretrained = role not in own and role != "full"
            if role == "full":  # counted as in the paper: the checkpoint and an adapter
                found = costs(f"{part}/lora", 9, rounds, whole=True)
            else:
                found = costs(name, 9, rounds)
            printed = ("text", TRAFFIC.get(name, ""))
            model = "GPT-2" if part == "text" else "ViT"
            label = METHODS[role] if role in own else f"{model}, {METHODS[role]}"
            row = [label, "2" if pretrained else "1", heads_of(name)]
            row += [f"{PAPER.value(*printed, 'MB'):,.0f}" if printed[1] else "-"]
            run = costs(name, 9, rounds, head=True)
            row += [f"{(x.bytes_up + x.bytes_down) / MIB:,.0f}" for x in (found, run)]
            time = clock(PAPER.value(*printed, "seconds")) if printed[1] else "-"
            rows.append([*row, time, clock(found.seconds)])
    notes = [
        "9 clients, 30 rounds (texts) or 50 (images), 10 MiB/s, one client after the other. Eq 1:"
        " the whole model, both ways. Eq 2: one download of the model, then adapters.",
        "Differences below .4 %: the paper cuts its sizes before it multiplies.",
        "The paper counts adapters without a head, although its text says that the head is sent,"
        " and full fine-tuning with an adapter; so does 'Ours MiB'. 'Head' says what 'Paper MiB'"
        " and 'Ours MiB' contain. 'Run MiB' is what a run counts: with ViT's head (100 classes),"
        " and full fine-tuning without an adapter.",
    ]
    header = ["Method", "Eq", "Head", "Paper MiB", "Ours MiB", "Run MiB"]
    header += ["Paper's time", "Our time"]
    return TextTable("Equations 1 and 2: traffic of training", header, rows, notes)


def heads_of(name: str) -> str:
    """Returns whether a row of the traffic contains the head."""
    part, role = name.split("/")
    if part == "text" and role not in ("rnn", "lstm"):
        return "is the embedding" if role == "full" else "never sent"
    return "in" if role in ("full", "rnn", "lstm", "cnn") else "not in"


def clock(seconds: float) -> str:
    """Returns a duration as the paper prints it."""
    hours, rest = divmod(round(seconds), 3600)
    minutes, seconds = divmod(rest, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {seconds:02d} s"


def settings_table() -> TextTable:
    """Returns Table 1 as our presets have it."""
    known = presets.presets()
    text, images = (known[f"fedadapters/{x}/lora"].settings for x in ("text", "images"))
    rows = [
        ["Rounds", "30", "50", str(text["rounds"]), str(images["rounds"])],
        ["Clients", "9", "9", "9", "9"],
        ["Local step", "5", "5", f"{text['epochs']} epochs", f"{images['epochs']} epochs"],
        ["Batch size", "16", "12", str(text["batch_size"]), str(images["batch_size"])],
        ["Optimizer", "Adam", "Adam", text["optimizer"]["name"], images["optimizer"]["name"]],
        ["Epsilon", ".0005", ".0005"] + [f"{x['optimizer']['eps']:g}" for x in (text, images)],
        ["Learning rate", *[".005, .001, .0005 or .0001"] * 2, *["swept"] * 2],
    ]
    notes = ["Our decision: a local step is an epoch, as Table 10's 30 rounds take 2 h 11 min."]
    header = ["Setting", "Paper, texts", "Paper, images", "Ours, texts", "Ours, images"]
    return TextTable("Table 1: settings", header, rows, notes)


# --------------------------------------------------------------------------------------------- main


def report(path: Path, out: Path | None) -> None:
    """Makes all tables and figures of a sweep."""
    sweep = read_sweep(path)
    tables = {f"table_{sweep.paper.table}": accuracy_table(sweep)}
    if (times := time_table(sweep)) is not None:
        table = TIMES.get((sweep.data, sweep.clients))
        tables[f"table_{table}" if table else "times"] = times
    for stem, made in tables.items():
        paper.write(made, out and out / f"{stem}_{sweep.name}")
    if out is None:
        return
    draw_curves(sweep, out / f"figure_{sweep.paper.table}_{sweep.name}")
    several = any(len(cells) > 1 for cells in sweep.study.methods.values())
    if sweep.paper.rates is not None and several:
        draw_rates(sweep, out / f"figure_{sweep.paper.rates}_{sweep.name}")


def main(arguments: list[str] | None = None) -> None:
    """Reads the command line."""
    parser = paper.arguments(__doc__, "sweeps*", out=False)
    parser.add_argument("--costs", action="store_true", help="Tables 1 and 12, and the traffic")
    given = parser.parse_args(arguments)
    if given.costs:
        for table, stem in ((settings_table(), "table_1"), (size_table(), "table_12")):
            paper.write(table, given.out and given.out / stem)
        paper.write(traffic_table(), given.out and given.out / "equations_1_2")
    for path in given.sweeps:
        report(path, given.out)


if __name__ == "__main__":
    main()
