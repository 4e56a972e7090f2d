"""RoLoRA (Chen et al. 2025): rounds train B and A in turn.

    odd rounds:   B_k ← optimizer steps on F_k(A, ·),   B ← Σ w_k B_k      A is common and rests
    even rounds:  A_k ← optimizer steps on F_k(·, B),   A ← Σ w_k A_k      B is common and rests

Each average is exact, because one factor is the same for all, and each round moves half of LoRA's
bytes; unlike in FFA-LoRA both factors are learned. B goes first: at LoRA's start B = 0, so that A
has no gradient. The optimizer does not touch the resting factor: no weight decay, no moments.

The head is trained in every round. This follows the paper's abstract and a note on it; the
equations were derived again.
"""

import jax.numpy as jnp
from jax import Array

from fedjax_peft import contracts as c
from fedjax_peft.algorithms.checks import checked, lora_model
from fedjax_peft.algorithms.fedavg import averaging, client
from fedjax_peft.numerics.roles import HeadPolicy, head_roles


@checked
def rolora(
    optimizer: c.Optimizer,
    *,
    aggregator: c.Aggregator | None = None,
    head: HeadPolicy = "shared",
    weights: c.Weights = "size",
) -> c.Algorithm:
    """RoLoRA: B is trained and averaged in odd rounds, A in even ones; exact averages.

    Raises:
      InputError: a kept optimizer; on use, a model without LoRA.
    """

    def bound(context: c.ClientContext) -> c.ClientUpdate:
        return client(optimizer, context, lambda name: turn(name, context.round_index))

    def sent_leaves(broadcast: c.Params, round_index: Array) -> dict[str, Array]:
        factors = [name for name in broadcast if name.endswith((".lora_a", ".lora_b"))]
        return {name: jnp.asarray(turn(name, round_index)) for name in factors}

    algorithm = averaging("rolora", optimizer, head_roles(head), aggregator)
    return algorithm._replace(
        client=bound,
        weights=weights,
        traffic=c.Traffic(sent_leaves),
        check=lora_model("rolora"),
        incompatible=taking_turns("RoLoRA"),
    )


def turn(name: str, round_index: Array) -> Array | bool:
    """Returns whether a leaf is trained in a round: A in even rounds, B in odd ones."""
    if name.endswith(".lora_a"):
        return round_index % 2 == 0
    return round_index % 2 == 1 if name.endswith(".lora_b") else True


def taking_turns(name: str) -> dict[c.Feature, str]:
    """Returns what cannot be combined with factors that are trained in turn."""
    return {
        c.Feature.ASYNCHRONY: f"{name}'s clients all train the same factor in a round.",
        c.Feature.NEW_FACTORS: f"In {name} one factor rests while the other is averaged, and is not"
        " sent. Leave the aggregator out, or use 'fedavg'.",
        c.Feature.KEPT_OPTIMIZER: f"In {name} each factor rests in every second round, in which the"
        " optimizer's moments would decay and its count of steps go on without a gradient of this"
        " factor. Use 'ffa' or 'fedavg'.",
    }
