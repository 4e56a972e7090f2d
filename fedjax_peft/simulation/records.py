"""What belongs together in a run: its system, its placement, its evaluation and its records.

Each option is written once, here: its name, type, default, check and sentence. ``simulate`` and
``session`` take these records, a config has a table for each (``[system]`` ...), and the reference
of configs, ``--explain`` and the messages are made from them.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from fedjax_peft.contracts import Availability
from fedjax_peft.data.dataset import Clients
from fedjax_peft.engine.computation import Engine
from fedjax_peft.engine.devices.layout import ModelSharding
from fedjax_peft.engine.lanes import Lanes
from fedjax_peft.engine.stores.client_store import ClientPlace
from fedjax_peft.engine.streaming import ExamplesPlace
from fedjax_peft.models.reuse import Reuse
from fedjax_peft.simulation.checks import (
    check_clients,
    check_counts,
    check_functions,
    check_list,
    check_stop,
)
from fedjax_peft.simulation.moment import Listener, Measure
from fedjax_peft.simulation.progress import Phase
from fedjax_peft.simulation.rows import Row
from fedjax_peft.simulation.run import Run
from fedjax_peft.simulation.stopping import Stop
from fedjax_peft.simulation.time_model import TimeModel, is_number
from fedjax_peft.simulation.trackers.base import Tracker, check_tracker
from fedjax_peft.support.checks import check_choice
from fedjax_peft.support.display import show
from fedjax_peft.support.errors import InputError, check_known

Late = Literal["drop", "partial"]
"""What a client does if its work does not end before the deadline."""

Diagnostic = Literal["clients", "local", "variation", "spectrum", "cka", "second_classifier"]
"""An optional measurement, see :attr:`Evaluation.diagnostics`."""


@dataclass(frozen=True, kw_only=True)
class System:
    """The clients' devices and network: their speed, availability and failures.

    ``fp.System(deadline=30.0, late="partial", failure_rate=0.1)``; in a config ``[system]``, where
    ``[time]`` and ``[availability]`` are tables of their own.

    Raises:
      InputError: a value cannot be used.
    """

    time: TimeModel = TimeModel()
    """Gives the simulated seconds."""
    availability: Availability | None = None
    """When clients can take part, such as ``fp.availability.diurnal()``; by default always. Clients
    are drawn from those that are available when they start. A client that leaves before its upload
    has arrived loses its work."""
    client_ranks: Sequence[int] | None = None
    """The LoRA rank of every client (a shorter list is repeated), at most the adapters' rank. A
    client of rank r trains and sends only the first r directions. The other directions add nothing
    to its model and stay as the server sent them."""
    stragglers: float = 1.0
    """With a range of ``epochs`` or ``local_steps``: the share of clients that draw their number. A
    client draws in a round with this probability; otherwise it does the most. FedProx's experiments
    have ``epochs=(1, 20)`` and stragglers of 0, 0.5 and 0.9."""
    failure_rate: float = 0.0
    """The probability that a sampled client drops out of the round. The client has fetched the
    broadcast of the server, but it sends nothing, and its client state does not change."""
    failure_exponent: float = 0.0
    """How failures depend on speed: the odds of a failure are proportional to the client's slowness
    to this power. 0: all clients fail with ``failure_rate``; otherwise the median client does."""
    deadline: float | None = None
    """Simulated seconds after which the server accepts no more uploads. The time model says who is
    late; the other uploads are aggregated."""
    late: Late = "drop"
    """What clients do whose work does not end before the deadline. ``drop``: they send nothing,
    like failed clients. ``partial``: they send what they have learned in the local steps that fit
    before the deadline; a client sends nothing if not a single step fits. The aggregation weights
    stay the same. With privacy whose clients add the noise (``local``, ``distributed``), sending
    nothing means to send the noise alone."""
    nonfinite: Literal["drop", "raise"] = "drop"
    """What to do with an upload that is not finite: ``drop`` leaves it out and names its client in
    the metrics, ``raise`` ends the run with an error."""

    def __post_init__(self) -> None:
        self.time.check()
        rate, exponent = self.failure_rate, self.failure_exponent
        if not is_number(self.stragglers) or not 0 <= self.stragglers <= 1:
            raise InputError(f"stragglers = {show(self.stragglers)} must be a number from 0 to 1.")
        if not is_number(rate) or not 0 <= rate < 1:
            raise InputError(f"failure_rate = {show(rate)} must be a number from 0 to below 1.")
        if not is_number(exponent) or exponent < 0:
            raise InputError(
                f"failure_exponent = {show(exponent)} must be a number from 0 up: the odds of a"
                " failure are proportional to the client's slowness to this power."
            )
        check_choice("nonfinite", self.nonfinite, ("drop", "raise"))
        check_choice("late", self.late, get_args(Late))
        self._check_deadline()
        self._check_ranks()

    def _check_ranks(self) -> None:
        """Makes the ranks a tuple of integers."""
        if self.client_ranks is None:
            return
        try:
            ranks = tuple(map(operator.index, self.client_ranks))
        except TypeError:
            raise InputError(
                f"client_ranks = {show(self.client_ranks)} must be a list of whole numbers, such as"
                " [2, 4, 8]."
            ) from None
        object.__setattr__(self, "client_ranks", ranks)

    def _check_deadline(self) -> None:
        if self.deadline is None:
            if self.late != "drop":
                raise InputError(
                    f"late = {self.late!r} needs a deadline, because without a deadline no client"
                    " is late: give deadline, in simulated seconds."
                )
            return
        if not is_number(self.deadline) or self.deadline <= 0:
            raise InputError(
                f"deadline = {self.deadline!r} must be a positive number of seconds, or None."
            )
        if self.time.seconds_per_step == "measured":
            raise InputError(
                "A deadline needs a time model that tells beforehand who will be late: give"
                " seconds_per_step as a number, not 'measured'."
            )


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where and how a run is computed. It changes speed and memory, and results by rounding only.

    ``fp.Placement(lanes=8, client_state="disk")``; in a config ``[placement]``.

    Raises:
      InputError: a value cannot be used.
    """

    lanes: Lanes = "auto"
    """Clients that run side by side on the device; ``auto`` chooses for speed."""
    devices: int | None = None
    """How many devices share the work; by default all accelerators. Each has a part of the lanes
    and of the state that the clients keep."""
    model_parallel: int = 1
    """How many devices share one copy of the frozen weights; a divisor of ``devices``. By default
    every device holds all of them."""
    model_sharding: ModelSharding = "tensor"
    """How they share it. ``tensor``: each device computes with its part of every matrix.
    ``gather``: each device stores a part; a matrix is put together just before its use, and every
    device has lanes of its own."""
    client_state: ClientPlace = "device"
    """Where the state of all clients is between rounds: ``device``; ``host`` (the host's memory);
    or ``disk`` (a file in ``out``, or without ``out`` a temporary file). With ``host`` and ``disk``
    only the clients of a round are on the device, and those of the next round are read while it
    computes. Checkpoints then only write the clients that have changed."""
    examples: ExamplesPlace = "device"
    """Where the training examples are: ``device``, or ``host``. With ``host`` only the examples of
    a round are on the device, and the columns of the data may be memory-mapped files
    (``numpy.load(path, mmap_mode="r")``)."""
    reuse: Reuse = "none"
    """Whether the hidden states below all trained leaves are computed once for each example and
    kept, because training never changes them. ``exact``: in the compute dtype; ``bfloat16``: in
    bfloat16, half of float32; ``none``: they are computed in every step. It needs adapters in upper
    blocks alone (``fp.lora(layers=[-2, -1])``) and a model without dropout below them. The states
    are where ``examples`` says; with ``host`` they are in a temporary file (``TMPDIR``) that is
    mapped into memory."""
    length_buckets: int = 4
    """For texts: the largest number of padded lengths for which a step is compiled. Each step runs
    at the shortest length that its examples fit in. The lengths are chosen from the data; fewer are
    used if more would not save time. 1 pads all texts to the longest text, 0 keeps the padding of
    the data."""
    engine: Engine = "compiled"
    """``compiled``: a round is one XLA program. ``reference``: a round is a Python loop over
    clients, one at a time and without jit; it is slow, and meant for reading and debugging."""

    def __post_init__(self) -> None:
        lanes = 1 if self.lanes == "auto" else self.lanes
        positive = {"lanes": lanes, "model_parallel": self.model_parallel}
        check_counts(positive, {"length_buckets": self.length_buckets})
        check_choice("placement.reuse", self.reuse, get_args(Reuse))


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """When the model is evaluated and on which data, and the rule that ends the run early.

    ``fp.Evaluation(every=5, stop=fp.early_stop(patience=3))``; in a config ``[evaluation]``, where
    ``[stop]`` is a table of its own.

    Raises:
      InputError: a value cannot be used.
    """

    every: int = 1
    """Rounds between evaluations; the last round is always evaluated."""
    batch_size: int = 64
    """Examples in an evaluation step."""
    test_clients: int = 10
    """The number of clients whose personal models are evaluated on ``test``."""
    client_test: Clients | None = None
    """Examples of every client to evaluate its model on (mean, deviation, worst)."""
    client_validation: Clients | None = None
    """Examples of every client to choose settings by: ``client_validation_accuracy_mean`` ..."""
    diagnostics: Sequence[Diagnostic] = ()
    """Additional measurements in every round; each takes time. ``clients``: every client's training
    loss, accuracy and update norm, and the metrics of its model on its ``client_test`` and
    ``client_validation``. ``local``: in evaluated rounds, the metrics on the test set of each
    participant's model between its local work and the aggregation, such as ``local_accuracy``. The
    local work is done twice in these rounds, and the uploads and states of all clients of the round
    are in memory together. ``variation``: how the global LoRA factors change in magnitude and
    direction from round to round (FeDeRA, Eq 11-14). ``spectrum``: the singular values of their
    product. ``cka``: how similar the representations of the test examples are under the global and
    the private adapter (dual adapters). ``second_classifier``: the test metrics of FedMCP's second
    classifier on the global adapter alone, such as ``test_accuracy_global``; it costs a second pass
    over the test examples."""
    measures: Sequence[Measure] = ()
    """Functions of yours that add fields to the row of every round, such as
    ``lambda moment: {"hour": time.localtime().tm_hour}``; see
    :class:`fedjax_peft.simulation.moment.Moment`."""
    stop: Stop | None = None
    """The rule that ends the run early, such as ``early_stop(target=0.8, patience=5)``. It is a
    function of all rows so far, and returns True or a sentence with the reason if the run should
    stop. It reads only the rows, so a resumed run stops at the same round as an uninterrupted
    one."""

    def __post_init__(self) -> None:
        counts = {"every": self.every, "batch_size": self.batch_size}
        counts |= {"test_clients": self.test_clients}
        check_counts({f"evaluation.{name}": number for name, number in counts.items()}, {})
        for name in ("client_test", "client_validation"):
            if getattr(self, name) is not None:
                check_clients(name, getattr(self, name))
        check_list("diagnostics", self.diagnostics)
        for wanted in self.diagnostics:
            check_known("diagnostic", wanted, get_args(Diagnostic))
        check_functions("measures", self.measures)
        check_stop(self.stop)

    def due(self, round_index: int) -> bool:
        """Returns whether a round has an evaluation. The last round always has one."""
        return round_index % self.every == 0


