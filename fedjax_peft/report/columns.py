"""The columns of tables whose rows are runs or methods."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias

from fedjax_peft.report import wording
from fedjax_peft.report.intervals import Summary
from fedjax_peft.report.judgement import Judgement
from fedjax_peft.report.separation import PairComparison

Part: TypeAlias = Literal["results", "clients", "difference", "costs"]
Values: TypeAlias = Sequence[float | None]

_SHORT = {"accuracy": "acc."}
"""Metric -> its name in a terminal."""
CLIENTS = {
    "mean": "Clients’ mean",
    "weighted": "Weighted by test size",
    "worst_tenth": "Worst 10 % of clients",
    "worst": "Worst client",
}
"""Figure of the clients' own tests -> heading."""

MODELS = {"global": "of the global model", "personal": "of personal models"}
"""Whose score on the test set a column has -> how its heading says it."""


class Column(NamedTuple):
    """A column of a table with one row for each run, or for each method."""

    title: str
    short: str
    """The heading on a terminal, in two lines; empty if only the page shows the column."""
    cells: list[str]
    best: set[int]
    """The rows with the best value; empty if no value is better than the others."""
    part: Part = "results"
    """The table of the page that has the column."""
    data: Mapping[str, Sequence[object]] | None = None
    """Heading -> numbers, which CSV has instead of the cells."""
    is_text: bool = False
    """Whether the page aligns the cells at the left."""

    @property
    def is_empty(self) -> bool:
        """Whether no row has a value."""
        return set(self.cells) == {wording.MISSING}


def column(
    title: str,
    values: Values,
    text: Callable[[float], str],
    best: Callable[[Iterable[float]], float] | set[int] | None = None,
    *,
    short: str = "",
    notes: Sequence[str] | None = None,
    part: Part = "results",
) -> Column:
    """Returns a column of numbers.

    Args:
        best: the rows to mark as the best; or ``max`` or ``min``, for values without an error.
        short: the heading in a terminal.
    """
    texts = [wording.MISSING if value is None else text(value) for value in values]
    marked = set() if best is None or callable(best) else best
    if callable(best) and len({*texts} - {wording.MISSING}) > 1:
        first = text(best(value for value in values if value is not None))
        # Compare the printed texts, so that cells with equal texts are marked together.
        marked = {i for i, one in enumerate(texts) if one == first}
    cells = [
        one if one == wording.MISSING else f"{one}{note}"
        for one, note in zip(texts, notes or [""] * len(texts), strict=True)
    ]
    return Column(title, short, cells, marked, part)


def in_unit(cost: str, values: Iterable[float | None]) -> tuple[str, Callable[[float], str]]:
    """Returns the symbol of the unit of a column, and the function that prints a value in it."""
    largest = max((value for value in values if value is not None), default=0.0)
    unit = wording.unit_of(cost, largest)
    return unit.symbol, lambda value: wording.digits(value / unit.size)


def of_models(column: Column, kind: str) -> Column:
    """Returns a column of scores whose headings, also those of its numbers, name the models.

    Args:
        kind: A key of :data:`MODELS`, or empty for a column that needs no name.
    """
    if not kind:
        return column
    title = column.title.removesuffix(" (%)")
    unit = column.title.removeprefix(title)
    first, _, last = column.short.partition("\n")
    data = column.data
    if data and kind == "personal":  # the global models of other rows have the plain names
        data = {f"personal_{name}": values for name, values in data.items()}
    return column._replace(
        title=f"{title} {MODELS[kind]}{unit}", short=f"{first}, {kind}\n{last}", data=data
    )


# Single runs.


Fact: TypeAlias = Mapping[str, Any]
"""The summary of a run (:func:`fedjax_peft.simulation.summaries.summary`)."""


