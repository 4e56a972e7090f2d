"""The time model: simulated seconds of computing and of transfers."""

import contextlib
import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

from fedjax_peft.models.base import Model
from fedjax_peft.models.registry import unused_bytes
from fedjax_peft.numerics import tree
from fedjax_peft.numerics.random import host_rng
from fedjax_peft.support.errors import InputError, check_known

Topology = Literal["parallel", "serial", "shared"]

Preset = Literal["default", "federa", "fedadapters"]

Device = Literal[
    "orin_full",
    "orin_bitfit",
    "orin_adapter",
    "orin_lora",
    "orin_full_deberta",
    "orin_bitfit_deberta",
    "orin_adapter_deberta",
    "orin_lora_deberta",
]

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
    (9_437_184.0, 3.24),  # Table 9, LoRA of rank 64: 2,359,296
    (18_874_368.0, 4.55),  # Table 9, LoRA of rank 128: 4,718,592
    (496_220_160.0, 109.67),  # FedFT: 124,055,040 (a sequence classifier has no pooler)
    (735_326_208.0, 149.98),  # FedFT, DeBERTaV3-base: 183,831,552
)
"""FeDeRA, Tables 8 and 9: bytes of an upload -> seconds of communication.

The paper's WiFi has 20 to 30 Mbit/s, but no single rate gives these seconds: if they are the time
of one direction, the rates are between 3.4 and 39.2 Mbit/s. So the measured seconds are used."""

_STEPS = 8
"""Local steps of FeDeRA's clients on 20 Newsgroups: 113 documents (Table 1) in batches of 16."""

DEVICES: dict[str, float] = {
    "orin_full": 4.59 / _STEPS,
    "orin_bitfit": 3.15 / _STEPS,
    "orin_adapter": 3.29 / _STEPS,
    "orin_lora": 3.27 / _STEPS,
    "orin_full_deberta": 6.31 / _STEPS,
    "orin_bitfit_deberta": 4.36 / _STEPS,
    "orin_adapter_deberta": 4.62 / _STEPS,
    "orin_lora_deberta": 4.54 / _STEPS,
}
"""Seconds of a local step on the Jetson AGX Orin of the FeDeRA paper (Table 8), for RoBERTa-base or
DeBERTaV3-base and 16 documents of 20 Newsgroups. ``full``: all weights are trained; ``bitfit``: the
biases; ``adapter``: Houlsby adapters; ``lora``: LoRA of rank 32."""


class Slowness(Sequence[float]):
    """The slowness of every client. A client's is drawn when it is read, from its own stream."""

    def __init__(self, spread: float, clients: int, seed: int):
        self._spread, self._clients, self._seed = spread, clients, seed

    def __len__(self) -> int:
        return self._clients

    def __getitem__(self, client: Any) -> Any:
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

    The defaults are our choice: 25 Mbit/s each way, 0.4 s latency each way, and half a second for a
    step. The links are the middle of the 20 to 30 Mbit/s of FeDeRA's WiFi, and the step is typical
    of an edge device with a base-size model. They do not reproduce the table of any paper;
    :meth:`preset` returns time models that do.
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
        transfers: Sequence[Sequence[float]] | None = None,
    ) -> "TimeModel":
        """Returns a time model by name, with the given fields replaced.

        Args:
          preset: ``default``; ``federa``, with the communication times of FeDeRA's Tables 8 and 9
            and 8.62 s for the SVD; or ``fedadapters``, with 10 MiB a second (the paper writes MB,
            but its sizes are in MiB), one client after the other, and a first download of the
            model.
          device: seconds per step from a paper, such as ``orin_lora`` (:data:`DEVICES`).
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
          transfers: pairs (bytes, seconds), in place of the bandwidths and the latency.

        Raises:
          InputError: the preset or device does not exist, or a rate cannot be read.
        """
        rates = {"bandwidth_up": bandwidth_up, "bandwidth_down": bandwidth_down}
        rates |= {"server_bandwidth": server_bandwidth}
        own: dict[str, Any] = {
            "seconds_per_step": seconds_per_step,
            "latency": latency,
            "spread": spread,
        }
        own |= {"topology": topology, "preload": preload, "svd_seconds": svd_seconds}
        own |= {"transfers": transfers}
        own |= {name: _rate(name, x) if isinstance(x, str) else x for name, x in rates.items()}
        given: dict[str, Any] = {name: x for name, x in own.items() if x is not None}
        check_known("time model", preset, _PRESETS)
        if device is not None:
            check_known("device", device, DEVICES)
            given.setdefault("seconds_per_step", DEVICES[device])
        if given.keys() & {"bandwidth_up", "bandwidth_down", "latency"}:
            given.setdefault("transfers", ())
        if isinstance(transfers, Iterable):
            pairs = (tuple(pair) if isinstance(pair, Iterable) else pair for pair in transfers)
            given["transfers"] = tuple(pairs)
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
        check_known("topology", self.topology, get_args(Topology))
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
        if not _increase(self.transfers):
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


def _increase(points: Any) -> bool:
    """Returns whether these are pairs of finite numbers, both positive and increasing."""
    try:
        pairs = itertools.pairwise([(0.0, 0.0), *((x, y) for x, y in points)])
        return all(a < c and b < d and math.isfinite(c + d) for (a, b), (c, d) in pairs)
    except (TypeError, ValueError):
        return False


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


def is_number(value: Any) -> bool:
    """Returns whether a value is a finite number and not a bool."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
