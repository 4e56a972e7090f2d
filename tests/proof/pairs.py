"""Which pairs of values of two features ran together, and few draws that have most of them.

python tests/proof/pairs.py LOG    # chooses the cover of test_machine.py from a log's draws
"""

import argparse
import functools
import itertools
import json
import pathlib
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from draws import FAMILY, FEATURES, OWN_PEFT, draw

__all__ = ["codes", "cover", "met", "possible", "table"]

COUNTED = [name for name in FEATURES if name not in ("as it fell", "mesh")]
DRAWS = 8000
"""A pair that none of the first so many draws of seed 0 has cannot be drawn, or hardly ever."""


def codes(draws: Iterable[Mapping]) -> np.ndarray:
    """Returns each draw's values as numbers of distinct (feature, value), ``[draws, features]``."""
    return np.array([[_numbers()[name, one[name]] for name in COUNTED] for one in draws], int)


def met(coded: np.ndarray) -> np.ndarray:
    """Returns which values ran together: bool ``[values, values]``."""
    here = np.zeros((len(coded), len(_numbers())), np.float32)
    np.put_along_axis(here, coded, 1, 1)
    together = here.T @ here > 0
    return together & ~_same_feature()


@functools.cache
def possible() -> np.ndarray:
    """Returns which values can be drawn together: bool ``[values, values]``."""
    return met(codes(draw(0, number) for number in range(0, DRAWS)))


def table(ran: Sequence[Mapping]) -> str:
    """Returns a table: for each feature the values that ran, and the share of its pairs."""
    can = possible()
    did = met(codes(ran)) if ran else np.zeros_like(can)
    can = can | did
    lines = ["| feature | values run | of | pairs run | of | share |", "|---|---|---|---|---|---|"]
    for name in COUNTED:
        rows = [number for (feature, _), number in _numbers().items() if feature == name]
        counts = (did[rows].any(1).sum(), can[rows].any(1).sum(), did[rows].sum(), can[rows].sum())
        lines.append(f"| {name} | " + " | ".join(map(str, counts)) + f" | {_share(*counts[2:])} |")
    total = did.sum() // 2, can.sum() // 2
    lines.append(f"\n{total[0]:,} of {total[1]:,} pairs that are drawn: {_share(*total)}")
    return "\n".join(lines)


def cover(
    coded: np.ndarray, families: Sequence[int], costs: Sequence[float], seconds: float, most: int
) -> list[int]:
    """Returns the places of draws that have many new pairs for their seconds, chosen one by one.

    The first chosen draw of a family pays for the programs, as its costliest draw did. A value that
    no draw has yet counts as many pairs, so that most values run.
    """
    first: dict[int, float] = {}
    for family, cost in zip(families, costs, strict=True):
        first[family] = max(cost, first.get(family, 0.0))
    chosen: list[int] = []
    done = np.zeros_like(met(coded[:1]))
    while len(chosen) < most:
        opened = {families[i] for i in chosen}
        priced = zip(families, costs, strict=True)
        prices = np.array([cost + (0 if f in opened else first[f]) for f, cost in priced])
        pairs = np.array([np.count_nonzero(~done[np.ix_(row, row)]) for row in coded])
        new = pairs + 2 * coded.shape[1] * np.array([np.sum(~done[row].any(1)) for row in coded])
        worth = np.where(prices <= seconds, new / (1 + prices), -1)
        worth[chosen] = -1
        best = int(worth.argmax())
        if worth[best] < 0:
            break
        seconds -= prices[best]
        chosen.append(best)
        done |= met(coded[[best]])
    return chosen


@functools.cache
def _numbers() -> dict[tuple, int]:
    """Returns (feature, value) -> its number; some algorithms have values that nothing else has."""
    values = itertools.chain(
        ((name, value) for name in COUNTED for value in FEATURES[name]),
        (("model", "two"), *(("peft", name) for name in sorted(set(OWN_PEFT.values())))),
    )
    return {pair: number for number, pair in enumerate(dict.fromkeys(values))}


@functools.cache
def _same_feature() -> np.ndarray:
    names = np.array([name for name, _ in _numbers()])
    return names[:, None] == names


def _share(part: int, whole: int) -> str:
    return f"{100 * part / max(whole, 1):.0f} %"


def main() -> None:
    """Prints the numbers of a cover."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("log", type=pathlib.Path)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--most", type=int, default=60)
    given = parser.parse_args()
    lines = [json.loads(line) for line in given.log.read_text().splitlines()]
    good = [line for line in lines if line["word"] in ("equal", "amplified")]
    ran = [draw(given.seed, line["number"]).of for line in good]
    families = [line["number"] // FAMILY for line in good]
    costs = [line["busy"] for line in good]
    chosen = cover(codes(ran), families, costs, given.seconds, given.most)
    print(sorted(good[i]["number"] for i in chosen))
    print(table([ran[i] for i in chosen]))


if __name__ == "__main__":
    main()