@dataclass(frozen=True, kw_only=True)
class Records:
    """What a run writes, shows and calls.

    ``fp.Records(checkpoint_every=50, on_round=print)``; in a config ``[records]``.

    Raises:
      InputError: a value cannot be used.
    """

    checkpoint_every: int = 10
    """Rounds between checkpoints; the last round always has one."""
    config: Mapping[str, Any] | None = None
    """Recorded as the run's ``config.toml``. ``{"point": ...}``, the values of a sweep, is added to
    the settings that a run made in Python records."""
    origin: Run | None = None
    """The run that this one starts from, with ``run.trained`` as the model. Clients, server,
    aggregator and upload transforms begin with the states that they had after it (private leaves,
    control variates, what error feedback has not sent yet), if their states have the same form.
    Rounds count from 1. Row 0 records the run as ``origin``, and which of its states begin anew."""
    on_round: Callable[[Row], bool | None] | None = None
    """Called with every row of metrics as it is made (row 0 is before training). If it returns True
    the run ends after this round: its row gains the final evaluation and the field ``stopped``, and
    a checkpoint is written. A resume continues from there; the row then loses the field, and the
    evaluation unless it was due."""
    listeners: Sequence[Listener] = ()
    """Functions of a :class:`fedjax_peft.simulation.moment.Moment`, called after every round, which
    can end the run. If one raises, the run ends after the round, with a checkpoint."""
    trackers: Sequence[Tracker] = ()
    """Where rows go beside ``out``, such as ``[fp.trackers.wandb(), fp.trackers.mlflow()]`` or
    functions of yours with the arguments ``(row, run)``; in a config ``[[trackers]]``. Each is
    called in a thread of its own, so that none stops or slows the run. ``fedjax-peft sync`` sends
    what a tracker has missed."""
    on_phase: Callable[[Phase], None] | None = None
    """Called with a :class:`fedjax_peft.simulation.progress.Phase` at the beginning of each phase
    that takes time: compiling, training a round, evaluating a part of the examples, saving."""
    progress: bool | Literal["auto"] = "auto"
    """Show these phases on stderr: ``"auto"`` in a terminal or notebook only, True everywhere,
    False nowhere."""

    def __post_init__(self) -> None:
        check_counts({"checkpoint_every": self.checkpoint_every}, {})
        if self.origin is not None and not isinstance(self.origin, Run):
            raise InputError(
                f"origin = {show(self.origin)} must be a run. Load it: fp.load_run('runs/mine')."
            )
        check_list("trackers", self.trackers)
        for tracker in self.trackers:
            check_tracker(tracker)
        check_functions("listeners", self.listeners)


RECORDS: dict[str, type] = {
    "system": System,
    "placement": Placement,
    "evaluation": Evaluation,
    "records": Records,
}
"""Argument of ``simulate``, and table of a config -> its record."""
