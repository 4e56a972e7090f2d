"""A run's ``metrics.jsonl``: one JSON object on each line, one line for each round.

:mod:`fedjax_peft.simulation.fields` lists all fields with their units. In short:

A row is a dict with an integer ``round`` (0 = before training); every other field is optional.
``bytes_up``, ``bytes_down`` and ``simulated_seconds`` are the values of one round; this module sums
them over rounds. These fields are lists of client ids: ``clients`` sent an upload; ``dropped`` are
those of them whose upload was not finite; ``partial`` are those that sent a part of their work;
``failed`` and ``late`` were sampled but sent no upload in time. ``skipped_leaves`` are the leaves
that clients did not send.

An evaluated round has ``headline`` (the metric that the task is judged by), ``headline_better``
(``higher`` or ``lower``) and, for each metric such as ``accuracy``:

* ``test_accuracy``: the score of the global model on the test set. If clients have their own
  models, it is the mean over ``test_count`` of them, ``test_accuracy_std`` is their standard
  deviation, and ``global_test_accuracy`` is the score of the shared model. ``test_examples`` is the
  size of the test set (several windows of one question count once).
* ``client_accuracy_mean``, ``_weighted``, ``_std`` and ``_worst``: over the ``client_count``
  clients with their own tests, each with its own model. ``_mean`` gives all clients the same
  weight; ``_weighted`` weights each by the size of its test. ``client_examples`` is the sum of
  these sizes.
* ``validation_accuracy``, ``global_validation_accuracy``, ``client_validation_accuracy_mean`` and
  so on: the same on the validation examples, in the same rounds.
* ``test_backdoor_success`` and ``global_test_backdoor_success``, under a backdoor attack: the share
  of test examples of other classes that are predicted as its target when they have the trigger.
* The same names with the suffix ``_seen`` or ``_unseen``, such as ``client_accuracy_mean_seen``
  and ``client_count_unseen``. Seen clients have trained: an upload of theirs was aggregated in this
  round or before. The private leaves of unseen clients still have their initial values. A group
  without clients has only its count.
* ``tuned_test_accuracy``, ``tuned_client_accuracy_mean`` and so on, in the last round: scores of
  clients' models that were adapted just for this evaluation (FedRep's ``tune_epochs``).
"""

import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from fedjax_peft.support.display import show
from fedjax_peft.support.errors import InputError, nearest
from fedjax_peft.support.files import naming, replace_file
from fedjax_peft.support.nested import flatten

__all__ = [
    "PREEMPTED",
    "Row",
    "append_metrics",
    "field_is_lower_better",
    "fields",
    "finite_or_none",
    "has_ended",
    "has_field",
    "headline",
    "headline_is_lower_better",
    "number",
    "personal_privacy_note",
    "privacy_in_words",
    "privacy_together",
    "read_metrics",
    "rounds_to",
    "seen_clients",
    "series",
    "summary",
    "without_scores",
    "write_metrics",
]

Row: TypeAlias = dict[str, Any]

_AXES = {"bytes": ("bytes_up", "bytes_down"), "simulated_seconds": ("simulated_seconds",)}
"""Cumulative x axis -> the per-round fields that are summed."""


def read_metrics(path: str | os.PathLike[str]) -> list[Row]:
    """Returns the rows of a ``metrics.jsonl``, sorted by round.

    A last line without a line break is the result of a crash and is ignored. NaN and infinite
    values are read as ``None``.

    Raises:
        InputError: the file does not exist, a line is not a row (the message names the line and the
            field), or a round occurs twice.
    """
    path = Path(path)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InputError(f"The metrics {path} cannot be read: {error.strerror}.") from error
    lines = content.split(b"\n")  # the last one has no line break: it is empty or incomplete
    rows: dict[int, Row] = {}
    for n, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = _parse(line)
        except (ValueError, RecursionError) as error:
            if n == len(lines):
                break
            raise InputError(f"{path}, line {n} is not a row of metrics: {error}.") from error
        if row["round"] in rows:
            raise InputError(
                f"{path}, line {n}: round {row['round']} occurs a second time. Two processes have"
                " written to this directory, so its rows are not from one run. Run it again."
            )
        rows[row["round"]] = row
    return [rows[r] for r in sorted(rows)]


def append_metrics(path: str | os.PathLike[str], row: Mapping[str, Any]) -> None:
    """Appends one row; the row is on disk when the function returns.

    Scalars and arrays of numpy or JAX become plain numbers, and non-finite numbers become null. An
    incomplete last line, which a crash can leave, is removed first.
    """
    path = Path(path)
    if _ends_incomplete(path):
        replace_file(path, _lines(read_metrics(path)))
    with naming(path), path.open("ab") as file:
        file.write(_lines([row]))
        file.flush()
        os.fsync(file.fileno())


