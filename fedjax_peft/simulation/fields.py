"""The units and meanings of all fields of a row of ``metrics.jsonl``.

The reference pages of the documentation are made from these tables, and a test compares them with
the rows of real runs.
"""

import re
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple


class Field(NamedTuple):
    """A field of a row, or several fields of the same form."""

    name: str
    """``METRIC`` stands for a metric of the task or of the algorithm (:data:`METRICS`), ``MODULE``
    for the path of a module. A dot separates a nested table from its field."""
    unit: str
    """For example ``bytes`` or ``seconds``; empty for a text or a number without a unit."""
    meaning: str


METRICS = (
    Field("loss", "nats per example", "Mean loss; per token for next-token prediction."),
    Field("accuracy", "fraction", "Correct predictions over all predictions."),
    Field("macro_f1", "fraction", "Classification: mean of the F1 of each class."),
    Field("f1", "fraction", "Tagging: micro F1 of entities. Question answering: F1 of words."),
    Field("precision", "fraction", "Tagging: correct entities over predicted entities."),
    Field("recall", "fraction", "Tagging: correct entities over all true entities."),
    Field("lost_entities", "fraction", "Tagging: entities after the last token kept."),
    Field("exact_match", "fraction", "Question answering: answers equal to a reference."),
    Field("raw_exact_match", "fraction", "Like exact_match, averaged over all references."),
    Field("raw_f1", "fraction", "F1 of words, averaged over all references of a question."),
    Field("rouge_l", "fraction", "Generated texts: F-measure of the longest common subsequence."),
    Field("gsm8k", "fraction", "Generated texts: equal numbers after ####."),
    Field("accuracy_norm", "fraction", "Multiple choice: accuracy by likelihood per character."),
    Field("perplexity", "", "Next token: exponential of the mean loss."),
    Field("contrastive", "nats per example", "MOON: the contrastive loss."),
    Field("loss_global", "nats per example", "FedMCP: loss of the second classifier."),
    Field("accuracy_global", "fraction", "FedMCP: accuracy of the second classifier."),
    Field("SIMILARITY_global_private", "", "FedMCP: similarity of the two adapters' outputs."),
    Field("SIMILARITY_global_average", "", "FedMCP: similarity of global and received adapter."),
    Field("backdoor_success", "fraction", "Other classes' examples that the trigger turns over."),
    Field("cka", "from 0 to 1", 'Similarity of two adapters; with diagnostics=["cka"].'),
)
"""The metrics that ``METRIC`` stands for in :data:`FIELDS`; tasks of users may have others."""

