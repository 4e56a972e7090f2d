"""Ditto (Li et al. 2021): FedAvg, and a personal model that is pulled towards the global one.

    client:  θ_k ← θ;  for each local step, both on the same batch:
               θ_k ← optimizer step on F_k(θ_k)
               v_k ← optimizer step on F_k(v_k) + λ/2 ‖v_k - θ‖²
    server:  θ ← Σ w_k θ_k, w_k ∝ n_k;  v_k never leaves the client, which predicts with it

θ in the penalty is the received model (Eq 2 and Algorithm 1 of the paper). Some
implementations pull towards the current θ_k instead, which is another objective.

v_k has every trained leaf. With a private head, θ_k and v_k have one head each. There is no global
head to be pulled towards, so the penalty is on the received leaves only. With a frozen head, v_k
has no head. Both steps use the same dropout masks.
"""

from typing import NamedTuple

from fedjax_peft import contracts as c
from fedjax_peft.algorithms.checks import checked
from fedjax_peft.algorithms.common import Local, init_local, proximal, train
from fedjax_peft.algorithms.fedavg import averaging
from fedjax_peft.contracts.arguments import NotNegative
from fedjax_peft.numerics.hyperparameters import maybe_nonzero
from fedjax_peft.numerics.roles import HeadPolicy, head_roles

_BASIS = (
    "Ditto pulls a client's own factors of earlier rounds towards the received ones, entry by"
    " entry. Leave the aggregator out to average A and B."
)


class State(NamedTuple):
    """A client during its local steps."""

    received: c.Params
    model: Local
    """θ_k and the private leaves."""
    personal: Local
    """v_k; all of its leaves are private."""


@checked
def ditto(
    optimizer: c.Optimizer,
    *,
    lam: NotNegative = 0.1,
    aggregator: c.Aggregator | None = None,
    head: HeadPolicy = "shared",
    weights: c.Weights = "size",
) -> c.Algorithm:
    """Ditto: every client has a personal model, pulled towards the global one.

    Metrics of training are those of the personal model.

    Args:
      optimizer: the clients' optimizer, for both models.
      lam: λ, the strength of the pull; with 0 the personal model is trained alone.
      head: policy of the global model's head: ``shared``, ``private`` or ``frozen``.
    """

    def client(context: c.ClientContext) -> c.ClientUpdate:
        def init(broadcast: c.Params, client_state: c.PyTree, key: c.Key) -> State:
            model = init_local(optimizer, broadcast, client_state["model"])
            return State(broadcast, model, init_local(optimizer, {}, client_state["personal"]))

        def step(state: State, batch: c.Batch, key: c.Key) -> tuple[State, c.Metrics]:
            received, model, personal = state
            model, _ = train(optimizer, context, model, batch, key)
            pull = proximal(lam, personal.private, received)
            personal, metrics = train(optimizer, context, personal, batch, key, pull)
            return State(received, model, personal), metrics

        def final(state: State) -> tuple[c.Params, c.PyTree]:
            client_state = {"model": state.model.private, "personal": state.personal.private}
            return state.model.shared, client_state

        return c.ClientUpdate(init, step, final)

    algorithm = averaging("ditto", optimizer, head_roles(head), aggregator)
    return algorithm._replace(
        client=client,
        init_client_state=lambda shared, private: {
            "model": private,
            "personal": {**shared, **private},
        },
        model=lambda broadcast, client_state: client_state["personal"],
        personal=True,
        weights=weights,
        gradients_per_step=2,
        incompatible={c.Feature.NEW_FACTORS: _BASIS} if maybe_nonzero(lam) else {},
    )