def write_metrics(path: str | os.PathLike[str], rows: Iterable[Mapping[str, Any]]) -> None:
    """Replaces all rows, atomically."""
    replace_file(path, _lines(rows))


PREEMPTED = "a process was asked to end (SIGTERM)"
"""The field ``stopped`` of a run that a signal has interrupted, in earlier versions."""


def has_ended(rows: Sequence[Mapping[str, Any]], rounds: int) -> bool:
    """Returns whether a run of ``rounds`` rounds has ended with its last row.

    It has done all of them, or a rule has stopped it there. A signal is no rule, and a run that
    went on after it was stopped has not ended.
    """
    if not rows:
        return False
    stopped = rows[-1].get("stopped")
    return rows[-1]["round"] >= rounds or (stopped is not None and stopped != PREEMPTED)


def without_scores(row: Row) -> Row:
    """Returns a row without the fields of an evaluation."""
    return {name: value for name, value in row.items() if not _SCORES.fullmatch(name)}


_SCORES = re.compile(
    r"headline(_better)?|local_.+|(tuned_|global_)*(test|validation)_.+"
    r"|(tuned_)?client_(?!steps$).+"
)


def number(row: Mapping[str, Any], key: str) -> float | None:
    """Returns a field as a finite float; ``None`` if it is missing, null or not a number.

    A dot separates the name of a nested table from that of its field, such as ``time.train_s``.
    """
    value = row.get(key)
    if value is None and "." in key and key not in row:
        table, _, rest = key.partition(".")
        inner = row.get(table)
        return number(inner, rest) if isinstance(inner, Mapping) else None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def has_field(row: Mapping[str, Any], key: str) -> bool:
    """Returns whether a row has a field, which can be null; see :func:`number` for nested names."""
    table, _, rest = key.partition(".")
    inner = row.get(table)
    return key in row or (isinstance(inner, Mapping) and bool(rest) and has_field(inner, rest))


def fields(row: Mapping[str, Any]) -> list[str]:
    """Returns the names of a row's numeric fields, with a dot before those of nested tables."""
    return [key for key in flatten(row) if number(row, key) is not None]


def finite_or_none(value: Any) -> float | None:
    """Returns a float; None (JSON's null) if the value is not finite."""
    return float(value) if math.isfinite(value) else None


def series(rows: Sequence[Mapping[str, Any]], x: str, y: str) -> tuple[list[float], list[float]]:
    """Returns the x and y coordinates of a curve, for the rounds that have the field ``y``.

    Args:
        rows: Rows sorted by round.
        x: ``"round"``, or a cost summed up to and including the round: ``"bytes"`` (up and down,
            all clients) or ``"simulated_seconds"``. Without this cost in any row, the curve has no
            points.
        y: Any numeric field.

    Raises:
        InputError: ``x`` is another word.
    """
    if x == "round":
        spent = [float(row["round"]) for row in rows]
    elif x in _AXES:
        spent = _running_total(rows, _AXES[x])
    else:
        raise InputError(f"There is no axis {x!r}. {nearest(x, ['round', *_AXES])}")
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
        * ``final_score`` and ``final_round``, ``best_score`` and ``best_round``: on the test set;
          of equal best scores, the first round counts;
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
        * ``client_worst_tenth``: the mean over the worst tenth of the clients (at least one), from
          the last ``client_tests``.
    """
    metric = headline(rows)
    rounds, scores = series(rows, "round", f"test_{metric}")
    better = min if headline_is_lower_better(rows) else max
    best = better(range(len(rounds)), key=scores.__getitem__, default=None)
    return {
        "rounds": rows[-1]["round"] if rows else None,
        "headline": metric,
        "final_score": scores[-1] if rounds else None,
        "final_round": int(rounds[-1]) if rounds else None,
        "best_score": None if best is None else scores[best],
        "best_round": None if best is None else int(rounds[best]),
        **{key: _total(_column(rows, key)) for key in ("bytes_up", "bytes_down")},
        "simulated_seconds": _total(_column(rows, "simulated_seconds")),
        "wall_seconds": _total(seconds for row in rows for seconds in _clock(row)),
        "client_rounds": _count(rows, "clients"),
        "dropped": _count(rows, "dropped"),
        **{key: _mean(_column(rows, key)) for key in _MEANS},
        **_privacy(rows),
        "test_examples": _last(rows, "test_examples"),
        "test_count": _last(rows, "test_count"),
        "test_std": _last(rows, f"test_{metric}_std"),
        "tuned_score": _last(rows, f"tuned_test_{metric}"),
        **_of_clients(rows, metric),
        "trained": _trained(rows),
    }


def _privacy(rows: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """Returns the last ε and δ; None without a mechanism, and ε is ``inf`` without a guarantee."""
    last = next((row for row in reversed(rows) if "epsilon" in row), None)
    if last is None:
        return {"epsilon": None, "delta": None}
    epsilon = number(last, "epsilon")
    return {"epsilon": math.inf if epsilon is None else epsilon, "delta": number(last, "delta")}


def _of_clients(rows: Sequence[Mapping[str, Any]], metric: str) -> dict[str, float | None]:
    """Returns the figures of the last evaluation of the clients' models."""
    start = f"client_{metric}_"
    tested = [row for row in rows if any(key.startswith(start) for key in row)][-1:]
    fields = {f"client_{kind}": f"client_{metric}_{kind}" for kind in ("std", "worst")}
    fields |= {f"tuned_client_{k}": f"tuned_client_{metric}_{k}" for k in ("mean", "std")}
    for group in ("", "_seen", "_unseen"):
        fields[f"client_count{group}"] = f"client_count{group}"
        fields |= {
            f"client_{kind}{group}": f"client_{metric}_{kind}{group}"
            for kind in ("mean", "weighted")
        }
    found = {name: _last(tested, field) for name, field in fields.items()}
    return {**found, "client_worst_tenth": _worst_tenth(rows, metric)}