FIELDS = (
    # ---- the round
    Field("round", "", "Index of the round; 0 is before training."),
    Field("clients", "client ids", "Clients that sent an upload in this round."),
    Field("dropped", "client ids", "The ``clients`` whose uploads were not finite."),
    Field("failed", "client ids", "Clients that dropped out (``failure_rate``)."),
    Field("late", "client ids", "Clients that missed the ``deadline`` and sent no change."),
    Field("discarded", "client ids", "Clients whose uploads were too stale (``max_staleness``)."),
    Field("staleness_mean", "updates", "Updates of the server since the ``clients`` fetched."),
    Field("staleness_max", "updates", "The largest staleness of the ``clients``."),
    Field("in_flight", "", "Clients still at work when the server aggregates."),
    Field("versions", "", "Versions of the broadcast that the server keeps for clients at work."),
    Field("available", "", "Clients that are available at the start (``availability``)."),
    Field("waited", "seconds", "Time until a client is available (``availability``)."),
    Field("partial", "client ids", "The ``clients`` that sent partial work (``late``)."),
    Field("skipped_leaves", "names", "Leaves that clients did not send in this round."),
    Field("stopped", "", "Why the run ended before its last round."),
    # ---- training
    Field("steps", "local steps", "Local steps of all clients."),
    Field("client_steps", "local steps", "One value for each of ``clients``, if work is unequal."),
    Field("train_METRIC", "as METRIC", "Mean over the training examples of the round."),
    Field("train_METRIC_std", "as METRIC", "Standard deviation over the clients of the round."),
    Field("train_METRIC_worst", "as METRIC", "Worst client of the round."),
    Field("update_norm", "", "Mean L2 norm of the change that an upload makes to the model."),
    Field("train_update_norm_std", "", "Standard deviation of this norm over clients."),
    Field("train_update_norm_worst", "", "Largest of these norms."),
    Field("per_client.METRIC", "as METRIC", "One value for each of ``clients``."),
    Field("per_client.update_norm", "", "One value for each of ``clients``."),
    Field("learning_rate_factor", "", "Factor of the clients' learning rate (``[schedule]``)."),
    Field("server_learning_rate_factor", "", "Of the server's (``[server_schedule]``)."),
    # ---- costs
    Field("bytes_up", "bytes", "Sent to the server in this round, by all clients."),
    Field("bytes_down", "bytes", "Sent to clients in this round."),
    Field("simulated_seconds", "seconds", "Duration of the round in the time model."),
    # ---- evaluation
    Field("headline", "", "Name of the main metric of the task."),
    Field("headline_better", "", "``higher`` or ``lower``."),
    Field("test_METRIC", "as METRIC", "Global model, or mean over ``test_count`` clients' models."),
    Field("test_METRIC_std", "as METRIC", "Standard deviation over these clients' models."),
    Field("test_examples", "examples", "Size of the test set."),
    Field("test_count", "clients", "Number of clients whose models were tested."),
    Field("global_test_METRIC", "as METRIC", "Global model, if clients have personal models."),
    Field("global_test_examples", "examples", "Size of the test set."),
    Field("validation_METRIC", "as METRIC", "The same on the validation set; choose by it."),
    Field("validation_METRIC_std", "as METRIC", "Standard deviation over these clients' models."),
    Field("validation_examples", "examples", "Size of the validation set."),
    Field("validation_count", "clients", "Number of clients whose models were validated."),
    Field("global_validation_METRIC", "as METRIC", "Global model beside personal models."),
    Field("global_validation_examples", "examples", "Size of the validation set."),
    Field("client_count", "clients", "Number of clients with their own test examples."),
    Field("client_examples", "examples", "Test examples of all clients."),
    Field("client_METRIC_mean", "as METRIC", "Mean over clients on their own tests."),
    Field("client_METRIC_weighted", "as METRIC", "Mean over clients, weighted by test size."),
    Field("client_METRIC_std", "as METRIC", "Standard deviation over clients."),
    Field("client_METRIC_worst", "as METRIC", "Worst client."),
    Field("client_tests.METRIC", "as METRIC", "One value for each of ``client_tests.client``."),
    Field("client_tests.client", "client ids", "Clients with their own test examples."),
    Field("client_validation_count", "clients", "Clients with their own validation examples."),
    Field("client_validation_examples", "examples", "Validation examples of all clients."),
    Field("client_validation_METRIC_mean", "as METRIC", "Mean over clients' own examples."),
    Field("client_validation_METRIC_weighted", "as METRIC", "The same, weighted by examples."),
    Field("client_validation_METRIC_std", "as METRIC", "Standard deviation over clients."),
    Field("client_validation_METRIC_worst", "as METRIC", "Worst client."),
    Field("client_validations.METRIC", "as METRIC", "One value for each of the next field."),
    Field("client_validations.client", "client ids", "Clients with validation examples."),
    Field("tuned_test_METRIC", "as METRIC", "The test metric after clients tune their models."),
    Field("tuned_test_METRIC_std", "as METRIC", "Standard deviation over these tuned models."),
    Field("tuned_validation_METRIC", "as METRIC", "The same on the validation set."),
    Field("tuned_validation_METRIC_std", "as METRIC", "Standard deviation over these models."),
    Field("tuned_client_validation_METRIC_KIND", "as METRIC", "On clients' validation examples."),
    Field("tuned_client_METRIC_KIND", "as METRIC", "KIND is mean, weighted, std or worst."),
    # ---- aggregation
    Field("aggregation_error", "", "Frobenius norm of used minus exact average of LoRA."),
    Field("aggregation_error_relative", "fraction", "Over the norm of the exact average."),
    Field("aggregation_error_max", "", "Largest absolute entry of the difference."),
    Field("layers.aggregation_error.MODULE", "", "The error of one module."),
    Field("spectrum_kept", "fraction", "Share of the average's squared norm that the rank keeps."),
    Field("residual", "", "FedEx-LoRA: Frobenius norm of the change of frozen weights."),
    Field("residual_relative", "fraction", "Over the norm of the exact average."),
    Field("uploads_ignored", "uploads", "Robust aggregators: changed by more than 1e9."),
    Field("too_few_clients", "0 or 1", "Krum, Bulyan: fewer uploads than guaranteed for."),
    Field("clipping_radius", "", "centred_clipping: the radius in this round."),
    Field("trusted", "0 or 1", "fltrust: whether the trusted client's upload arrived."),
    Field("trust_score", "fraction", "fltrust: mean trust score of the other clients."),
    Field("norm_bound", "", "norm_bounding: the largest norm of a change in this round."),
    Field("client_clusters", "clusters", "HiLoRA: of clients; 0 before they are found."),
    Field("switched", "0 or 1", "FRA-FFA: whether the run has switched to FFA."),
    # ---- upload transforms
    Field("clip_share", "fraction", "clip_norm: aggregated clients whose change was clipped."),
    Field("clip_median_norm", "", "clip_norm: median L2 norm of their changes before clipping."),
    Field(
        "compression_error",
        "fraction",
        "Compressors: mean over aggregated clients of the norm of what was lost over that of what"
        " was to be sent; a second one of a chain has its place, such as ``_2``.",
    ),
    Field("downlink_error", "fraction", "downlink: the same of what the server broadcasts."),
    # ---- differential privacy
    Field("epsilon", "", "ε of the rounds so far; null without a guarantee."),
    Field("delta", "", "δ of this guarantee."),
    Field("privacy_noise_std", "", "Standard deviation of the noise on the mean of the uploads."),
    Field("privacy_clip_share", "fraction", "Clients that were clipped. Not private."),
    Field("privacy_median_norm", "", "Median norm of uploads before clipping. Not private."),
    Field("privacy_clip", "", "adaptive: clip norm of the round."),
    Field("privacy_unclipped", "fraction", "adaptive: noisy share of clients not clipped."),
    Field("snr", "", "Smallest singular value that is kept, over the norm of the noise."),
    Field("layers.snr.MODULE", "", "The same of one module."),
    # ---- attacks
    Field("hostile", "clients", "Hostile clients in the round; null in a private run."),
    # ---- diagnostics
    Field("local_METRIC", "as METRIC", "One value for each of ``clients``, before aggregation."),
    Field("local_METRIC_mean", "as METRIC", "Mean over these models."),
    Field("local_METRIC_std", "as METRIC", "Standard deviation over these models."),
    Field("local_METRIC_worst", "as METRIC", "Worst of these models."),
    Field("variation_magnitude_FACTOR", "", "Mean change of the columns' norms; FACTOR: a or b."),
    Field("variation_direction_FACTOR", "", "Mean of 1 - cosine of the columns' directions."),
    Field("layers.variation_magnitude_FACTOR.MODULE", "", "The same of one module."),
    Field("layers.variation_direction_FACTOR.MODULE", "", "The same of one module."),
    Field("effective_rank", "", "Mean effective rank of the LoRA products."),
    Field("layers.effective_rank.MODULE", "", "Effective rank of one product."),
    Field("layers.singular_value.MODULE", "", "Largest singular value of one product."),
    # ---- the machine
    Field("lanes", "", "Clients that run side by side."),
    Field("slot_utilisation", "fraction", "Local steps over the step slots of all lanes."),
    Field("padded_utilisation", "fraction", "The same if all clients had the largest step count."),
    Field("padding_share", "fraction", "Tokens of the round that are padding."),
    Field("time.train_s", "seconds", "Wall-clock time of training on this machine."),
    Field("time.compile_s", "seconds", "Time of compiling the round, if it was compiled."),
    Field("time.eval_s", "seconds", "Time of evaluation."),
    Field("time.local_s", "seconds", 'Time of diagnostics=["local"].'),
    Field("time.tune_s", "seconds", "Time of tuning before the last evaluation."),
    # ---- row 0
    Field("parameters.KIND", "parameters", "KIND is adapter, head or frozen."),
    Field("roles.ROLE", "parameters", "ROLE is shared, private or fixed."),
    Field("origin.FACT", "", "The run that this one starts from, and its clients."),
    Field("federation.FACT", "", "With a mechanism or an attack: the facts that it depends on."),
    Field("privacy.name", "", "The mechanism of differential privacy."),
    Field("privacy.unit", "", "Whose data it protects: client or example."),
    Field("privacy.statement", "", "Its guarantee in words: neighbours, sampling, trust."),
)
"""All fields. Evaluations over clients' models also exist for two groups of clients. Names that end
in ``_seen`` are for clients with at least one aggregated upload; ``_unseen`` is for the others."""

