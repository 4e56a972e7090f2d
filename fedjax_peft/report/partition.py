"""The numbers of a partition: sizes, classes of each client, and distances between clients."""

import json
import math
from collections.abc import Mapping
from inspect import signature
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from rich.table import Table
from rich.text import Text

from fedjax_peft.data import heterogeneity, keys, partition
from fedjax_peft.data.dataset import Clients
from fedjax_peft.numerics.random import host_rng
from fedjax_peft.report.wording import shorten
from fedjax_peft.support.display import one_line

Measure = Literal["js", "js_sqrt", "jeffreys"]

COMPARED = 1000
"""Most clients that are compared in pairs; of more clients, a random sample is compared."""
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
TABLE_CLASSES, TABLE_CLIENTS = 20, 6
"""Number of the largest classes and of the first clients in the table, which fit 80 columns."""


class PartitionReport(NamedTuple):
    """The figures of a partition."""

    title: str
    names: tuple[str, ...]
    """Names of the clients."""
    examples: int
    """Number of examples, including those that belong to no client."""
    sizes: np.ndarray
    """Examples of each client, int ``[clients]``."""
    by: str
    """The source of the classes: ``"label"`` or a key."""
    classes: tuple[str, ...]
    """Names of the classes; empty if the examples have no classes."""
    histogram: np.ndarray
    """Examples per client and class, int ``[clients, classes]``."""
    measure: str
    """The divergence in words."""
    limit: float | None
    """The largest possible divergence; None if it is not bounded."""
    compared: np.ndarray
    """The clients that are compared, int ``[compared]``, ascending; all have examples."""
    divergence: np.ndarray
    """The divergence of each pair of them, float ``[compared, compared]``."""

    @property
    def mean_divergence(self) -> float:
        """The mean divergence of the compared pairs."""
        return heterogeneity.mean_pairwise(self.divergence) if len(self.divergence) else 0.0

    def sampled(self, shown: int) -> str:
        """Returns a note if only some of the clients are shown."""
        every = len(self.sizes)
        return "" if shown == every else f", {shown:,} of {every:,} clients"

    def largest(self, most: int) -> tuple[list[str], np.ndarray]:
        """Returns the largest classes, and the counts ``[clients, names]``.

        If there are more than ``most`` classes, the last name stands for all others.
        """
        order = np.argsort(-self.histogram.sum(axis=0), kind="stable")
        shown = order if len(order) <= most else order[: most - 1]
        names, counts = [self.classes[i] for i in shown], self.histogram[:, shown]
        if rest := len(order) - len(shown):
            other = self.histogram[:, order[len(shown) :]].sum(axis=1, keepdims=True)
            names, counts = [*names, f"{rest:,} others"], np.hstack([counts, other])
        return names, counts


