"""What a round costs in bytes and in simulated seconds, derived from roles and dtypes."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from fedjax_peft import tree
from fedjax_peft.models.base import Model
from fedjax_peft.peft.ranks import owned_shares

__all__ = ["TimeModel", "Traffic", "traffic"]


class Traffic(NamedTuple):
    """Bytes that one client moves."""

    up: int
    """Upload of a round."""
    down: int
    """Broadcast of a round."""
    first: int
    """Once, at a client's first round, unless that is the run's first: what it needs to build its
    frozen tree (the initial factors of an SVD start; in the first round they are the broadcast)."""


def traffic(model: Model, names: Mapping[str, Sequence[str]], rank: int | None = None) -> Traffic:
    """Returns a client's traffic.

    Args:
      model: what is trained.
      names: the leaves by role (``tree.assign_roles``).
      rank: the LoRA directions that the client owns; by default all.
    """
    shares = {} if rank is None else owned_shares(model.trainable, rank)
    shared = sum(round(tree.nbytes(model.trainable[n]) * shares.get(n, 1)) for n in names["shared"])
    first = 0
    # Where nothing is shared, nobody talks to a server.
    if shared and model.method is not None and model.method.start_shapes_frozen:
        adapters = [n for n, kind in model.kinds.items() if kind == "adapter"]
        first = tree.nbytes(tree.select(model.trainable, adapters))
    return Traffic(up=shared, down=shared, first=first)


class TimeModel(NamedTuple):
    """Simulated seconds of a round: compute and transfer of its slowest client.

    Defaults: the links of FeDeRA's testbed (25 Mbit/s WiFi, 0.4 s latency each way), and half a
    second a step, an edge device's pace on a base-size model (our choice; set your own).
    """

    seconds_per_step: float = 0.5
    bandwidth_up: float = 25e6
    """Bits a second."""
    bandwidth_down: float = 25e6
    latency: float = 0.4
    """Seconds, each way."""

    def round_seconds(self, steps: int, bytes_up: int, bytes_down: int) -> float:
        """Returns one client's seconds."""
        transfer = 0.0
        if bytes_up or bytes_down:
            up, down = 8 * bytes_up / self.bandwidth_up, 8 * bytes_down / self.bandwidth_down
            transfer = up + down + 2 * self.latency
        return steps * self.seconds_per_step + transfer
