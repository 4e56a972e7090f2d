"""A slow reference for the round engine: federated averaging of the toy problem.

It loops over rounds, clients and batches in NumPy float64, without jit, lanes or padding, and with
gradients and Adam by hand. It shares only the names of the random streams with the library.
"""

import itertools

import jax
import numpy as np
from internals import client_key, host_rng, stream


def gradients(frozen, leaves, x, labels, kept):
    """Returns the gradient of the mean cross entropy by every leaf; ``kept`` is dropout's mask."""
    w, scale = frozen["layer.kernel"], leaves["layer.lora_scale"][None]
    a, b, head = leaves["layer.lora_a"], leaves["layer.lora_b"], leaves["head.kernel"]
    low = (x @ a) * scale
    hidden = np.tanh(x @ w + low @ b)
    dropped = hidden * kept / 0.8
    logits = dropped @ head + leaves["head.bias"][None]
    chances = np.exp(logits - logits.max(axis=1, keepdims=True))
    chances /= chances.sum(axis=1, keepdims=True)
    by_logits = (chances - np.eye(head.shape[1])[labels]) / len(x)
    by_inner = (by_logits @ head.T) * kept / 0.8 * (1 - hidden**2)
    return {
        "head.bias": by_logits.sum(axis=0),
        "head.kernel": dropped.T @ by_logits,
        "layer.lora_a": x.T @ (by_inner @ b.T * scale),
        "layer.lora_b": low.T @ by_inner,
    }


def by_kernel(kernel, leaves, x, labels, kept=0.8):
    """Returns the gradients by the adapted kernel and by the head; by default without dropout.

    A product of rank ``in`` that is zero has the derivative of the kernel by its second factor.
    """
    n_in, n_out = kernel.shape
    given = {
        "layer.lora_a": np.eye(n_in),
        "layer.lora_b": np.zeros((n_in, n_out)),
        "layer.lora_scale": np.ones(n_in),
        **{n: leaves[n] for n in ("head.bias", "head.kernel")},
    }
    by = gradients({"layer.kernel": kernel}, given, x, labels, kept)
    return by["layer.lora_b"], {n: by[n] for n in ("head.bias", "head.kernel")}


def svd(matrix, rank=None):
    """Returns (U, σ, Vᵀ) of a rank; the largest entry of each column of U is positive."""
    u, sigma, vt = np.linalg.svd(matrix, full_matrices=False)
    u, sigma, vt = u[:, :rank], sigma[:rank], vt[:rank]
    sign = np.sign(u[np.abs(u).argmax(axis=0), range(len(sigma))])
    return u * sign, sigma, vt * sign[:, None]


def slopes(function, leaves, width=1e-5):
    """Returns the gradient of a function of leaves by central differences, without a derivation."""
    found = {}
    for name, value in leaves.items():
        found[name] = np.zeros_like(value)
        for place in np.ndindex(value.shape):
            nudge = np.zeros_like(value)
            nudge[place] = width
            up, down = ({**leaves, name: value + s * nudge} for s in (1, -1))
            found[name][place] = (function(up) - function(down)) / (2 * width)
    return found


def best_groups(distances, fewest, most):
    """Returns (the group of each, their number) of spectral clustering.

    Of all groupings, the one whose rows of eigenvectors are nearest to the means of their groups.
    """
    n = len(distances)
    near = np.exp(-(distances**2) / (2 * np.median(distances[np.triu_indices(n, 1)]) ** 2))
    np.fill_diagonal(near, 1)
    root = np.diag(near.sum(axis=1) ** -0.5)
    values, vectors = np.linalg.eigh(np.eye(n) - root @ near @ root)
    k = max(range(fewest, min(most, n - 1) + 1), key=lambda k: values[k] - values[k - 1])
    points = vectors[:, :k] / np.linalg.norm(vectors[:, :k], axis=1, keepdims=True)

    def spread(labels):
        parts = [points[np.array(labels) == j] for j in set(labels)]
        return sum(((x - x.mean(axis=0)) ** 2).sum() for x in parts)

    return min(itertools.product(range(k), repeat=n), key=spread), k


