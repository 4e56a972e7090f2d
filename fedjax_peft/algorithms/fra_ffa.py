"""FRA-LoRA, then FFA-LoRA: learn the directions together, then train only within them.

    rounds of FRA:  (A, B) ← rank-r factors of Σ w_k s A_k B_k
    at the switch:  A ← A D⁻¹,  B ← D B,  D the lengths of A's columns        (A is orthonormal)
    from then on:   A rests,  B ← Σ w_k B_k                                           (exact)

The FRA-LoRA paper proposes this as an outlook and does not specify when to switch. Three triggers:

* ``round``: after a given number of rounds;
* ``plateau``: the cohort's mean training loss has not fallen below its best by a relative tolerance
  for some rounds (a server that sees no validation set has nothing better);
* ``subspace``: the space that A spans has hardly turned for some rounds. The measure is the root
  mean square of sin θ over all matrices, with the principal angles θ between old and new space.

FRA's factors come from an SVD, so the columns of A are already orthogonal and the switch only
changes their lengths. The paper's authors published the idea of the switch without results; all
details were decided here.
"""

from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array

from fedjax_peft import contracts as c
from fedjax_peft.aggregators import fra, mean
from fedjax_peft.algorithms.checks import checked, lora_model
from fedjax_peft.algorithms.fedavg import client
from fedjax_peft.contracts.arguments import Count, Fraction
from fedjax_peft.numerics.lowrank import matmul, pairs, scale
from fedjax_peft.numerics.measures.aggregation_error import truncation_metrics
from fedjax_peft.numerics.roles import HeadPolicy, head_roles
from fedjax_peft.support.errors import InputError

TOLERANCE = {"round": 0.0, "plateau": 0.01, "subspace": 0.1}


@checked
def fra_ffa(
    optimizer: c.Optimizer,
    *,
    trigger: Literal["round", "plateau", "subspace"] = "round",
    at: Count = 10,
    patience: Count = 3,
    tolerance: Fraction | None = None,
    rank: Count | None = None,
    head: HeadPolicy = "shared",
    weights: c.Weights = "size",
) -> c.Algorithm:
    """FRA-LoRA until a switch, then A rests and only B is trained and sent, as in FFA-LoRA.

    Args:
      trigger: the condition of the switch: a number of rounds, a training loss that no longer
        falls, or an A that hardly turns.
      at: the number of rounds with FRA (``round``).
      patience: rounds in a row that must be calm (``plateau``, ``subspace``).
      tolerance: limit for a calm round: relative fall of the loss (``plateau``, by default 0.01),
        or the root mean square sine of the angles (``subspace``, by default 0.1).
      rank: directions that FRA keeps; by default the adapter's own rank.

    Raises:
      InputError: a kept optimizer; on use, a model without LoRA.
    """
    calm = TOLERANCE[trigger] if tolerance is None else tolerance

    def sent_leaves(broadcast: c.PyTree, round_index: Array) -> dict[str, Array]:
        learning = broadcast["switched"] == 0
        sent = {a: learning for a, _ in pairs(broadcast["model"]).values()}
        return {**sent, "switched": jnp.array(False)}  # the server knows

    incompatible = {
        c.Feature.ASYNCHRONY: "The clients of fra_ffa all switch to FFA-LoRA in the same round.",
        c.Feature.KEPT_OPTIMIZER: "Until the switch, FRA factors LoRA's products anew in every"
        " round, so gradients of earlier rounds belong to other factors. Use 'ffa'.",
    }
    if trigger == "plateau":
        reason = (
            "With trigger = 'plateau' fra_ffa switches by the clients' training losses, which would"
            " not be private. Set trigger = 'round' or 'subspace'."
        )
        incompatible |= dict.fromkeys((c.Feature.CLIENT_PRIVACY, c.Feature.EXAMPLE_PRIVACY), reason)
    return c.Algorithm(
        "fra_ffa",
        head_roles(head),
        lambda context: _client(optimizer, context),
        _aggregator(rank),
        _server(trigger, at, patience, calm),
        model=lambda broadcast, client_state: {**broadcast["model"], **client_state},
        weights=weights,
        traffic=c.Traffic(sent_leaves, change_field="model"),
        incompatible=incompatible,
        check=lora_model("fra_ffa"),
    )


def _client(optimizer: c.Optimizer, context: c.ClientContext) -> c.ClientUpdate:
    """Returns local training in which A rests once the server has switched."""

    def inner(switched: Array) -> c.ClientUpdate:
        def moves(name: str) -> Array | bool:
            return switched == 0 if name.endswith(".lora_a") else True

        return client(optimizer, context, moves)

    def init(broadcast: c.PyTree, private: c.Params, key: c.Key) -> c.PyTree:
        switched = broadcast["switched"]
        return inner(switched).init(broadcast["model"], private, key), switched

    def step(state: c.PyTree, batch: c.Batch, key: c.Key) -> tuple[c.PyTree, c.Metrics]:
        local, switched = state
        local, metrics = inner(switched).step(local, batch, key)
        return (local, switched), metrics

    def final(state: c.PyTree) -> tuple[c.PyTree, c.Params]:
        local, switched = state
        shared, private = inner(switched).final(local)
        return {"model": shared, "switched": switched}, private

    return c.ClientUpdate(init, step, final)


