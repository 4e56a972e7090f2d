"""The federations of papers: partitions, clients and rounds of the named data sets."""

from collections.abc import Mapping
from typing import Any, NamedTuple


class Settings(NamedTuple):
    """A paper's federation of a data set; ``partition = "paper"`` in a config takes it."""

    max_length: int = 128
    """Tokens per example, the default of ``load_dataset``. Our choice if the paper gives none."""
    paper: str | None = None
    """The source of the settings; None: no implemented paper partitions this data set."""
    partition: Mapping[str, Any] | None = None
    """A config's table ``[partition]``."""
    clients_per_round: int | None = None
    rounds: int | None = None
    """The largest number of rounds that the paper reports."""
    options: Mapping[str, Any] = {}
    """Options of ``load_dataset`` that the partition needs."""


def federa(
    max_length: int,
    clients: int,
    clients_per_round: int,
    alpha: float,
    rounds: int,
    by: str | None = None,
    **options: Any,
) -> Settings:
    """Returns a row of FeDeRA's Table 1, whose partition is FedNLP's (its appendix A.2, A.3)."""
    partition = {"name": "dirichlet", "clients": clients, "alpha": alpha, "mode": "client_prior"}
    partition |= {} if by is None else {"by": by}
    return Settings(
        max_length, "FeDeRA, Table 1", partition, clients_per_round, rounds, options=options
    )


def fra(shares: list[list[float]]) -> Settings:
    """Returns FRA-LoRA's label skew of two clients; it does not give the length."""
    partition = {"name": "label_share", "shares": shares}
    return Settings(128, "FRA-LoRA, label skew", partition, 2, 30)


def fedadapters(max_length: int, rounds: int) -> Settings:
    """Returns FedAdapters' nine natural clients; it does not give the length."""
    return Settings(
        max_length, "FedAdapters, Table 1", {"name": "natural", "clients": 9}, 9, rounds
    )


def pfl(partition: Mapping[str, Any]) -> Settings:
    """Returns pfl-research's setting: 512 tokens, cohorts of 100, 1,000 rounds."""
    return Settings(512, "pfl-research, benchmarks/llm", partition, 100, 1000)


def flowertune(task: str, clients: int, clients_per_round: int) -> Settings:
    """Returns a challenge of the FlowerTune leaderboard: equal shares, 512 tokens, 200 rounds."""
    partition = {"name": "iid", "clients": clients}
    return Settings(512, f"FlowerTune, {task} task", partition, clients_per_round, 200)
