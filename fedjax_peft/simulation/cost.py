"""The costs of a round in bytes and in simulated seconds.

No size is entered by hand. Bytes are counted from the leaves that the server broadcasts and
receives. A client fetches the leaves that the server has changed since the client's last round.
"""

import bisect
import contextlib
import itertools
import math
import re
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import jax

from fedjax_peft.contracts import Algorithm, Params, PyTree, Transform
from fedjax_peft.models.base import Model
from fedjax_peft.models.registry import unused_bytes
from fedjax_peft.numerics import tree
from fedjax_peft.numerics.random import host_rng
from fedjax_peft.numerics.roles import assign_roles
from fedjax_peft.numerics.summation import lifted_shapes
from fedjax_peft.peft.ranks import cycle_ranks, owned_shares
from fedjax_peft.simulation.rows import Row
from fedjax_peft.support.errors import InputError, nearest
from fedjax_peft.transforms.packing import is_wire, wires_of

__all__ = [
    "DEVICES",
    "FEDERA_TRANSFERS",
    "MB",
    "MIB",
    "Costs",
    "Forecast",
    "Ledger",
    "Slowness",
    "TimeModel",
    "forecast",
    "is_number",
    "preload_bytes",
    "start_seconds",
]

Topology = Literal["parallel", "serial", "shared"]
Preset = Literal["default", "federa", "fedadapters"]
Device = Literal["orin_full", "orin_lora"]

MB, MIB = 8 * 10**6, 8 * 2**20
"""Bits of a decimal megabyte and of a mebibyte: ``10 * MIB`` as a bandwidth is 10 MiB a second."""

_UNITS = {
    **{"bit": 1.0, "kbit": 1e3, "Mbit": 1e6, "Gbit": 1e9},
    **{"kB": MB / 1e3, "MB": float(MB), "GB": MB * 1e3},
    **{"KiB": MIB / 2**10, "MiB": float(MIB), "GiB": MIB * 2.0**10},
}

FEDERA_TRANSFERS = (
    (408_576.0, 0.96),  # FedBF: 102,144 float32 parameters
    (4_718_592.0, 1.68),  # FedLR and FeDeRA, rank 32: 1,179,648
    (7_156_224.0, 2.47),  # FedAP, Houlsby adapters: 1,789,056
    (496_220_160.0, 109.67),  # FedFT: 124,055,040 (a sequence classifier has no pooler)
)
"""FeDeRA, Table 8, RoBERTa-base on 20 Newsgroups: bytes of an upload -> seconds of communication.

The paper's WiFi has 20 to 30 Mbit/s, but no single rate gives these seconds: if they are the time
of one direction, the rates are 3.4, 22.5, 23.2 and 36.2 Mbit/s. So the measured seconds are
used."""

_STEPS = 8
"""Local steps of FeDeRA's clients on 20 Newsgroups: 113 documents (Table 1) in batches of 16."""
DEVICES: dict[str, float] = {
    "orin_full": 4.59 / _STEPS,  # FedFT: seconds of training in a round, Table 8
    "orin_lora": (4.95 - 1.68) / _STEPS,  # FeDeRA: a round without communication, Table 8
}
"""Seconds of a local step on the Jetson AGX Orin of the FeDeRA paper, for RoBERTa-base and 16
documents of 256 tokens. ``orin_full``: all weights are trained. ``orin_lora``: LoRA of rank 32."""


class Slowness(Sequence[float]):
    """The slowness of every client. A client's is drawn when it is read, from its own stream."""

    def __init__(self, spread: float, clients: int, seed: int):
        """Takes ``TimeModel.spread``, the number of clients and the seed of the run."""
        self._spread, self._clients, self._seed = spread, clients, seed

    def __len__(self) -> int:
        """Returns the number of clients."""
        return self._clients

    def __getitem__(self, client: Any) -> Any:
        """Returns the slowness of a client."""
        if not -self._clients <= client < self._clients:
            raise IndexError(client)
        if not self._spread:
            return 1.0
        client = client % self._clients
        return math.exp(self._spread * host_rng(self._seed, "slowness", client).normal())


