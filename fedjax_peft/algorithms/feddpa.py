"""FedDPA (Yang et al. 2024): a global LoRA for new texts, and a local LoRA for each client's own.

    layer:     y = x W + (1 - α) Δ_g(x) + α Δ_l(x)               (:mod:`fedjax_peft.peft.dual_lora`)
    FedDPA-T:  in each round, a client trains both on the same batches:
                 g_k ← g;  g_k ← optimizer steps on F_k with the global adapter alone (α = 0)
                 l_k ← optimizer steps on F_k with α = mix, beside the received g, which rests
               server:  g ← (1/K) Σ g_k;   l_k stays on its client
    FedDPA-F:  rounds train and average g alone.  Before the last evaluation, each client starts
               l_k from g and trains it alone (α = 1)
    a text x:  α(x) = w · mean_j cos(h(x), h(x_j))    over a few training examples x_j of a client

h is the last hidden state of the last token, with the local adapter alone
(:mod:`fedjax_peft.contracts.instance_weights`). Texts that are like a client's own use its local
adapter more.

The local adapter of FedDPA-T is trained against the received g, as in the authors' code, so the two
trainings of a round do not depend on each other and can take turns batch by batch. Each has its own
optimizer state. The authors begin with the local one in the second round; here it is the first. The
mean is unweighted, as in their code.

The paper gives a text like the client's own more of the local adapter. In the authors' script the
two weights are swapped: there the global adapter gets α(x). Here it is as in the paper. A negative
α is 0. The examples x_j are the first ones of a client's last batch, which was shuffled: 5 as in
the code, or fewer. Their hidden states stay on the client. A client that has not trained its local
adapter predicts with g alone.

The paper's models have no new head. Here the head, shared or private, is trained with g, and rests
while l_k is trained. Checked against the authors' code, except for the swap.
"""

import re
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import optax
from jax import Array

from fedjax_peft import contracts as c
from fedjax_peft.aggregators import mean
from fedjax_peft.algorithms.checks import checked, model_with
from fedjax_peft.algorithms.common import Local, init_local, replace_server, train, tuned_by
from fedjax_peft.contracts.arguments import FromZero, Positive, Probability
from fedjax_peft.contracts.instance_weights import REFERENCE, embedding, with_weight
from fedjax_peft.numerics.roles import HeadPolicy, dual_roles

_NONE = optax.identity()
"""The optimizer of leaves that rest."""

_EXAMPLES = 5
"""Training examples that a text is compared with."""


_REMEMBERS = (
    "With FedDPA-T, a client keeps the mean of hidden states of training examples, which is no"
    " gradient and gets no noise. Use an algorithm that learns personal leaves by gradients alone,"
    " such as fedalt or ditto, or client-level privacy."
)


class State(NamedTuple):
    """A client during its local steps."""

    received: c.Params
    """g, and the head at the start of the round."""
    shared: Local
    """g_k and the head."""
    private: Local
    """l_k."""
    reference: Array
    """What instance weights compare with; zeros: nothing yet."""


@checked
def feddpa_t(
    optimizer: c.Optimizer,
    *,
    mix: Probability = 0.5,
    max_weight: Positive = 0.5,
    aggregator: c.Aggregator | None = None,
    head: HeadPolicy = "shared",
    weights: c.Weights = "uniform",
) -> c.Algorithm:
    """FedDPA-T: clients train a global and a local LoRA in every round; personal models.

    Args:
      optimizer: the clients' optimizer, for both adapters.
      mix: α while the local adapter is trained.
      max_weight: w, the largest weight of the local adapter in predictions.
      aggregator: how the global adapters combine; by default their mean.

    Raises:
      InputError: on use, a model without a pair of LoRAs.
    """

    def client(context: c.ClientContext) -> c.ClientUpdate:
        def step(state: State, batch: c.Batch, key: c.Key) -> tuple[State, c.Metrics]:
            shared, _ = _global_step(optimizer, context, state, batch, key)
            state, metrics = _local_step(optimizer, context, state, batch, key, mix, max_weight)
            return state._replace(shared=shared), metrics

        return c.ClientUpdate(_begin(optimizer, optimizer), step, _end)

    return _algorithm("feddpa_t", client, aggregator, head, weights)._replace(
        gradients_per_step=2, incompatible={c.Feature.EXAMPLE_PRIVACY: _REMEMBERS}
    )


