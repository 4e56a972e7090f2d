"""FedAdapters (Kim et al., Mathematics 2023, 11, 4479): its numbers, and what they belong to.

The numbers of its tables are in ``experiments/papers/fedadapters.csv``.
"""

import sys
from pathlib import Path
from typing import NamedTuple

sys.path.append(str(Path(__file__).parents[1]))
from printouts import read_printed

__all__ = ["FEDERATIONS", "LABELS", "METHODS", "PAPER", "SIZES", "TIMES", "TRAFFIC", "Federation"]

PAPER = read_printed(Path(__file__).parents[1] / "papers" / "fedadapters.csv")
METHODS = {
    "rnn": "RNN",
    "lstm": "LSTM",
    "cnn": "CNN",
    "full": "Full fine-tuning",
    "pfeiffer": "Pfeiffer",
    "lora": "LoRA",
    "houlsby": "Houlsby",
}
"""Method in the configs -> its name in the tables."""
LABELS = {
    "stack_overflow": "Stack Overflow",
    "shakespeare": "Shakespeare",
    "cifar100": "CIFAR-100",
    "emnist": "EMNIST",
}


class Federation(NamedTuple):
    """One of the paper's tables of accuracies."""

    table: int
    """The table, and the figure of accuracy against round."""
    rates: int | None = None
    """The figure of accuracy against learning rate; None: the paper has none."""


FEDERATIONS = {
    ("stack_overflow", "natural"): Federation(2, 10),
    ("cifar100", "natural"): Federation(3, 11),
    ("shakespeare", "natural"): Federation(4, 12),
    ("emnist", "natural"): Federation(5, 13),
    ("stack_overflow", "grouped"): Federation(6),
    ("cifar100", "grouped"): Federation(7),
    ("shakespeare", "grouped"): Federation(8),
    ("emnist", "grouped"): Federation(9),
}
"""(data set, clients) -> its table. ``grouped`` is what the paper calls IID."""
TIMES = {("stack_overflow", "natural"): "10", ("shakespeare", "natural"): "11"}
"""(data set, clients) -> the table of its training times. The paper has none of images: it says
that they did not differ."""
SIZES = {
    "text/pfeiffer": ("Pfeiffer", "GPT-2 Pfeiffer"),
    "text/lora": ("LoRA", "GPT-2 LoRA"),
    "text/houlsby": ("Houlsby", "GPT-2 Houlsby"),
    "text/full": ("GPT-2 base", "GPT-2 base"),
    "images/full": ("ViT base", "ViT base"),
    "text/rnn": ("RNN", "RNN"),
    "text/lstm": ("LSTM", "LSTM"),
    "images/cnn": ("CNN", "CNN"),
}
"""Table 12: preset of the method -> (our row, the paper's row)."""
TRAFFIC = {
    "text/full": "GPT-2 base",
    "images/full": "ViT base",
    "text/lstm": "LSTM",
    "images/cnn": "CNN",
    "text/lora": "GPT-2 LoRA",
    "images/lora": "ViT LoRA",
}
"""Preset -> its row in the section on transmission: traffic by Eq 1 (whole models) or Eq 2
(adapters, after a download of the model)."""