class TimeModel(NamedTuple):
    """Simulated seconds of a round (local steps and transfers), and of the start of a run.

    A client computes for ``steps * seconds_per_step * slowness`` and transfers for ``8 * up /
    bandwidth_up + 8 * down / bandwidth_down + 2 * latency`` seconds, where
    ``up`` and ``down`` are bytes. The ``topology`` says how the transfers of several clients
    combine.

    The defaults are our choice: 25 Mbit/s each way (the middle of the 20 to 30 Mbit/s of FeDeRA's
    WiFi), 0.4 s latency each way, and half a second for a step, which is typical of an edge device
    with a base-size model. They do not reproduce the table of any paper; :meth:`preset` returns
    time models that do.
    """

    seconds_per_step: float | Literal["measured"] = 0.5
    """Seconds of a local step. ``measured``: the seconds on this machine, which are the training
    time of the round divided by the local steps of all its clients. Then simulated seconds vary
    from run to run."""
    bandwidth_up: float = 25e6
    """Bits a second of a client's link to the server."""
    bandwidth_down: float = 25e6
    """Bits a second of the server's link to a client."""
    latency: float = 0.4
    """Seconds, each way."""
    spread: float = 0.0
    """How much the clients' computing speeds differ: the standard deviation of the logarithm of
    their slowness, whose median is 1. With 0 all clients are equally fast. With 0.5 one client in
    six takes at least 1.6 times as long as the median client."""
    topology: Topology = "parallel"
    """``parallel``: every client has its own link, and a round lasts as long as its slowest client.
    ``serial``: transfers follow one another, so a round lasts for the sum of all transfers plus the
    longest computation. ``shared``: all clients transfer at the same time through the server's
    link, whose rate is ``server_bandwidth``; a transfer ends when both the client's link and the
    server's link have finished."""
    server_bandwidth: float | None = None
    """Bits a second of the server's link, in each direction; for ``shared`` only."""
    preload: bool = False
    """Whether a client also downloads the frozen weights before its first round. They are then in
    ``bytes_down`` too."""
    svd_seconds: float = 0.0
    """Seconds of the SVD of the pretrained weights before the first round. They are counted in
    round 0, and only in runs whose PEFT method initialises the adapters by an SVD."""
    transfers: tuple[tuple[float, float], ...] = ()
    """Measured transfers, pairs (bytes, seconds) with both increasing: the seconds that it takes to
    send and receive this number of bytes each way. They replace the bandwidths and the latency.
    Seconds are interpolated linearly between the pairs and extrapolated linearly after the last
    one. Smaller transfers take the seconds of the first pair."""

    @classmethod
    def preset(
        cls,
        preset: Preset = "default",
        *,
        device: Device | None = None,
        seconds_per_step: float | Literal["measured"] | None = None,
        bandwidth_up: float | str | None = None,
        bandwidth_down: float | str | None = None,
        latency: float | None = None,
        spread: float | None = None,
        topology: Topology | None = None,
        server_bandwidth: float | str | None = None,
        preload: bool | None = None,
        svd_seconds: float | None = None,
    ) -> "TimeModel":
        """Returns a time model by name, with the given fields replaced.

        Args:
          preset: ``default``; ``federa``, with the communication times of FeDeRA's Table 8 and
            8.62 s for the SVD; or ``fedadapters``, with 10 MiB a second (the paper writes MB, but
            its sizes are in MiB), one client after the other, and a first download of the model.
          device: seconds per step from a paper: ``orin_full`` or ``orin_lora`` (:data:`DEVICES`).
          seconds_per_step: seconds of a local step, or ``measured``; replaces those of the device.
          bandwidth_up: bits a second, or a rate with its unit, such as "25 Mbit/s", "10 MB/s"
            (decimal) or "10 MiB/s". If ``bandwidth_up``, ``bandwidth_down`` or ``latency`` is
            given, the measured transfers of a preset are not used.
          bandwidth_down: likewise.
          latency: seconds, each way.
          spread: how much the clients' computing speeds differ; 0 makes them equal.
          topology: ``parallel``, ``serial`` or ``shared``.
          server_bandwidth: the rate of the server's link in a ``shared`` topology, in the form of
            ``bandwidth_up``.
          preload: whether clients download the frozen weights before their first round.
          svd_seconds: seconds of the SVD of the pretrained weights before the first round.

        Raises:
          InputError: the preset or device does not exist, or a rate cannot be read.
        """
        fields = {
            "seconds_per_step": seconds_per_step,
            "bandwidth_up": bandwidth_up,
            "bandwidth_down": bandwidth_down,
            "latency": latency,
            "spread": spread,
            "topology": topology,
            "server_bandwidth": server_bandwidth,
            "preload": preload,
            "svd_seconds": svd_seconds,
        }
        given: dict[str, Any] = {k: v for k, v in fields.items() if v is not None}
        for name in ("bandwidth_up", "bandwidth_down", "server_bandwidth"):
            if isinstance(given.get(name), str):
                given[name] = _rate(name, given[name])
        if preset not in _PRESETS:
            raise InputError(f"There is no time model {preset!r}. {nearest(preset, _PRESETS)}")
        if device is not None:
            if device not in DEVICES:
                raise InputError(f"There is no device {device!r}. {nearest(device, DEVICES)}")
            given.setdefault("seconds_per_step", DEVICES[device])
        if given.keys() & {"bandwidth_up", "bandwidth_down", "latency"}:
            given["transfers"] = ()
        return _PRESETS[preset]._replace(**given)

    def compute_seconds(self, steps: int, slowness: float = 1.0) -> float:
        """Returns the seconds of a client's local steps."""
        assert not isinstance(self.seconds_per_step, str)
        return steps * self.seconds_per_step * slowness

    def transfer_seconds(self, bytes_up: int, bytes_down: int) -> float:
        """Returns the seconds of a client's transfers on its own link; 0 if there are no bytes."""
        if not (bytes_up or bytes_down):
            return 0.0
        if self.transfers:
            return _interpolated(self.transfers, (bytes_up + bytes_down) / 2)
        up, down = 8 * bytes_up / self.bandwidth_up, 8 * bytes_down / self.bandwidth_down
        return up + down + 2 * self.latency

    def round_seconds(
        self, steps: int, bytes_up: int, bytes_down: int, slowness: float = 1.0
    ) -> float:
        """Returns the seconds of a round with one client only."""
        return self.clients_seconds({0: steps}, {0: bytes_up}, {0: bytes_down}, [slowness])[0]

    def clients_seconds(
        self,
        steps: Mapping[int, int],
        up: Mapping[int, int],
        down: Mapping[int, int],
        slowness: Sequence[float],
    ) -> dict[int, float]:
        """Returns when each client of a round has finished, in seconds from the round's start.

        The round ends when its last client has finished. With the topology ``serial``, no client
        finishes before the transfers of all clients have ended.

        Args:
          steps: local steps by client; a missing client makes no steps.
          up: uploaded bytes by client; a missing client uploads nothing.
          down: downloaded bytes by client, for all clients of the round.
          slowness: the slowness of every client of the run.
        """
        compute = {c: self.compute_seconds(steps.get(c, 0), slowness[c]) for c in down}
        own = {c: self.transfer_seconds(up.get(c, 0), down[c]) for c in down}
        if self.topology == "serial":
            return {c: sum(own.values()) + compute[c] for c in down}
        if self.topology == "shared":
            assert self.server_bandwidth is not None
            all_up = 8 * sum(up.values()) / self.server_bandwidth
            all_down = 8 * sum(down.values()) / self.server_bandwidth
            for c, size in down.items():
                if not own[c]:
                    continue
                sent = max(8 * up[c] / self.bandwidth_up, all_up) if up.get(c) else 0.0
                got = max(8 * size / self.bandwidth_down, all_down) if size else 0.0
                own[c] = sent + got + 2 * self.latency
        return {c: own[c] + compute[c] for c in down}

    def slowness(self, clients: int, seed: int) -> list[float]:
        """Returns each client's slowness: its seconds per step over those of the median client."""
        return [*Slowness(self.spread, clients, seed)]

    def check(self) -> None:
        """Raises InputError for a field with an invalid value."""
        for name in ("seconds_per_step", *_BANDWIDTHS, "latency", "spread", "svd_seconds"):
            value = getattr(self, name)
            if name == "seconds_per_step" and value == "measured":
                continue
            if name == "server_bandwidth" and value is None:
                continue
            positive = name in _BANDWIDTHS
            if not is_number(value) or value < 0 or (positive and value == 0):
                kind = "a positive number" if positive else "a number from 0 up"
                other = " or 'measured'" if name == "seconds_per_step" else ""
                raise InputError(f"{name} = {value!r} of the time model must be {kind}{other}.")
        if self.topology not in get_args(Topology):
            advice = nearest(str(self.topology), get_args(Topology))
            raise InputError(f"There is no topology {self.topology!r}. {advice}")
        if (self.topology == "shared") != (self.server_bandwidth is not None):
            raise InputError(
                f"topology = {self.topology!r} with server_bandwidth = {self.server_bandwidth!r}:"
                " server_bandwidth is what the topology 'shared' needs, and only that one."
            )
        if self.topology == "shared" and self.transfers:
            raise InputError(
                "Measured transfers say nothing of a link that clients share: topology = 'shared'"
                " needs bandwidth_up and bandwidth_down."
            )
        pairs = list(itertools.pairwise(((0.0, 0.0), *self.transfers)))
        if any(not (a < c and b < d) for (a, b), (c, d) in pairs):
            raise InputError(
                f"transfers = {self.transfers!r} of the time model must be pairs of bytes and"
                " seconds, both positive and increasing."
            )