@checked
def feddpa_f(
    optimizer: c.Optimizer,
    *,
    tune_epochs: FromZero = 1,
    max_weight: Positive = 0.5,
    aggregator: c.Aggregator | None = None,
    head: HeadPolicy = "shared",
    weights: c.Weights = "uniform",
) -> c.Algorithm:
    """FedDPA-F: a global LoRA is trained in rounds, and fine-tuned to a local one at the end.

    The scores after the fine-tuning are recorded as ``tuned_...``.

    Args:
      optimizer: the clients' optimizer, for both adapters.
      tune_epochs: the epochs of the fine-tuning, before the last evaluation. 0 means none.
      max_weight: w, the largest weight of the local adapter in predictions.
      aggregator: how the global adapters combine; by default their mean.

    Raises:
      InputError: on use, a model without a pair of LoRAs.
    """

    def client(context: c.ClientContext) -> c.ClientUpdate:
        def step(state: State, batch: c.Batch, key: c.Key) -> tuple[State, c.Metrics]:
            shared, metrics = _global_step(optimizer, context, state, batch, key)
            return state._replace(shared=shared), metrics

        return c.ClientUpdate(_begin(optimizer, _NONE), step, _end)

    def tuning(context: c.ClientContext) -> c.ClientUpdate:
        def init(broadcast: c.Params, private: c.Params, key: c.Key) -> State:
            return _begin(_NONE, optimizer)(broadcast, {**private, **_as_local(broadcast)}, key)

        def step(state: State, batch: c.Batch, key: c.Key) -> tuple[State, c.Metrics]:
            return _local_step(optimizer, context, state, batch, key, 1.0, max_weight)

        return c.ClientUpdate(init, step, lambda state: ({}, _end(state)[1]))

    algorithm = _algorithm("feddpa_f", client, aggregator, head, weights)
    return algorithm._replace(**tuned_by(tuning, tune_epochs, "the local adapters"))


def _algorithm(
    name: str,
    client: Callable[[c.ClientContext], c.ClientUpdate],
    aggregator: c.Aggregator | None,
    head: HeadPolicy,
    weights: c.Weights,
) -> c.Algorithm:
    check = model_with(
        f"{name!r} needs a global and a local LoRA at every site: attach fp.peft.dual_lora().",
        re.escape(REFERENCE),
    )
    rules, combine, server = dual_roles(head), aggregator or mean(), replace_server()
    return c.Algorithm(name, rules, client, combine, server, weights=weights, check=check)


def _begin(
    shared_optimizer: c.Optimizer, own_optimizer: c.Optimizer
) -> Callable[[c.Params, c.Params, c.Key], State]:
    """Returns the function that makes a client before its first step."""

    def init(broadcast: c.Params, private: c.Params, key: c.Key) -> State:
        local = {n: x for n, x in private.items() if _is_local(n)}
        rest = {n: x for n, x in private.items() if n not in local and n != REFERENCE}
        shared = init_local(shared_optimizer, broadcast, rest)
        own = init_local(own_optimizer, {}, local)
        return State({**broadcast, **rest}, shared, own, private[REFERENCE])

    return init


def _end(state: State) -> tuple[c.Params, c.Params]:
    """Returns (upload, private leaves)."""
    private = {**state.shared.private, **state.private.private, REFERENCE: state.reference}
    return state.shared.shared, private


def _is_local(name: str) -> bool:
    return ".private_adapter.lora_" in name


def _as_local(broadcast: c.Params) -> c.Params:
    """Returns the local adapters that equal the global ones."""
    own = {n: x for n, x in broadcast.items() if ".global_adapter.lora_" in n}
    return {n.replace(".global_adapter.", ".private_adapter."): x for n, x in own.items()}


def _global_step(
    optimizer: c.Optimizer, context: c.ClientContext, state: State, batch: c.Batch, key: c.Key
) -> tuple[Local, c.Metrics]:
    """Returns g_k and the head after a step with the global adapter alone."""
    loss = _loss(context, state.private.private, 0.0)
    return train(optimizer, context, state.shared, batch, key, loss=loss)


def _local_step(
    optimizer: c.Optimizer,
    context: c.ClientContext,
    state: State,
    batch: c.Batch,
    key: c.Key,
    mix: float,
    max_weight: float,
) -> tuple[State, c.Metrics]:
    """Returns the client after a step of l_k beside what was received, with a new reference."""
    loss = _loss(context, state.received, mix)
    private, metrics = train(optimizer, context, state.private, batch, key, loss=loss)
    rows = {n: x[:_EXAMPLES] if jnp.ndim(x) else x for n, x in batch.items()}
    alone = with_weight({**state.received, **private.private, REFERENCE: jnp.zeros(0)}, 1.0)
    states = embedding(context.apply(alone, rows, None, False))
    real = rows["mask"] & jnp.all(jnp.isfinite(states), axis=1)
    total = jnp.sum(jnp.where(real[:, None], states, 0.0), axis=0)
    centre = max_weight * total / jnp.maximum(jnp.sum(real), 1)
    reference = jnp.where(jnp.any(real), centre, state.reference)
    return state._replace(private=private, reference=reference), metrics


def _loss(context: c.ClientContext, resting: c.Params, weight: float) -> c.LossFn:
    """Returns the training loss of some leaves beside others that rest."""

    def loss(params: c.Params, batch: c.Batch, key: c.Key) -> tuple[Array, c.Metrics]:
        leaves = {**resting, **params, REFERENCE: jnp.zeros(0)}
        return context.objective(with_weight(leaves, weight), batch, key)

    return loss
