"""Padded lengths: short texts are not computed at the length of the longest.

Texts lie padded to one length on the device. A step reads only as many tokens as its longest
example has, rounded up to one of a few lengths; the round program holds one copy of the step for
each and chooses by a scalar. Attention masks padding, and dropout masks do not depend on how much
of it there is, so results are those of full padding to float32 rounding.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

__all__ = ["Lengths", "token_columns"]

_UNIT = 8
"""Padded lengths are multiples of it."""
_GAIN = 0.05
"""A further length must save this share of the tokens: it costs a compilation of the step."""


def token_columns(columns: Mapping[str, Any]) -> frozenset[str]:
    """Returns the columns with an axis of tokens: those of ``attention_mask``'s shape."""
    mask = columns.get("attention_mask")
    if mask is None or mask.ndim != 2:
        return frozenset()
    return frozenset(name for name, x in columns.items() if x.shape == mask.shape)


class Lengths(NamedTuple):
    """How long every example is, and which padded lengths a program is compiled for."""

    examples: np.ndarray
    """int32 ``[examples]``: tokens up to the last real one. An example without any counts as full:
    attention has nothing to leave out there, and averages over all of its padding."""
    full: int
    """Tokens of an example as it lies on the device."""
    most: int
    """How many padded lengths there may be."""
    padded: tuple[int, ...]
    """The padded lengths, ascending; all examples fit into the last."""

    @classmethod
    def of(cls, columns: Mapping[str, np.ndarray], most: int) -> "Lengths | None":
        """Returns the lengths of a data set's examples, None where it has no tokens.

        Args:
          columns: of the data set.
          most: how many padded lengths there may be; with 0 everything stays as it was padded.
        """
        if not token_columns(columns):
            return None
        mask = np.asarray(columns["attention_mask"], bool)
        full = mask.shape[1]
        last = full - np.argmax(mask[:, ::-1], axis=1)
        examples = np.where(mask.any(axis=1), last, full).astype(np.int32)
        return cls(examples, full, most, (full,))

    def fitted(self, group: int) -> "Lengths":
        """Returns the lengths with the padded ones that suit steps of ``group`` examples.

        They minimise the expected padded length of a step whose examples are drawn at random.
        """
        if self.most == 0 or not len(self.examples):
            return self
        edges = np.unique(np.minimum(-(-np.maximum(self.examples, 1) // _UNIT) * _UNIT, self.full))
        share = np.searchsorted(np.sort(self.examples), edges, side="right") / len(self.examples)
        longest = np.diff(share**group, prepend=0.0)  # the chance to be the longest of a group
        return self._replace(padded=_best(edges, longest, self.most))

    def bucket(self, rows: np.ndarray) -> np.ndarray:
        """Returns the index of the padded length for each step, int32 ``[...]``.

        Args:
          rows: int ``[..., lanes, batch]``, the examples of a step; -1 pads.
        """
        longest = np.where(rows < 0, 0, self.examples[rows]).max(axis=(-2, -1), initial=0)
        return np.searchsorted(self.padded, longest).astype(np.int32)

    def padding_share(self, rows: np.ndarray, bucket: np.ndarray) -> float:
        """Returns which part of the tokens that were computed was padding.

        Args:
          rows: int ``[steps, lanes, batch]``; -1 pads, and costs as much as an example.
          bucket: int ``[steps]``.
        """
        computed = rows[0].size * np.asarray(self.padded)[bucket].sum()
        return float(1 - np.where(rows < 0, 0, self.examples[rows]).sum() / max(computed, 1))


def _best(edges: np.ndarray, chance: np.ndarray, most: int) -> tuple[int, ...]:
    """Returns at most ``most`` of the edges, the last one included, of the least expected length.

    Args:
      edges: candidate lengths, ascending.
      chance: how often each is the one that is needed, float ``[edges]``.
      most: how many to choose.
    """
    below = np.concatenate([[0.0], np.cumsum(chance)])
    # cost[i]: of all steps up to edge i, which is the last one chosen so far.
    cost, chosen = edges * below[1:], [(i,) for i in range(len(edges))]
    best: tuple[float, tuple[int, ...]] = (float(cost[-1]), chosen[-1])
    for _ in range(most - 1):
        # One more, below i: whatever is longer than edge j then costs edge i.
        further = cost[:, None] + edges[None] * (below[None, 1:] - below[1:, None])
        further = np.where(np.tri(len(edges), k=-1, dtype=bool).T, further, np.inf)
        before = further.argmin(axis=0)
        cost = further.min(axis=0)
        chosen = [(*chosen[j], i) for i, j in enumerate(before)]
        if cost[-1] > (1 - _GAIN) * best[0]:
            break
        best = (float(cost[-1]), chosen[-1])
    return tuple(int(edges[i]) for i in best[1])
