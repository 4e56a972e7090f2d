"""Padded lengths: a step of short texts is computed at a short length.

On the device, all texts are padded to one full length. A step reads only as many tokens as its
longest example has, rounded up to one of a few padded lengths. The round program holds one copy of
the step for each padded length, and a scalar chooses the copy. Attention masks padding, and dropout
masks do not depend on the amount of padding. Therefore the results equal those of full padding up
to float32 rounding.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

_UNIT = 8
"""Padded lengths are multiples of this number of tokens."""
_GAIN = 0.05
"""An additional padded length must save at least this share of the tokens, because the step is
compiled once for each padded length."""


def token_columns(columns: Mapping[str, Any]) -> frozenset[str]:
    """Returns the names of the columns with a token axis.

    They have the shape of ``attention_mask``, ``[examples, length]``, or one more axis. Prompts
    (``prompt_...``) are padded on the left and cannot be cut on the right.
    """
    mask = columns.get("attention_mask")
    if mask is None or mask.ndim != 2:
        return frozenset()
    return frozenset(
        name
        for name, x in columns.items()
        if x.shape[:2] == mask.shape and not name.startswith("prompt_")
    )


class Lengths(NamedTuple):
    """The length of every example, and the padded lengths that a program is compiled for."""

    examples: np.ndarray
    """int32 ``[examples]``: number of tokens up to the last real one. An example without real
    tokens counts as full, because attention then averages over all of its padding."""
    full: int
    """Number of tokens of each example as it is stored on the device."""
    most: int
    """The largest number of padded lengths."""
    padded: tuple[int, ...]
    """The padded lengths, ascending; the last one has room for every example."""
    least: int = 0
    """Number of tokens that each step has at least; at most ``full``."""

    @classmethod
    def of(cls, columns: Mapping[str, np.ndarray], most: int) -> "Lengths | None":
        """Returns the lengths of a data set's examples; None if it has no tokens.

        Args:
          most: the largest number of padded lengths; with 0 all steps use the full length.
        """
        if not token_columns(columns):
            return None
        mask = np.asarray(columns["attention_mask"], bool)
        full = mask.shape[1]
        last = full - np.argmax(mask[:, ::-1], axis=1)
        examples = np.where(mask.any(axis=1), last, full).astype(np.int32)
        return cls(examples, full, most, (full,))

    def at_least(self, least: int) -> "Lengths":
        """Returns a copy whose steps have at least ``least`` tokens, if the examples have them."""
        return self._replace(least=min(least, self.full))

    def fitted(self, group: int) -> "Lengths":
        """Returns a copy with padded lengths that are chosen for steps of ``group`` examples.

        They minimise the expected padded length of a step whose examples are drawn at random.
        """
        if self.most == 0 or not len(self.examples):
            return self
        needed = np.maximum(self.examples, max(self.least, 1))
        edges = np.unique(np.minimum(-(-needed // _UNIT) * _UNIT, self.full))
        share = np.searchsorted(np.sort(needed), edges, side="right") / len(needed)
        # Probability of each edge to be the longest of a group.
        longest = np.diff(share**group, prepend=0.0)
        return self._replace(padded=_best(edges, longest, self.most))

    def bucket(self, rows: np.ndarray) -> np.ndarray:
        """Returns the index of the padded length for each step, int32 ``[...]``.

        Args:
          rows: int ``[..., lanes, batch]``, the examples of a step; -1 pads.
        """
        needed = np.where(rows < 0, 0, self.examples[rows])
        longest = needed.max(axis=(-2, -1), initial=self.least)
        return np.searchsorted(self.padded, longest).astype(np.int32)

    def padding_share(self, rows: np.ndarray, bucket: np.ndarray) -> float:
        """Returns the share of padding among the computed tokens.

        Args:
          rows: int ``[steps, lanes, batch]``; -1 pads, and costs as much as a real example.
          bucket: int ``[steps]``.
        """
        computed = rows[0].size * np.asarray(self.padded)[bucket].sum()
        return float(1 - np.where(rows < 0, 0, self.examples[rows]).sum() / max(computed, 1))


def _best(edges: np.ndarray, chance: np.ndarray, most: int) -> tuple[int, ...]:
    """Returns at most ``most`` of the edges, those with the smallest expected padded length.

    The last edge is always among them.

    Args:
      chance: probability that each edge is the one that a step needs, float ``[edges]``.
    """
    below = np.concatenate([[0.0], np.cumsum(chance)])
    # cost[i]: cost of all steps up to edge i, if edge i is the longest one chosen so far.
    cost, chosen = edges * below[1:], [(i,) for i in range(len(edges))]
    best: tuple[float, tuple[int, ...]] = (float(cost[-1]), chosen[-1])
    for _ in range(most - 1):
        # Adds a choice: edge j is chosen below edge i. A step longer than edge j costs edge i.
        further = cost[:, None] + edges[None] * (below[None, 1:] - below[1:, None])
        further = np.where(np.tri(len(edges), k=-1, dtype=bool).T, further, np.inf)
        before = further.argmin(axis=0)
        cost = further.min(axis=0)
        chosen = [(*chosen[j], i) for i, j in enumerate(before)]
        if cost[-1] > (1 - _GAIN) * best[0]:
            break
        best = (float(cost[-1]), chosen[-1])
    return tuple(int(edges[i]) for i in best[1])
