"""A run's metrics: one JSON object a line, one line a round, and what is read off them.

All fields, with their units, are in :mod:`fedjax_peft.fields`. In short:

A row is a dict with an integer ``round`` (0 = before training); every other field is optional.
``bytes_up``, ``bytes_down`` and ``simulated_seconds`` are per round and are accumulated here. Lists
of client ids: ``clients`` (who sent an upload), of them ``dropped`` (not finite), beside them
``failed`` and ``late`` (not heard). ``skipped_leaves`` are the leaves that clients did not send.

An evaluated round has ``headline`` (the metric that the task is judged by), ``headline_better``
(``higher`` or ``lower``) and, for each metric such as ``accuracy``:

* ``test_accuracy``: of the global model on the test set; where clients have models of their own,
  the mean over ``test_count`` of these, ``test_accuracy_std`` is their standard deviation, and
  ``global_test_accuracy`` is of the shared model.
  ``test_examples`` is the size of the test set (windows of one question count once).
* ``client_accuracy_mean``, ``_weighted``, ``_std`` and ``_worst``: over the ``client_count``
  clients with a test of their own, each with its model. The mean counts all clients the same, and
  ``_weighted`` counts each by the size of its test; ``client_examples`` is their sum.
* The same names with ``_seen`` or ``_unseen`` at the end, such as ``client_accuracy_mean_seen``
  and ``client_count_unseen``: of the clients that have trained (an upload of theirs was aggregated
  in this round or an earlier one), and of the others, whose private leaves still have their initial
  values. A group without clients has only its count.
* ``tuned_test_accuracy``, ``tuned_client_accuracy_mean`` and so on, in the last round: of clients'
  models that were adapted just for this evaluation (FedRep's ``tune_epochs``).
"""

import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from fedjax_peft.display import show
from fedjax_peft.errors import InputError, nearest
from fedjax_peft.files import naming, replace_file

__all__ = [
    "Row",
    "append_metrics",
    "finite_or_none",
    "headline",
    "headline_is_lower_better",
    "number",
    "read_metrics",
    "rounds_to",
    "seen_clients",
    "series",
    "summary",
    "truncate_metrics",
]

Row: TypeAlias = dict[str, Any]

_AXES = {"bytes": ("bytes_up", "bytes_down"), "simulated_seconds": ("simulated_seconds",)}
"""Cumulative x axis -> the per-round fields it adds up."""


def read_metrics(path: str | os.PathLike[str]) -> list[Row]:
    """Returns the rows of a ``metrics.jsonl``, in order of rounds.

    A last line without its line break was torn by a crash and is ignored; NaN and infinities read
    as ``None``.

    Raises:
        InputError: if there is no such file, another line is not a row (the line and the field are
            named), or a round occurs twice.
    """
    path = Path(path)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InputError(f"The metrics {path} cannot be read: {error.strerror}.") from error
    lines = content.split(b"\n")  # the last one has no line break: it is empty, or torn
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
                " run in this directory and mixed their rows, so it holds no result: run again."
            )
        rows[row["round"]] = row
    return [rows[r] for r in sorted(rows)]


def append_metrics(path: str | os.PathLike[str], row: Mapping[str, Any]) -> None:
    """Appends one row and returns when it is on disk.

    Scalars and arrays of numpy or JAX become plain numbers, non-finite numbers become null. A line
    that a crash tore is removed first, so that it cannot end up in the middle of the file.
    """
    path = Path(path)
    if _is_torn(path):
        replace_file(path, _lines(read_metrics(path)))
    with naming(path), path.open("ab") as file:
        file.write(_lines([row]))
        file.flush()
        os.fsync(file.fileno())


def truncate_metrics(path: str | os.PathLike[str], last_round: int) -> None:
    """Keeps the rows with ``round <= last_round``, atomically; does nothing if there is no file."""
    path = Path(path)
    if path.exists():
        rows = [row for row in read_metrics(path) if row["round"] <= last_round]
        replace_file(path, _lines(rows))