def score_columns(facts: Sequence[Fact], judged: Judgement | None) -> list[Column]:
    """Returns the columns of rounds and scores."""
    metrics = [fact["headline"] for fact in facts]
    score = wording.word(wording.common(metrics, "score"))
    short = _SHORT.get(score, score)
    share = all(map(wording.is_share, metrics))
    sign = " %" if share else ""
    best = judged.best if judged else set()
    scores = partial(_score_column, facts, share)
    rounds = [fact["rounds"] for fact in facts]
    finals = [scores(f"Final {score}", "final_score", short=f"Final\n{short}{sign}")]
    if any(fact["personal_score"] is not None for fact in facts):
        finals = [
            of_models(finals[0]._replace(cells=scores("", f"{kind}_score").cells), kind)
            for kind in MODELS
        ]
    clients = _client_columns(facts, share)
    if any(fact["final_score"] is not None for fact in facts):
        finals = [
            one._replace(best={i for i in best if one.cells[i] != wording.MISSING})
            for one in finals
        ]
    else:  # without a test set, the clients' mean is the score
        clients[0] = clients[0]._replace(best=best, short=f"Clients’\n{short}{sign}")
    return [
        column("Rounds", rounds, str, short="\nRounds"),
        *finals,
        scores(f"Tuned {score}", "tuned_score", short=f"Tuned\n{short}{sign}"),
        scores(
            f"Best {score}",
            "best_score",
            after=", round",
            short=f"Best {short}\n" + f"{sign} (round)".strip(),
            note=lambda fact: f" ({fact['best_round']})",
        ),
        *clients,
    ]


def _client_columns(facts: Sequence[Fact], share: bool) -> list[Column]:
    """Returns the columns of scores on the clients' own tests."""
    scores = partial(_score_column, facts, share, part="clients")

    def deviation(key: str) -> Callable[[Fact], str]:
        text = wording.score_text(share, "")
        return lambda fact: "" if fact[key] is None else f" ± {text(fact[key])}"

    def count(fact: Fact, group: str) -> str:
        clients = fact[f"client_count_{group}"]
        return f" ({wording.MISSING if clients is None else round(clients)})"

    grouped = any(fact["client_count_unseen"] for fact in facts)  # otherwise all have trained
    return [
        scores(CLIENTS["mean"], "client_mean", note=deviation("client_std")),
        scores(CLIENTS["weighted"], "client_weighted"),
        *(
            scores(
                f"{group.capitalize()} clients’ mean",
                f"client_mean_{group}",
                after=", clients",
                note=partial(count, group=group),
            )
            for group in ("seen", "unseen")
            if grouped
        ),
        scores(CLIENTS["worst"], "client_worst"),
        scores(CLIENTS["worst_tenth"], "client_worst_tenth"),
        scores("Clients’ mean, tuned", "tuned_client_mean", note=deviation("tuned_client_std")),
    ]


def _score_column(
    facts: Sequence[Fact],
    share: bool,
    title: str,
    key: str,
    *,
    after: str = "",
    note: Callable[[Fact], str] = lambda fact: "",
    **options: Any,
) -> Column:
    """Returns the column of a score, with the unit and ``after`` behind its title."""
    values, notes = [fact[key] for fact in facts], list(map(note, facts))
    heading = f"{title}{' (%)' if share else ''}{after}"
    return column(heading, values, wording.score_text(share, ""), notes=notes, **options)


