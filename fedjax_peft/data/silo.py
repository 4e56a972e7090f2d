"""GLUE's tasks cut to one size, one task for each client: FedMCP's data."""

from collections.abc import Mapping

import numpy as np

from fedjax_peft.data.table import Table
from fedjax_peft.numerics.random import host_rng
from fedjax_peft.support.errors import check_known

_TRAIN, _BOTH, _TEST = 3_668, 4_076, 204
"""MRPC's sizes: its training split, training and validation together, and half the validation."""


def divide(task: str, tables: Mapping[str, Table], rule: str, seed: int) -> dict[str, Table]:
    """Returns ``train``, ``validation`` and ``test`` of one task.

    ``6:2:2`` follows the text of FedMCP: training and validation split together, at most as many
    rows as MRPC has, divided 6:2:2. ``fedpetuning`` follows its numbers, whose denominators are 204
    and 139: the training split, at most as many rows as MRPC's, and two halves of the validation
    split, at most 204 rows each. All cuts are stratified by label.

    Args:
      tables: the task's ``train`` and ``test`` (GLUE's validation split), with ``label``.

    Raises:
      InputError: an unknown rule.
    """
    check_known("split", rule, ("6:2:2", "fedpetuning"), " of GLUE's silo")
    train, test = tables["train"], tables["test"]
    if rule == "6:2:2":
        both = Table.joined(f"{train.origin} or {test.origin}", (train, test))
        both = _stratified(both, task, seed)
        both = both.take(range(len(both))[:_BOTH])
        n = len(both)
        cuts = {"train": (0, 0.6), "validation": (0.6, 0.8), "test": (0.8, 1)}
        return {
            part: both.take(range(int(first * n), int(last * n)))
            for part, (first, last) in cuts.items()
        }
    train, test = (_stratified(table, task, seed) for table in (train, test))
    half = len(test) // 2
    return {
        "train": train.take(range(len(train))[:_TRAIN]),
        "validation": test.take(range(half)[:_TEST]),
        "test": test.take(range(half, len(test))[:_TEST]),
    }


def _stratified(table: Table, task: str, seed: int) -> Table:
    """Returns the rows in an order in which any stretch has the label proportions of the whole."""
    labels = np.unique([str(x) for x in table.columns["label"]], return_inverse=True)[1]
    shuffled = host_rng(seed, f"glue:{task}").permutation(len(labels))
    place = np.empty(len(labels))
    for label in np.unique(labels):
        own = shuffled[labels[shuffled] == label]
        place[own] = (np.arange(len(own)) + 0.5) / len(own)
    return table.take(np.argsort(place, kind="stable").tolist())
