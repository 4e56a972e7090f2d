"""Mechanisms of differential privacy, and attacks: wrappers of an algorithm."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from fedjax_peft.contracts.algorithm import Algorithm
from fedjax_peft.contracts.upload import Stages


class Federation(NamedTuple):
    """Facts about a run that privacy mechanisms and attacks depend on. Hashable."""

    clients: int
    """The number of clients in the federation."""
    per_round: int
    """Clients that are drawn for a round; with Poisson sampling, on average."""
    sampling: str
    """How they are drawn: see :data:`fedjax_peft.engine.schedule.Sampling`."""
    batch_size: int
    """Examples in a local step; on average, if they are Poisson-sampled."""
    batch_sampling: str
    """How they are drawn: see :data:`fedjax_peft.engine.schedule.BatchSampling`."""
    most_steps: int
    """The largest number of local steps that a client can take in a round."""
    most_passes: int
    """How often an example of a client is used in a round at most. With Poisson-sampled batches it
    may be used in each of ``most_steps``."""
    fewest_examples: int
    """The examples of the smallest client that has any."""
    columns: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """The columns of the examples: name and shape of each, without the axis of the examples."""
    classes: int = 0
    """The number of label names; 0 for data without labels."""
    workloads: tuple[tuple[int, int], ...] = ()
    """The different pairs (examples, most local steps in a round) of the clients that have
    examples. Empty: only the numbers above are known."""
    overflow_probability: float = 0.0
    """The probability, at most, that a Poisson-sampled batch is too large, and is cut."""
    gradients_per_step: int = 1
    """How many gradients a local step takes of its batch at most."""

    @property
    def sampling_probability(self) -> float:
        """The share of all clients that a round samples, on average."""
        return self.per_round / self.clients


class Guarantee(NamedTuple):
    """What differential privacy a run has given so far. Made by the accountant, on the host."""

    epsilon: float
    """ε; ``inf`` without any guarantee."""
    delta: float
    """δ."""


class Privacy(NamedTuple):
    """A mechanism of differential privacy: a wrapper of any algorithm, and its accountant."""

    name: str
    unit: Literal["client", "example"]
    """Whose data the guarantee protects."""
    protect: Callable[[Algorithm, Federation], Algorithm]
    """Returns the algorithm with the mechanism in it. Raises InputError with the reason if the
    algorithm, or the way in which clients are drawn, does not fit."""
    guarantee: Callable[[Federation, int], Guarantee]
    """(facts, rounds) -> the guarantee after this number of rounds. It runs on the host."""
    statement: Callable[[Federation], str]
    """facts -> the guarantee in words: its unit, its neighbours, its sampling, and who is
    trusted."""


class Wrapped(NamedTuple):
    """An algorithm, and what a run does to its uploads."""

    algorithm: Algorithm
    stages: Stages = Stages()
    """What happens to uploads between the local work and the sum, beside what the algorithm and
    the upload transforms say."""


class Attack(NamedTuple):
    """What hostile clients do: a wrapper of any algorithm."""

    name: str
    apply: Callable[[Algorithm, Federation], Wrapped]
    """Returns the algorithm under attack, and what hostile clients do to their uploads. Raises
    InputError with the reason if it does not fit."""
    hostile: Callable[[int], tuple[int, ...]]
    """The number of clients in the federation -> the numbers of its hostile clients, ascending."""
    triggered: Callable[[Any], Any] | None = None
    """Of a backdoor: a :class:`fedjax_peft.data.Dataset` -> the data set that tests it. The share
    of its examples that a model gets right is the success rate of the backdoor. None: the attack
    has no goal that examples can test."""
    least_length: int = 0
    """The number of tokens that it needs in each local step. A step of shorter texts is padded to
    it, so that it does not depend on the other texts of the step whether an example can change."""