_BANDWIDTHS = ("bandwidth_up", "bandwidth_down", "server_bandwidth")
_PRESETS = {
    "default": TimeModel(),
    "federa": TimeModel(svd_seconds=8.62, transfers=FEDERA_TRANSFERS),  # 8.62 s: the paper, on Orin
    "fedadapters": TimeModel(0.5, 10.0 * MIB, 10.0 * MIB, 0.0, topology="serial", preload=True),
}


def start_seconds(time: TimeModel, model: Model) -> float:
    """Returns the simulated seconds before the first round: those of the initial SVD, or 0."""
    starts = model.method is not None and model.method.start_shapes_frozen
    return time.svd_seconds if starts else 0.0


def preload_bytes(time: TimeModel, model: Model) -> int:
    """Returns the bytes that a client downloads before its first round; 0 without ``preload``.

    These are the frozen weights in the dtype of the checkpoint, and the other weights of the
    checkpoint, such as a pooler (:func:`fedjax_peft.models.registry.unused_bytes`).
    """
    return tree.nbytes(model.frozen) + unused_bytes(model.config) if time.preload else 0


def _interpolated(points: Sequence[tuple[float, float]], size: float) -> float:
    """Returns the seconds of a size by linear interpolation; see ``TimeModel.transfers``."""
    if size <= points[0][0] or len(points) == 1:
        return points[0][1]
    (x0, y0), (x1, y1) = next(
        (pair for pair in itertools.pairwise(points) if size <= pair[1][0]), points[-2:]
    )
    return y0 + (y1 - y0) * (size - x0) / (x1 - x0)


