"""pFedMe (T Dinh et al. 2020, Algorithm 1): personal models by Moreau envelopes.

    client:  x_k ← w_k ← θ;  for each local step, on its batch:
               K times:  x_k ← optimizer step on F_k(x_k) + λ/2 ‖x_k - w_k‖²
               w_k ← w_k - ηλ (w_k - x_k)
    server:  θ ← (1 - β) θ + β · mean of w_k;  x_k stays with the client, which predicts with it

The paper solves the inner problem to some accuracy by any first-order method and specifies no more.
Here a local step starts from x_k and the optimizer state of the last step, as in the authors'
program. That program also has a weight decay on x_k, which is neither in the paper nor here. In
that program all clients compute and the server selects some; here only the selected ones compute.

A private head is part of x_k only. There is no global head to be pulled towards, so the head is
trained in the inner steps and kept from round to round. A client that has never taken part predicts
with the initial leaves.
"""

from typing import Any, NamedTuple

import jax

from fedjax_peft import contracts as c
from fedjax_peft.algorithms.checks import checked, with_factor
from fedjax_peft.algorithms.common import optimizer_step, proximal, replace_server
from fedjax_peft.algorithms.fedavg import averaging
from fedjax_peft.contracts.arguments import Count, Positive
from fedjax_peft.numerics.hyperparameters import is_traced
from fedjax_peft.numerics.roles import HeadPolicy, head_roles

_BASIS = (
    "With a beta other than 1, or a server_schedule, pFedMe's server goes part of the way between"
    " two pairs of factors. Set beta = 1, or leave the aggregator out to average A and B."
)


class State(NamedTuple):
    """A client during its local steps."""

    shared: c.Params
    """w_k."""
    personal: c.Params
    """x_k, private leaves included."""
    optimizer: c.PyTree


@checked
def pfedme(
    optimizer: c.Optimizer,
    *,
    lam: Positive = 15.0,
    learning_rate: Positive = 0.005,
    inner_steps: Count = 5,
    beta: Positive = 1.0,
    aggregator: c.Aggregator | None = None,
    head: HeadPolicy = "shared",
    weights: c.Weights = "uniform",
    server_schedule: c.RateSchedule | None = None,
) -> c.Algorithm:
    """pFedMe: personal models near the global one; the global model moves towards them.

    An epoch costs ``inner_steps`` times that of FedAvg. Metrics of training are those of the
    personal model before its last inner step.

    Args:
      optimizer: the optimizer of the inner problem.
      lam: λ, the pull to the global model: their distance is about a gradient's length over λ.
      learning_rate: η of the clients' copy of the global model; a step moves it by the fraction ηλ
        of its distance to the personal model. It follows a schedule of the optimizer over rounds.
      inner_steps: K, the number of optimizer steps on each batch.
      beta: β, the size of the server's step to the clients' mean; 1 takes the mean.
      server_schedule: factor of β by round; by default 1 in every round.
    """

    def client(context: c.ClientContext) -> c.ClientUpdate:
        def init(broadcast: c.Params, client_state: c.PyTree, key: c.Key) -> State:
            personal = {**client_state["personal"], **broadcast}
            return State(broadcast, personal, optimizer.init(personal))

        def step(state: State, batch: c.Batch, key: c.Key) -> tuple[State, c.Metrics]:
            w = state.shared

            def inner(carry: tuple[c.Params, c.PyTree], key: c.Key) -> tuple[tuple, c.Metrics]:
                x, opt = carry
                gradient, metrics = context.gradient(context.objective, x, batch, key)
                gradient = proximal(lam, x, w)(gradient)
                return optimizer_step(optimizer, gradient, x, opt), metrics

            keys = jax.random.split(key, inner_steps)
            (x, opt), metrics = jax.lax.scan(inner, (state.personal, state.optimizer), keys)
            w = {n: old - learning_rate * lam * (old - x[n]) for n, old in w.items()}
            return State(w, x, opt), jax.tree.map(lambda m: m[-1], metrics)

        return c.ClientUpdate(
            init, step, lambda state: (state.shared, {"personal": state.personal})
        )

    def update(state: c.Params, new: c.Params, context: c.RoundContext) -> c.Params:
        # Without uploads `new` equals the old state.
        step: Any = beta
        if server_schedule is not None:
            step = step * server_schedule(context.round_index)
        return jax.tree.map(lambda old, mean: old + step * (mean - old), state, new)

    moves_partly = bool(server_schedule) or is_traced(beta) or beta != 1
    algorithm = averaging("pfedme", optimizer, head_roles(head), aggregator)
    algorithm = algorithm._replace(
        client=client,
        server=replace_server()._replace(update=update),
        init_client_state=lambda shared, private: {"personal": {**shared, **private}},
        model=lambda broadcast, client_state: client_state["personal"],
        personal=True,
        weights=weights,
        gradients_per_step=inner_steps,
        incompatible={c.Feature.NEW_FACTORS: _BASIS} if moves_partly else {},
    )
    return with_factor(algorithm, "server_learning_rate_factor", server_schedule)