def _aggregator(rank: int | None) -> c.Aggregator:
    """Returns FRA before the switch and the mean after it; ``switched`` says which."""
    before, after = fra(rank), mean(error=False)

    def lift(upload: c.PyTree, template: c.PyTree, fixed: c.Params) -> c.PyTree:
        model = (upload["model"], template["model"], fixed)
        return {"before": before.lift(*model), "after": after.lift(*model)}

    def lift_used(upload: c.PyTree, template: c.PyTree, fixed: c.Params) -> c.PyTree:
        """Lifts with zeros in the half that ``finish`` does not read in this round."""
        learning = template["switched"] == 0
        used = {"before": learning, "after": ~learning}
        return {
            half: jax.tree.map(lambda x, half=half: jnp.where(used[half], x, 0), lifted)
            for half, lifted in lift(upload, template, fixed).items()
        }

    def finish(
        total: c.Total, template: c.PyTree, context: c.RoundContext, state: c.PyTree
    ) -> c.Aggregated:
        model = template["model"]
        rest: Any = (model, context, ())  # neither of the two has a state

        def learning() -> c.Aggregated:
            return before.finish(total._replace(value=total.value["before"]), *rest)

        def resting() -> c.Aggregated:
            new = after.finish(total._replace(value=total.value["after"]), *rest).update
            norms = {
                p: jnp.linalg.norm(scale(context.fixed, p) * matmul(new[a], new[b]))
                for p, (a, b) in pairs(new).items()
            }
            exact = {p: jnp.zeros(()) for p in norms}
            return c.Aggregated(new, truncation_metrics(exact, exact, norms))

        result = jax.lax.cond(template["switched"] == 0, learning, resting)
        update = {"model": result.update, "switched": template["switched"]}
        return c.Aggregated(update, result.metrics | {"switched": template["switched"]}, state)

    plain = before._replace(name="fra_ffa", lift=lift, finish=finish, refactor=None)
    return plain._replace(unmeasured=plain._replace(lift=lift_used))


def _server(trigger: str, at: int, patience: int, tolerance: float) -> c.ServerUpdate:
    """Returns the server that replaces the model, and watches for the switch."""

    def init(shared: c.Params) -> c.PyTree:
        return {
            "model": shared,
            "switched": jnp.zeros(()),
            "calm": jnp.zeros((), jnp.int32),  # rounds in a row
            "best": jnp.array(jnp.finfo(jnp.float32).max),  # training loss; finite, as all state
            "orthogonal": jnp.array(False),  # A is FRA's, and no longer the start
        }

    def update(state: c.PyTree, new: c.PyTree, context: c.RoundContext) -> c.PyTree:
        model, best = new["model"], state["best"]
        calm = jnp.array(False)
        if trigger == "plateau":
            if "loss" not in context.metrics:
                raise InputError(
                    "trigger = 'plateau' of 'fra_ffa' watches the training metric 'loss', and the"
                    f" task has {', '.join(context.metrics) or 'none'}. Set trigger = 'round' or"
                    " 'subspace'."
                )
            total, count = context.metrics["loss"]
            loss = total / jnp.maximum(count, 1.0)
            calm = loss >= best * (1 - tolerance)
            # Without a finite loss the round says nothing: it is neither calm nor a new best.
            known = (count > 0) & jnp.isfinite(loss)
            best = jnp.where(known & ~calm, loss, best)
            calm &= known
        elif trigger == "subspace":
            calm = state["orthogonal"] & (_turned(state["model"], model) <= tolerance)
        rounds = jnp.where(calm, state["calm"] + 1, 0)
        due = context.round_index >= at if trigger == "round" else rounds >= patience
        learning = state["switched"] == 0
        moved = {
            "model": jax.tree.map(
                lambda x, y: jnp.where(due & learning, x, y), _orthonormal(model), model
            ),
            "switched": jnp.where(due, 1.0, state["switched"]),
            "calm": rounds,
            "best": best,
            "orthogonal": jnp.array(True),
        }
        received = context.participants > 0
        return jax.tree.map(lambda x, y: jnp.where(received, x, y), moved, state)

    def broadcast(state: c.PyTree) -> c.PyTree:
        return {"model": state["model"], "switched": state["switched"]}

    return c.ServerUpdate(init, update, broadcast, params=lambda state: state["model"])


def _orthonormal(model: c.Params) -> c.Params:
    """Returns the leaves with the lengths of A's columns moved to B."""
    new = dict(model)
    for a, b in pairs(model).values():
        length = jnp.linalg.norm(model[a], axis=0)
        length = jnp.where(length > 0, length, 1.0)
        new[a], new[b] = model[a] / length[None], model[b] * length[:, None]
    return new


def _turned(old: c.Params, new: c.Params) -> Array:
    """Returns the root mean square sine of the principal angles between two As' column spaces."""
    old, new = _orthonormal(old), _orthonormal(new)
    squares, angles = jnp.zeros(()), 0
    for a, _ in pairs(old).values():
        off = new[a] - matmul(old[a], matmul(old[a].T, new[a]))
        squares, angles = squares + jnp.sum(off**2), angles + off.shape[1]
    return jnp.sqrt(squares / angles)
