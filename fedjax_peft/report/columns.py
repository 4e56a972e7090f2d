"""The columns of tables whose rows are runs or methods."""

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias

from fedjax_peft.report import tested, wording
from fedjax_peft.report.cells import At, Cell, Choice, Study, value_text
from fedjax_peft.report.intervals import Summary, summarise
from fedjax_peft.report.judgement import Judgement
from fedjax_peft.report.separation import PairComparison
from fedjax_peft.report.tested import MODELS
from fedjax_peft.simulation.score_names import Score, of_global, plain
from fedjax_peft.support.display import one_line

Part: TypeAlias = Literal["results", "clients", "difference", "costs"]
Values: TypeAlias = Sequence[float | None]

_SHORT = {"accuracy": "acc."}
"""Metric -> its name in a terminal."""
CLIENTS = {
    "mean": "Clients’ mean",
    "std": "Standard deviation across clients",
    "weighted": "Weighted by test size",
    "worst_tenth": "Worst 10 % of clients",
    "worst": "Worst client",
}
"""Figure of the clients' own tests -> heading."""
_SHORT_OF_CLIENTS = {
    "mean": "Clients’\nmean",
    "std": "Clients’\nsd",
    "worst_tenth": "Worst 10 %\nof clients",
}
"""The figures of the clients' own tests that a terminal shows -> heading."""


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


class Frame(NamedTuple):
    """A table, which a terminal, files and the page show each in its way."""

    head: str
    """What a row is, such as ``Method``."""
    names: Sequence[str]
    """The names of the rows."""
    columns: Sequence[Column]


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
    cells = [wording.MISSING if value is None else text(value) for value in values]
    marked = set() if best is None or callable(best) else best
    if callable(best) and len({*cells} - {wording.MISSING}) > 1:
        first = text(best(value for value in values if value is not None))
        # Compare the printed texts, so that cells with equal texts are marked together.
        marked = {i for i, one in enumerate(cells) if one == first}
    return Column(title, short, _noted(cells, notes), marked, part)


def _noted(cells: Sequence[str], notes: Sequence[str] | None) -> list[str]:
    """Returns texts with notes behind those that are not missing."""
    pairs = zip(cells, notes or [""] * len(cells), strict=True)
    return [text if text == wording.MISSING else f"{text}{note}" for text, note in pairs]


def in_unit(cost: str, values: Iterable[float | None]) -> tuple[str, Callable[[float], str]]:
    """Returns the symbol of the unit of a column, and the function that prints a value in it."""
    largest = max((value for value in values if value is not None), default=0.0)
    unit = wording.unit_of(cost, largest)
    return unit.symbol, lambda value: wording.digits(value / unit.size)


# Scores.


Fact: TypeAlias = Mapping[str, Any]
"""The summary of a run (:func:`fedjax_peft.simulation.summaries.summary`)."""


def scores(
    title: str,
    values: Sequence[Summary],
    share: bool,
    *,
    kind: str = "",
    after: str = "",
    short: str | None = None,
    notes: Sequence[str] | None = None,
    best: set[int] | None = None,
    part: Part = "results",
) -> Column:
    """Returns a column of scores or means with standard deviations; shares are in percent.

    Args:
        title: The heading without its unit.
        kind: A key of :data:`MODELS`, if the heading has to name the models.
        after: Text behind the unit.
        short: The heading in a terminal; by default ``title``, with its last word in a second line.
        notes: Text behind each value.
    """
    title = wording.capital(title)
    first, _, last = title.rpartition(" ")
    if short is None:
        short = f"{first}\n{_SHORT.get(last, last)}{' %' if share else ''}"
    if kind:
        title, short = f"{title} {MODELS[kind]}", short.replace("\n", f", {kind}\n")
    cells = _noted([one.score_text(share) for one in values], notes)
    return Column(f"{title}{' (%)' if share else ''}{after}", short, cells, best or set(), part)


# Single runs.


