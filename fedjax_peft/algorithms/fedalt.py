"""FedALT (Bian et al. 2026): every client trains its own LoRA beside a frozen LoRA of all others.

    client:  rest-of-world LoRA  R_k = (A_r, B_r) = 1/(K-1) Σ_{j≠k} (A_j, B_j),  frozen
             optimizer steps of its individual LoRA (A_k, B_k) and its mixer M_k on F_k, with
               y = x W + s (g_0(x) (x A_r) B_r + g_1(x) (x A_k) B_k),   g(x) = softmax(x M_k)
             send (A_k, B_k)
    server:  compute R_k of each client

(:func:`fedjax_peft.peft.mixed_lora` is the layer.) Local training goes on from the client's own
LoRA, never from an average, and the mixer stays on the client. A and B are averaged one by one.

In the authors' code all clients take part in every round, and the server sends each client another
mean. Here the server keeps and sends one mean of all K clients, C = 1/K Σ_j (A_j, B_j), and a
client takes its own part out: R_k = C + (C - (A_k, B_k)) / (K-1). This is the same, with the same
traffic. A client sends C plus the change of its LoRA, so that with partial participation

    C ← C + 1/K Σ_{k in the round} Δ(A_k, B_k)

stays the mean of the last LoRAs of all clients, those that rest included. K counts the clients that
have examples. Weights are equal, as in the paper. All individual LoRAs start from the same values,
with one common A (B = 0 leaves the model unchanged). In the authors' code each client draws an A of
its own, so the mean of the others' is smaller there in the first rounds. A lossy upload transform,
clipping or noise changes C: what was lost of a client's change then stays in its own R_k, with the
factor -1/(K-1).

The paper's models have no new head. Here it is private by default, as everything personal; with
``head="shared"`` it is averaged over the round's clients.

This was written from the paper's abstract and the authors' code (github.com/jmbian/FedALT), and
checked against a loop that holds every client's LoRA and averages those of the others.
"""

import re
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_peft.aggregators import mean
from fedjax_peft.algorithms.checks import checked
from fedjax_peft.algorithms.common import Local, init_local, objective, train
from fedjax_peft.contracts import (
    Algorithm,
    Batch,
    ClientContext,
    ClientUpdate,
    Key,
    Metrics,
    Params,
    PyTree,
    Roles,
    RoundContext,
    ServerUpdate,
)
from fedjax_peft.numerics.roles import HeadPolicy
from fedjax_peft.support.errors import InputError

__all__ = ["fedalt"]

_REST, _OWN = ".rest_of_world.", ".individual."


class State(NamedTuple):
    """A client during its local steps."""

    received: Params
    """The shared leaves: C under the names of the rest-of-world LoRA, and a shared head."""
    start: Params
    """The client's private leaves at the start of the round."""
    rest: Params
    """R_k."""
    local: Local


@checked
def fedalt(
    optimizer: optax.GradientTransformation,
    *,
    head: HeadPolicy = "private",
    keep_optimizer: bool = False,
) -> Algorithm:
    """FedALT: an individual LoRA, a frozen mean of the others', and a mixer (``peft.mixed_lora``).

    Args:
      optimizer: the clients' optimizer.

    Raises:
      InputError: on use, a model without ``peft.mixed_lora``.
    """

    def client(context: ClientContext) -> ClientUpdate:
        def init(broadcast: PyTree, client_state: Params, key: Key) -> State:
            del key
            model = broadcast["model"]
            shared = {n: x for n, x in model.items() if _REST not in n}
            local = init_local(optimizer, shared, client_state)
            return State(model, client_state, _rest(broadcast, client_state), local)

        def step(state: State, batch: Batch, key: Key) -> tuple[State, Metrics]:
            def loss(params: Params, batch: Batch, key: Key) -> tuple[jax.Array, Metrics]:
                return objective(context, {**state.rest, **params}, batch, key)

            local, metrics = train(optimizer, context, state.local, batch, key, loss=loss)
            return state._replace(local=local), metrics

        def final(state: State) -> tuple[Params, Params]:
            own, upload = state.local.private, dict(state.local.shared)
            for n in state.rest:
                upload[n] = state.received[n] + (own[_own(n)] - state.start[_own(n)])
            return {n: upload[n] for n in state.received}, own

        return ClientUpdate(init, step, final)

    def model(broadcast: PyTree, client_state: Params) -> Params:
        return {**broadcast["model"], **client_state, **_rest(broadcast, client_state)}

    def local_model(broadcast: PyTree, upload: Params, client_state: Params) -> Params:
        """Returns the leaves with R_k of the local work, which the client's old LoRA gives."""
        before = dict(client_state)
        for n, x in broadcast["model"].items():
            if _REST in n:
                before[_own(n)] = client_state[_own(n)] - (upload[n] - x)
        return {**upload, **client_state, **_rest(broadcast, before)}

    return Algorithm(
        "fedalt",
        _roles(head),
        client,
        mean(error=False),
        _server(),
        init_client_state=_same_start,
        model=model,
        local_model=local_model,
        weights="uniform",
        check=_check,
        synchronous_only="The server of FedALT holds the sum of all clients' LoRAs, from which each"
        " client takes its own part: a stale upload that counts less would leave some of it there.",
    )


def _own(name: str) -> str:
    return name.replace(_REST, _OWN)


def _rest(broadcast: PyTree, own: Params) -> Params:
    """Returns R_k = C + (C - (A_k, B_k)) / (K-1), under the names of the rest-of-world LoRA.

    Before the first aggregation K is unknown, and C equals every client's LoRA.
    """
    others = jnp.maximum(broadcast["clients"] - 1, 1)
    means = {n: x for n, x in broadcast["model"].items() if _REST in n}
    return {n: x + (x - own[_own(n)]) / others for n, x in means.items()}


def _server() -> ServerUpdate:
    def start(shared: Params) -> PyTree:
        return {"model": shared, "clients": jnp.zeros((), jnp.float32)}

    def update(state: PyTree, new: Params, context: RoundContext) -> PyTree:
        share = context.participants / context.total_clients
        model = {
            n: x + share * (new[n] - x) if _REST in n else new[n] for n, x in state["model"].items()
        }
        return {"model": model, "clients": jnp.float32(context.total_clients)}

    return ServerUpdate(
        init=start,
        update=update,
        broadcast=lambda state: state,
        params=lambda state: state["model"],
        template=lambda state: state["model"],
    )


def _same_start(shared: Params, private: Params) -> Params:
    """Returns the private leaves, with the individual LoRA equal to the initial C."""
    return {**private, **{_own(n): x for n, x in shared.items() if _REST in n}}


def _roles(head: HeadPolicy) -> Roles:
    rules = {
        "shared": (r"^adapter:.*\.rest_of_world\.lora_[ab]$",),
        "private": (r"^adapter:.*\.(individual\.lora_[ab]|mixer)$",),
    }
    policy = "fixed" if head == "frozen" else head
    return Roles(**{**rules, policy: (*rules.get(policy, ()), "^head:")})


def _check(kinds: Mapping[str, str], clients: int) -> None:
    del clients
    needed = (r"\.rest_of_world\.lora_a$", r"\.individual\.lora_a$", r"\.mixer$")
    if not all(any(re.search(rule, n) for n in kinds) for rule in needed):
        raise InputError(
            "fedalt needs a model with an individual and a rest-of-world LoRA and a mixer at every"
            " site: attach peft.mixed_lora()."
        )
