"""What the rows of a run say together: series, totals, best values and guarantees."""

import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fedjax_peft.simulation.rows import (
    field_is_lower_better,
    headline,
    headline_is_lower_better,
    is_personal,
    last_with,
    number,
)
from fedjax_peft.simulation.score_names import Score, of_global, worst_tenth
from fedjax_peft.support.errors import check_known

_COSTS = {"bytes": ("bytes_up", "bytes_down"), "simulated_seconds": ("simulated_seconds",)}
"""Cost -> the fields of a round that are summed; the seconds of the wall clock are in ``time``."""


def series(rows: Sequence[Mapping[str, Any]], x: str, y: str) -> tuple[list[float], list[float]]:
    """Returns the x and y coordinates of a curve, for the rounds that have the field ``y``.

    Args:
        x: ``"round"``, or a cost summed up to and including the round: ``"bytes"`` (up and down,
            all clients), ``"simulated_seconds"`` or ``"wall_seconds"``. Without this cost in any
            row, the curve has no points.

    Raises:
        InputError: ``x`` is another word.
    """
    check_known("axis", x, ["round", *_COSTS, "wall_seconds"])
    spent = [float(row["round"]) for row in rows] if x == "round" else _running_total(rows, x)
    values = [number(row, y) for row in rows]
    # Not strict, because `spent` is empty if no row has the cost.
    points = [(a, b) for a, b in zip(spent, values, strict=False) if b is not None]
    return [a for a, _ in points], [b for _, b in points]


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the figures that describe a run; ``None`` for a figure that its rows do not contain.

    Scores are values of the headline metric.

    Returns:
        A dict with these keys:

        * ``headline``: the metric that the task is judged by;
        * ``rounds``: the last round;
        * ``final_score`` and ``final_round``: the last score on the test set, and its round; the
          score is ``None`` if it is not finite, because an earlier one would hide that;
        * ``best_score`` and ``best_round``: on the test set; of equal scores, the first round;
        * ``personal_score`` and ``global_score``: like ``final_score``, as a mean over clients'
          personal models, and that of the global model;
        * ``test_examples``; for personal models also ``test_count`` and ``test_std``;
        * ``tuned_score``: the last ``tuned_test_...`` score;
        * ``bytes_up``, ``bytes_down``, ``simulated_seconds`` and ``wall_seconds``: totals; the wall
          time is the sum of all entries of ``time``;
        * ``client_rounds`` and ``dropped``: the number of uploads, and of those not finite;
        * ``slot_utilisation``, ``aggregation_error`` and ``aggregation_error_relative``: means over
          rounds;
        * ``epsilon`` and ``delta``: the last guarantee of differential privacy; ``epsilon`` is
          ``inf`` if a mechanism gives none;
        * ``trained``: the number of trained parameters, shared and private;
        * ``client_count``, ``client_mean`` and ``client_weighted``, also with ``_seen`` and
          ``_unseen``; ``client_std`` and ``client_worst``; ``tuned_client_mean`` and
          ``tuned_client_std``: from the last evaluation of clients;
        * ``client_worst_tenth``: the mean over the worst tenth of the clients, rounded up.
    """
    metric = headline(rows)
    test = Score("test", metric)
    field = test.name
    rounds, scores = series(rows, "round", field)
    better = min if headline_is_lower_better(rows) else max
    best = better(range(len(rounds)), key=scores.__getitem__, default=None)
    return {
        "rounds": rows[-1]["round"] if rows else None,
        "headline": metric,
        "final_score": final(rows, field),
        "final_round": last_with(rows, field).get("round"),
        "personal_score": final([row for row in rows if is_personal(row, field)], field),
        "global_score": final(rows, of_global(field)),
        "best_score": None if best is None else scores[best],
        "best_round": None if best is None else int(rounds[best]),
        **{key: _total(_column(rows, key)) for key in ("bytes_up", "bytes_down")},
        "simulated_seconds": _total(_column(rows, "simulated_seconds")),
        "wall_seconds": _total(seconds for row in rows for seconds in _clock(row)),
        "client_rounds": _count(rows, "clients"),
        "dropped": _count(rows, "dropped"),
        **{key: mean(_column(rows, key)) for key in _MEANS},
        **_privacy(rows),
        "test_examples": _last(rows, Score("test", "examples").name),
        "test_count": _last(rows, Score("test", "count").name),
        "test_std": _last(rows, test._replace(statistic="std").name),
        "tuned_score": final(rows, test._replace(tuned=True).name),
        **_of_clients(rows, metric),
        "trained": _trained(rows),
    }


def final(rows: Sequence[Mapping[str, Any]], key: str) -> float | None:
    """Returns a field of the last row that has it; None if it is not finite there."""
    return number(last_with(rows, key), key)


def _privacy(rows: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """Returns the last ε and δ; None without a mechanism, and ε is ``inf`` without a guarantee."""
    last = next((row for row in reversed(rows) if "epsilon" in row), None)
    if last is None:
        return {"epsilon": None, "delta": None}
    epsilon = number(last, "epsilon")
    return {"epsilon": math.inf if epsilon is None else epsilon, "delta": number(last, "delta")}


def _of_clients(rows: Sequence[Mapping[str, Any]], metric: str) -> dict[str, float | None]:
    """Returns the figures of the last evaluation of the clients' models."""
    groups = ("", "seen", "unseen")
    scores = [Score("client", metric, kind, x) for kind in ("mean", "weighted") for x in groups]
    scores += [Score("client", metric, kind) for kind in ("std", "worst", "worst_tenth")]
    scores += [Score("client", metric, kind, tuned=True) for kind in ("mean", "std")]
    fields = {one._replace(metric="").name: one.name for one in scores}
    tested = [row for row in rows if not row.keys().isdisjoint(fields.values())][-1:]
    fields |= {(name := Score("client", "count", group=x).name): name for x in groups}
    found = {name: _last(tested, field) for name, field in fields.items()}
    if found["client_worst_tenth"] is None:  # rows of earlier versions
        found["client_worst_tenth"] = _last_worst_tenth(rows, metric)
    return found


