"""The privacy guarantee of a run: its fields in the rows, and what would break it."""

import warnings
from collections.abc import Collection, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax

from fedjax_peft.contracts import Federation, Privacy
from fedjax_peft.engine.session import Session
from fedjax_peft.engine.uploads import start_transform
from fedjax_peft.simulation.moment import Moment
from fedjax_peft.simulation.records import System
from fedjax_peft.simulation.rows import LOWER, Row, finite_or_none
from fedjax_peft.simulation.score_names import Score, is_global, plain
from fedjax_peft.simulation.stopping import Stop
from fedjax_peft.simulation.summaries import privacy_in_words
from fedjax_peft.support.errors import InputError, users_level
from fedjax_peft.support.nested import Watched
from fedjax_peft.transforms.chain import tells_clients

_PUBLIC = ("round", "headline", "headline_better", LOWER, "epsilon", "delta")
"""Fields of a row that do not depend on the training examples."""
_COSTS = ("bytes_", "simulated_seconds", "time")
"""Starts of fields that show who takes part, and how many examples these clients have."""


class Accounted(NamedTuple):
    """A mechanism of differential privacy and the facts that its guarantee depends on."""

    privacy: Privacy
    """Made with the concrete run-time values."""
    federation: Federation
    personal: bool = False
    """Whether clients predict with models of their own."""
    before: str = ""
    """A sentence on the run that this one starts from, whose rounds ε does not count."""

    def is_public(self, name: str) -> bool:
        """Returns whether the guarantee covers decisions that depend on a field of a row.

        Examples are protected in all that a client makes of them, and their numbers are public. A
        mechanism for whole clients protects the released model only, so that scores of personal
        models are not covered.
        """
        by_example, score = self.privacy.unit == "example", Score.read(name)
        if score is None:
            return name in _PUBLIC or (by_example and name.startswith(_COSTS))
        common = plain(score.evaluation) in ("test", "validation")
        released = is_global(name) or by_example or not self.personal
        return common and released and not score.tuned

    def fields(self, rounds: int) -> Row:
        """Returns the fields ``epsilon`` and ``delta`` of the row after a number of rounds.

        ``epsilon`` is None if there is no guarantee.
        """
        if not rounds:
            return {"epsilon": 0.0, "delta": self.privacy.guarantee(self.federation, 1).delta}
        found = self.privacy.guarantee(self.federation, rounds)
        return {"epsilon": finite_or_none(found.epsilon), "delta": found.delta}

    def measure(self, moment: Moment) -> Row:
        """Returns the fields of a row about the guarantee, those that it still lacks."""
        if "epsilon" in moment.row:
            return {}
        return self.fields(moment.round_index) | ({} if moment.info else self.start())

    def start(self) -> Row:
        """Returns the field of row 0 that describes the guarantee."""
        return {
            "privacy": {
                "name": self.privacy.name,
                "unit": self.privacy.unit,
                "statement": self.statement,
            }
        }

    def promise(self, rounds: int) -> str:
        """Returns the guarantee after all rounds, in words."""
        return privacy_in_words([{**self.fields(rounds), **self.start()}])

    @property
    def statement(self) -> str:
        """The guarantee in words."""
        return f"{self.privacy.statement(self.federation)} {self.before}".strip()


def accounted(
    privacy: Privacy | None,
    federation: Federation,
    session: Session,
    system: System,
    *,
    diagnostics: Collection[str],
) -> Accounted | None:
    """Returns the accountant of a run; None for a run without a mechanism.

    It warns of measurements of single clients.

    Args:
      privacy: the mechanism, with concrete values.

    Raises:
      InputError: a setting would break the guarantee.
    """
    if privacy is None:
        return None
    if system.nonfinite == "raise":
        raise InputError(
            "With privacy, nonfinite='raise' would tell everyone that one client's upload was not"
            " finite, and nothing hides that. Use nonfinite='drop': the upload then counts as 0."
        )
    if privacy.unit == "client":
        _check_topology(system)
        _check_transform(session)
    single = [word for word in ("clients", "local") if word in diagnostics]
    if single:
        warnings.warn(
            f"diagnostics={single} writes measurements of single clients without noise to the"
            " metrics. The privacy guarantee covers the released model only: keep the metrics"
            " secret.",
            stacklevel=users_level(),
        )
    return Accounted(privacy, federation, session.personal)


def _check_topology(system: System) -> None:
    """Raises InputError if one client decides whether the uploads of others are in time."""
    topology = system.time.topology
    if system.deadline is not None and topology != "parallel":
        raise InputError(
            f"With the topology {topology!r} of the time model, one client's transfers can make all"
            " others miss the deadline, so that it changes the sum by more than the noise hides."
            " With client-level privacy, use topology = 'parallel', or leave out the deadline."
        )


def _check_transform(session: Session) -> None:
    """Raises InputError for a transform that gives away what it measured of single clients."""
    transform, algorithm = session.setup.transform, session.setup.algorithm
    if transform is None:
        return
    told = "changes the sum, and may use"
    name = transform.name if transform.changes_aggregate else None
    if name is None:
        server = jax.eval_shape(algorithm.server.init, session.leaves[0])
        start = partial(start_transform, transform, algorithm)
        state: Any = jax.eval_shape(start, server)
        told = "has a state that is sent to clients, and may hold"
        name = tells_clients(transform, state.server)
    if name is not None:
        raise InputError(
            f"The server's part of the transform {name!r} {told} what it measured of single"
            " clients, which the noise does not hide. With client-level privacy, use transforms"
            " that work at the clients only."
        )


def watched(stop: Stop | None, private: Accounted | None) -> Stop | None:
    """Returns a stop rule that warns once if it reads what the guarantee does not cover."""
    if stop is None or private is None:
        return stop
    told: set[str] = set()

    def asked(rows: Sequence[Row]) -> bool | str | None:
        watched_rows: list[Any] = [Watched(row) for row in rows]
        answer = stop(watched_rows)
        read = set().union(*(row.read for row in watched_rows))
        found = {name for name in read if not private.is_public(name)}
        if found and not told:
            told.update(found)
            model = "global_test_..., of the shared model" if private.personal else "test_..."
            warnings.warn(
                f"The stop rule reads {sorted(found)}, which depends on the clients' examples or"
                " on who takes part without noise, so that the number of rounds is not covered by"
                f" the privacy guarantee. Use a metric on a public test set ({model}).",
                stacklevel=2,
            )
        return answer

    return asked
