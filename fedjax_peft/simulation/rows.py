"""A run's ``metrics.jsonl``: one JSON object on each line, one line for each round.

A row is a dict with an integer ``round`` (0 = before training); every other field is optional.
``docs/reference/metrics.csv`` lists them with their units. ``bytes_up``, ``bytes_down`` and
``simulated_seconds`` are those of one round; :mod:`fedjax_peft.simulation.summaries` sums them.

An evaluated round has ``headline`` (the metric that the task is judged by), ``headline_better`` and
the scores (:mod:`fedjax_peft.simulation.score_names`): ``test_...`` of the global model, or the
mean over some clients' own models, beside which ``global_test_...`` is that of the shared one;
``client_...`` over the clients with their own tests; ``validation_...`` likewise. The suffix
``_seen`` is for clients that have trained (an upload of theirs was aggregated in this round or
before), ``_unseen`` for the others, whose private leaves still have their initial values; a group
without clients has only its count. Row 0 says of which metrics lower values are better.
"""

import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from fedjax_peft.simulation.score_names import Score, is_lower_better, plain
from fedjax_peft.support.display import show
from fedjax_peft.support.errors import InputError
from fedjax_peft.support.files import naming, replace_file
from fedjax_peft.support.nested import flatten
from fedjax_peft.tasks.by_class import ByClass

Row: TypeAlias = dict[str, Any]


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


def has_ended(rows: Sequence[Mapping[str, Any]], rounds: int) -> bool:
    """Returns whether a run of ``rounds`` rounds has ended with its last row.

    It has done all of them, or a rule has stopped it there. A run that went on after it was stopped
    has not ended.
    """
    if not rows:
        return False
    return rows[-1]["round"] >= rounds or rows[-1].get("stopped") is not None


def without_scores(row: Row) -> Row:
    """Returns a row without the fields of an evaluation."""
    return {name: value for name, value in row.items() if not _is_of_evaluation(name)}


def without_end(row: Row) -> Row:
    """Returns a row without what it has because the run ended there."""
    ended = ("stopped", BY_CLASS)
    scores = {name: Score.read(name) for name in row if name not in ended}
    return {name: row[name] for name, one in scores.items() if one is None or not one.tuned}


def _is_of_evaluation(name: str) -> bool:
    score = Score.read(name)
    return name in _OF_EVALUATION if score is None else score.evaluation != "train"


_OF_EVALUATION = (
    *("headline", "headline_better", "tokenizer", "by_class", "client_tests", "client_validations"),
)
"""Fields of an evaluation that are no scores."""


def number(row: Mapping[str, Any], key: str) -> float | None:
    """Returns a field as a finite float; ``None`` if it is missing, null or not a number.

    A dot separates the name of a nested table from that of its field, such as ``time.train_s``.
    Without personal models, ``global_test_accuracy`` is ``test_accuracy``.
    """
    key = _recorded(row, key)
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
    key = _recorded(row, key)
    table, _, rest = key.partition(".")
    inner = row.get(table)
    return key in row or (isinstance(inner, Mapping) and bool(rest) and has_field(inner, rest))


def last_with(rows: Sequence[Mapping[str, Any]], key: str) -> Mapping[str, Any]:
    """Returns the last row that has a field, which can be null; an empty one if none has it."""
    return next((row for row in reversed(rows) if has_field(row, key)), {})


def is_personal(row: Mapping[str, Any], field: str) -> bool:
    """Returns whether a score is a mean over clients' own models on a common set of examples."""
    score = Score.read(field)
    if score is None or score.tuned or score.evaluation not in ("test", "validation"):
        return False
    return Score(score.evaluation, "count").name in row


def _recorded(row: Mapping[str, Any], key: str) -> str:
    """Returns the name under which a row has a field of the global model."""
    own = plain(key)
    return own if own != key and key not in row and not is_personal(row, own) else key


def fields(row: Mapping[str, Any]) -> list[str]:
    """Returns the names of a row's numeric fields, with a dot before those of nested tables."""
    return [key for key in flatten(row) if number(row, key) is not None]


def finite_or_none(value: Any) -> float | None:
    """Returns a float; None (JSON's null) if the value is not finite."""
    return float(value) if math.isfinite(value) else None