def number(row: Mapping[str, Any], key: str) -> float | None:
    """Returns a field as a finite float, or ``None`` if it is missing, null or no number."""
    value = row.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def finite_or_none(value: Any) -> float | None:
    """Returns a float, None (JSON's null) if it is not finite."""
    return float(value) if math.isfinite(value) else None


def series(rows: Sequence[Mapping[str, Any]], x: str, y: str) -> tuple[list[float], list[float]]:
    """Returns the points of a curve, for the rounds that have a ``y``.

    Args:
        rows: Rows in order of rounds.
        x: ``"round"``, or what has been spent up to and with the round: ``"bytes"`` (up and down,
            all clients) or ``"simulated_seconds"``. No points if no row has the field.
        y: Any numeric field.

    Raises:
        InputError: if ``x`` is none of these.
    """
    if x == "round":
        spent = [float(row["round"]) for row in rows]
    elif x in _AXES:
        spent = _running_total(rows, _AXES[x])
    else:
        raise InputError(f"No axis is called {x!r}. {nearest(x, ['round', *_AXES])}")
    values = [number(row, y) for row in rows]
    # Not strict: nothing was spent where no row has the field.
    points = [(a, b) for a, b in zip(spent, values, strict=False) if b is not None]
    return [a for a, _ in points], [b for _, b in points]


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the figures that describe a run; ``None`` for what its rows do not tell.

    Returns:
        ``headline`` (the metric that the task is judged by), ``rounds`` (the last one),
        ``final_score`` and ``final_round``, ``best_score`` and ``best_round`` (its values on the
        test set, fractions; the first round on a tie), ``bytes_up``,
        ``bytes_down``, ``simulated_seconds`` and ``wall_seconds`` (totals; wall time adds up all
        entries of a row's ``time``), ``client_rounds`` (how many times a client took part),
        ``dropped`` (uploads), ``slot_utilisation``, ``aggregation_error`` and
        ``aggregation_error_relative`` (means over rounds), the ``trained`` parameters (shared and
        private ones), ``test_examples``, of personal models ``test_count`` and ``test_std`` of the
        headline metric, and of the last evaluation of clients ``client_count``, ``client_mean``,
        ``client_weighted``, ``client_std`` and ``client_worst`` of the headline metric, the first
        three also of the clients ``_seen`` and ``_unseen`` (see the top).
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
        "test_examples": _last(rows, "test_examples"),
        "test_count": _last(rows, "test_count"),
        "test_std": _last(rows, f"test_{metric}_std"),
        **_of_clients(rows, metric),
        "trained": _trained(rows),
    }


def _of_clients(rows: Sequence[Mapping[str, Any]], metric: str) -> dict[str, float | None]:
    """Returns the figures of the last evaluation of the clients' models."""
    start = f"client_{metric}_"
    tested = [row for row in rows if any(key.startswith(start) for key in row)][-1:]
    fields = {f"client_{kind}": f"client_{metric}_{kind}" for kind in ("std", "worst")}
    for group in ("", "_seen", "_unseen"):
        fields[f"client_count{group}"] = f"client_count{group}"
        fields |= {
            f"client_{kind}{group}": f"client_{metric}_{kind}{group}"
            for kind in ("mean", "weighted")
        }
    return {name: _last(tested, field) for name, field in fields.items()}


def _last(rows: Sequence[Mapping[str, Any]], key: str) -> float | None:
    """Returns the last value of a field."""
    return next(reversed(_column(rows, key)), None)


