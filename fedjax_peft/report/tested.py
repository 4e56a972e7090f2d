"""Which models a score on the test set is of: the global model, or the clients' own.

``test_accuracy`` of an algorithm with personal models is the mean over the models of some clients,
and ``global_test_accuracy`` is that of its global model, if it has one. ``test_accuracy`` of other
algorithms is that of their global model. These are unlike things, so a table has a column for each
as soon as one of its runs has personal models, and compares global models with global ones.
"""

from collections.abc import Mapping, Sequence

from fedjax_peft.report.cells import At
from fedjax_peft.report.records import RunRecord
from fedjax_peft.report.wording import listing, word
from fedjax_peft.simulation.rows import has_field, is_personal
from fedjax_peft.simulation.score_names import Score, is_global, of_global, plain

MODELS = {"global": "of the global model", "personal": "of personal models"}
"""Whose score on the test set a column has -> how its heading says it."""


def personal(run: RunRecord, metric: str) -> bool:
    """Returns whether a run's score is a mean over personal models."""
    return any(is_personal(row, metric) for row in run.rows)


def comparable(metric: str, runs: Sequence[RunRecord]) -> str:
    """Returns the field that compares a score of like models.

    It is that of the global models if some runs have personal models, others not, and all have a
    global one. Otherwise it is ``metric`` itself.
    """
    shared = of_global(metric)
    mixed = len({personal(run, metric) for run in runs}) > 1
    known = all(any(has_field(row, shared) for row in run.rows) for run in runs)
    return shared if mixed and known else metric


def models(metric: str, runs: Sequence[RunRecord]) -> str:
    """Returns the models of a score in words; empty if all runs have global models only."""
    if is_global(metric):
        return MODELS["global"]
    return MODELS["personal"] if runs and all(personal(run, metric) for run in runs) else ""


def words(metric: str, at: At, runs: Sequence[RunRecord] = ()) -> str:
    """Returns a metric, of which models and at which round, such as ``final test accuracy``."""
    score, text = Score.read(metric), word(plain(metric))
    own, _, split = score.evaluation.partition("_") if score else ("", "", "")
    if score is not None and own == "client" and score[2:] == ("mean", "", False):
        text = f"mean of the clients’ {word(Score(split, score.metric).name)}"
    text = " ".join(filter(None, [text, models(metric, runs)]))
    return f"{text} in round {at}" if isinstance(at, int) else f"{at} {text}"


def captions(metric: str, runs: Sequence[RunRecord]) -> list[str]:
    """Returns sentences on the models whose scores a table shows."""
    found = []
    score = Score.read(plain(metric))
    if score is not None and score.evaluation == "test" and not score.tuned:
        found = ["Test scores are of the global model, on the common test set."]
        if any(personal(run, plain(metric)) for run in runs):
            found = [
                "Scores of the global model and of personal models are on the same test set. Those"
                " of personal models are means over the own models of some clients."
            ]
    if any(has_field(row, "client_count") for run in runs for row in run.rows):
        found.append(
            "Clients’ scores are on each client’s own test examples, by its personal model if the"
            " method has one, otherwise by the global model."
        )
    return found


def caution(metric: str, rows: Mapping[str, RunRecord]) -> list[str]:
    """Returns a sentence if a metric is of unlike models in different rows of a table."""
    own = {name: personal(run, metric) for name, run in rows.items()}
    if len({*own.values()}) < 2:
        return []
    personal_, shared = ([n for n in own if own[n] is kind] for kind in (True, False))
    return [
        f"{metric} is a mean over clients’ personal models for {listing(personal_)}, and the score"
        f" of the global model for {listing(shared)}: their differences compare unlike models."
        " Tests of the clients’ own examples (client_holdout) compare what each client would use."
    ]
