"""The slow reference of rounds: one loop over rounds, clients and local steps of the toy problem.

It is in NumPy float64, without jit, lanes or padding, and with gradients and Adam by hand. It
shares only the names of the random streams with the library.
"""

import itertools
from typing import ClassVar

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


def loss(frozen, leaves, x, labels):
    """Returns the mean cross entropy, without dropout."""
    low = (x @ leaves["layer.lora_a"]) * leaves["layer.lora_scale"]
    hidden = np.tanh(x @ frozen["layer.kernel"] + low @ leaves["layer.lora_b"])
    logits = hidden @ leaves["head.kernel"] + leaves["head.bias"]
    top = logits.max(axis=1, keepdims=True)
    log = logits - top - np.log(np.exp(logits - top).sum(axis=1, keepdims=True))
    return -log[np.arange(len(x)), labels].mean()


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


def moved(optimizer, leaves, gradient):
    """Returns leaves after one step of an optimizer on those that the gradient has."""
    optimizer.count += 1
    return {**leaves, **{n: leaves[n] + optimizer(n, g) for n, g in gradient.items()}}


def cohorts(federation, per_round, rounds=2):
    """Returns round -> its members, in order; clients without examples take no part."""
    found = {}
    for number in range(1, rounds + 1):
        rng = host_rng(0, "cohort", number)
        drawn = sorted(rng.choice(len(federation), per_round, replace=False).tolist())
        found[number] = [c for c in drawn if len(federation.indices[c])]
    return found


def average(uploads, weights=None):
    """Returns the weighted mean of dicts of leaves."""
    return {n: np.average([u[n] for u in uploads], axis=0, weights=weights) for n in uploads[0]}


class Slow:
    """Federated averaging: a loop over rounds, clients and local steps.

    A method is a subclass, or has options, in the steps in which it differs.
    """

    model, federation, optimizer = None, None, None
    """The last is a function that returns the optimizer of a client in a round."""
    shared, private = (), ()
    size_weights, mixing = True, 1.0
    local: ClassVar = {"batch_size": 4, "epochs": 1, "dropout": False}

    def __init__(self, **options):
        vars(self).update(options)
        frozen = leaves64(self.model.frozen)
        self.kernel = next(iter(frozen.values()), None)
        self.leaves, self.steps = leaves64(self.model.trainable), {}
        self.own = [{n: self.leaves[n] for n in self.private} for _ in self.federation.indices]

    def names(self, number):
        """Returns the leaves that are trained in a round."""
        return [*self.shared, *self.private]

    def start(self, client, number):
        """Returns the leaves with which a client begins a round."""
        return {**self.leaves, **self.own[client]}

    def batches(self, client, number):
        """Yields (x, labels, kept) of every local step."""
        return local_batches(self.federation, client, number, **self.local)

    def gradient(self, leaves, batch, client, number):
        """Returns the gradient by the trained leaves."""
        by = gradients({"layer.kernel": self.kernel}, leaves, *batch)
        return {n: by[n] for n in self.names(number)}

    def train(self, client, number):
        """Returns all leaves of a client after its local steps."""
        leaves, optimizer = self.start(client, number), self.optimizer()
        for batch in self.batches(client, number):
            leaves = moved(optimizer, leaves, self.gradient(leaves, batch, client, number))
        self.steps[client] = optimizer.count
        return leaves

    def upload(self, leaves, number):
        """Returns what a client with these leaves sends."""
        return leaves

    def work(self, client, number):
        """Returns (what a client sends, what it keeps)."""
        leaves = self.train(client, number)
        return self.upload(leaves, number), {n: leaves[n] for n in self.own[client]}

    def aggregate(self, uploads, weights, number):
        """Changes the server's leaves; ``members`` has the clients of the uploads."""
        for n in self.shared:
            mean = np.average([u[n] for u in uploads], axis=0, weights=weights)
            self.leaves[n] = (1 - self.mixing) * self.leaves[n] + self.mixing * mean

    def run(self, cohorts):
        """Returns the federation after all rounds, for each of which its members are given."""
        for number, self.members in cohorts.items():
            uploads, self.steps = [], {}
            for client in self.members:
                upload, self.own[client] = self.work(client, number)
                uploads.append(upload)
            sizes = [len(self.federation.indices[c]) for c in self.members]
            weights = np.array(sizes if self.size_weights else [1] * len(sizes), float)
            self.aggregate(uploads, weights / weights.sum(), number)
        return self