def headline(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns the metric that a run's task is judged by, such as ``accuracy`` or ``f1``."""
    found = next((row["headline"] for row in rows if "headline" in row), None)
    return found if isinstance(found, str) else "accuracy"


def headline_is_lower_better(rows: Sequence[Mapping[str, Any]]) -> bool:
    """Returns whether less of the headline metric is better.

    Rows of earlier versions do not tell; then it is decided by the metric's name.
    """
    told = next((row["headline_better"] for row in rows if "headline_better" in row), None)
    if told is None:
        return headline(rows) in ("loss", "perplexity", "lost_entities")
    return told == "lower"


def seen_clients(rows: Iterable[Mapping[str, Any]]) -> set[int]:
    """Returns the clients of which at least one upload was aggregated."""
    seen: set[int] = set()
    for row in rows:
        sent, dropped = (row.get(key) or () for key in ("clients", "dropped"))
        seen |= set(sent) - set(dropped)
    return seen


def rounds_to(rows: Sequence[Mapping[str, Any]], target: float) -> int | None:
    """Returns the first round whose headline metric has reached ``target``, or ``None``.

    That is at or above it, or at or below it where less is better. Round 0 is before training.
    Metrics are rounded to float32: 19 of 25 reach 0.76, although that is 0.7599999905 there.
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
    """Returns the row of one line; raises ValueError if it is none."""
    row = json.loads(line.decode(), parse_constant=lambda _: None)
    if not isinstance(row, dict) or type(row.get("round")) is not int:
        raise ValueError("it must be a JSON object with an integer 'round'")
    if not 0 <= row["round"] < 2**31:
        raise ValueError(f"its 'round' is {show(row['round'], 40)}")
    for key, value in row.items():
        if (wrong := _fault(key, value)) is not None:
            raise ValueError(f"its {show(key, 60)} is {show(value, 60)}, and {wrong}")
    return {_RENAMED.get(key) or key: value for key, value in row.items()}


_RENAMED = {"unsent": "skipped_leaves"}
"""Fields of rows that version 0.1.0 wrote -> their present names."""
_CLIENTS = ("clients", "dropped", "failed", "late")
_TABLES = ("time", "roles", "parameters")
_NUMBERS = re.compile(r"((global_|tuned_)*test|train|bytes|aggregation_error|simulated)_\w+|steps")
"""Fields of numbers; a file that was edited may hold anything under these names."""


def _fault(key: str, value: Any) -> str | None:
    """Returns what a field must be, if its value is something else that no reader could use."""
    if _is_huge(value):
        return "it must not hold whole numbers beyond 64 bits"
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
    """Returns whether a value is or holds a whole number that no float can stand for."""
    if isinstance(value, dict):
        return any(map(_is_huge, value.values()))
    if isinstance(value, list):
        return any(map(_is_huge, value))
    return isinstance(value, int) and abs(value) >= 2**63


def _lines(rows: Iterable[Mapping[str, Any]]) -> bytes:
    """Returns rows in the form they have on disk."""
    text = (json.dumps(_plain(row), allow_nan=False, ensure_ascii=False) for row in rows)
    return "".join(f"{line}\n" for line in text).encode()


def _plain(value: Any) -> Any:
    """Returns what JSON can hold: no arrays, no non-finite numbers."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if hasattr(value, "tolist"):  # arrays and scalars of numpy and JAX
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _is_torn(path: Path) -> bool:
    """Returns whether the last line lacks its newline, with which every whole write ends."""
    if not path.exists() or path.stat().st_size == 0:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


def _column(rows: Iterable[Mapping[str, Any]], key: str) -> list[float]:
    return [value for row in rows if (value := number(row, key)) is not None]


def _clock(row: Mapping[str, Any]) -> list[float]:
    """Returns the wall-clock seconds of a round, phase by phase."""
    phases = row.get("time")
    if not isinstance(phases, Mapping):
        return []
    return [seconds for phase in phases if (seconds := number(phases, phase)) is not None]


def _count(rows: Iterable[Mapping[str, Any]], key: str) -> int:
    """Returns how many entries the lists of a field have in all."""
    return sum(len(row[key]) for row in rows if isinstance(row.get(key), list))


def _running_total(rows: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> list[float]:
    """Returns the sum of the fields up to each row, or nothing if no row has any of them."""
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
