"""IFCA (Ghosh et al. 2020, Algorithm 1): k models; each client trains the one that fits it best.

    server:  broadcast θ_1 ... θ_k
    client:  j ← argmin_j F_i(θ_j);   θ̃ ← optimizer steps on F_i, from θ_j;   send j and θ̃
    server:  θ_j ← Σ w_i θ̃_i / Σ w_i over the clients i that have chosen j; others stay

This is the paper's option II, model averaging; option I, gradient averaging, is it with one local
step of SGD.

Decided here:

* F_i is the loss of the examples of all local steps (:mod:`fedjax_peft.algorithms.received_loss`),
  known at their end. So a client trains all k models on the same batches, one after the other, and
  then chooses and sends one. The result is the paper's: the choice does not depend on the training.
  A simulated step takes k times as long as FedAvg's, and the forward passes; a real client would
  measure first and train once.
* The models must differ at the start, or all clients choose the first one. The paper draws each at
  random. Fine-tuning begins at pretrained weights: each model is the given start with normal noise
  of standard deviation ``spread`` on the shared leaves. (A model without noise would be the best
  one for most clients.)
* Weights are by size, as in FedAvg; the authors' code (github.com/jichan3751/ifca) has equal ones.
* A client predicts with the model that it has last chosen, as it is now. One that has never taken
  part has the model that most of the last round's weight has chosen.
* The paper also shares the first layers among all clusters. Here all shared leaves have k versions.
* The training metrics of a step are those of the model that is best so far.

**Bytes**: k models down, one model and its number up.

Checked against a loop in NumPy float64 that measures first and trains once.
"""

import jax
import jax.numpy as jnp
from jax import Array

from fedjax_peft import contracts as c
from fedjax_peft.algorithms import rows
from fedjax_peft.algorithms.checks import checked
from fedjax_peft.algorithms.received_loss import Measuring, begin, step
from fedjax_peft.contracts.arguments import Count, FromZero, Positive
from fedjax_peft.numerics import tree
from fedjax_peft.numerics.random import stream
from fedjax_peft.numerics.roles import HeadPolicy, head_roles
from fedjax_peft.support.errors import InputError


@checked
def ifca(
    optimizer: c.Optimizer,
    *,
    clusters: Count = 2,
    spread: Positive = 0.01,
    head: HeadPolicy = "shared",
    weights: c.Weights = "size",
    seed: FromZero = 0,
) -> c.Algorithm:
    """IFCA: a model for each cluster of clients, and clients choose the model of least loss.

    Args:
      clusters: k, the number of models; no more than clients.
      spread: standard deviation of what the models differ by at the start.
      seed: of these differences.

    Raises:
      InputError: a kept optimizer; on use, more clusters than clients.
    """
    return c.Algorithm(
        "ifca",
        head_roles(head),
        lambda context: _client(optimizer, context),
        rows.by_row("ifca", clusters),
        _server(clusters, spread, seed),
        init_client_state=lambda shared, private: {"model": private, "cluster": jnp.int32(-1)},
        model=_model,
        local_model=rows.local_model,
        personal=True,
        weights=weights,
        traffic=c.Traffic(
            received_part=lambda broadcast: {"models": broadcast["models"]}, change_field="model"
        ),
        check=lambda kinds, clients: _check(clusters, clients),
        gradients_per_step=clusters,
        incompatible={
            c.Feature.KEPT_OPTIMIZER: "A client of IFCA may choose another model in each round,"
            " and the optimizer's moments belong to one model. Use 'fedavg'.",
            c.Feature.CLIENT_PRIVACY: rows.NO_NOISE,
            c.Feature.EXAMPLE_PRIVACY: "Clients choose a model by the loss of their examples,"
            " without noise. Use 'fedavg'.",
            c.Feature.ASYNCHRONY: "Clients choose among the models of one version of the server.",
        },
    )


def _model(broadcast: c.PyTree, own: c.PyTree) -> c.Params:
    met, row = rows.known(own["cluster"])
    row = jnp.where(met, row, broadcast["newcomers"])
    return {**tree.take(broadcast["models"], row), **own["model"]}


def _client(optimizer: c.Optimizer, context: c.ClientContext) -> c.ClientUpdate:
    """Returns the work of a client; its local state has an axis of models."""

    def init(broadcast: c.PyTree, own: c.PyTree, key: c.Key) -> Measuring:
        return jax.vmap(lambda model: begin(optimizer, model, own["model"]))(broadcast["models"])

    def train(states: Measuring, batch: c.Batch, key: c.Key) -> tuple[Measuring, c.Metrics]:
        # One model after the other, so that the memory of activations does not grow with k.
        def one(state: Measuring) -> tuple[Measuring, c.Metrics]:
            return step(optimizer, context, state, batch, key)

        states, metrics = jax.lax.map(one, states)
        return states, tree.row(metrics, _best(states))

    def final(states: Measuring) -> tuple[c.PyTree, c.PyTree]:
        best = _best(states)
        local, _ = tree.row(states, best)
        change = {n: x - local.start[n] for n, x in local.shared.items()}
        return rows.upload(change, best), {"model": local.private, "cluster": best}

    return c.ClientUpdate(init, train, final)


def _best(states: Measuring) -> Array:
    """Returns the number of the model of least loss so far, int32."""
    losses = states.loss.mean
    return jnp.argmin(jnp.where(jnp.isfinite(losses), losses, jnp.inf)).astype(jnp.int32)


def _server(clusters: int, spread: float, seed: int) -> c.ServerUpdate:
    def start(shared: c.Params) -> c.PyTree:
        key = stream(seed, "ifca")
        models = {
            n: x + spread * jax.random.normal(stream(key, n), x.shape, x.dtype)
            for n, x in rows.repeated(shared, clusters).items()
        }
        return {"models": models, "newcomers": jnp.int32(0), "chosen": jnp.zeros(clusters)}

    def update(state: c.PyTree, new: c.PyTree, context: c.RoundContext) -> c.PyTree:
        weights = new["weights"]
        moved = {
            "models": jax.tree.map(jnp.add, state["models"], new["changes"]),
            "newcomers": jnp.argmax(weights).astype(jnp.int32),
            "chosen": weights,
        }
        return tree.where(context.participants > 0, moved, state)

    return c.ServerUpdate(
        init=start,
        update=update,
        broadcast=lambda state: {n: state[n] for n in ("models", "newcomers")},
        params=lambda state: tree.take(state["models"], state["newcomers"]),
        template=lambda state: rows.unchanged(state["models"]),
        metrics=lambda state: {"client_clusters": jnp.sum(state["chosen"] > 0).astype(jnp.float32)},
    )


def _check(clusters: int, clients: int) -> None:
    if clusters > clients:
        raise InputError(
            f"clusters = {clusters} of ifca must be at most the number of clients, {clients}: each"
            " client chooses one model, and the others would never be trained."
        )
