"""Options of a run by their plain names, for tests that hand them on from test to test."""

import dataclasses
from typing import Any

from internals import RECORDS

MOVED = {
    field.name: (table, field.name)
    for table, record in RECORDS.items()
    for field in dataclasses.fields(record)
    if field.name not in ("batch_size", "every", "time")
} | {
    "eval_every": ("evaluation", "every"),
    "eval_batch_size": ("evaluation", "batch_size"),
    "time_model": ("system", "time"),
}
"""Plain name -> the record of the option, and its name there."""


def run_options(**given: Any) -> dict[str, Any]:
    """Returns the arguments of ``fp.simulate``: ``lanes=2`` becomes a part of ``placement``."""
    found: dict[str, Any] = {name: value for name, value in given.items() if name not in MOVED}
    fields: dict[str, dict[str, Any]] = {}
    for name in given.keys() - found.keys():
        table, field = MOVED[name]
        if name != "time_model" or given[name] is not None:
            fields.setdefault(table, {})[field] = given[name]
    for table, values in fields.items():
        found[table] = dataclasses.replace(found.get(table, RECORDS[table]()), **values)
    return found


def session_options(**given: Any) -> dict[str, Any]:
    """Returns the arguments of ``fp.session``, which takes the diagnostics themselves."""
    diagnostics = {name: given.pop(name) for name in ("diagnostics",) if name in given}
    return run_options(**given) | diagnostics