def distinct_partitions(configs: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Returns the resolved configs by name, without those whose partition equals an earlier one."""
    firsts: dict[str, str] = {}
    for name, config in configs.items():
        model = {key: config["model"][key] for key in ("name", "source")}  # for its tokenizer
        parts = [model, config["data"], config["partition"], config["seed"]]
        firsts.setdefault(json.dumps(parts, sort_keys=True, default=str), name)
    return {name: configs[name] for name in firsts.values()}


def title(config: Mapping[str, Any]) -> str:
    """Returns the data set and the call of the partition of a resolved config, in one line.

    Arguments with their default values are omitted.
    """
    name = config["partition"]["name"]
    function = getattr(partition, name, None)  # None: the user's own
    known = signature(function).parameters if function else {}
    usual = {key: parameter.default for key, parameter in known.items()}
    given = {k: v for k, v in config["partition"].items() if k != "name" and v is not None}
    call = ", ".join(f"{k}={v!r}" for k, v in given.items() if k not in usual or v != usual[k])
    return f"{Path(config['data']['name']).name}: {Path(name).name}({call})"


def classes_key(config: Mapping[str, Any]) -> str | None:
    """Returns the key whose values are the classes of a resolved config's partition, if any."""
    of_users = config["partition"]["name"] in ("natural", "grouped")
    return None if of_users else config["partition"].get("by")


def inspect(
    clients: Clients[Any],
    title: str = "",
    *,
    by: str | None = None,
    measure: Measure = "js",
    base: float = 2,
) -> PartitionReport:
    """Returns the report of a partition.

    Args:
      by: a key of ``data.meta`` whose values are the classes. None: the labels are the classes, and
        data with several labels per example, or none, have no classes.
      measure: Jensen-Shannon, its square root, or half of the Jeffreys divergence.

    Raises:
      InputError: the key does not exist.
    """
    histogram, classes = (
        heterogeneity.histograms(clients, by)
        if by is not None or keys.has_labels(clients.data)
        else (np.zeros((len(clients), 0), np.int64), ())
    )
    compared = np.flatnonzero(clients.sizes) if classes else np.zeros(0, np.int64)
    if len(compared) > COMPARED:
        drawn = host_rng(0, "partition report").choice(compared, COMPARED, replace=False)
        compared = np.sort(drawn)
    return PartitionReport(
        title,
        clients.names or tuple(map(str, range(len(clients)))),
        len(clients.data),
        clients.sizes,
        by or "label",
        classes,
        histogram,
        _measure_name(measure, base),
        None if measure == "jeffreys" else float(_divergence(np.eye(2), measure, base)[0, 1]),
        compared,
        _divergence(histogram[compared], measure, base),
    )


def summary(report: PartitionReport) -> dict[str, Any]:
    """Returns the content of ``partition.json``; of the divergences it has only the mean."""
    sizes = report.sizes
    return {
        "title": report.title,
        "examples": report.examples,
        "unowned": report.examples - int(sizes.sum()),
        "clients": len(sizes),
        "size": {
            "min": int(sizes.min()),
            "mean": float(sizes.mean()),
            "max": int(sizes.max()),
            "quantiles": {str(q): float(np.quantile(sizes, q)) for q in QUANTILES},
        },
        "by": report.by,
        "measure": report.measure,
        "compared_clients": len(report.compared),
        "mean_divergence": report.mean_divergence,
        "classes": list(report.classes),
        "client_names": list(report.names),
        "client_sizes": sizes.tolist(),
        "histogram": report.histogram.tolist(),
    }


def size_table(report: PartitionReport) -> Table:
    """Returns a table for a terminal with the sizes and the mean divergence."""
    out = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    out.add_column(style="bold")
    out.add_column()
    sizes = report.sizes
    unowned = report.examples - int(sizes.sum())
    rest = f", {unowned:,} of them without a client" if unowned else ""
    rows = {"Partition": report.title} if report.title else {}
    rows |= {
        "Clients": f"{len(sizes):,}",
        "Examples": f"{report.examples:,}{rest}",
        "Per client": f"{sizes.min():,} to {sizes.max():,}, mean {sizes.mean():,.1f}",
        "Quantiles": ", ".join(f"{q:.0%} {np.quantile(sizes, q):,.0f}" for q in QUANTILES),
    }
    if report.classes:
        rows["Classes"] = f"{len(report.classes):,} by {report.by}"
        pairs = f"mean of all pairs{report.sampled(len(report.compared))}"
        rows["Divergence"] = f"{report.mean_divergence:.3f} ({report.measure}; {pairs})"
    for name, value in rows.items():
        out.add_row(name, Text(one_line(value)))
    return out


def class_table(report: PartitionReport) -> Table:
    """Returns a table for a terminal: examples per class, in total and for the first clients."""
    out = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    out.add_column(Text(f"\n{one_line(report.by).capitalize()}"), no_wrap=True)
    out.add_column("\nTotal", justify="right")
    shown = report.names[:TABLE_CLIENTS]
    for i, name in enumerate(shown):
        title = Text(f"{'' if i else 'Client'}\n{shorten(name, 7)}")
        out.add_column(title, justify="right", no_wrap=True)
    names, counts = report.largest(TABLE_CLASSES)
    for name, column in zip(names, counts.T, strict=True):
        cells = [f"{n:,}" if n else "-" for n in column[: len(shown)]]
        out.add_row(Text(shorten(name, 24)), f"{column.sum():,}", *cells)
    sizes = [f"{n:,}" for n in report.sizes[: len(shown)]]
    out.add_row("Total", f"{report.sizes.sum():,}", *sizes, style="bold")
    if more := len(report.sizes) - len(shown):
        out.caption = f"{more:,} more clients are in partition.json."
        out.caption_justify = "left"
    return out


def _divergence(histogram: np.ndarray, measure: Measure, base: float) -> np.ndarray:
    if not histogram.size:
        return np.zeros((0, 0))
    if measure == "jeffreys":
        return heterogeneity.jeffreys(histogram)
    return heterogeneity.js_divergence(histogram, base, sqrt=measure == "js_sqrt")


def _measure_name(measure: Measure, base: float) -> str:
    if measure == "jeffreys":
        return "Jeffreys / 2"
    root = ", square root" if measure == "js_sqrt" else ""
    return f"Jensen-Shannon{root}, base {'e' if base == math.e else f'{base:g}'}"
