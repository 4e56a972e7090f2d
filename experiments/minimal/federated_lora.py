"""Federated LoRA in one file: FedAvg, FRA and Ditto, with JAX and Optax alone.

The idea of ``fedjax_peft`` without its engine, from top to bottom:

    1. a frozen transformer, and the small leaves that LoRA adds to it
    2. the data, and the plan: who takes part in a round, with which examples
    3. a client: init, steps, final; those of FedAvg and of Ditto
    4. aggregation: leaves of all clients in, leaves of the server out; the mean, and FRA
    5. a round: clients side by side by ``vmap``, their steps by ``scan``, one compiled program
    6. the loop over rounds

``python experiments/minimal/federated_lora.py`` trains all three (15 seconds on two CPU cores, no
download). ``tests/test_experiments_minimal.py`` compares each of them with ``fp.simulate``.
"""

import zlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

SEED, ROUNDS, CLIENTS, COHORT, BATCH = 0, 15, 10, 4, 8
VOCABULARY, LENGTH, WIDTH, LAYERS, CLASSES = 32, 8, 16, 2, 4
RANK, SCALE = 2, 2.0
OPTIMIZER = optax.adam(1e-2)

Leaves = dict[str, jax.Array]  # flat, so that a rule about leaves is a rule about names


def generator(name: str, *indices: int) -> np.random.Generator:
    """Returns the random numbers of one purpose, such as ``generator("cohort", round_index)``.

    They follow from the seed and from names, never from what ran before. So a run can be resumed,
    clients can be computed in any order, and ``fp.simulate`` draws the same numbers.
    """
    words = [SEED, zlib.crc32(name.encode()), *indices]
    return np.random.default_rng(np.random.SeedSequence(words))


# 1. The model: frozen leaves, which are the same for everybody, and trained leaves. ---------------


def init_model() -> tuple[Leaves, Leaves]:
    """Returns the frozen leaves, in the place of pretrained ones, and the trained leaves."""
    rng = generator("model")

    def draw(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(0, shape[0] ** -0.5, shape), jnp.float32)

    frozen = {"embedding": draw(VOCABULARY, WIDTH) * 3, "position": draw(LENGTH, WIDTH)}
    trained = {"head.kernel": jnp.zeros((WIDTH, CLASSES)), "head.bias": jnp.zeros(CLASSES)}
    for layer in range(LAYERS):
        for name in ("query", "key", "value", "mlp"):
            frozen[f"layer.{layer}.{name}.kernel"] = draw(WIDTH, WIDTH)
        for name in ("query", "value"):  # B is zero, so training starts from the frozen model
            trained[f"layer.{layer}.{name}.lora_a"] = draw(WIDTH, RANK)
            trained[f"layer.{layer}.{name}.lora_b"] = jnp.zeros((RANK, WIDTH))
    return frozen, trained


def logits(frozen: Leaves, trained: Leaves, tokens: jax.Array) -> jax.Array:
    """Returns the logits of texts, ``[texts, classes]``: a pure function of the leaves."""

    def linear(name: str, x: jax.Array) -> jax.Array:
        y = x @ frozen[f"{name}.kernel"]
        if f"{name}.lora_a" in trained:  # LoRA adds s A B, a matrix of rank r, to the kernel
            y += SCALE * (x @ trained[f"{name}.lora_a"]) @ trained[f"{name}.lora_b"]
        return y

    x = frozen["embedding"][tokens] + frozen["position"][None]
    for layer in range(LAYERS):
        query, key, value = (linear(f"layer.{layer}.{n}", x) for n in ("query", "key", "value"))
        x += jax.nn.softmax(query @ key.swapaxes(1, 2) * WIDTH**-0.5) @ value
        x += jnp.tanh(linear(f"layer.{layer}.mlp", x))
    return x.mean(axis=1) @ trained["head.kernel"] + trained["head.bias"][None]


def loss(frozen: Leaves, trained: Leaves, batch: Leaves) -> jax.Array:
    """Returns the mean cross entropy of those examples of a batch that are not padding."""
    scores = logits(frozen, trained, batch["tokens"])
    losses = optax.softmax_cross_entropy_with_integer_labels(scores, batch["labels"])
    return jnp.where(batch["mask"], losses, 0).sum() / jnp.maximum(batch["mask"].sum(), 1)


# 2. The data and the plan, which are made on the host. --------------------------------------------


