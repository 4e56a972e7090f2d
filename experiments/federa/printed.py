"""The FeDeRA paper (Yan et al. 2024, arXiv:2404.18848): its numbers, and what they belong to.

The numbers of its tables are in ``experiments/papers/federa.csv``. Its plots have no numbers.
"""

import sys
from pathlib import Path
from typing import NamedTuple

sys.path.append(str(Path(__file__).parents[1]))
from printouts import read_printed

__all__ = [
    "BUDGETS",
    "FEDERATIONS",
    "METHODS",
    "PAPER",
    "STAGES",
    "STEPS",
    "TARGETS",
    "Federation",
    "Target",
    "backbone",
]

PAPER = read_printed(Path(__file__).parents[1] / "papers" / "federa.csv")
METHODS = {
    "federa/fedft": "FedFT",
    "federa/fedbf": "FedBF",
    "federa/fedap": "FedAP",
    "federa/fedlr": "FedLR",
    "federa": "FeDeRA",
}
"""A run's ``system`` -> the paper's name of the method, in the order of the paper's rows."""
STAGES = {**{name: name for name in METHODS.values()}, "FedLR": "FedLR & FeDeRA"}
STAGES["FeDeRA"] = STAGES["FedLR"]
"""The paper's name of the method -> its name in Tables 8 and 9."""
STEPS = {"20News": 8, "WNUT": 8, "SQuAD": 19}
"""Data set of Table 8 -> local steps of a client in a round: batches of 16 (Table 1)."""


def backbone(model: str) -> str:
    """Returns the paper's model whose rows stand beside runs of a model."""
    return "DeBERTaV3" if "deberta" in model.lower() else "RoBERTa"


class Federation(NamedTuple):
    """A row of Table 1."""

    label: str
    sweep: str
    """The name of its config and of its sweep."""
    train: str
    test: str
    clients: int
    clients_per_round: int
    classes: int
    alpha: float
    length: int
    rounds: tuple[int, ...]
    """The rounds of the columns in Tables 2 to 4."""
    alphas: tuple[float, ...] = (0.1, 1.0, 10.0, 100.0)
    """The panels of Figure 7."""


_QA = (0.01, 0.1, 1.0, 10.0)
FEDERATIONS = {
    "20newsgroups": Federation(
        *("20News", "20news", "11.3k", "7.5k", 100, 10, 20, 0.1, 256, (200, 500, 1000))
    ),
    "semeval2010_task8": Federation(
        *("SemEval", "semeval", "8k", "2.7k", 100, 10, 19, 1.0, 64, (200, 500, 1000))
    ),
    "wnut17": Federation(*("WNUT", "wnut17", "3.4k", "1.2k", 30, 5, 37, 0.1, 64, (100, 200, 500))),
    "ploner": Federation(
        *("PLONER", "ploner", "14k", "3.5k", 100, 10, 49, 0.01, 64, (50, 100, 150))
    ),
    "squad": Federation(
        *("SQuAD", "squad", "87.5k", "34.7k", 300, 15, 30, 0.1, 384, (50, 100)), alphas=_QA
    ),
    "mrqa": Federation(
        *("MRQA", "mrqa", "45.5k", "11.3k", 300, 15, 6, 0.01, 512, (100, 200)), alphas=_QA
    ),
}
"""Data set -> its row of Table 1."""


class Target(NamedTuple):
    """A target of Table 5."""

    label: str
    sweep: str
    metric: str
    value: float


TARGETS = (
    Target("20News", "20news", "accuracy", 0.8),
    Target("WNUT", "wnut17", "f1", 0.5),
    Target("SQuAD EM", "squad", "raw_exact_match", 0.65),
    Target("SQuAD F1", "squad", "raw_f1", 0.8),
)
"""Table 5. SQuAD's targets are read as FedNLP's metrics, which count each gold answer."""

BUDGETS = {0.1: (3, 3), 1.2: (32, 32), 1.8: (48, 48), 2.4: (64, 64), 4.8: (128, 128)}
"""Figure 6 and Table 9: million parameters -> rank of LoRA and width of adapters (our choice)."""
