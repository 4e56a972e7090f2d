"""The command ``partition``: the report of how a config partitions its data."""

import argparse
import math
from pathlib import Path

from rich.console import Console

from fedjax_peft.config import config as configs
from fedjax_peft.config import sweeps
from fedjax_peft.report import partition as reports
from fedjax_peft.report import partition_files


def partition(options: argparse.Namespace) -> None:
    """Prints and writes the report of a config's partition."""
    out = options.out or Path("runs") / f"{options.config.stem}-partition"
    raw = configs.methods(*sweeps.read(options.config, options.overrides))
    resolved = {name: configs.resolve(one) for name, one in raw.items()}
    distinct = reports.distinct_partitions(resolved)
    for name, config in distinct.items():
        _, clients = configs.federation(config)
        report = reports.inspect(
            clients,
            reports.title(config),
            by=options.by or reports.classes_key(config),
            measure=options.measure,
            base=math.e if options.base == "e" else float(options.base),
        )
        Console().print(reports.size_table(report), "", reports.class_table(report), sep="\n")
        for path in partition_files.write(report, out / name if len(distinct) > 1 else out):
            print(path)