def _worst_tenth(rows: Sequence[Mapping[str, Any]], metric: str) -> float | None:
    """Returns the mean of a metric over the worst tenth of the clients of the last test of each."""
    tests = [row["client_tests"] for row in rows if isinstance(row.get("client_tests"), Mapping)]
    values = tests[-1].get(metric) if tests else None
    if not isinstance(values, list):
        return None
    known = [x for value in values if (x := number({metric: value}, metric)) is not None]
    ordered = sorted(known, reverse=headline_is_lower_better(rows))
    return _mean(ordered[: math.ceil(len(ordered) / 10)])


def _last(rows: Sequence[Mapping[str, Any]], key: str) -> float | None:
    """Returns the last value of a field."""
    return next(reversed(_column(rows, key)), None)


def headline(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns the metric that a run's task is judged by, such as ``accuracy`` or ``f1``."""
    found = next((row["headline"] for row in rows if "headline" in row), None)
    return found if isinstance(found, str) else "accuracy"


def headline_is_lower_better(rows: Sequence[Mapping[str, Any]]) -> bool:
    """Returns whether lower values of the headline metric are better.

    Rows of earlier versions do not contain the direction; the metric's name then decides.
    """
    recorded = next((row["headline_better"] for row in rows if "headline_better" in row), None)
    if recorded is None:
        return headline(rows) in ("loss", "perplexity", "lost_entities")
    return recorded == "lower"


def field_is_lower_better(rows: Sequence[Mapping[str, Any]], name: str) -> bool:
    """Returns whether lower values of a field are better.

    A field of the headline metric, such as ``validation_accuracy``, has its direction. Of the other
    fields, losses, errors and costs are better if lower.
    """
    words = re.split(r"[_.]", name)
    main = headline(rows).split("_")
    if any(words[i : i + len(main)] == main for i in range(len(words))):
        return headline_is_lower_better(rows)
    return not _LOWER.isdisjoint(words)


_LOWER = {
    "backdoor",
    "loss",
    "perplexity",
    "lost",
    "error",
    "bytes",
    "seconds",
    "time",
    "std",
    "steps",
}


def privacy_in_words(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns the differential privacy of a run after its last row; empty without a mechanism."""
    described = next((row["privacy"] for row in rows if "privacy" in row), None)
    if not isinstance(described, Mapping):
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
        described = next((row["privacy"] for row in rows if "privacy" in row), None)
        if isinstance(described, Mapping):
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
    described = next((row["privacy"] for row in rows if "privacy" in row), None)
    if not isinstance(described, Mapping) or described.get("unit") != "client":
        return ""
    return (
        "a client's personal model was trained on its examples without noise, and the run's"
        " guarantee of differential privacy does not cover it. Give it to this client only."
    )


def seen_clients(rows: Iterable[Mapping[str, Any]]) -> set[int]:
    """Returns the clients that have trained: at least one of their uploads was aggregated."""
    seen: set[int] = set()
    for row in rows:
        seen |= {*(row.get("origin") or {}).get("seen", ())}  # in the run that this one starts from
        sent, dropped = (row.get(key) or () for key in ("clients", "dropped"))
        seen |= set(sent) - set(dropped)
    return seen


def rounds_to(rows: Sequence[Mapping[str, Any]], target: float) -> int | None:
    """Returns the first round in which the headline metric reaches ``target``, or ``None``.

    The metric must be at least the target, or at most the target if lower is better. Round 0 is
    before training. A small tolerance allows for float32: an accuracy of 19 / 25 is stored as
    0.7599999905, and reaches 0.76.
    """
    rounds, values = series(rows, "round", f"test_{headline(rows)}")
    sign = -1 if headline_is_lower_better(rows) else 1
    enough = sign * target - 1e-6 * max(1.0, abs(target))
    reached = (int(r) for r, v in zip(rounds, values, strict=True) if sign * v >= enough)
    return next(reached, None)


def _trained(rows: Sequence[Mapping[str, Any]]) -> int | None:
    roles = rows[0].get("roles") if rows else None
    if not isinstance(roles, Mapping):
        return None
    return sum(roles.get(role, 0) for role in ("shared", "private"))


_MEANS = ("slot_utilisation", "aggregation_error", "aggregation_error_relative")


def _parse(line: bytes) -> Row:
    """Returns the row of a line; raises ValueError if the line is not a row."""
    row = json.loads(line.decode(), parse_constant=lambda _: None)
    if not isinstance(row, dict) or type(row.get("round")) is not int:
        raise ValueError("it must be a JSON object with an integer 'round'")
    if not 0 <= row["round"] < 2**31:
        raise ValueError(f"its 'round' is {show(row['round'], 40)}")
    for key, value in row.items():
        if (wrong := _fault(key, value)) is not None:
            raise ValueError(f"its {show(key, 60)} is {show(value, 60)}, but {wrong}")
    return {_RENAMED.get(key) or key: value for key, value in row.items()}


_RENAMED = {"unsent": "skipped_leaves"}
"""Former name of a field, in version 0.1.0 -> present name."""
_CLIENTS = ("clients", "dropped", "failed", "late", "partial")
_TABLES = ("time", "roles", "parameters")
_NUMBERS = re.compile(
    r"((global_|tuned_)*(test|validation)|train|bytes|aggregation_error|simulated)_\w+|steps"
)
"""Fields that must be numbers; a file edited by hand can contain other values."""


def _fault(key: str, value: Any) -> str | None:
    """Returns the requirement that the value of a field violates; None if the value is valid."""
    if _is_huge(value):
        return "it must not contain integers beyond 64 bits"
    if key in _CLIENTS:
        good = isinstance(value, list) and all(type(client) is int for client in value)
        return None if good else "it must be a list of clients' numbers"
    if key in _TABLES:
        good = isinstance(value, dict) and all(_is_number(item) for item in value.values())
        return None if good else "it must be a table of numbers"
    if key in ("headline", "headline_better"):
        good = isinstance(value, str) and re.fullmatch(r"\w{1,60}", value) is not None
        return None if good else "it must be a word"
    if _NUMBERS.fullmatch(key) and not _is_number(value):
        return "it must be a number or null"
    return None


def _is_number(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _is_huge(value: Any) -> bool:
    """Returns whether a value is or contains an integer that is too large for a float."""
    if isinstance(value, dict):
        return any(map(_is_huge, value.values()))
    if isinstance(value, list):
        return any(map(_is_huge, value))
    return isinstance(value, int) and abs(value) >= 2**63


def _lines(rows: Iterable[Mapping[str, Any]]) -> bytes:
    """Returns rows as JSON lines."""
    text = (json.dumps(_plain(row), allow_nan=False, ensure_ascii=False) for row in rows)
    return "".join(f"{line}\n" for line in text).encode()


def _plain(value: Any) -> Any:
    """Returns a value as JSON types: lists instead of arrays, None for non-finite numbers."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if hasattr(value, "tolist"):  # arrays and scalars of numpy and JAX
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _ends_incomplete(path: Path) -> bool:
    """Returns whether the last line has no line break; every complete line ends with one."""
    if not path.exists() or path.stat().st_size == 0:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


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


def _running_total(rows: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> list[float]:
    """Returns the sum of the fields up to each row; an empty list if no row has any of them."""
    if not any(_column(rows, key) for key in keys):
        return []
    totals, total = [], 0.0
    for row in rows:
        total += sum(number(row, key) or 0.0 for key in keys)
        totals.append(total)
    return totals


def _total(values: Iterable[float]) -> float | None:
    values = list(values)
    return sum(values) if values else None


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