def of_runs(facts: Sequence[Fact], judged: Judgement | None, compared: str) -> list[Column]:
    """Returns the columns of rounds and scores of single runs.

    Args:
        compared: The figure that was judged, ``final_score`` or ``global_score``.
    """
    metrics = [fact["headline"] for fact in facts]
    score = wording.word(wording.common(metrics, "score"))
    short = _SHORT.get(score, score)
    share = all(map(wording.is_share, metrics))
    sign = " %" if share else ""
    best = judged.best if judged else set()

    def of(title: str, key: str, **options: Any) -> Column:
        known = ([] if fact[key] is None else [fact[key]] for fact in facts)
        return scores(title, [*map(summarise, known)], share, **options)

    def score_of(when: str, key: str, kind: str = "") -> Column:
        return of(f"{when} {score}", key, short=f"{when}\n{short}{sign}", kind=kind)

    clients = _of_clients(facts, share, of)
    if all(fact["final_round"] is None for fact in facts):
        # Without a test set, the clients' mean is the score.
        clients[0] = clients[0]._replace(best=best, short=f"Clients’\n{short}{sign}")
        best = set()
    finals = [score_of("Final", "final_score")._replace(best=best)]
    if own := {i for i, fact in enumerate(facts) if fact["test_count"] is not None}:
        own_best = best & own if compared == "final_score" else set()
        marks = {"global": best - own_best, "personal": own_best}
        finals = [
            score_of("Final", f"{kind}_score", kind)._replace(best=marks[kind]) for kind in MODELS
        ]
    return [
        column("Rounds", [fact["rounds"] for fact in facts], str, short="\nRounds"),
        *finals,
        score_of("Tuned", "tuned_score"),
        of(
            f"Best {score}",
            "best_score",
            after=", round",
            short=f"Best {short}\n" + f"{sign} (round)".strip(),
            notes=[f" ({fact['best_round']})" for fact in facts],
        ),
        *clients,
    ]


def _of_clients(facts: Sequence[Fact], share: bool, of: Callable[..., Column]) -> list[Column]:
    """Returns the columns of scores on the clients' own tests."""
    look: dict[str, Any] = {"part": "clients", "short": ""}
    text = wording.score_text(share, "")

    def deviations(key: str) -> list[str]:
        return ["" if (sd := fact[key]) is None else f" ± {text(sd)}" for fact in facts]

    def figure(key: str, **options: Any) -> Column:
        options |= look | {"short": _SHORT_OF_CLIENTS.get(key, "")}
        return of(CLIENTS[key], f"client_{key}", **options)

    def counts(group: str) -> list[str]:
        found = [fact[f"client_count_{group}"] for fact in facts]
        return [f" ({wording.MISSING if n is None else round(n)})" for n in found]

    grouped = any(fact["client_count_unseen"] for fact in facts)  # otherwise all have trained
    groups = [
        of(
            f"{group} clients’ mean",
            f"client_mean_{group}",
            after=", clients",
            notes=counts(group),
            **look,
        )
        for group in ("seen", "unseen")
        if grouped
    ]
    return [
        figure("mean", notes=deviations("client_std")),
        figure("weighted"),
        *groups,
        figure("worst"),
        figure("worst_tenth"),
        of(
            "Clients’ mean, tuned",
            "tuned_client_mean",
            notes=deviations("tuned_client_std"),
            **look,
        ),
    ]


# Methods.


def of_methods(
    rows: Mapping[str, Cell],
    facts: Sequence[Sequence[Fact]],
    metric: str,
    at: At,
    choice: Choice,
    judged: Judgement | None,
) -> list[Column]:
    """Returns the columns of the scores of methods, and of their differences.

    Args:
        facts: The summaries of the runs of each row.
    """
    cells = list(rows.values())
    score = facts[0][0]["headline"] if facts else "accuracy"

    setting = "Setting" if choice.metric is None else "Chosen setting"
    labels = [cell.label or wording.MISSING for cell in cells]
    out = [texts(setting, labels, short="\nSetting", is_text=True), _seeds(cells)]
    if choice.metric is not None and choice.metric != metric:
        out += _means(cells, choice.metric, at)
    out += _means(cells, metric, at, best=judged.best if judged else set())
    if plain(metric) == Score("test", score).name and at == "final":
        out += _means(cells, metric, "best", prefix="best_")
    for key, title in CLIENTS.items():
        field = Score("client", score, key).name
        if field != metric:
            values = [summarise(known(one, f"client_{key}")) for one in facts]
            heading = _SHORT_OF_CLIENTS.get(key, "")
            out.append(_mean_column(field, values, title, part="clients", short=heading))
    return [*out, *differences(list(rows), judged)]


def known(facts: Sequence[Fact], key: str) -> list[float]:
    """Returns the numbers of a figure of the runs of a row."""
    return [x for fact in facts if isinstance(x := fact[key], int | float)]


def all_settings(study: Study, metric: str, at: At, choice: Choice) -> Frame:
    """Returns the table of all settings of all methods."""
    cells = [cell for found in study.methods.values() for cell in found]
    chosen = {id(cell) for cell in choice.cells.values()}
    out = []
    for key in dict.fromkeys(key for cell in cells for key in cell.settings):
        values = [
            value_text(cell.settings[key]) if key in cell.settings else wording.MISSING
            for cell in cells
        ]
        last = one_line(key).rpartition(".")[2]
        out.append(texts(one_line(key), values, short=f"\n{last}"))
    out.append(_seeds(cells))
    for field in dict.fromkeys(filter(None, (choice.metric, metric))):
        out += _means(cells, field, at)
    marks = ["chosen" if id(cell) in chosen else wording.MISSING for cell in cells]
    out.append(texts("Choice", marks, short="\nChoice", is_text=True))
    return Frame("Method", [cell.name for cell in cells], out)


