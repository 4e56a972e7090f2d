"""Made-up runs, as the scripts of ``experiments/`` read them, and the tables that they write."""

import csv
import json
from pathlib import Path
from typing import Any

import tomli_w


def begin_sweep(folder: Path, **fields: Any) -> Path:
    """Returns the folder of a sweep without runs."""
    folder.mkdir(parents=True)
    (folder / "sweep.toml").write_text(tomli_w.dumps(fields))
    return folder


def write_run(folder: Path, settings: dict, rows: list[dict]) -> None:
    """Writes the settings and the rows of a run."""
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(tomli_w.dumps(settings))
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def read_table(path: Path) -> list[dict[str, str]]:
    """Returns the rows of a file of a table or figure, whose comments are left out."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return list(csv.DictReader(line for line in lines if line and not line.startswith("#")))