class Sgd:
    """SGD with momentum, with a new buffer for each client and round, which starts at 0."""

    def __init__(self, rate, momentum=0.0):
        self.rate, self.momentum, self.buffer, self.count = rate, momentum, {}, 0

    def __call__(self, name, gradient):
        """Returns what to add to a leaf."""
        self.buffer[name] = self.momentum * self.buffer.get(name, 0) + gradient
        return -self.rate * self.buffer[name]


class Adam:
    """Adam (Kingma and Ba, 2015), with a new state for each client and round."""

    def __init__(self, rate):
        self.rate, self.count, self.m, self.v = rate, 0, {}, {}

    def __call__(self, name, gradient):
        """Returns what to add to a leaf; ``count`` is the step, from 1."""
        self.m[name] = 0.9 * self.m.get(name, 0) + 0.1 * gradient
        self.v[name] = 0.999 * self.v.get(name, 0) + 0.001 * gradient**2
        m = self.m[name] / (1 - 0.9**self.count)
        v = self.v[name] / (1 - 0.999**self.count)
        return -self.rate * m / (np.sqrt(v) + 1e-8)


def leaves64(params):
    """Returns leaves as float64 NumPy arrays."""
    return {n: np.asarray(x, np.float64) for n, x in params.items()}


def local_batches(clients, client, number, *, batch_size, epochs, width=6, seed=0, dropout=True):
    """Yields (x, labels, kept) of every local step of a client in a round; kept masks dropout.

    Without dropout in the model, ``kept`` is 0.8, which :func:`gradients` undoes.
    """
    key = client_key(stream(seed, "clients"), number, client)
    rng = host_rng(seed, "order", number, client)
    columns, step = clients.data.columns, 0
    for _ in range(epochs):
        order = rng.permutation(clients.indices[client])
        for start in range(0, len(order), batch_size):
            rows = order[start : start + batch_size]
            step += 1
            step_key = jax.random.fold_in(key, step)  # 0 is the key of the start
            kept = 0.8
            if dropout:
                kept = np.asarray(jax.random.bernoulli(step_key, 0.8, (batch_size, width)))
                kept = kept[: len(rows)]
            yield columns["x"][rows].astype(np.float64), columns["labels"][rows], kept


def cohort_of(clients, number, per_round, seed=0):
    """Returns the clients of a round (those without examples take no part), and their sizes."""
    drawn = host_rng(seed, "cohort", number).choice(len(clients), per_round, replace=False)
    members = [c for c in sorted(drawn.tolist()) if len(clients.indices[c])]
    return members, [len(clients.indices[c]) for c in members]


def train_client(model, leaves, trained, clients, client, number, *, rate, **options):
    """Returns a client's leaves after its local steps, and their number.

    ``options`` are those of :func:`local_batches`.
    """
    frozen, adam = leaves64(model.frozen), Adam(rate)
    options = {**options, "width": frozen["layer.kernel"].shape[1]}
    for x, labels, kept in local_batches(clients, client, number, **options):
        adam.count += 1
        by = gradients(frozen, leaves, x, labels, kept)
        leaves = {**leaves, **{n: leaves[n] + adam(n, by[n]) for n in trained}}
    return leaves, adam.count


def federated(model, clients, *, shared, private, rounds, per_round, rate, batch_size, epochs):
    """Returns (leaves of the server, leaves of every client, steps in the last round by client)."""
    server = leaves64(model.trainable)
    own = [{n: server[n] for n in private} for _ in range(len(clients))]
    steps = {}
    for number in range(1, rounds + 1):
        members, sizes = cohort_of(clients, number, per_round)
        uploads, steps = [], {}
        for client in members:
            leaves, steps[client] = train_client(
                model,
                {**server, **own[client]},
                [*shared, *private],
                clients,
                client,
                number,
                rate=rate,
                batch_size=batch_size,
                epochs=epochs,
            )
            own[client] = {n: leaves[n] for n in private}
            uploads.append(leaves)
        for name in shared:
            server[name] = np.average([u[name] for u in uploads], axis=0, weights=sizes)
    return server, own, steps
