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
  :mod:`fedjax_peft.numerics.measures.representation`, also for the debiased one. A batch of one
  example has no similarities. In a batch of two the biased CKA is always 1, without gradient.
* Every training pass draws its own dropout masks, like separate calls of the model.

No code of the authors was found. This was checked against a plain loop written from the formulas.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from fedjax_peft import contracts as c
from fedjax_peft.algorithms.checks import checked, dual_adapters
from fedjax_peft.algorithms.common import Local, init_local, send_shared, train
from fedjax_peft.algorithms.fedavg import averaging
from fedjax_peft.contracts.arguments import Fraction, NotNegative
from fedjax_peft.contracts.dual_modes import Mode, mode
from fedjax_peft.numerics.hyperparameters import maybe_nonzero
from fedjax_peft.numerics.measures.representation import (
    SIMILARITIES,
    Pooling,
    Similarity,
    pool,
)
from fedjax_peft.numerics.random import stream
from fedjax_peft.numerics.roles import HeadPolicy, dual_roles
from fedjax_peft.support.errors import InputError

PrivateRep = Literal["private_only", "dual"]


class Terms(NamedTuple):
    """What the loss consists of: options of :func:`fedmcp`."""

    gamma: float
    mu: float
    similarity: Similarity
    pooling: Pooling
    private_rep: PrivateRep
    stop_grad_global_in_private_term: bool

    @property
    def second(self) -> bool:
        """Whether there is a loss of the second classifier."""
        return maybe_nonzero(self.gamma)

    @property
    def contrasts(self) -> bool:
        """Whether there is a contrastive loss."""
        return maybe_nonzero(self.mu)

    @property
    def calls(self) -> list[list[Mode]]:
        """The passes of each batched call of the model.

        The compiler leaves out the unused parts of a pass. The pass with both adapters only
        classifies: if it is not batched with passes whose last layer is compared, its last layer is
        computed for the first token alone.
        """
        if self.contrasts and self.private_rep == "private_only":
            return [["dual"], ["global", "private"]]
        return [["dual", "global"]] if self.second or self.contrasts else [["dual"]]


@checked
def fedmcp(
    optimizer: c.Optimizer,
    *,
    gamma: Fraction = 0.5,
    mu: NotNegative = 0.05,
    similarity: Similarity = "cka",
    pooling: Pooling = "mean",
    private_rep: PrivateRep = "private_only",
    stop_grad_global_in_private_term: bool = False,
    aggregator: c.Aggregator | None = None,
    head: HeadPolicy = "private",
    weights: c.Weights = "uniform",
) -> c.Algorithm:
    """FedMCP: global and private adapters, told apart by a contrastive loss (needs ``dual``).

    Args:
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
    """
    terms = Terms(gamma, mu, similarity, pooling, private_rep, stop_grad_global_in_private_term)

    def client(context: c.ClientContext) -> c.ClientUpdate:
        def init(broadcast: c.Params, private: c.Params, key: c.Key) -> Local:
            adapter = {n: x for n, x in broadcast.items() if ".global_adapter." in n}
            return init_local(optimizer, broadcast, private, adapter if terms.contrasts else {})

        def step(local: Local, batch: c.Batch, key: c.Key) -> tuple[Local, c.Metrics]:
            received = {**local.shared, **local.private, **local.start}
            loss = _loss(terms, context, received)
            return train(optimizer, context, local, batch, key, loss=loss)

        return c.ClientUpdate(init, step, send_shared)

    couples = terms.contrasts and similarity != "cosine"
    algorithm = averaging("fedmcp", optimizer, dual_roles(head), aggregator)
    return algorithm._replace(
        client=client,
        weights=weights,
        incompatible={c.Feature.EXAMPLE_PRIVACY: _COUPLED} if couples else {},
        check=partial(_check, terms),
        lower_is_better=(f"{similarity}_global_private",),
    )