def texts(title: str, cells: list[str], *, short: str = "", is_text: bool = False) -> Column:
    """Returns a column of texts, of which none is the best."""
    return Column(title, short, cells, set(), is_text=is_text)


def _seeds(cells: Sequence[Cell]) -> Column:
    return texts("Seeds", [str(len(cell.runs)) for cell in cells], short="\nSeeds")


def _means(
    cells: Sequence[Cell], metric: str, at: At, *, best: Set[int] = frozenset(), prefix: str = ""
) -> list[Column]:
    """Returns the means of a metric over seeds; global and personal models have a column each.

    Args:
      best: the rows with the best value of ``metric``.
      prefix: text before the field in the headings of the CSV.
    """
    any_model, rows = plain(metric), {*range(len(cells))}
    own = {i for i in rows if tested.personal(cells[i].first, any_model)}
    compared = own if metric == any_model else set()
    kinds = [("global", of_global(metric), rows, rows - compared)]
    kinds += [("personal", any_model, own, compared)]
    found = []
    for kind, field, shown, marked in kinds if own else [("", any_model, rows, rows)]:
        values = [
            summarise(cell.values(field, at) if i in shown else {}) for i, cell in enumerate(cells)
        ]
        marks = {*best} & marked
        title = tested.words(any_model, at)
        found.append(_mean_column(field, values, title, prefix, kind=kind, best=marks))
    return found


def _mean_column(
    field: str,
    values: Sequence[Summary],
    title: str,
    prefix: str = "",
    *,
    kind: str = "",
    **options: Any,
) -> Column:
    """Returns a column of means over seeds, whose CSV has all figures in columns of their own."""
    # The global models of other rows have the plain names.
    name = f"{'personal_' if kind == 'personal' else ''}{prefix}{field}"
    data = {name: [one.mean for one in values]}
    for key in ("sd", "n", "low", "high"):
        data[f"{name}_{key}"] = [getattr(one, key) for one in values]
    share = wording.is_share(field)
    return scores(title, values, share, kind=kind, **options)._replace(data=data)


def differences(names: Sequence[str], judged: Judgement | None) -> list[Column]:
    """Returns the columns of the paired differences; none for a single row."""
    if judged is None or not judged.ranking.comparisons:
        return []
    reference = judged.ranking.comparisons[0].reference
    found = {one.name: one for one in judged.ranking.comparisons}
    rows = [found.get(name) for name in names]
    unit, short = (" (points)", " (pts)") if judged.share else ("", "")

    def cells(text: Callable[[PairComparison], str]) -> list[str]:
        return [wording.MISSING if one is None else text(one) for one in rows]

    def numbers(key: str) -> list[Any]:
        return [one and getattr(one.difference, key) for one in rows]

    means = cells(lambda one: _signed(one.difference.mean, judged.share))
    means[list(names).index(reference)] = "baseline"
    heading = f"Difference to\n{wording.shorten(reference, 16)}{short}"
    data: dict[str, Sequence[Any]] = {"difference": numbers("mean"), "difference_n": numbers("n")}
    out = [Column(f"Difference to {reference}{unit}", heading, means, set(), "difference", data)]
    for kind, prefix in (("t", ""), ("bootstrap", "boot_")):
        ends = cells(partial(_interval, prefix=prefix, share=judged.share))
        title = f"95 % interval ({kind})"
        data = {f"{kind}_{end}": numbers(f"{prefix}{end}") for end in ("low", "high")}
        out.append(Column(title, f"95 % interval\n{kind}", ends, set(), "difference", data))
    data = {"result": [one and _result(one) for one in rows]}
    return [*out, Column("Result", "\nResult", cells(_result), set(), "difference", data, True)]


def separations(judged: Judgement) -> Frame:
    """Returns the table of what separates single runs."""
    pairs = judged.ranking.comparisons
    margins = [wording.MISSING if x.margin is None else f"± {judged.gap(x.margin)}" for x in pairs]
    bases = [x.basis if x.margin is not None else f"unknown: {x.basis}" for x in pairs]
    results = ["separated" if x.separated else "not separated" for x in pairs]
    return Frame(
        "Runs",
        [f"{x.reference} and {x.name}" for x in pairs],
        [
            texts("Difference", [judged.gap(abs(x.difference.mean or 0.0)) for x in pairs]),
            texts("Margin", margins),
            texts("Margin from", bases, is_text=True),
            texts("Result", results, is_text=True),
        ],
    )


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
