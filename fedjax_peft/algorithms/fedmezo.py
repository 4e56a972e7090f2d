"""FedMeZO (Ling et al. 2024): FedAvg with zeroth-order local steps; a seed and scalars travel.

    server:  broadcast θ
    client:  for each local step t:  z_t ~ N(0, I) from the client's seed s_k and t
                                     g ← (F_k(θ_k + εz_t) - F_k(θ_k - εz_t)) / 2ε
                                     θ_k ← θ_k - η g z_t,   u_kt ← -η g
             upload s_k and u_k1, u_k2, ...
    server:  θ ← θ + Σ_k w_k Σ_t u_kt z_t(s_k),  w_k ∝ n_k

The paper averages the clients' leaves, LoRA's factors. A seed and the lengths are enough to make
them again, so these are what is sent here, and the server makes the same mean.

What the paper leaves open:

* s_k is the key of the client in the round, of the key schedule.
* An upload has room for ``steps`` lengths; a client's further steps do not move it.
* Broadcast are the leaves. To rebuild them itself, a client would need the uploads of all clients
  of all rounds before, which soon is more; FedKSeed avoids that.
* Its personal step sizes are not implemented. Another optimizer than SGD steps on the slopes as on
  one weight.

**Bytes**: a client sends 8 bytes of seed and 4 for each step. ``update_norm`` is the norm of the
lengths, as in FedKSeed.

Checked against a slow loop in NumPy float64 with the same directions.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

from fedjax_peft import contracts as c
from fedjax_peft.algorithms import zeroth_order as zo
from fedjax_peft.algorithms.checks import checked
from fedjax_peft.contracts.arguments import Count, Positive
from fedjax_peft.numerics.roles import HeadPolicy, head_roles


@checked
def fedmezo(
    optimizer: c.Optimizer,
    *,
    steps: Count = 512,
    epsilon: Positive = 1e-3,
    head: HeadPolicy = "shared",
    weights: c.Weights = "size",
) -> c.Algorithm:
    """FedMeZO: zeroth-order local training; clients send a seed, and 4 bytes for each step.

    Local steps need two forward passes, and no gradient.

    Args:
      optimizer: the clients' optimizer, for slopes along random directions: SGD in the paper. Its
        step size is smaller than that of gradients by about the number of trained numbers.
      steps: the most local steps of a client in a round that can move it.
      epsilon: the width ε of the difference.
    """
    return c.Algorithm(
        "fedmezo",
        head_roles(head),
        partial(_client, optimizer, steps, epsilon),
        c.Aggregator("rebuilding", _lift, _finish, needs_all_uploads=True),
        _server(steps),
        local_model=lambda broadcast, upload, private: {
            **_walked(broadcast, upload["lengths"], upload["client_seed"]),
            **private,
        },
        weights=weights,
        traffic=c.Traffic(sent_shares=_sent, change_field="lengths"),
        incompatible=zo.REFUSED,
    )


def _client(
    optimizer: c.Optimizer, steps: int, epsilon: float, context: c.ClientContext
) -> c.ClientUpdate:
    def init(broadcast: c.Params, private: c.Params, key: c.Key) -> zo.Walk:
        return zo.init_walk(optimizer, broadcast, private, steps, _parts(key))

    def step(walk: zo.Walk, batch: c.Batch, key: c.Key) -> tuple[zo.Walk, c.Metrics]:
        way = jax.random.fold_in(_whole(walk.start), batch["step"])
        return zo.step(optimizer, context, walk, batch["step"], way, epsilon, batch, key)

    def final(walk: zo.Walk) -> tuple[c.PyTree, c.Params]:
        lengths = {"lengths": walk.lengths}
        return {"lengths": lengths, "client_seed": walk.start}, walk.private

    return c.ClientUpdate(init, step, final)


def _parts(key: c.Key) -> Array:
    """Returns a key as uint16 ``[4]``: numbers that the float32 of a sum holds exactly."""
    words = jax.random.key_data(key)
    return jnp.stack([words >> 16, words & 0xFFFF], axis=-1).reshape(-1).astype(jnp.uint16)


def _whole(parts: Array) -> c.Key:
    """Returns the key of its parts."""
    pairs = parts.astype(jnp.uint32).reshape(-1, 2)
    return jax.random.wrap_key_data((pairs[:, 0] << 16) | pairs[:, 1])


def _walked(
    leaves: c.Params, lengths: c.PyTree, seed: Array, weight: Array | float = 1.0
) -> c.Params:
    """Returns leaves after the steps of one client, each times the weight."""
    key = _whole(seed)
    return zo.rebuilt(leaves, lengths["lengths"], partial(jax.random.fold_in, key), weight)


def _lift(upload: c.PyTree, template: c.PyTree, fixed: c.Params) -> c.PyTree:
    return c.Stacked(upload)


def _finish(
    total: c.Total, template: c.PyTree, context: c.RoundContext, state: c.PyTree
) -> c.Aggregated:
    shares = total.weights / jnp.where(total.weight > 0, total.weight, 1.0)
    return c.Aggregated({"uploads": total.value.value, "shares": shares}, {})


def _server(steps: int) -> c.ServerUpdate:
    def update(state: c.Params, new: c.PyTree, context: c.RoundContext) -> c.Params:
        def of_client(i: Array, leaves: c.Params) -> c.Params:
            upload = jax.tree.map(lambda x: x[i], new["uploads"])
            return _walked(leaves, upload["lengths"], upload["client_seed"], new["shares"][i])

        found: c.Params = jax.lax.fori_loop(0, len(new["shares"]), of_client, state)
        return found

    def template(state: c.Params) -> c.PyTree:
        lengths = {"lengths": jnp.zeros(steps)}
        return {"lengths": lengths, "client_seed": jnp.zeros(4, jnp.uint16)}

    return c.ServerUpdate(
        init=lambda shared: shared,
        update=update,
        broadcast=lambda state: state,
        template=template,
    )


def _sent(upload: c.PyTree, template: c.PyTree) -> dict[str, Array]:
    lengths = upload["lengths"]["lengths"]
    return {"lengths": jnp.count_nonzero(lengths) / len(lengths)}
