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

from typing import NamedTuple

import jax.numpy as jnp

from fedjax_peft import contracts as c
from fedjax_peft.aggregators import mean
from fedjax_peft.algorithms.checks import checked, model_with
from fedjax_peft.algorithms.common import Local, init_local, loss_beside, train
from fedjax_peft.numerics.roles import HeadPolicy, with_head

_REST, _OWN = ".rest_of_world.", ".individual."


class Start(NamedTuple):
    """What a client had at the start of the round."""

    received: c.Params
    """The shared leaves: C under the names of the rest-of-world LoRA, and a shared head."""
    private: c.Params
    """The client's private leaves."""
    rest: c.Params
    """R_k."""


@checked
def fedalt(optimizer: c.Optimizer, *, head: HeadPolicy = "private") -> c.Algorithm:
    """FedALT: an individual LoRA, a frozen mean of the others', and a mixer (``peft.mixed_lora``).

    Raises:
      InputError: on use, a model without ``peft.mixed_lora``.
    """

    def client(context: c.ClientContext) -> c.ClientUpdate:
        def init(broadcast: c.PyTree, client_state: c.Params, key: c.Key) -> Local:
            shared = {n: x for n, x in broadcast["model"].items() if _REST not in n}
            start = Start(broadcast["model"], client_state, _rest(broadcast, client_state))
            return init_local(optimizer, shared, client_state, start)

        def step(local: Local, batch: c.Batch, key: c.Key) -> tuple[Local, c.Metrics]:
            loss = loss_beside(context, local.start.rest)
            return train(optimizer, context, local, batch, key, loss=loss)

        def final(local: Local) -> tuple[c.Params, c.Params]:
            start, own, upload = local.start, local.private, dict(local.shared)
            for n in start.rest:
                upload[n] = start.received[n] + (own[_own(n)] - start.private[_own(n)])
            return {n: upload[n] for n in start.received}, own

        return c.ClientUpdate(init, step, final)

    def model(broadcast: c.PyTree, client_state: c.Params) -> c.Params:
        return {**broadcast["model"], **client_state, **_rest(broadcast, client_state)}

    def local_model(broadcast: c.PyTree, upload: c.Params, client_state: c.Params) -> c.Params:
        """Returns the leaves with R_k of the local work, which the client's old LoRA gives."""
        before = dict(client_state)
        for n, x in broadcast["model"].items():
            if _REST in n:
                before[_own(n)] = client_state[_own(n)] - (upload[n] - x)
        return {**upload, **client_state, **_rest(broadcast, before)}

    return c.Algorithm(
        "fedalt",
        with_head(
            head,
            shared=r"^adapter:.*\.rest_of_world\.lora_[ab]$",
            private=r"^adapter:.*\.(individual\.lora_[ab]|mixer)$",
        ),
        client,
        mean(error=False),
        _server(),
        init_client_state=_same_start,
        model=model,
        local_model=local_model,
        weights="uniform",
        check=model_with(
            "fedalt needs a model with an individual and a rest-of-world LoRA and a mixer at every"
            " site: attach peft.mixed_lora().",
            *(r"\.rest_of_world\.lora_a$", r"\.individual\.lora_a$", r"\.mixer$"),
        ),
        incompatible={
            c.Feature.ASYNCHRONY: "The server of FedALT holds the sum of all clients' LoRAs, from"
            " which each client takes its own part: a stale upload that counts less would leave"
            " some of it there."
        },
    )


def _own(name: str) -> str:
    return name.replace(_REST, _OWN)


def _rest(broadcast: c.PyTree, own: c.Params) -> c.Params:
    """Returns R_k = C + (C - (A_k, B_k)) / (K-1), under the names of the rest-of-world LoRA.

    Before the first aggregation K is unknown, and C equals every client's LoRA.
    """
    others = jnp.maximum(broadcast["clients"] - 1, 1)
    means = {n: x for n, x in broadcast["model"].items() if _REST in n}
    return {n: x + (x - own[_own(n)]) / others for n, x in means.items()}


def _server() -> c.ServerUpdate:
    def start(shared: c.Params) -> c.PyTree:
        return {"model": shared, "clients": jnp.zeros((), jnp.float32)}

    def update(state: c.PyTree, new: c.Params, context: c.RoundContext) -> c.PyTree:
        share = context.participants / context.total_clients
        model = {
            n: x + share * (new[n] - x) if _REST in n else new[n] for n, x in state["model"].items()
        }
        return {"model": model, "clients": jnp.float32(context.total_clients)}

    return c.ServerUpdate(
        init=start,
        update=update,
        broadcast=lambda state: state,
        params=lambda state: state["model"],
        template=lambda state: state["model"],
    )


def _same_start(shared: c.Params, private: c.Params) -> c.Params:
    """Returns the private leaves, with the individual LoRA equal to the initial C."""
    return {**private, **{_own(n): x for n, x in shared.items() if _REST in n}}
