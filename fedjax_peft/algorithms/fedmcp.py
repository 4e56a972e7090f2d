"""FedMCP (Zhao et al. 2024): a global and a private adapter, told apart by a contrastive loss.

    client:  θ_k ← θ;  for each local step: one optimizer step of θ_k, p_k, g1 and g2 on
               (1-γ) CE(g1(dual), y) + γ CE(g2(global), y)
               + μ ( Sim(R_global, R_private) - Sim(R_global, R_average) )
    server:  θ ← (1/|S|) Σ θ_k;  the private adapter p_k and both heads never leave the client

(Algorithm 1 and Eq 3-9.) The encoder runs with both adapters (dual: the mean of what they add) or
with one alone. R is an example's pooled last hidden state in one pass. R_average comes from the
global adapter as it was received, without dropout and without gradient. Clients predict with g1 on
dual. The training accuracy of g2 is the metric ``train_accuracy_global``; its test accuracy needs
``diagnostics=["second_classifier"]``.

Where the paper contradicts itself or is silent:

* It names the three representations in two ways. Eq 5 does what the text describes (it pulls the
  global adapter towards the average and away from the private one) only with the first naming,
  which is used here.
* R_private comes from a third pass, with the private adapter alone, as in section IV-D. The text
  also mentions two passes in total; ``private_rep="dual"`` is this variant.
* Adapters are received once in a round. Algorithm 1 receives them inside of the loop over epochs,
  which would undo the work of all epochs but the last.
* The mean is unweighted as in Algorithm 1; the text says weighted (``weights="size"``).
* Only the gradient of R_average is stopped: the first similarity moves both adapters.
* Biased CKA is near 1 for independent representations of a small batch; see
  :mod:`fedjax_peft.measures.representation`, also for the debiased one. A batch of one example has
  no similarities. In a batch of two examples the biased CKA is always 1, without gradient.
* Every training pass draws its own dropout masks, like separate calls of the model.

No code of the authors was found. This was checked against a plain loop written from the formulas.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_peft.aggregators import mean
from fedjax_peft.algorithms.checks import at_least, checked, dual_adapters, fraction
from fedjax_peft.algorithms.common import Local, Weights, init_local, replace_server, train
from fedjax_peft.contracts import (
    Aggregator,
    Algorithm,
    Batch,
    ClientContext,
    ClientUpdate,
    Key,
    Metrics,
    Outputs,
    Params,
)
from fedjax_peft.contracts.dual_modes import Mode, mode
from fedjax_peft.measures.representation import (
    SIMILARITIES,
    Pooling,
    Similarity,
    check_pooling,
    pool,
)
from fedjax_peft.numerics.hyperparameters import maybe_nonzero
from fedjax_peft.numerics.random import stream
from fedjax_peft.numerics.roles import HeadPolicy, dual_roles
from fedjax_peft.support.errors import InputError, nearest

__all__ = ["fedmcp"]


class State(NamedTuple):
    """A client during its local steps."""

    received: Params
    """The global adapter at the start of the round."""
    local: Local


@checked
def fedmcp(
    optimizer: optax.GradientTransformation,
    *,
    gamma: float = 0.5,
    mu: float = 0.05,
    similarity: Similarity = "cka",
    pooling: Pooling = "mean",
    private_rep: Literal["private_only", "dual"] = "private_only",
    stop_grad_global_in_private_term: bool = False,
    aggregator: Aggregator | None = None,
    head: HeadPolicy = "private",
    weights: Weights = "uniform",
    keep_optimizer: bool = False,
) -> Algorithm:
    """FedMCP: global and private adapters, told apart by a contrastive loss (needs ``dual``).

    Args:
      optimizer: the clients' optimizer.
      gamma: γ, weight of the loss of the second classifier, which uses the global adapter alone.
        With 0 this loss is left out, and a plain classification head is enough.
      mu: μ, weight of the contrastive loss; 0 leaves its passes out.
      similarity: similarity of representations: ``cka`` (the paper's), ``cka_debiased`` or
        ``cosine``.
      pooling: representation of an example: the ``mean`` over its tokens, or ``cls``, its first
        token (the last real one in a causal model).
      private_rep: the private representation: from the private adapter alone, or from both
        adapters, which saves a pass.
      stop_grad_global_in_private_term: the similarity to the private representation moves the
        private adapter only.
      aggregator: how the global adapters combine; by default their mean.
      head: policy of both classification heads: ``shared``, ``private`` or ``frozen``.

    Raises:
      InputError: γ out of [0, 1), a negative μ, or an unknown name.
    """
    fraction(gamma=gamma)
    at_least(0.0, mu=mu)
    check_pooling(pooling)
    choices: dict[str, tuple[str, Collection[str]]] = {
        "similarity": (similarity, SIMILARITIES),
        "private_rep": (private_rep, ("private_only", "dual")),
    }
    for option, (value, known) in choices.items():
        if value not in known:
            raise InputError(f"{option} = {value!r} is unknown. {nearest(value, known)}")

    # The compiler leaves out the unused parts of a pass. The pass with both adapters only
    # classifies: if it is not batched with passes whose last layer is compared, its last layer is
    # computed for the first token alone.
    pulls, contrasts = maybe_nonzero(gamma), maybe_nonzero(mu)
    calls: list[list[Mode]] = [["dual", "global"]] if pulls or contrasts else [["dual"]]
    if contrasts and private_rep == "private_only":
        calls = [["dual"], ["global", "private"]]

    def contrast(
        passes: dict[str, Outputs], average: jax.Array, batch: Batch
    ) -> tuple[jax.Array, Metrics]:
        similar, mask = SIMILARITIES[similarity], batch["mask"]
        ours = pushed = pool(passes["global"], batch, pooling)
        if stop_grad_global_in_private_term:
            pushed = jax.lax.stop_gradient(ours)
        private = passes["private" if private_rep == "private_only" else "dual"]
        apart = similar(pushed, pool(private, batch, pooling), mask)
        near = similar(ours, average, mask)
        n = jnp.sum(mask, dtype=jnp.float32)
        return apart - near, {
            f"{similarity}_global_private": (apart * n, n),
            f"{similarity}_global_average": (near * n, n),
        }

    def client(context: ClientContext) -> ClientUpdate:
        def init(broadcast: Params, private: Params, key: Key) -> State:
            del key
            received = {n: x for n, x in broadcast.items() if contrasts and ".global_adapter." in n}
            return State(received, init_local(optimizer, broadcast, private))

        def cross_entropy(outputs: Outputs, batch: Batch) -> jax.Array:
            total, count = context.task.loss(outputs, batch)
            return total / jnp.maximum(count, 1.0)

        def step(state: State, batch: Batch, key: Key) -> tuple[State, Metrics]:
            def average(batch: Batch) -> jax.Array:
                leaves = {**state.local.shared, **state.local.private, **state.received}
                outputs = context.apply(mode(leaves, "global"), batch, None, False)
                return pool(outputs, batch, pooling)

            def loss(params: Params, batch: Batch, key: Key) -> tuple[jax.Array, Metrics]:
                passes: dict[str, Outputs] = {}
                for modes in calls:
                    passes |= _passes(context, params, batch, key, modes)
                value = (1 - gamma) * cross_entropy(passes["dual"], batch)
                metrics = context.task.metrics(passes["dual"], batch)
                if pulls:
                    second = passes["global"].second
                    assert second is not None, "the model has no second classifier"
                    alone = passes["global"]._replace(logits=second)
                    value += gamma * cross_entropy(alone, batch)
                    of_second = context.task.metrics(alone, batch)
                    metrics |= {f"{name}_global": x for name, x in of_second.items()}
                if contrasts:
                    term, similarities = contrast(passes, average(batch), batch)
                    value, metrics = value + mu * term, {**metrics, **similarities}
                return value, jax.lax.stop_gradient(metrics)

            local, metrics = train(optimizer, context, state.local, batch, key, loss=loss)
            return state._replace(local=local), metrics

        def final(state: State) -> tuple[Params, Params]:
            return state.local.shared, state.local.private

        return ClientUpdate(init, step, final)

    def check(kinds: Mapping[str, str], clients: int) -> None:
        dual_adapters("fedmcp")(kinds, clients)
        if pulls and not any("second_classifier." in name for name in kinds):
            raise InputError(
                "fedmcp needs a model with a second classifier: load it with"
                " head=heads.two_classifiers(...), or set gamma = 0."
            )

    rules, aggregator = dual_roles(head), aggregator or mean()
    algorithm = Algorithm("fedmcp", rules, client, aggregator, replace_server(), check=check)
    apart = f"{similarity}_global_private"
    couples = contrasts and similarity != "cosine"
    return algorithm._replace(
        weights=weights,
        lower_is_better=(apart,),
        no_example_privacy=_COUPLED if couples else None,
    )


_COUPLED = (
    "CKA, the similarity of representations, couples the examples of a batch, so that no part of"
    " the gradient belongs to a single example. Use similarity = 'cosine', which is a mean over"
    " examples, or mu = 0."
)


def _passes(
    context: ClientContext, params: Params, batch: Batch, key: Key, modes: Sequence[Mode]
) -> dict[str, Outputs]:
    """Returns the training outputs of the encoder by mode, from one batched call of the model.

    Only leaves that differ between modes have a batch axis. Frozen weights have none.
    """
    keys = {name: key if name == "dual" else stream(key, name) for name in modes}
    leaves = {name: mode(params, name) for name in modes}
    if len(modes) == 1:
        return {n: context.apply(leaves[n], batch, keys[n], True) for n in modes}
    scaled = {n: x for n, x in params.items() if "_adapter.up." in n}
    stacked = {n: jnp.stack([leaves[name][n] for name in modes]) for n in scaled}

    def run(own: Params, key: Key) -> Outputs:
        return context.apply({**params, **own}, batch, key, True)

    outputs = jax.vmap(run)(stacked, jnp.stack(list(keys.values())))
    return {name: jax.tree.map(lambda x, i=i: x[i], outputs) for i, name in enumerate(modes)}