_COUPLED = (
    "CKA, the similarity of representations, couples the examples of a batch, so that no part of"
    " the gradient belongs to a single example. Use similarity = 'cosine', which is a mean over"
    " examples, or mu = 0."
)


def _check(terms: Terms, kinds: Mapping[str, str], clients: int) -> None:
    dual_adapters("fedmcp", alone=True)(kinds, clients)
    if terms.second and not any("second_classifier." in name for name in kinds):
        raise InputError(
            "fedmcp needs a model with a second classifier: load it with"
            " head=heads.two_classifiers(...), or set gamma = 0."
        )


def _loss(terms: Terms, context: c.ClientContext, received: c.Params) -> c.LossFn:
    """Returns the training loss.

    Args:
      received: the client's leaves, with the global adapter at the start of the round.
    """

    def cross_entropy(outputs: c.Outputs, batch: c.Batch) -> Array:
        total, count = context.task.loss(outputs, batch)
        return total / jnp.maximum(count, 1.0)

    def loss(params: c.Params, batch: c.Batch, key: c.Key) -> tuple[Array, c.Metrics]:
        passes: dict[str, c.Outputs] = {}
        for modes in terms.calls:
            passes |= _passes(context, params, batch, key, modes)
        value = (1 - terms.gamma) * cross_entropy(passes["dual"], batch)
        metrics = context.task.metrics(passes["dual"], batch)
        if terms.second:
            second = passes["global"].second
            assert second is not None, "the model has no second classifier"
            alone = passes["global"]._replace(logits=second)
            value += terms.gamma * cross_entropy(alone, batch)
            of_second = context.task.metrics(alone, batch)
            metrics |= {f"{name}_global": x for name, x in of_second.items()}
        if terms.contrasts:
            average = context.apply(mode(received, "global"), batch, None, False)
            term, similarities = _contrast(terms, passes, average, batch)
            value, metrics = value + terms.mu * term, {**metrics, **similarities}
        return value, jax.lax.stop_gradient(metrics)

    return loss


def _contrast(
    terms: Terms, passes: dict[str, c.Outputs], average: c.Outputs, batch: c.Batch
) -> tuple[Array, c.Metrics]:
    """Returns ``Sim(R_global, R_private) - Sim(R_global, R_average)``, and both as metrics."""
    similar, mask = SIMILARITIES[terms.similarity], batch["mask"]
    near = pool(average, batch, terms.pooling)
    ours = pushed = pool(passes["global"], batch, terms.pooling)
    if terms.stop_grad_global_in_private_term:
        pushed = jax.lax.stop_gradient(ours)
    private = passes["private" if terms.private_rep == "private_only" else "dual"]
    to_private = similar(pushed, pool(private, batch, terms.pooling), mask)
    to_average = similar(ours, near, mask)
    n = jnp.sum(mask, dtype=jnp.float32)
    return to_private - to_average, {
        f"{terms.similarity}_global_private": (to_private * n, n),
        f"{terms.similarity}_global_average": (to_average * n, n),
    }


def _passes(
    context: c.ClientContext, params: c.Params, batch: c.Batch, key: c.Key, modes: Sequence[Mode]
) -> dict[str, c.Outputs]:
    """Returns the training outputs of the encoder by mode, from one batched call of the model.

    Only leaves that differ between modes have a batch axis. Frozen weights have none.
    """
    keys = {name: key if name == "dual" else stream(key, name) for name in modes}
    leaves = {name: mode(params, name) for name in modes}
    if len(modes) == 1:
        return {n: context.apply(leaves[n], batch, keys[n], True) for n in modes}
    scaled = {n: x for n, x in params.items() if "_adapter.up." in n}
    stacked = {n: jnp.stack([leaves[name][n] for name in modes]) for n in scaled}

    def run(own: c.Params, key: c.Key) -> c.Outputs:
        return context.apply({**params, **own}, batch, key, True)

    outputs = jax.vmap(run)(stacked, jnp.stack(list(keys.values())))
    return {name: jax.tree.map(lambda x, i=i: x[i], outputs) for i, name in enumerate(modes)}
