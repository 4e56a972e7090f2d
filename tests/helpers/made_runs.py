"""Made-up runs and sweeps for reports and the scripts of ``experiments/``, and what these write."""

import csv
import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w
from documented_fields import field_names, find
from internals import config as configs
from internals import merge, write_config


def columns(**values: Sequence[Any]) -> list[dict[str, Any]]:
    """Returns the rows of the rounds 0, 1 ... from the values of each field; None is left out."""
    values = {"round": range(len(next(iter(values.values())))), **values}
    rows = zip(*values.values(), strict=True)
    return [{k: v for k, v in zip(values, row, strict=True) if v is not None} for row in rows]


def write_run(folder: Path, config: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> Path:
    """Writes a finished run, whose main metric is the accuracy, and returns its folder.

    Args:
      folder: of the run, which does not exist.
      config: some settings, by dotted keys or in tables.
      rows: of ``metrics.jsonl``; every field must be one that real runs have.
    """
    unknown = {name for row in rows for name in field_names(row) if find(name) is None}
    assert not unknown, f"no run has these fields: {unknown}"
    whole: dict[str, Any] = {"rounds": rows[-1]["round"], "model": {"name": "tiny"}}
    for key, value in config.items():
        for part in reversed(key.split(".")):
            value = {part: value}
        whole = merge(whole, value)
    folder.mkdir(parents=True)
    write_config(folder / "config.toml", whole)
    lines = (json.dumps({"headline": "accuracy", "headline_better": "higher", **r}) for r in rows)
    (folder / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return folder


def begin_sweep(folder: Path, **fields: Any) -> Path:
    """Returns the folder of a sweep without runs."""
    folder.mkdir(parents=True)
    (folder / "sweep.toml").write_text(tomli_w.dumps(fields))
    return folder


def write_sweep(root: Path, runs: Iterable[tuple[Mapping, Sequence]], **fields: Any) -> Path:
    """Writes a sweep of made-up runs, each a named config and its rows, and returns its folder."""
    begin_sweep(root, **fields)
    for number, (config, rows) in enumerate(runs):
        write_run(root / config["name"] / str(number), config, rows)
    return root


def accuracy(validation: float | None, test: float | None) -> dict[str, Any]:
    """Tests have so many examples that the seeds decide about intervals."""
    scores = {"validation_accuracy": validation, "test_accuracy": test}
    return scores | {"validation_examples": 10**6, "test_examples": 10**6}


def write_rates(root, scores, *, keys=("optimizer.learning_rate", "seed"), **fields) -> Path:
    """Writes a sweep over rates: method -> learning rate -> seed -> fields of the last row."""
    begin_sweep(root, keys=list(keys), **fields)
    for method, rates in scores.items():
        for (rate, seeds), flip in zip(rates.items(), itertools.cycle((False, True))):
            for seed, last in seeds.items():
                point = f"seed={seed},rate={rate}" if flip else f"rate={rate},seed={seed}"
                config = {"name": method, "algorithm": method, "seed": seed}
                config |= {"optimizer": {"name": "adamw", "learning_rate": rate}}
                write_run(root / method / point, config, [{"round": 0}, {"round": 3, **last}])
    return root


def read_table(path: Path) -> list[dict[str, str]]:
    """Returns the rows of a file of a table or figure, whose comments are left out."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return list(csv.DictReader(line for line in lines if line and not line.startswith("#")))


def resolved(path: Path, *overrides: str) -> dict[str, dict[str, Any]]:
    """Returns the resolved config of each method of a file."""
    found = configs.methods(configs.load(path), overrides)
    return {name: configs.resolve(raw) for name, raw in found.items()}


def grids(path: Path) -> dict[str, dict[str, Any]]:
    """Returns what a sweep of the file varies, for each method."""
    found = configs.methods(configs.load(path))
    return {name: raw["sweep"]["grid"] for name, raw in found.items()}
