"""Rows of metrics from the reports of a session (fields: :mod:`fedjax_peft.simulation.rows`)."""

from collections.abc import Mapping, Sequence

import jax
import numpy as np

from fedjax_peft.contracts import Algorithm
from fedjax_peft.engine.state import RoundInfo
from fedjax_peft.models.base import Model
from fedjax_peft.numerics import tree
from fedjax_peft.numerics.roles import assign_roles
from fedjax_peft.simulation.rows import LOWER, Row, finite_or_none
from fedjax_peft.simulation.score_names import BACKDOOR_SUCCESS, Score, worst


def start_row(model: Model, algorithm: Algorithm, seconds: float, lower: Sequence[str]) -> Row:
    """Returns the fields of row 0 about the model, its costs and its metrics.

    Args:
      seconds: simulated seconds before the first round.
      lower: the metrics whose lower values are better.
    """
    names = assign_roles(model.kinds, algorithm.roles)
    return {
        "bytes_up": 0,
        "bytes_down": 0,
        "simulated_seconds": seconds,
        LOWER: [*lower, BACKDOOR_SUCCESS],
        "parameters": model.counts(),
        "roles": {
            role: tree.size(tree.select(model.trainable, leaves)) for role, leaves in names.items()
        },
    }


def round_row(info: RoundInfo, *, each: bool = False, lower: Sequence[str] = ("loss",)) -> Row:
    """Returns the training metrics of a round; it waits for the device.

    Args:
      each: also return the metrics of every client, their standard deviation and worst value.
      lower: the metrics whose lower values are better.
    """
    plan = info.plan
    row: Row = {"round": info.round_index}
    sums, finite, norms, aggregation = jax.device_get(
        (info.sums, info.finite, info.norms, info.aggregation)
    )
    if not plan.client_steps:  # nobody takes part; the server may still move (``every_round``)
        row |= {"clients": [], "dropped": [], "steps": 0, "lanes": plan.lanes}
        return row | _aggregation_fields(aggregation)
    for name, (total, count) in sums.items() if plan.useful else ():  # all may only send noise
        good = finite & (count > 0)
        row[Score("train", name).name] = (
            finite_or_none(total[good].sum() / count[good].sum()) if good.any() else None
        )
    took_part = plan.client >= 0
    row["clients"] = plan.client[took_part].tolist()
    row["dropped"] = plan.client[took_part & ~finite].tolist()
    row["steps"] = plan.useful
    row["lanes"] = plan.lanes
    row["slot_utilisation"] = plan.slot_utilisation
    row["padded_utilisation"] = plan.padded_utilisation
    sent = ~plan.silent_slots  # the others took part without an update of their own
    good = took_part & finite & sent
    row["update_norm"] = finite_or_none(norms[good].mean()) if good.any() else None
    if each:
        per_client = {n: s / np.where(c > 0, c, np.nan) for n, (s, c) in sums.items()}
        per_client["update_norm"] = norms
        per_client = {n: np.where(sent, x, np.nan)[took_part] for n, x in per_client.items()}
        counted = {
            n: (good & (sums[n][1] > 0) if n in sums else good)[took_part] for n in per_client
        }
        row |= _client_fields(per_client, counted, lower)
    skipped = skipped_leaves(info.sent_leaves)
    return row | _aggregation_fields(aggregation) | ({"skipped_leaves": skipped} if skipped else {})


def _client_fields(
    per_client: Mapping[str, np.ndarray], counted: Mapping[str, np.ndarray], lower: Sequence[str]
) -> Row:
    """Returns each client's metrics, and their deviation and worst value.

    Args:
      counted: for each metric, the clients with a finite upload and something to measure.
    """
    row: Row = {"per_client": {n: [finite_or_none(x) for x in v] for n, v in per_client.items()}}
    for name, values in per_client.items():
        received = values[counted[name]]
        if len(received):
            over = {"std": received.std(), "worst": worst(received, name, lower)}
            row |= {Score("train", name, n).name: finite_or_none(x) for n, x in over.items()}
    return row


def _aggregation_fields(aggregation: Mapping[str, np.ndarray]) -> Row:
    """Returns the metrics of the aggregation; the names of layer metrics are ``kind/path``."""
    row: Row = {}
    layers: dict[str, dict[str, float | None]] = {}
    for name, value in aggregation.items():
        kind, _, path = name.partition("/")
        if path:
            layers.setdefault(kind, {})[path] = finite_or_none(value)
        else:
            row[name] = finite_or_none(value)
    return row | ({"layers": layers} if layers else {})


def sent_shares(info: RoundInfo) -> dict[int, dict[str, float]]:
    """Returns client -> ``Traffic.sent_shares`` of its upload; it waits for the device."""
    shares = jax.device_get(info.shares)
    slots = enumerate(info.plan.client.tolist()) if shares else ()
    return {c: {n: float(x[i]) for n, x in shares.items()} for i, c in slots if c >= 0}


def skipped_leaves(sent_leaves: Mapping[str, jax.Array]) -> list[str]:
    """Returns the leaves that clients do not send in a round."""
    return sorted(name for name, sent in jax.device_get(sent_leaves).items() if not sent)