def headline(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns the metric that a run's task is judged by, such as ``accuracy`` or ``f1``."""
    found = next((row["headline"] for row in rows if "headline" in row), None)
    return found if isinstance(found, str) else "accuracy"


def headline_is_lower_better(rows: Sequence[Mapping[str, Any]]) -> bool:
    """Returns whether lower values of the headline metric are better."""
    recorded = (row["headline_better"] for row in rows if "headline_better" in row)
    return next(recorded, None) == "lower"


def field_is_lower_better(rows: Sequence[Mapping[str, Any]], name: str) -> bool:
    """Returns whether lower values of a field are better.

    Of a score, such as ``validation_accuracy``, the run has recorded it; less deviation is better.
    Of the other fields, those that a measure declares, losses, norms, errors and costs are better
    if lower.
    """
    score, declared = Score.read(name), next((row[LOWER] for row in rows if LOWER in row), None)
    if score is not None and score.statistic == "std":
        return True
    if isinstance(declared, list) and (score is not None or name in declared):
        return score is None or is_lower_better(score.metric, declared)
    if score is not None and score.metric == headline(rows):
        return headline_is_lower_better(rows)
    return not _LOWER.isdisjoint(re.split(r"[_.]", name))


LOWER = "lower_is_better"
"""The field of row 0 with the metrics of which lower values are better."""
_LOWER = {
    *("backdoor", "loss", "losses", "contrastive", "perplexity", "lost", "norm"),
    *("error", "errors", "mae", "mse", "rmse"),
    *("bytes", "seconds", "time", "std", "steps"),
}
"""Words in the names of costs and errors, which no task declares, and in those of metrics before a
run has recorded its own."""


CLIENT_NAMES = "client_names"
"""The field of row 0 with the names of the clients, in the order of their numbers."""


def client_names(rows: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Returns the names of a run's clients, in the order of their numbers; empty without any."""
    names = rows[0].get(CLIENT_NAMES) if rows else None
    return tuple(map(str, names)) if isinstance(names, list) else ()


BY_CLASS = "by_class"
"""The field with the counts of each class: evaluation (``test``, ``global_test``, ``client``) ->
:meth:`fedjax_peft.tasks.by_class.ByClass.record`. The row of a run's last round has it."""


def by_class_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, ByClass]:
    """Returns the scores of each class after the last round, by the name of the evaluation."""
    last = rows[-1].get(BY_CLASS) if rows else None
    if not isinstance(last, Mapping):
        return {}
    found = ((name, ByClass.read(record)) for name, record in last.items())
    return {name: scores for name, scores in found if scores is not None}


def seen_clients(rows: Iterable[Mapping[str, Any]]) -> set[int]:
    """Returns the clients that have trained: at least one of their uploads was aggregated.

    An upload of noise alone, which clients with private data may send, is none.
    """
    seen: set[int] = set()
    for row in rows:
        seen |= {*(row.get("origin") or {}).get("seen", ())}  # in the run that this one starts from
        sent, dropped, late = (row.get(key) or () for key in ("clients", "dropped", "late"))
        steps = row.get("client_steps")
        pairs = zip(sent, steps, strict=False) if isinstance(steps, list) else ()
        seen |= set(sent) - set(dropped) - set(late) - {c for c, n in pairs if not n}
    return seen


def unreadable(key: str, value: Any) -> str | None:
    """Returns the requirement for which :func:`read_metrics` would refuse a field; None if none."""
    return _fault(key, _plain(value))


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
    return row


_CLIENTS = ("clients", "dropped", "failed", "late", "partial")
_TABLES = ("time", "roles", "parameters")
_NUMBERS = re.compile(r"(bytes|aggregation_error|simulated)_\w+|steps")
"""Fields beside scores that must be numbers; a file edited by hand can contain other values."""


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
    if key in ("headline", "headline_better", "tokenizer"):
        good = isinstance(value, str) and re.fullmatch(r"\w{1,60}", value) is not None
        return None if good else "it must be a word"
    if key == LOWER:
        good = isinstance(value, list) and all(isinstance(metric, str) for metric in value)
        return None if good else "it must be a list of metrics"
    score = Score.read(key)
    numeric = score is not None and (score.evaluation != "local" or bool(score.statistic))
    if (numeric or _NUMBERS.fullmatch(key)) and not _is_number(value):
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
