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

EXECUTION = ("as it fell", "reference", "places", "resume", "sweep", "turn", "mesh")
"""Not counted: they say which comparisons a draw has."""
COUNTED = [name for name in FEATURES if name not in EXECUTION]
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


def cover(coded: np.ndarray, families: Sequence[int], costs: Sequence[float], most: int):
    """Returns the places of draws that have many pairs for their seconds, chosen one by one.

    The first draw of a family pays for its programs, which the others share.
    """
    chosen: list[int] = []
    done = np.zeros_like(met(coded[:1]))
    paid = {
        family: max(c for f, c in zip(families, costs, strict=True) if f == family)
        for family in families
    }
    while len(chosen) < min(most, len(coded)):
        opened = {families[i] for i in chosen}
        best, gain = 0, 0.0
        for i, row in enumerate(coded):
            new = np.count_nonzero(~done[np.ix_(row, row)]) / 2
            price = 0.3 if families[i] in opened else 0.3 + paid[families[i]]
            if i not in chosen and new / price > gain:
                best, gain = i, new / price
        chosen.append(best)
        done |= met(coded[best : best + 1])
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
    parser.add_argument("--most", type=int, default=60)
    given = parser.parse_args()
    lines = [json.loads(line) for line in given.log.read_text().splitlines()]
    good = [line for line in lines if line["word"] in ("equal", "amplified")]
    ran = [draw(given.seed, line["number"]).of for line in good]
    families = [line["number"] // FAMILY for line in good]
    chosen = cover(codes(ran), families, [line["busy"] for line in good], given.most)
    print(sorted(good[i]["number"] for i in chosen))
    print(table([ran[i] for i in chosen]))


if __name__ == "__main__":
    main()
