"""All data in one place: the result that training reaches without federation.

    θ ← optimizer steps on F over all examples;  its state is kept from round to round

A round is then only the interval between two evaluations, and nothing travels.
"""

from collections.abc import Mapping

import jax.numpy as jnp
from jax import Array

from fedjax_peft import contracts as c
from fedjax_peft.aggregators import mean
from fedjax_peft.algorithms.checks import checked
from fedjax_peft.algorithms.fedavg import averaging
from fedjax_peft.algorithms.local import Trained, trained_as
from fedjax_peft.contracts.part import part
from fedjax_peft.numerics.optimizers import kept
from fedjax_peft.support.errors import InputError


@part
def centralised(
    optimizer: c.Optimizer, *, train: Trained = "all", fresh_optimizer: bool = False
) -> c.Algorithm:
    """Baseline with all data in one place, ``partition.pooled``: usually an upper bound.

    Args:
      optimizer: the optimizer of the training. Its state is kept, as if there were no rounds.
      train: everything, the ``head`` only, or the ``adapters`` only.
      fresh_optimizer: the optimizer starts anew in every round, unless it is a ``kept`` one.
    """
    return _centralised(optimizer if fresh_optimizer else kept(optimizer), train)


@checked
def _centralised(optimizer: c.Optimizer, train: Trained) -> c.Algorithm:
    """Returns the algorithm, with a state that is kept if the optimizer says so."""

    def check(kinds: Mapping[str, str], clients: int) -> None:
        if clients != 1:
            raise InputError(
                f"The algorithm 'centralised' trains on all data in one place, but there are"
                f" {clients} clients: make one that has everything with partition.pooled(data)."
            )

    def nothing(broadcast: c.PyTree, round_index: Array) -> dict[str, Array]:
        return {name: jnp.zeros((), bool) for name in broadcast}

    rules = trained_as("shared", train)
    traffic = c.Traffic(sent_leaves=nothing, received_part=lambda broadcast: {})
    return averaging(
        "centralised", optimizer, rules, mean(error=False), check=check, traffic=traffic
    )
