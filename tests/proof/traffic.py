"""The bytes of a run, counted from shapes, independently of the package's own count."""

import re

from built import RANKS, Built
from draws import Draw

import fedjax_peft as fp

__all__ = ["counted"]

PLAIN = (
    *("apfl", "ditto", "fedadagrad", "fedadam", "fedavg", "fedavgm", "fedbabu", "feddyn"),
    *("fednova", "fedper", "fedprox", "fedrep", "fedsa", "fedyogi", "ffa", "local", "moon"),
    *("pfedme", "q_fedavg", "scaffold"),
)
"""Algorithms whose clients send what is shared, and receive the same."""
OTHERWISE = ("fra", "flexlora", "ilora", "flora_na", "lora_fair", "hetlora", "raflora")
"""Aggregators that may send something else."""
PRIVATE = {
    "local": "",
    "ffa": r"lora_?a$|\.a$|lora_A",
    "fedsa": r"lora_?b$|\.b$|lora_B",
}
"""Algorithm -> the names of leaves that do not travel."""
OWN_HEADS = ("fedbabu", "fedper", "fedrep", "fedsa")
"""Algorithms whose heads are not shared unless it is asked for."""


def counted(built: Built, run: fp.Run) -> list[tuple[int, int]] | None:
    """Returns (bytes_up, bytes_down) of each round; None if the traffic is not plain."""
    draw = built.draw
    sums = (draw["privacy"] or "example").startswith(("example", "paper"))
    aggregator = (draw["aggregator"] or "").partition("(")[0]
    if draw["transform"] or draw["second transform"] or draw["asynchronous"] or draw["space"]:
        return None
    plain = draw["algorithm"] in PLAIN and draw["peft"] != "lora_svd"
    if not plain or not sums or aggregator in OTHERWISE:
        return None
    twice = 2 if draw["algorithm"] == "scaffold" else 1
    of = [twice * _bytes(built, client) for client in range(len(built.sizes))]
    # FedNova's clients send the number of steps of each leaf, too.
    leaves = sum(_travels(draw, leaf, kind) for leaf, kind in _moving(built))
    extra = {"fednova": 4 * leaves, "q_fedavg": 4}.get(str(draw["algorithm"]), 0)
    last: dict[int, int] = {}
    changed, rows = 0, []
    for row in run.metrics[1:]:
        here = [*row["clients"], *row.get("failed", ()), *row.get("late", ())]
        up = sum(of[c] + extra for c in row["clients"])
        down = sum(of[c] for c in here if c not in last or changed >= last[c])
        last |= dict.fromkeys(here, row["round"])
        if [c for c in row["clients"] if c not in row["dropped"]]:
            changed = row["round"]
        rows.append((up, down))
    return rows


def _bytes(built: Built, client: int) -> int:
    """Returns the bytes of a client's upload."""
    draw, model = built.draw, built.model
    ranks, full = built.options["system"].client_ranks, RANKS.get(draw["peft"], 2)
    total = 0
    for leaf, kind in _moving(built):
        if not _travels(draw, leaf, kind):
            continue
        x, size = model.trainable[leaf], model.trainable[leaf].size
        if ranks and kind == "adapter" and "lora" in leaf.lower() and x.ndim >= 2:
            size = size * ranks[client % len(ranks)] // full
        total += 4 * size
    return total


def _moving(built: Built) -> list[tuple[str, str]]:
    """Returns the leaves and their kinds, without fixed ones, such as a scale."""
    return [item for item in built.model.kinds.items() if item[1] != "fixed"]


def _travels(draw: Draw, leaf: str, kind: str) -> bool:
    usual = "private" if draw["algorithm"] in OWN_HEADS else "shared"
    if kind == "head" and (draw["head"] or usual) != "shared":
        return False
    private = PRIVATE.get(draw["algorithm"])
    return private is None or not re.search(private, leaf)
