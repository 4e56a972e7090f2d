"""The columns of costs: parameters, communication, time and privacy, and the aggregation error."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fedjax_peft.report import wording
from fedjax_peft.report.columns import Column, Fact, Values, column, in_unit, known
from fedjax_peft.simulation.summaries import mean


def of_methods(facts: Sequence[Sequence[Fact]]) -> list[Column]:
    """Returns the columns of the means over the runs of each row, which a terminal leaves out."""
    averages = [{key: mean(known(one, key)) for key in one[0]} for one in facts]
    return [one._replace(part="costs", short="") for one in of_runs(averages)]


def of_runs(facts: Sequence[Mapping[str, Any]]) -> list[Column]:
    """Returns the columns of parameters, communication and time, and the aggregation error.

    Args:
        facts: The summary of each row, or the means of its runs' summaries.
    """

    def values(key: str) -> list[Any]:
        return [fact[key] for fact in facts]

    def cost(title: str, unit: str, amounts: Values, start: str = "", **options: Any) -> Column:
        symbol, text = in_unit(unit, amounts)
        short = f"{start}\n{symbol}" if start else ""
        return column(f"{title} ({symbol})", amounts, text, short=short, **options)

    up, down = values("bytes_up"), values("bytes_down")
    upload = [
        None if size is None or not count else size / count
        for size, count in zip(up, values("client_rounds"), strict=True)
    ]
    total, text = in_unit("bytes", up + down)
    received = [f" / {wording.MISSING if n is None else text(n)}" for n in down]
    short = f"Up / down\n{total}"
    return [
        _privacy_column(values("epsilon"), values("delta")),
        column("Trained parameters", values("trained"), "{:,.0f}".format),
        cost("Upload per client and round", "bytes", upload, best=min),
        column(f"Total up / down ({total})", up, text, short=short, notes=received),
        cost("Simulated time", "simulated_seconds", values("simulated_seconds"), "Sim."),
        cost("Wall time", "wall_seconds", values("wall_seconds"), "Wall"),
        column("Slots in use (%)", values("slot_utilisation"), wording.percent),
        _error_column(values("aggregation_error_relative"), values("aggregation_error")),
    ]


def _privacy_column(epsilon: Values, delta: Values) -> Column:
    """Returns the guarantee of differential privacy after the last round."""
    cells = [
        wording.MISSING
        if e is None
        else "none"
        if d is None or not math.isfinite(e)
        else f"{e:.3g}, {d:g}"
        for e, d in zip(epsilon, delta, strict=True)
    ]
    data = {"epsilon": epsilon, "delta": delta}
    return Column("Privacy (ε, δ)", "Privacy\nε, δ", cells, set(), data=data)


def _error_column(relative: Values, absolute: Values) -> Column:
    """Returns the aggregation error; the relative one, which compares better, if it is known."""
    title = "Mean aggregation error"
    if any(value is not None for value in relative):
        return column(f"{title} (%)", relative, wording.percent, short="Agg.\nerr. %")
    return column(title, absolute, "{:.2g}".format, short="Agg.\nerror")