def _rate(name: str, text: str) -> float:
    """Returns the bits per second of a rate such as "10 MiB/s"."""
    match = re.fullmatch(r"\s*([0-9.eE+]+)\s*([A-Za-z]+)/s\s*", text)
    if match and match[2] in _UNITS:
        with contextlib.suppress(ValueError):
            return float(match[1]) * _UNITS[match[2]]
    raise InputError(
        f"{name} = {text!r} is no rate: write bits a second, or a number and a unit"
        f" ({', '.join(f'{unit}/s' for unit in _UNITS)}), such as '10 MiB/s'."
    )


class Ledger:
    """Counts the bytes that a client sends and fetches in its next round.

    The ledger records the rounds of each client and of each leaf. Leaves are identified by their
    last dict key. Equal keys, such as a parameter and its control variate, are counted together, so
    they are sent together. A client sends the leaves of an upload that are not skipped in the
    round, or the shares of them that it chose (``Traffic.sent_shares``). It fetches

    * in its first round, the whole broadcast, or its part (``Traffic.received_part``). If the
      initial adapters determine the frozen weights (initialisation by an SVD), the client also
      fetches the initial value of every adapter leaf that is not in the broadcast or has changed
      since;
    * in later rounds, the leaves of the broadcast that the server has changed since the client's
      last round;
    * for relayed leaves (``Traffic.relayed_leaves``), whose uploads the server passes on one by
      one, the uploads of every round since then (in its first round: of all rounds). The client
      computes these leaves of the broadcast from the uploads itself. If it is smaller, the client
      instead fetches these leaves and the sums of all uploads as matrices
      (``ServerUpdate.frozen_delta``). Before any upload is passed on, it fetches the initial
      leaves. It never fetches leaves that it draws itself (``Traffic.redrawn_leaves``).

    Of a LoRA leaf, only the share of the client's own rank is counted. An upload transform replaces
    the sizes of uploads (``Transform.wire``), and clients also fetch what the transform
    broadcasts. It may also replace the sizes of the broadcast (``Transform.down_wire``).
    """

    def __init__(
        self,
        model: Model,
        algorithm: Algorithm,
        server: PyTree,
        clients: int,
        ranks: Sequence[int] | None = None,
        transform: Transform | None = None,
    ):
        """Prepares to count the traffic of a run.

        Args:
          model: the model with its PEFT method.
          algorithm: the algorithm of the run.
          server: the server's state, or its shapes.
          clients: the number of all clients.
          ranks: as ``client_ranks`` of ``simulate``.
          transform: the upload transform, if there is one.
        """
        upload, received = _upload_sizes(algorithm, server, transform)
        if algorithm.aggregator.wire_bytes is not None:
            upload = {_LIFTED: _lifted_bytes(algorithm, server, model.trainable)}
        leaves = jax.eval_shape(algorithm.server.broadcast, server)
        if algorithm.traffic.received_part is not None:
            leaves = jax.eval_shape(algorithm.traffic.received_part, leaves)
        if transform is not None and transform.down_wire is not None:
            leaves = transform.down_wire(leaves, wires_of(leaves))
        broadcast = _sizes(leaves) | received
        self._whole = upload
        of_rank: dict[int | None, tuple[dict, dict]] = {None: (upload, broadcast)}
        for rank in set(ranks or ()):
            shares = owned_shares(model.trainable, rank)
            of_rank[rank] = (_owned(upload, shares), _owned(broadcast, shares))
        self._of_client = [of_rank[rank] for rank in cycle_ranks(ranks or [None], clients)]
        self._start = {}
        # If no leaf is shared, clients and server exchange nothing.
        talks = any(upload.values()) or any(broadcast.values())
        if talks and model.method is not None and model.method.start_shapes_frozen:
            adapters = [n for n, kind in model.kinds.items() if kind == "adapter"]
            self._start = {n: tree.nbytes(model.trainable[n]) for n in adapters}
        traffic = algorithm.traffic
        self._forwarded = {n for n in upload if re.search(traffic.relayed_leaves or r"(?!)", n)}
        drawn = re.compile(traffic.redrawn_leaves or r"(?!)")
        self._redrawn = {n for n in broadcast if drawn.search(n)}
        self._dense: float = math.inf
        if algorithm.server.frozen_delta is not None:
            self._dense = tree.nbytes(jax.eval_shape(algorithm.server.frozen_delta, server))
        self._changed = dict.fromkeys(broadcast, 0)  # leaf -> the last round that changed it
        self._last: dict[int, int] = {}  # client -> the last round that it was in
        self._passed_on: dict[int, int] = {}  # round -> bytes

    def up(
        self,
        client: int,
        skipped_leaves: Collection[str] = (),
        shares: Mapping[str, float] | None = None,
    ) -> int:
        """Returns the bytes of a client's upload without the skipped leaves.

        Args:
          client: the client.
          skipped_leaves: the leaves that clients do not send in the round.
          shares: leaf name -> the share of the leaf that the client sends, if it is known already
            (``Traffic.sent_shares``); other leaves are sent whole, as far as its rank goes.
        """
        sizes = {n: x for n, x in self._of_client[client][0].items() if n not in skipped_leaves}
        sizes |= {n: round(self._whole[n] * x) for n, x in (shares or {}).items() if n in sizes}
        return sum(sizes.values())

    def down(self, client: int) -> int:
        """Returns the bytes that a client fetches at the start of its next round."""
        broadcast = self._of_client[client][1]
        since = self._last.get(client, 0)  # 0 at its first round
        passed_on = sum(size for number, size in self._passed_on.items() if number >= since)
        start = 0
        if not since:
            start = sum(size for name, size in self._start.items() if self._changed.get(name, 1))
        changed = {n: size for n, size in broadcast.items() if self._changed[n] >= since}
        changed = {
            n: x for n, x in changed.items() if n not in self._redrawn or not self._changed[n]
        }
        # Leaves that the client computes from relayed uploads; initial leaves are always fetched.
        made = sum(
            n for name, n in changed.items() if name in self._forwarded and self._changed[name]
        )
        return start + sum(changed.values()) - made + int(min(passed_on, self._dense + made))

    def whole(self, client: int, *, first: bool) -> int:
        """Returns the bytes of the whole broadcast that a client fetches.

        Args:
          client: the client.
          first: whether it also fetches the initial adapters that determine the frozen weights.
        """
        start = sum(size for name, size in self._start.items() if self._changed.get(name, 1))
        return sum(self._of_client[client][1].values()) + (start if first else 0)

    def has_met(self, client: int) -> bool:
        """Returns whether a client has taken part in a round."""
        return client in self._last

    def record(self, row: Mapping[str, Any]) -> None:
        """Records a round: its clients, the accepted uploads and the skipped leaves."""
        clients, dropped = row.get("clients", ()), row.get("dropped", ())
        for client in (*clients, *row.get("failed", ()), *row.get("late", ())):
            self._last[client] = row["round"]
        taken = [client for client in clients if client not in dropped]
        if not taken:
            return  # the server has not changed
        skipped_leaves = row.get("skipped_leaves", ())
        self._changed |= {
            name: row["round"] for name in self._changed if name not in skipped_leaves
        }
        if sent := self._forwarded.difference(skipped_leaves):
            uploads = [self._of_client[client][0] for client in taken]
            self._passed_on[row["round"]] = sum(upload[n] for upload in uploads for n in sent)


