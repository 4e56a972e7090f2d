"""FeDeRA's Tables 8 and 9: seconds of the stages of a round, by the cost model, without runs."""

import functools
import itertools
from typing import NamedTuple

import optax
from printed import BUDGETS, METHODS, PAPER, STAGES, STEPS

from fedjax_peft import algorithms, heads, peft
from fedjax_peft.config import presets
from fedjax_peft.peft.base import Method, abstract_model
from fedjax_peft.report.table_files import TextTable
from fedjax_peft.simulation.cost import forecast
from fedjax_peft.simulation.time_model import TimeModel

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


def table8() -> TextTable:
    """Returns Table 8: seconds of training and communication in a round, as the paper and here."""
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


def table9() -> TextTable:
    """Returns Table 9: seconds of a round by budget of trained parameters."""
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