def make_data() -> tuple[Leaves, list[np.ndarray], np.ndarray]:
    """Returns the columns of all examples, and each client's rows for training and for tests.

    Words depend on the class. Most texts of a client are of two of the four classes, so one model
    for all clients is a compromise: the reason for personal models.
    """
    rng = generator("data")
    labels, train, test, rows = [], [], [], 0
    for client, size in enumerate(rng.integers(32, 80, CLIENTS)):
        shares = np.roll([0.6, 0.3, 0.05, 0.05], client)
        labels.append(rng.choice(CLASSES, size, p=shares))
        test.append(np.arange(rows, rows + 20))
        train.append(np.arange(rows + 20, rows + size))
        rows += size
    label = np.concatenate(labels).astype(np.int32)
    topic = label[:, None] * 8 + rng.integers(0, 8, (rows, LENGTH))  # class c: words 8c to 8c + 7
    anything = rng.integers(0, VOCABULARY, (rows, LENGTH))
    tokens = np.where(rng.random((rows, LENGTH)) < 0.6, topic, anything).astype(np.int32)
    return {"tokens": jnp.asarray(tokens), "labels": jnp.asarray(label)}, train, np.stack(test)


class Plan(NamedTuple):
    """A round in arrays, whose shapes are the same in every round: nothing compiles twice."""

    clients: np.ndarray  # [cohort]: who takes part
    rows: np.ndarray  # [cohort, steps, batch]: the examples of every local step; -1 pads
    weights: np.ndarray  # [cohort]: the clients' numbers of examples