class Costs:
    """The costs of a run: bytes from a ledger, and simulated seconds from a time model.

    Args:
      ledger: counts the bytes of each client.
      time: the time model, which gives the simulated seconds.
      slowness: the slowness of every client.
      deadline: simulated seconds after which the server accepts no more uploads; None: no deadline.
      preload: bytes that a client downloads before its first round (:func:`preload_bytes`).
      extra: bytes that are added to every upload and every download.
    """

    def __init__(
        self,
        ledger: Ledger,
        time: TimeModel,
        slowness: Sequence[float],
        deadline: float | None,
        preload: int = 0,
        extra: int = 0,
    ):
        self._ledger, self._time, self._slowness = ledger, time, slowness
        self._deadline = math.inf if deadline is None else deadline
        self._preload, self._extra = preload, extra

    def late(
        self, steps: Mapping[int, int], skipped_leaves: Collection[str] = ()
    ) -> dict[int, int]:
        """Returns the clients that will miss the deadline with all of their steps.

        The value of a client is the number of steps with which it can still upload in time; 0 if it
        cannot upload in time even with a single step. The transfers are those of all clients, also
        of the late ones.

        Args:
          steps: local steps by client.
          skipped_leaves: the leaves that clients do not send in this round.
        """
        up = {c: self.up(c, skipped_leaves) for c in steps}
        down = {c: self.down(c) for c in steps}
        transfers = self._time.clients_seconds({}, up, down, self._slowness)

        def end(client: int, steps: int) -> float:
            compute = self._time.compute_seconds(steps, self._slowness[client])
            return transfers[client] + compute

        fitting = {
            c: bisect.bisect_right(range(1, n + 1), self._deadline, key=partial(end, c))
            for c, n in steps.items()
        }
        return {c: k for c, k in fitting.items() if k < steps[c]}

    def finish_seconds(
        self, steps: Mapping[int, int], skipped_leaves: Collection[str] = ()
    ) -> dict[int, float]:
        """Returns the seconds from the beginning of a round to the end of each client's upload.

        No client works longer than until the deadline.

        Args:
          steps: local steps by client.
          skipped_leaves: the leaves that clients do not send in this round.
        """
        up = {c: self.up(c, skipped_leaves) for c in steps}
        down = {c: self.down(c) for c in steps}
        seconds = self._time.clients_seconds(steps, up, down, self._slowness)
        return {client: min(s, self._deadline) for client, s in seconds.items()}

    def charge(
        self,
        row: Row,
        steps: Mapping[int, int],
        train_seconds: float,
        shares: Mapping[int, Mapping[str, float]] | None = None,
    ) -> Row:
        """Returns bytes and simulated seconds of a round, and records the round in the ledger.

        Failed and late clients have fetched the broadcast, but their uploads are not counted. The
        server waits for late clients until the deadline.

        Args:
          row: the row of the round, with ``clients`` and, if there are any, ``failed``, ``late``
            and ``skipped_leaves``.
          steps: the local steps of the clients of the round.
          train_seconds: wall-clock seconds of these steps on this machine.
          shares: client -> ``Traffic.sent_shares`` of its upload.
        """
        time = self._time
        if time.seconds_per_step == "measured":
            time = time._replace(seconds_per_step=train_seconds / max(sum(steps.values()), 1))
        failed, late = row.get("failed", []), row.get("late", [])
        skipped, shares = row.get("skipped_leaves", ()), shares or {}
        up = {c: self.up(c, skipped, shares.get(c)) for c in row["clients"]}
        down = {c: self.down(c) for c in (*row["clients"], *failed, *late)}
        seconds = time.clients_seconds(steps, up, down, self._slowness)
        slowest = max(seconds.values(), default=0.0)
        self._ledger.record(row)
        return {
            "bytes_up": sum(up.values()),
            "bytes_down": sum(down.values()),
            "simulated_seconds": self._deadline if late else min(slowest, self._deadline),
        }

    def up(
        self,
        client: int,
        skipped_leaves: Collection[str] = (),
        shares: Mapping[str, float] | None = None,
    ) -> int:
        """Returns the bytes of a client's upload; see :meth:`Ledger.up`."""
        return self._ledger.up(client, skipped_leaves, shares) + self._extra

    def down(self, client: int) -> int:
        """Returns the bytes that a client fetches in its next round, including the preload."""
        new = 0 if self._ledger.has_met(client) else self._preload
        return self._ledger.down(client) + new + self._extra

    def fetch(self, client: int, *, first: bool) -> int:
        """Returns the bytes that a client of an asynchronous server fetches for a job.

        The server has usually changed since the client's last job, so it fetches everything.

        Args:
          client: the client.
          first: whether it is its first job.
        """
        preload = self._preload if first else 0
        return self._ledger.whole(client, first=first) + preload + self._extra

    def job_seconds(self, client: int, steps: int, *, first: bool) -> float:
        """Returns the seconds of a job, from the beginning of its download to its upload's end."""
        up, down = self.up(client), self.fetch(client, first=first)
        return self._time.round_seconds(steps, up, down, self._slowness[client])

    def record(self, row: Mapping[str, Any]) -> None:
        """Records a round that was charged before, such as one before a resume."""
        self._ledger.record(row)


