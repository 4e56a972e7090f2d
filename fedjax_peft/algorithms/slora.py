"""SLoRA (Babakniya et al. 2023): a few rounds of sparse fine-tuning, whose SVD starts LoRA.

    stage 1, to round R:      S_k ← S;  S_k ← optimizer steps on F_k(W + S_k + s A B); S ← Σ w_k S_k
    then once, at the server: U Σ Vᵀ = svd(S + s A B),  A ← U_{:r},  B ← Σ_{:r} V_{:r}ᵀ / s,  S ← 0
    stage 2:                  (A_k, B_k) ← optimizer steps on F_k(W + s A_k B_k);  A, B ← averages

S has values at the same random places for all clients, about 1 % of each adapted kernel
(:mod:`fedjax_peft.peft.slora`); the averages of stage 1 are exact. The start of stage 2 is the best
rank-r form of what stage 1 learned. What the rank cannot hold is lost, because W stays as it is.
In a new model A B = 0, as in the paper. If a trained LoRA comes with the model, the SVD keeps it.

Decided here, because the text that we have is silent: stage 1 ends with the first round from R on
that has an upload; the optimizer is the same in both stages; the head is trained in both; the
leaves of the other stage rest, without gradient, moments or decay, and are not sent. A client
computes the start of stage 2 itself, from the last average of S, which it fetches.

This follows the abstract, a review of the paper and the start in the code of FlexLoRA's authors
(``load_weight_SLoRA``: B = U Σ / s and A = Vᵀ of the change, in the transposed layout). The paper's
equations could not be read; these were derived again.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax import Array

from fedjax_peft import contracts as c
from fedjax_peft.aggregators.fra import truncated_products
from fedjax_peft.algorithms.checks import checked, lora_model, model_with
from fedjax_peft.algorithms.common import (
    Local,
    freeze_where,
    init_local,
    loss_where,
    send_shared,
    train,
)
from fedjax_peft.algorithms.fedavg import averaging
from fedjax_peft.contracts.arguments import Count
from fedjax_peft.numerics.lowrank import matmul, pairs, pairs_by_shape, scale
from fedjax_peft.numerics.roles import HeadPolicy, head_roles


@checked
def slora(
    optimizer: c.Optimizer,
    *,
    sparse_rounds: Count,
    aggregator: c.Aggregator | None = None,
    head: HeadPolicy = "shared",
    weights: c.Weights = "size",
) -> c.Algorithm:
    """SLoRA: sparse fine-tuning of the adapted kernels first, then LoRA from its SVD.

    Args:
      optimizer: the clients' optimizer, in both stages.
      sparse_rounds: R, the rounds of stage 1.

    Raises:
      InputError: a kept optimizer; on use, a model without SLoRA's layers.
    """

    def sent_leaves(broadcast: c.PyTree, round_index: Array) -> dict[str, Array]:
        sent = {n: jnp.asarray(_moves(n, broadcast["primed"])) for n in broadcast["model"]}
        return {**sent, "primed": jnp.array(False)}  # the server knows

    algorithm = averaging("slora", optimizer, head_roles(head), aggregator)
    return algorithm._replace(
        client=lambda context: _client(optimizer, context),
        server=_server(sparse_rounds),
        model=lambda broadcast, private: {**broadcast["model"], **private},
        local_model=lambda broadcast, upload, private: {**upload, **private},
        weights=weights,
        traffic=c.Traffic(sent_leaves),
        check=_check,
        incompatible={
            c.Feature.ASYNCHRONY: "SLoRA's clients all train the same leaves in a round.",
            c.Feature.NEW_FACTORS: "In the first stage of SLoRA the factors A and B rest and are"
            " not sent. Leave the aggregator out.",
            c.Feature.KEPT_OPTIMIZER: "The two stages of SLoRA train different leaves, whose"
            " moments would decay while they rest. Use 'fedavg'.",
        },
    )


def _moves(name: str, primed: Array) -> Array | bool:
    """Returns whether a leaf is trained in the present stage."""
    if name.endswith((".lora_a", ".lora_b")):
        return primed
    return ~primed if name.endswith(".sparse_values") else True


def _client(optimizer: c.Optimizer, context: c.ClientContext) -> c.ClientUpdate:
    def moving(primed: Array) -> c.Optimizer:
        return freeze_where(optimizer, lambda name: _moves(name, primed))

    def init(broadcast: c.PyTree, private: c.Params, key: c.Key) -> Local:
        primed = broadcast["primed"]
        return init_local(moving(primed), broadcast["model"], private, start=primed)

    def step(local: Local, batch: c.Batch, key: c.Key) -> tuple[Local, c.Metrics]:
        primed = local.start
        loss = loss_where(context, lambda name: _moves(name, primed))
        return train(moving(primed), context, local, batch, key, loss=loss)

    return c.ClientUpdate(init, step, send_shared)


def _server(sparse_rounds: int) -> c.ServerUpdate:
    """Returns the server that replaces the model, and starts LoRA once stage 1 has ended."""

    def update(state: c.PyTree, new: c.Params, context: c.RoundContext) -> c.PyTree:
        received = context.participants > 0
        now = ~state["primed"] & received & (context.round_index >= sparse_rounds)
        # Only one round pays for the SVDs.
        model = jax.lax.cond(now, lambda: _started(new, context.fixed), lambda: dict(new))
        return {"model": model, "primed": state["primed"] | now}

    return c.ServerUpdate(
        init=lambda shared: {"model": shared, "primed": jnp.array(False)},
        update=update,
        broadcast=lambda state: state,
        params=lambda state: state["model"],
        template=lambda state: state["model"],
    )


def _started(model: c.Params, fixed: c.Params) -> c.Params:
    """Returns the leaves with LoRA's start from the SVD of S + s·AB, and S = 0."""
    new = dict(model)
    sparse = {n: x for n, x in model.items() if n.rsplit(".", 1)[0] + ".sparse_values" in model}
    for (shape_a, shape_b), paths in sorted(pairs_by_shape(sparse).items()):
        size = (shape_a[0], shape_b[1])
        dense = jnp.stack([_dense(model, fixed, path, size) for path in paths])
        scales = jnp.stack([scale(fixed, path) for path in paths])
        left, right, *_ = truncated_products(dense, scales, shape_a[1], split="B")
        for i, path in enumerate(paths):
            a, b = pairs(model)[path]
            new[a], new[b] = left[i].astype(model[a].dtype), right[i].astype(model[b].dtype)
            new[f"{path}.sparse_values"] = jnp.zeros_like(model[f"{path}.sparse_values"])
    return new


def _dense(model: c.Params, fixed: c.Params, path: str, size: tuple[int, int]) -> Array:
    """Returns ``S / s + AB``, ``[in, out]``."""
    values = model[f"{path}.sparse_values"] / scale(fixed, path)
    places, product = fixed[f"{path}.sparse_index"], matmul(*(model[n] for n in pairs(model)[path]))
    return product.reshape(-1).at[places].add(values).reshape(size)


def _check(kinds: Mapping[str, str], clients: int) -> None:
    lora_model("slora")(kinds, clients)
    message = (
        "'slora' starts with sparse values beside LoRA, and this model has none: attach"
        " fp.peft.slora(), or use 'fedavg'."
    )
    model_with(message, r"\.sparse_values$")(kinds, clients)
