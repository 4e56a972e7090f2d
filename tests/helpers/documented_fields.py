"""The fields of ``metrics.jsonl`` that the documentation describes."""

import csv
import functools
import re
from pathlib import Path

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"


def read(name):
    """Returns the names in the first column of a table, without their backquotes."""
    with (REFERENCE / name).open(newline="", encoding="utf-8") as file:
        return [row["field"].strip("`") for row in csv.DictReader(file)]


FIELDS, METRICS = read("metrics.csv"), read("metrics_of_tasks.csv")
PARTS = {
    "METRIC": f"(?:{'|'.join(METRICS)})".replace("SIMILARITY", "(?:cka|cka_debiased|cosine)"),
    "MODULE": r"[\w.]+",
    "FACTOR": "[ab]",
    "KIND": "(?:mean|weighted|std|worst|worst_tenth|adapter|head|frozen)",
    "ROLE": "(?:shared|private|fixed)",
    "FACT": r"\w+",
    "EVALUATION": "(?:test|global_test|client)",
}
"""A word in capitals -> the pattern of what it stands for."""
GROUPED = ("test_", "validation_", "client_", "tuned_")
"""Starts of fields that also exist for clients that have trained, and for those that have not."""


@functools.cache
def pattern(name):
    """Returns the pattern that matches all names of a field."""
    parts = re.split(f"({'|'.join(PARTS)})", name)
    groups = "(?:_seen|_unseen)?" if name.startswith(GROUPED) else ""
    return re.compile("".join(PARTS.get(part, re.escape(part)) for part in parts) + groups)


def find(name):
    """Returns the field of a name, such as ``client_f1_mean_unseen``; None if there is none."""
    return next((field for field in FIELDS if pattern(field).fullmatch(name)), None)


def field_names(row):
    """Returns the names of all fields of a row; names in nested tables are joined by dots."""
    names = set()
    for key, value in row.items():
        inside = field_names(value) if isinstance(value, dict) else None
        names |= {key} if inside is None else {f"{key}.{name}" for name in inside}
    return names
