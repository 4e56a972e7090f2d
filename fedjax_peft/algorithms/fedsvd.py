"""FedSVD (Lee et al. 2025): only B is trained; the server turns A with an SVD after each round.

    client:  B_k ← B;  for each local step:  B_k ← optimizer step on F_k(A, B_k)      A rests
    server:  B ← Σ w_k B_k                        exact:  Σ w_k s A B_k = s A (Σ w_k B_k)
             U Σ Vᵀ = svd(A B),   A ← U_{:r},   B ← Σ_{:r} V_{:r}ᵀ                    (A B stays)

The product has rank r, so the SVD changes no weight. The columns of A become orthonormal and follow
the main directions of what was learned. So ‖∂F/∂B‖ ≤ ‖x‖ ‖∂F/∂(x A B)‖: the gradient that private
training clips is not stretched by A. The SVD acts on what the server has released already, so it
costs no privacy. The paper writes the transposes: its A has orthonormal rows, the right singular
vectors of its BA.

Clients send B only. A is not in the gradient, so noise and clipping are those of B alone. The SVD
is that of ``R B`` with ``Q R = qr(A)``, so no dense product is formed. Signs are canonical. Where B
has a lower rank than r, as in LoRA's start, the remaining columns of A are orthonormal too, and
their rows of B are zero.

Decided here, because the paper is silent: the first round uses LoRA's own start, whose A is not
orthonormal. The factor s stays outside. The head is trained and averaged like B; in the authors'
code the classifier of RoBERTa is frozen (``head="frozen"``). ``period`` is an option of their code,
which sets it to 1. Checked against that code (``reinit_lora``, and the averages of B).
"""

import jax.numpy as jnp
from jax import Array

from fedjax_peft import contracts as c
from fedjax_peft.algorithms.checks import checked, lora_model
from fedjax_peft.algorithms.common import (
    Local,
    init_local,
    loss_beside,
    replace_server,
    send_shared,
    train,
)
from fedjax_peft.algorithms.fedavg import averaging
from fedjax_peft.contracts.arguments import Count
from fedjax_peft.numerics.linalg import canonical, qr, svd
from fedjax_peft.numerics.lowrank import matmul, one_by_one, pairs
from fedjax_peft.numerics.roles import HeadPolicy, head_roles


@checked
def fedsvd(
    optimizer: c.Optimizer,
    *,
    period: Count = 1,
    aggregator: c.Aggregator | None = None,
    head: HeadPolicy = "shared",
    weights: c.Weights = "size",
) -> c.Algorithm:
    """FedSVD: LoRA's B is trained and averaged, A follows by an SVD at the server; exact averages.

    Args:
      period: the SVD follows every ``period``-th round.
      aggregator: how the clients' B combine; by default their mean.

    Raises:
      InputError: a kept optimizer; on use, a model without LoRA.
    """

    def sent_leaves(broadcast: c.Params, round_index: Array) -> dict[str, Array]:
        turned = _turns(period, round_index)  # else A is what clients have already
        return {a: turned for a, _ in pairs(broadcast).values()}

    algorithm = averaging("fedsvd", optimizer, head_roles(head), aggregator)
    return algorithm._replace(
        client=lambda context: _client(optimizer, context),
        server=_server(period),
        local_model=lambda broadcast, upload, private: {**broadcast, **upload, **private},
        weights=weights,
        traffic=c.Traffic(sent_leaves),
        check=lora_model("fedsvd"),
        incompatible={
            c.Feature.ASYNCHRONY: "In FedSVD the server turns A after a round, so a B that was"
            " trained with an older A belongs to other directions.",
            c.Feature.KEPT_OPTIMIZER: "In FedSVD the server turns A after a round, so gradients of"
            " B of earlier rounds belong to other directions. Use 'ffa' or 'fedavg'.",
        },
    )


def _client(optimizer: c.Optimizer, context: c.ClientContext) -> c.ClientUpdate:
    def init(broadcast: c.Params, private: c.Params, key: c.Key) -> Local:
        trained = _without_a(broadcast)
        resting = {name: x for name, x in broadcast.items() if name not in trained}
        return init_local(optimizer, trained, private, start=resting)

    def step(local: Local, batch: c.Batch, key: c.Key) -> tuple[Local, c.Metrics]:
        loss = loss_beside(context, local.start)
        return train(optimizer, context, local, batch, key, loss=loss)

    return c.ClientUpdate(init, step, send_shared)


def _server(period: int) -> c.ServerUpdate:
    """Returns the server whose state is all shared leaves, A included."""

    def update(state: c.Params, new: c.Params, context: c.RoundContext) -> c.Params:
        model = {**state, **new}
        turned = with_orthonormal_a(model)
        now = _turns(period, context.round_index) & (context.participants > 0)
        return {name: jnp.where(now, turned[name], x) for name, x in model.items()}

    return replace_server()._replace(update=update, template=_without_a)


def _turns(period: int, round_index: Array) -> Array:
    """Returns whether the server turns A after a round."""
    return round_index % period == 0


def _without_a(leaves: c.Params) -> c.Params:
    """Returns the leaves that clients train and send."""
    resting = {a for a, _ in pairs(leaves).values()}
    return {name: x for name, x in leaves.items() if name not in resting}


def with_orthonormal_a(leaves: c.Params) -> c.Params:
    """Returns the leaves with every product A·B factored anew: A has orthonormal columns.

    Args:
      leaves: A ``[in, r]`` and B ``[r, out]`` of every pair, and any others, which stay.
    """

    def one(factors: tuple[Array, Array]) -> tuple[Array, Array]:
        q, r = qr(factors[0])
        p, sigma, vt = svd(matmul(r, factors[1]), full_matrices=False)
        u, sigma, vt = canonical(matmul(q, p), sigma, vt)
        return u, sigma[:, None] * vt

    new, found = dict(leaves), pairs(leaves)
    turned = one_by_one(one, {path: (leaves[a], leaves[b]) for path, (a, b) in found.items()})
    for path, (a, b) in found.items():
        new[a], new[b] = (x.astype(leaves[a].dtype) for x in turned[path])
    return new
