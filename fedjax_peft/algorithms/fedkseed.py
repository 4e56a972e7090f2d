"""FedKSeed (Qin et al. 2024, Algorithm 1): K seeds, and one length for each of them.

K directions z_j are drawn from seeds that everybody has from the start, so θ is known from K
lengths, a_j, and the initial leaves θ⁰:

    server:  broadcast a_1 ... a_K
    client:  θ ← θ⁰ + Σ_j a_j z_j
             for each local step:  j uniformly from 1 ... K
                                   g ← (F_k(θ + εz_j) - F_k(θ - εz_j)) / 2ε
                                   θ ← θ - η g z_j,   u_kj ← u_kj - η g
    server:  a ← a + Σ_k w_k u_k,  w_k ∝ n_k

The step size is inside of the sum: the paper adds up the slopes g, and multiplies by η at the
client. So η may change over rounds here.

What the paper leaves open:

* Client's leaves that stay with it (``head="private"``) are trained with the same directions.
* The paper draws z for all weights of the model; here for the leaves that are trained. It has no
  adapters, so that θ⁰ is the pretrained model; here clients make θ⁰ from its seed, as they load W.
* FedKSeed-Pro, which draws j by the size of earlier slopes, is not implemented.
* Only plain SGD is in the paper. Another optimizer steps on the slopes as on one weight.

The server keeps θ, to which it adds Σ_k w_k u_k in each round. That is the same sum in another
order, so no client computes all K directions in a simulation. **Bytes**: a client fetches the K
lengths, 4K, and sends the numbers and lengths of the directions that it took, 8 for each, or all
of them, 4K, if that is less.

The norm of an upload (``update_norm``) is that of its lengths: directions have norms of about √d,
for d trained numbers, and are nearly orthogonal.

Checked against a slow loop in NumPy float64 with the same directions.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

from fedjax_peft import contracts as c
from fedjax_peft.aggregators import mean
from fedjax_peft.algorithms import zeroth_order as zo
from fedjax_peft.algorithms.checks import checked
from fedjax_peft.contracts.arguments import Count, FromZero, Positive
from fedjax_peft.numerics.random import stream
from fedjax_peft.numerics.roles import HeadPolicy, head_roles


@checked
def fedkseed(
    optimizer: c.Optimizer,
    *,
    seeds: Count = 4096,
    epsilon: Positive = 1e-3,
    head: HeadPolicy = "shared",
    weights: c.Weights = "size",
    seed: FromZero = 0,
) -> c.Algorithm:
    """FedKSeed: zeroth-order training where only scalars travel, at most 4 bytes for each seed.

    Local steps need two forward passes, and no gradient.

    Args:
      optimizer: the clients' optimizer, for slopes along random directions: SGD in the paper. Its
        step size is smaller than that of gradients by about the number of trained numbers.
      seeds: K, the number of directions.
      epsilon: the width ε of the difference.
      seed: the seed of the K seeds.
    """
    pool = partial(_key, seed)
    return c.Algorithm(
        "fedkseed",
        head_roles(head),
        partial(_client, optimizer, seeds, epsilon, pool),
        mean(),
        _server(seeds, pool),
        model=lambda broadcast, private: {**broadcast["model"], **private},
        local_model=lambda broadcast, upload, private: {
            **zo.rebuilt(broadcast["model"], upload["lengths"], pool),
            **private,
        },
        weights=weights,
        traffic=c.Traffic(
            sent_shares=_sent, received_part=lambda broadcast: {"lengths": broadcast["lengths"]}
        ),
        incompatible=zo.REFUSED,
    )


def _key(seed: int, index: Array) -> c.Key:
    """Returns what a direction is drawn from."""
    return jax.random.fold_in(stream(seed, "fedkseed"), index)


def _client(
    optimizer: c.Optimizer, seeds: int, epsilon: float, pool: c.PyTree, context: c.ClientContext
) -> c.ClientUpdate:
    def init(broadcast: c.PyTree, private: c.Params, key: c.Key) -> zo.Walk:
        return zo.init_walk(optimizer, broadcast["model"], private, seeds)

    def step(walk: zo.Walk, batch: c.Batch, key: c.Key) -> tuple[zo.Walk, c.Metrics]:
        index = jax.random.randint(stream(key, "direction"), (), 0, seeds)
        return zo.step(optimizer, context, walk, index, pool(index), epsilon, batch, key)

    def final(walk: zo.Walk) -> tuple[c.PyTree, c.Params]:
        return {"lengths": walk.lengths}, walk.private

    return c.ClientUpdate(init, step, final)


def _server(seeds: int, pool: c.PyTree) -> c.ServerUpdate:
    def update(state: c.PyTree, new: c.PyTree, context: c.RoundContext) -> c.PyTree:
        model = zo.rebuilt(state["model"], new["lengths"], pool)
        return {"model": model, "lengths": state["lengths"] + new["lengths"]}

    return c.ServerUpdate(
        init=lambda shared: {"model": shared, "lengths": jnp.zeros(seeds)},
        update=update,
        broadcast=lambda state: state,
        params=lambda state: state["model"],
        template=lambda state: {"lengths": jnp.zeros_like(state["lengths"])},
    )


def _sent(upload: c.PyTree, template: c.PyTree) -> dict[str, Array]:
    """Returns the share of 4K bytes that the taken directions need, 8 bytes for each."""
    taken = jnp.count_nonzero(upload["lengths"]) / len(upload["lengths"])
    return {"lengths": jnp.minimum(2.0 * taken, 1.0)}