class Forecast(NamedTuple):
    """The expected costs of a run, by its time model."""

    bytes_up: int
    """Bytes that all clients upload in all rounds."""
    bytes_down: int
    seconds: float
    """Simulated seconds, including those before the first round."""


def forecast(
    model: Model,
    algorithm: Algorithm,
    *,
    clients: int,
    rounds: int,
    steps: int,
    clients_per_round: int | None = None,
    time_model: TimeModel | None = None,
    whole: bool = False,
    transform: Transform | None = None,
) -> Forecast:
    """Returns the bytes and simulated seconds of a run, without running it.

    Clients take turns, and all leaves of an upload are sent in every round.

    Args:
      model: the model with its method; shapes suffice (``peft.base.abstract_model``).
      algorithm: the algorithm; the learning rate of its optimizer does not matter.
      clients: the number of all clients.
      rounds: communication rounds.
      steps: local steps of a client in a round.
      clients_per_round: clients in a round; None: all clients.
      time_model: by default ``TimeModel()``.
      whole: add the whole checkpoint, frozen weights included, to every transfer, because some
        frameworks send it (and FedAdapters counts full fine-tuning in this way).
      transform: the upload transform, if there is one.
    """
    time = time_model or TimeModel()
    time.check()
    names = assign_roles(model.kinds, algorithm.roles)
    shared = tree.select(model.trainable, names["shared"])
    server = jax.eval_shape(algorithm.server.init, shared)
    ledger = Ledger(model, algorithm, server, clients, transform=transform)
    checkpoint = preload_bytes(time._replace(preload=True), model)
    preload, extra = (0, checkpoint) if whole else (preload_bytes(time, model), 0)
    slowness = Slowness(time.spread, clients, seed=0)
    costs = Costs(ledger, time, slowness, None, preload, extra)
    total, per_round = Forecast(0, 0, start_seconds(time, model)), clients_per_round or clients
    for number in range(1, rounds + 1):
        chosen = [(number * per_round + i) % clients for i in range(per_round)]
        row: Row = {"round": number, "clients": chosen, "dropped": []}
        row = costs.charge(row, dict.fromkeys(chosen, steps), 0.0)
        total = Forecast(
            total.bytes_up + row["bytes_up"],
            total.bytes_down + row["bytes_down"],
            total.seconds + row["simulated_seconds"],
        )
    return total