def make_plan(train: list[np.ndarray], round_index: int) -> Plan:
    """Returns the plan of a round: a cohort without replacement, one pass over shuffled examples.

    The steps of a client that has fewer examples end with padding. The engine wastes less: where a
    client has ended, the next one begins.
    """
    cohort = np.sort(generator("cohort", round_index).choice(CLIENTS, COHORT, replace=False))
    steps = -(-max(map(len, train)) // BATCH)
    rows = np.full((COHORT, steps * BATCH), -1, np.int32)
    for i, client in enumerate(cohort.tolist()):
        own = generator("order", round_index, client).permutation(train[client])
        rows[i, : len(own)] = own
    weights = (rows >= 0).sum(axis=1).astype(np.float32)
    return Plan(cohort, rows.reshape(COHORT, steps, BATCH), weights)


# 3. A client: its work in a round, written for one client. ----------------------------------------

Loss = Callable[[Leaves, Leaves], jax.Array]  # (trained leaves, batch) -> loss


class Client(NamedTuple):
    """The three parts of a client's work. Its client state is what it keeps between its rounds."""

    init: Callable[[Leaves, Leaves], Any]  # (what the server sends, client state) -> local state
    step: Callable[[Any, Leaves], Any]  # (local state, batch) -> local state
    final: Callable[[Any], tuple[Leaves, Leaves]]  # local state -> (upload, client state)


def descend(objective: Loss, state: tuple[Leaves, Any], batch: Leaves) -> tuple[Leaves, Any]:
    """Returns the leaves and the optimizer's state after a step."""
    trained, optimizer = state
    gradient = jax.grad(objective)(trained, batch)
    updates, optimizer = OPTIMIZER.update(gradient, optimizer, trained)
    return optax.apply_updates(trained, updates), optimizer


def fedavg_client(objective: Loss) -> Client:
    """FedAvg: trains what the server has sent, and sends it back. There is no client state."""

    def init(broadcast: Leaves, own: Leaves) -> Any:
        del own
        return broadcast, OPTIMIZER.init(broadcast)

    def step(state: Any, batch: Leaves) -> Any:
        return descend(objective, state, batch)

    def final(state: Any) -> tuple[Leaves, Leaves]:
        return state[0], {}

    return Client(init, step, final)


def ditto_client(objective: Loss, strength: float = 0.1) -> Client:
    """Ditto: FedAvg, and a personal model v beside it, which never leaves the client.

    v minimises ``F(v) + λ/2 ‖v - θ‖²``, where θ is what the server has sent.
    """

    def init(broadcast: Leaves, own: Leaves) -> Any:
        return broadcast, (broadcast, OPTIMIZER.init(broadcast)), (own, OPTIMIZER.init(own))

    def step(state: Any, batch: Leaves) -> Any:
        received, shared, personal = state

        def pulled(leaves: Leaves, batch: Leaves) -> jax.Array:
            distance = sum(jnp.sum((leaves[n] - received[n]) ** 2) for n in received)
            return objective(leaves, batch) + strength / 2 * distance

        return received, descend(objective, shared, batch), descend(pulled, personal, batch)

    def final(state: Any) -> tuple[Leaves, Leaves]:
        _, (upload, _), (own, _) = state
        return upload, own

    return Client(init, step, final)


# 4. Aggregation: a function of leaves whose first axis is the client. -----------------------------


def mean(uploads: Leaves, weights: jax.Array) -> Leaves:
    """Returns the weighted mean of every leaf, which is all that FedAvg's server does."""
    return {n: jnp.tensordot(weights / weights.sum(), x, axes=1) for n, x in uploads.items()}


def fra(uploads: Leaves, weights: jax.Array) -> Leaves:
    """Returns the best factors of rank r of the mean of the products ``A_k B_k``: FRA.

    The product of the mean factors is another matrix: ``Σ w_k A_k B_k ≠ (Σ w_k A_k) (Σ w_k B_k)``.
    """
    new = mean(uploads, weights)
    for a in [name for name in uploads if name.endswith("lora_a")]:
        b = a.replace("lora_a", "lora_b")
        shares, factors = weights / weights.sum(), (uploads[a], uploads[b])
        product = jnp.einsum("k,kir,kro->io", shares, *factors, precision="highest")
        u, sigma, vt = jnp.linalg.svd(product, full_matrices=False)
        # An SVD leaves signs open: let the largest entry of each column of u be positive.
        sign = jnp.sign(jnp.take_along_axis(u, jnp.abs(u).argmax(axis=0)[None], axis=0))
        half = sign * jnp.sqrt(sigma)[None]
        new[a], new[b] = (u * half)[:, :RANK], (vt.T * half).T[:RANK]
    return new


class Method(NamedTuple):
    """A federated algorithm: what a client does, and how uploads combine."""

    client: Callable[[Loss], Client]
    aggregate: Callable[[Leaves, jax.Array], Leaves]
    personal: bool = False  # whether a client predicts with its client state


METHODS = {
    "FedAvg": Method(fedavg_client, mean),
    "FRA": Method(fedavg_client, fra),
    "Ditto": Method(ditto_client, mean, personal=True),
}


# 5. A round: one program, of which nothing goes back to the host. ---------------------------------


def train(client: Client, broadcast: Leaves, own: Leaves, batches: Leaves) -> tuple[Leaves, Leaves]:
    """Returns one client's upload and client state; ``batches`` are ``[steps, batch, ...]``."""

    def step(state: Any, batch: Leaves) -> tuple[Any, None]:
        new, busy = client.step(state, batch), batch["mask"].any()
        # The gradient of padding is zero, but Adam's momentum would move the leaves all the same.
        return jax.tree.map(lambda x, old: jnp.where(busy, x, old), new, state), None

    state, _ = jax.lax.scan(step, client.init(broadcast, own), batches)
    return client.final(state)


@partial(jax.jit, static_argnames="method")
def run_round(
    method: Method, frozen: Leaves, server: Leaves, clients: Leaves, columns: Leaves, plan: Plan
) -> tuple[Leaves, Leaves]:
    """Returns the server's leaves and the states of all clients after a round."""
    client = method.client(partial(loss, frozen))
    # The row -1 of padding is some other example, which the mask leaves out of the loss.
    batches = {name: x[plan.rows] for name, x in columns.items()} | {"mask": plan.rows >= 0}
    own = {name: x[plan.clients] for name, x in clients.items()}
    # Here one client becomes many. Of the frozen leaves there is one copy, however many train.
    uploads, own = jax.vmap(partial(train, client, server))(own, batches)
    clients = {name: x.at[plan.clients].set(own[name]) for name, x in clients.items()}
    return method.aggregate(uploads, plan.weights), clients


# 6. The loop over rounds. -------------------------------------------------------------------------


@jax.jit
def accuracies(frozen: Leaves, models: Leaves, columns: Leaves, rows: jax.Array) -> jax.Array:
    """Returns the accuracy of each client's model on the client's own test rows, ``[clients]``."""
    scores = jax.vmap(partial(logits, frozen))(models, columns["tokens"][rows])
    return (scores.argmax(axis=-1) == columns["labels"][rows]).mean(axis=1)


def simulate(method: Method) -> Iterator[tuple[Leaves, Leaves, float]]:
    """Yields (server's leaves, clients' models ``[clients, ...]``, mean accuracy) of each round."""
    (frozen, server), (columns, rows, test) = init_model(), make_data()

    def for_everybody(leaves: Leaves) -> Leaves:
        return {name: jnp.stack([x] * CLIENTS) for name, x in leaves.items()}

    clients = for_everybody(server) if method.personal else {}
    for round_index in range(1, ROUNDS + 1):
        plan = make_plan(rows, round_index)
        server, clients = run_round(method, frozen, server, clients, columns, plan)
        models = clients if method.personal else for_everybody(server)
        yield server, models, float(accuracies(frozen, models, columns, test).mean())


if __name__ == "__main__":
    for name, method in METHODS.items():
        scores = [accuracy for _, _, accuracy in simulate(method)]
        shown = "  ".join(f"{accuracy:.2f}" for accuracy in scores[2::3])
        print(f"{name:7} mean accuracy of the clients' models after every third round:  {shown}")
