"""The numbers that FedAdapters prints (Kim et al., Mathematics 2023, 11, 4479)."""

from typing import NamedTuple

__all__ = [
    "ACCURACY",
    "LABELS",
    "METHODS",
    "RATIOS",
    "SIZES",
    "TRAFFIC",
    "Federation",
    "Traffic",
]

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
    curves: int
    """The figure of accuracy against round."""
    rates: int | None
    """The figure of accuracy against learning rate; None: the paper has none."""
    accuracy: dict[str, str]
    """Method -> accuracy in percent, as printed."""


def _text(*values: str) -> dict[str, str]:
    return dict(zip(("rnn", "lstm", "full", "pfeiffer", "lora", "houlsby"), values, strict=True))


def _images(*values: str) -> dict[str, str]:
    return dict(zip(("cnn", "full", "pfeiffer", "lora", "houlsby"), values, strict=True))


ACCURACY = {
    ("stack_overflow", "natural"): Federation(
        2, 2, 10, _text("13.26", "14.66", "26.97", "26.69", "25.87", "26.58")
    ),
    ("cifar100", "natural"): Federation(
        3, 3, 11, _images("19.5", "61.51", "64.09", "60.91", "64.19")
    ),
    ("shakespeare", "natural"): Federation(
        4, 4, 12, _text("16.49", "17.48", "28.46", "29.18", "27.75", "28.29")
    ),
    ("emnist", "natural"): Federation(5, 5, 13, _images("94.64", "99.17", "100", "95.83", "100")),
    ("stack_overflow", "grouped"): Federation(
        6, 6, None, _text("14.94", "16.96", "28.57", "28.71", "28.16", "28.04")
    ),
    # The paper prints 249 for the CNN, a misprint.
    ("cifar100", "grouped"): Federation(
        7, 7, None, _images("24.9", "74.8", "79.0", "76.3", "76.9")
    ),
    ("shakespeare", "grouped"): Federation(
        8, 8, None, _text("19.83", "19.79", "31.10", "30.6", "30.73", "31.01")
    ),
    ("emnist", "grouped"): Federation(9, 9, None, _images("98.21", "99.10", "100", "99.10", "100")),
}
"""(data set, clients) -> its table. ``grouped`` is what the paper calls IID."""

SIZES = {
    "text/pfeiffer": ("Pfeiffer", 3.41),
    "text/lora": ("LoRA", 1.12),
    "text/houlsby": ("Houlsby", 6.82),
    "text/full": ("GPT-2 base", 487.82),
    "images/full": ("ViT base", 330.96),
    "text/rnn": ("RNN", 219.34),
    "text/lstm": ("LSTM", 241.87),
    "images/cnn": ("CNN", 18.36),
}
"""Table 12: preset of the method -> (row, MiB)."""


class Traffic(NamedTuple):
    """A sentence of the section on transmission: 9 clients, 10 MB/s, one after the other."""

    megabytes: float
    clock: str


TRAFFIC = {
    "text/full": Traffic(262_980, "7 h 18 min"),
    "images/full": Traffic(297_000, "8 h 15 min"),
    "text/lstm": Traffic(130_610, "3 h 37 min"),
    "images/cnn": Traffic(16_524, "27 min 32 s"),
    "text/lora": Traffic(4_977.7, "8 min 17 s"),
    "images/lora": Traffic(3_967.9, "6 min 36 s"),
}
"""Preset -> traffic by Eq 1 (whole models) or Eq 2 (adapters, after a download of the model)."""

RATIOS = {10: ("GPT-2", ".754, .793 and .805"), 11: ("ViT", ".582, .624 and .626")}
"""Tables 10 and 11: training time of the three adapters over that of full fine-tuning. Table 11
prints .65 for 463/740 and 462/740 minutes, a mistake; 2 h 11 min is a time of Table 10."""