def _last_worst_tenth(rows: Sequence[Mapping[str, Any]], metric: str) -> float | None:
    """Returns the mean of a metric over the worst tenth of the clients of the last test of each."""
    tests = [row["client_tests"] for row in rows if isinstance(row.get("client_tests"), Mapping)]
    values = tests[-1].get(metric) if tests else None
    if not isinstance(values, list):
        return None
    known = [x for value in values if (x := number({metric: value}, metric)) is not None]
    return worst_tenth(known, lower=headline_is_lower_better(rows)) if known else None


def _last(rows: Sequence[Mapping[str, Any]], key: str) -> float | None:
    """Returns the last finite value of a field."""
    return next(reversed(_column(rows, key)), None)


def _described(rows: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Returns the mechanism of differential privacy that row 0 describes; empty without one."""
    found = next((row["privacy"] for row in rows if "privacy" in row), None)
    return found if isinstance(found, Mapping) else {}


def privacy_in_words(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns the differential privacy of a run after its last row; empty without a mechanism."""
    if not (described := _described(rows)):
        return ""
    statement = f"{described.get('name')}: {described.get('statement')}"
    epsilon, delta = (number(rows[-1], name) for name in ("epsilon", "delta"))
    if epsilon is None or delta is None:
        return f"no guarantee of differential privacy. {statement}"
    unit = described.get("unit")
    return f"({epsilon:.4g}, {delta:g})-differential privacy of each {unit}. {statement}"


def privacy_together(runs: Sequence[tuple[Any, Sequence[Mapping[str, Any]]]]) -> list[str]:
    """Returns sentences on the differential privacy of several runs that are all released.

    It is the sum of their ε and δ (basic composition). That needs independent noise, which runs of
    one seed have, and independent draws of the clients or examples if these are counted on, which
    only runs of different seeds have.

    Args:
      runs: (seed, rows) of each run.
    """
    groups: dict[tuple[str, str], list[tuple[Any, Mapping[str, Any], str]]] = {}
    for seed, rows in runs:
        if described := _described(rows):
            statement = str(described.get("statement"))
            compared = re.search(r"It compares [^.]*", statement)
            unit = (str(described.get("unit")), compared[0] if compared else statement)
            groups.setdefault(unit, []).append((seed, rows[-1], statement))
    return [_together(unit, group) for (unit, _), group in groups.items() if len(group) > 1]


def _together(unit: str, runs: Sequence[tuple[Any, Mapping[str, Any], str]]) -> str:
    """Returns a sentence on private runs of one unit with the same neighbours."""
    who = f"The {len(runs)} private runs of each {unit}'s data together"
    numbers = [[number(row, name) for _, row, _ in runs] for name in ("epsilon", "delta")]
    epsilons, deltas = ([x for x in values if x is not None] for values in numbers)
    if len(epsilons) < len(runs) or len(deltas) < len(runs):
        return f"{who} have no guarantee of differential privacy, because one of them has none."
    drawn = [seed for seed, _, statement in runs if "amplifies" in statement]
    if len(set(drawn)) < len(drawn):
        return (
            f"{who} have no stated ε: runs of one seed draw the same clients and examples, so that"
            " the amplification by sampling does not hold for several of them. The ε of a run is"
            " that of its release alone; give each run that is released a seed of its own."
        )
    return (
        f"{who} are ({sum(epsilons):.4g}, {sum(deltas):g})-differentially private, if all are"
        " released or a choice looks at all of them (the sum of their ε and δ)."
    )


def personal_privacy_note(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns why a client's personal model is for that client only; empty if there is no reason.

    A guarantee for clients is about what the server releases. What a client keeps was trained on
    its examples without noise.
    """
    if _described(rows).get("unit") != "client":
        return ""
    return (
        "a client's personal model was trained on its examples without noise, and the run's"
        " guarantee of differential privacy does not cover it. Give it to this client only."
    )


def rounds_to(
    rows: Sequence[Mapping[str, Any]], target: float, metric: str | None = None
) -> int | None:
    """Returns the first round in which a metric reaches ``target``, or ``None``.

    The metric must be at least the target, or at most the target if lower is better. Round 0 is
    before training. A small tolerance allows for float32: an accuracy of 19 / 25 is stored as
    0.7599999905, and reaches 0.76.

    Args:
      metric: by default the headline metric on the test set.
    """
    field = metric or Score("test", headline(rows)).name
    rounds, values = series(rows, "round", field)
    sign = -1 if field_is_lower_better(rows, field) else 1
    enough = sign * target - 1e-6 * max(1.0, abs(target))
    reached = (int(r) for r, v in zip(rounds, values, strict=True) if sign * v >= enough)
    return next(reached, None)


def _trained(rows: Sequence[Mapping[str, Any]]) -> int | None:
    roles = rows[0].get("roles") if rows else None
    if not isinstance(roles, Mapping):
        return None
    return sum(roles.get(role, 0) for role in ("shared", "private"))


_MEANS = ("slot_utilisation", "aggregation_error", "aggregation_error_relative")


def _column(rows: Iterable[Mapping[str, Any]], key: str) -> list[float]:
    return [value for row in rows if (value := number(row, key)) is not None]


def _clock(row: Mapping[str, Any]) -> list[float]:
    """Returns the wall-clock seconds of each phase of a round."""
    phases = row.get("time")
    if not isinstance(phases, Mapping):
        return []
    return [seconds for phase in phases if (seconds := number(phases, phase)) is not None]


def _count(rows: Iterable[Mapping[str, Any]], key: str) -> int:
    """Returns the total length of the lists of a field."""
    return sum(len(row[key]) for row in rows if isinstance(row.get(key), list))


def _running_total(rows: Sequence[Mapping[str, Any]], cost: str) -> list[float]:
    """Returns a cost up to and including each row; an empty list if no row has it."""

    def of(row: Mapping[str, Any]) -> list[float]:
        if cost == "wall_seconds":
            return _clock(row)
        return [x for key in _COSTS[cost] if (x := number(row, key)) is not None]

    spent = [of(row) for row in rows]
    return list(itertools.accumulate(map(sum, spent))) if any(spent) else []


def _total(values: Iterable[float]) -> float | None:
    values = list(values)
    return sum(values) if values else None


def mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