def _sizes(shapes: PyTree) -> dict[str, int]:
    """Returns leaf name (last dict key) -> bytes; leaves of the same name are added up.

    Args:
      shapes: of arrays, or the :class:`fedjax_peft.contracts.Wire` of each leaf.
    """
    sizes: dict[str, int] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(shapes, is_leaf=is_wire):
        keys = [key.key for key in path if isinstance(key, jax.tree_util.DictKey)]
        name = str(keys[-1]) if keys else ""
        sizes[name] = sizes.get(name, 0) + (leaf.nbytes if is_wire(leaf) else tree.nbytes(leaf))
    return sizes


def _upload_sizes(
    algorithm: Algorithm, server: PyTree, transform: Transform | None
) -> tuple[dict[str, int], dict[str, int]]:
    """Returns leaf name -> bytes of an upload, and the same of the transform's broadcast."""
    template = jax.eval_shape(algorithm.server.unchanged, server)
    if transform is None:
        return _sizes(template), {}
    change = algorithm.change_part(template)
    sizes = _sizes(change)
    if transform.wire is not None:
        sizes = _sizes(transform.wire(change, wires_of(change)))
    field = algorithm.traffic.change_field
    rest = {} if field is None else {n: x for n, x in template.items() if n != field}
    others = _sizes(rest)
    upload = {n: sizes.get(n, 0) + others.get(n, 0) for n in {**sizes, **others}}
    received = jax.eval_shape(lambda x: transform.broadcast(transform.init(x)), change)
    return upload, {_RECEIVED: tree.nbytes(received)} if tree.nbytes(received) else {}


def _lifted_bytes(algorithm: Algorithm, server: PyTree, leaves: Params) -> int:
    """Returns the bytes of an upload that its client lifts before it sends it."""
    aggregator, fixed = algorithm.aggregator, jax.eval_shape(lambda: leaves)
    template = jax.eval_shape(algorithm.server.unchanged, server)
    assert aggregator.wire_bytes is not None
    return aggregator.wire_bytes(lifted_shapes(aggregator, template, fixed))


_LIFTED = "lifted upload"
"""The name under which the ledger counts an upload that its client lifts before it sends it."""
_RECEIVED = "upload transform"
"""The name under which the ledger counts the broadcast of an upload transform."""


def _owned(sizes: Mapping[str, int], shares: Mapping[str, Any]) -> dict[str, int]:
    return {name: round(size * shares.get(name, 1)) for name, size in sizes.items()}


def is_number(value: Any) -> bool:
    """Returns whether a value is a finite number and not a bool."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