_PARTS = {
    "METRIC": f"(?:{'|'.join(metric.name for metric in METRICS)})".replace(
        "SIMILARITY", "(?:cka|cka_debiased|cosine)"
    ),
    "MODULE": r"[\w.]+",
    "FACTOR": "[ab]",
    "KIND": "(?:mean|weighted|std|worst|adapter|head|frozen)",
    "ROLE": "(?:shared|private|fixed)",
    "FACT": r"\w+",
}
_GROUPED = ("test_", "validation_", "client_", "tuned_")


def find(name: str) -> Field | None:
    """Returns the field of a name, such as ``client_f1_mean_unseen`` or ``time.train_s``.

    Returns None for a name that is not in the tables.
    """
    return next((field for field in FIELDS if _pattern(field.name).fullmatch(name)), None)


def field_names(row: Mapping[str, Any]) -> set[str]:
    """Returns the names of all fields of a row; names in nested tables are joined by dots."""
    names: set[str] = set()
    for key, value in row.items():
        inside = field_names(value) if isinstance(value, Mapping) else None
        names |= {key} if inside is None else {f"{key}.{name}" for name in inside}
    return names


@cache
def _pattern(name: str) -> re.Pattern[str]:
    """Returns the pattern that matches all names of a field."""
    parts = (_PARTS.get(part, re.escape(part)) for part in re.split(f"({'|'.join(_PARTS)})", name))
    groups = "(?:_seen|_unseen)?" if name.startswith(_GROUPED) else ""
    return re.compile("".join(parts) + groups)