def cost_columns(facts: Sequence[Fact]) -> list[Column]:
    """Returns the columns of parameters, communication and time, and the aggregation error.

    Args:
        facts: The summary of each row, or the means of its runs' summaries.
    """

    def values(key: str) -> list[Any]:
        return [fact[key] for fact in facts]

    up, down = values("bytes_up"), values("bytes_down")
    simulated, wall = values("simulated_seconds"), values("wall_seconds")
    upload = [
        None if size is None or not count else size / count
        for size, count in zip(up, values("client_rounds"), strict=True)
    ]
    one, one_text = in_unit("bytes", upload)
    total, total_text = in_unit("bytes", up + down)
    clock, clock_text = in_unit("simulated_seconds", simulated)
    wall_clock, wall_text = in_unit("wall_seconds", wall)
    received = [f" / {wording.MISSING if n is None else total_text(n)}" for n in down]
    short = f"Up / down\n{total}"
    return [
        _privacy_column(values("epsilon"), values("delta")),
        column("Trained parameters", values("trained"), "{:,.0f}".format),
        column(f"Upload per client and round ({one})", upload, one_text, min),
        column(f"Total up / down ({total})", up, total_text, short=short, notes=received),
        column(f"Simulated time ({clock})", simulated, clock_text, short=f"Sim.\n{clock}"),
        column(f"Wall time ({wall_clock})", wall, wall_text, short=f"Wall\n{wall_clock}"),
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


# Means over seeds.


def mean_column(
    field: str,
    values: Sequence[Summary],
    title: str,
    *,
    best: set[int] | None = None,
    part: Part = "results",
    prefix: str = "",
) -> Column:
    """Returns a column of means and standard deviations; fractions are in percent.

    Args:
        title: The heading without its unit.
        prefix: Text before the field in the headings of the CSV.
    """
    sign = " %" if wording.is_share(field) else ""
    # Two lines on a terminal: everything but the last word in the first.
    first, _, last = wording.capital(title).rpartition(" ")
    short = f"{first}\n{_SHORT.get(last, last)}{sign}"
    name = f"{prefix}{field}"
    data = {name: [one.mean for one in values]}
    for key in ("sd", "n", "low", "high"):
        data[f"{name}_{key}"] = [getattr(one, key) for one in values]
    cells = [mean_text(field, one) for one in values]
    heading = f"{wording.capital(title)} (%)" if sign else wording.capital(title)
    return Column(heading, short, cells, best or set(), part, data)


def mean_text(field: str, values: Summary) -> str:
    """Returns text such as ``81.2 ± 0.4``; fractions are in percent, without the sign."""
    if wording.is_share(field) or values.mean is None:
        return values.text(100)
    return f"{values.mean:.4g}" + ("" if values.sd is None else f" ± {values.sd:.2g}")


def difference_columns(names: Sequence[str], judged: Judgement | None) -> list[Column]:
    """Returns the columns of the paired differences; none for a single row."""
    if judged is None or not judged.ranking.comparisons:
        return []
    reference = judged.ranking.comparisons[0].reference
    found = {one.name: one for one in judged.ranking.comparisons}
    rows = [found.get(name) for name in names]
    unit, short = (" (points)", " (pts)") if judged.share else ("", "")

    def build(
        title: str, short: str, text: Callable[[PairComparison], str], data: Mapping[str, str]
    ) -> Column:
        cells = [wording.MISSING if one is None else text(one) for one in rows]
        numbers = {
            name: [one and getattr(one.difference, key) for one in rows]
            for name, key in data.items()
        }
        return Column(title, short, cells, set(), "difference", numbers)

    difference = build(
        f"Difference to {reference}{unit}",
        f"Difference to\n{wording.shorten(reference, 16)}{short}",
        lambda one: _signed(one.difference.mean, judged.share),
        {"difference": "mean", "difference_n": "n"},
    )
    difference.cells[list(names).index(reference)] = "baseline"
    t, bootstrap = (
        build(
            f"95 % interval ({kind})",
            f"95 % interval\n{kind}",
            partial(_interval, prefix=prefix, share=judged.share),
            {f"{kind}_low": f"{prefix}low", f"{kind}_high": f"{prefix}high"},
        )
        for kind, prefix in (("t", ""), ("bootstrap", "boot_"))
    )
    results = [one and _result(one) for one in rows]
    result = build("Result", "\nResult", _result, {})._replace(
        data={"result": results}, is_text=True
    )
    return [difference, t, bootstrap, result]


def _signed(value: float | None, share: bool) -> str:
    """Returns a difference with its sign; in points for a share."""
    return wording.MISSING if value is None else wording.signed(value, share)


def _interval(one: PairComparison, prefix: str, share: bool) -> str:
    low, high = (getattr(one.difference, f"{prefix}{end}") for end in ("low", "high"))
    return wording.MISSING if low is None else f"{_signed(low, share)} to {_signed(high, share)}"


def _result(one: PairComparison) -> str:
    if one.separated:
        return "separated"
    return "not separated" if one.margin is not None else f"not known: {one.basis}"
