"""q-FedAvg and AFL against loops in NumPy float64, and against sums by hand."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
import slow_lora
import toy
from closeness import assert_close
from internals import Ledger

import fedjax_peft as fp
from fedjax_peft.algorithms.afl import onto_simplex as onto_simplex_fast

RATE, Q, LIPSCHITZ = 0.3, 1.5, 4.0
SGD = optax.sgd(RATE)
HEADS = {"shared": (toy.SHARED, ()), "private": (toy.ADAPTER, toy.HEAD)}


class Slow(slow_lora.Slow):
    """Clients that train by SGD, and know their loss at the received model."""

    optimizer = functools.partial(reference.Sgd, RATE)

    def loss_of(self, leaves, client):
        """Returns the loss of all examples of a client."""
        rows = self.federation.indices[client]
        columns = self.federation.data.columns
        x, labels = columns["x"][rows].astype(np.float64), columns["labels"][rows]
        return reference.loss({"layer.kernel": self.kernel}, leaves, x, labels)

    def work(self, client, number):
        before = self.loss_of(self.start(client, number), client)
        upload, own = super().work(client, number)
        return {**upload, "loss": before}, own


class SlowFair(Slow):
    """Algorithm 2 of the paper, with Δ and h as they stand there."""

    def aggregate(self, uploads, weights, number):
        deltas, bends = [], []
        for upload in uploads:
            gradient = {n: LIPSCHITZ * (self.leaves[n] - upload[n]) for n in self.shared}
            square, loss = sum((g**2).sum() for g in gradient.values()), upload["loss"]
            deltas.append({n: loss**Q * g for n, g in gradient.items()})
            bends.append(Q * loss ** (Q - 1) * square + LIPSCHITZ * loss**Q)
        for n in self.shared:
            step = sum(w * d[n] for w, d in zip(weights, deltas, strict=True))
            self.leaves[n] = self.leaves[n] - step / np.dot(weights, bends)


@pytest.mark.parametrize(("head", "weights"), [("shared", "size"), ("private", "uniform")])
@pytest.mark.sample("private-uniform")
def test_rounds_of_q_fedavg_equal_the_slow_reference(head, weights):
    shared, own = HEADS[head]
    made = fp.algorithms.q_fedavg(SGD, q=Q, lipschitz=LIPSCHITZ, head=head, weights=weights)
    rig = slow_lora.engine(made)
    slow = SlowFair(shared=shared, private=own, size_weights=weights == "size").run()
    result = slow_lora.rounds(rig)[-1]
    slow_lora.compare(rig, result, slow, atol=1e-5)
    for n in shared:
        assert np.abs(slow.leaves[n] - rig.shared[n]).max() > 1e-3, "every leaf has moved"


@pytest.mark.parametrize(("q", "expected"), [(0, 2.5), (1, 34 / 18.5)])
def test_a_round_by_hand(q, expected):
    """X = 0, L = 1/2, uploads 1 and 4 with the losses 2 and 8.

    With q = 1, Δ = -L (2 · 1, 8 · 4) and h = (L² · 1 + 2 L, L² · 16 + 8 L) = L (2.5, 16).
    With q = 0 it is the mean.
    """
    made = fp.algorithms.q_fedavg(SGD, q=q, lipschitz=0.5)
    template = made.server.unchanged({"x": jnp.zeros(1)})
    one, two = (
        made.aggregator.lift(
            {"model": {"x": jnp.full(1, x)}, "loss": {"received_loss": jnp.float32(loss)}},
            template,
            {},
        )
        for x, loss in ((1.0, 2.0), (4.0, 8.0))
    )
    total = fp.contracts.Total(jax.tree.map(jnp.add, one, two), jnp.float32(2), jnp.ones(2))
    new = made.aggregator.finish(total, template, toy.context(), ()).update
    assert_close(made.server.update({}, new, toy.context())["x"], [expected], rtol=1e-6)


GAMMA, WITH_EMPTY = 0.4, toy.clients((*slow_lora.SIZES, 0))


def onto_simplex(x):
    """Returns max(x - τ, 0), whose sum is 1; τ is found by bisection."""
    low, high = x.min() - 1, x.max()
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if np.maximum(x - middle, 0).sum() > 1 else (low, middle)
    return np.maximum(x - high, 0)


class SlowAgnostic(Slow):
    """λ and θ as in the head of the file, with a client that has no examples."""

    federation = WITH_EMPTY

    def __init__(self, **options):
        super().__init__(**options)
        self.mixture = np.full(len(WITH_EMPTY), 1 / len(WITH_EMPTY))

    def aggregate(self, uploads, weights, number):
        own = self.mixture[list(self.members)]
        for n in self.shared:
            self.leaves[n] = np.average([u[n] for u in uploads], axis=0, weights=own)
        gradient = np.zeros(len(self.mixture))
        gradient[list(self.members)] = [u["loss"] for u in uploads]
        scale = len(slow_lora.SIZES) / len(self.members)
        self.mixture = onto_simplex(self.mixture + GAMMA * scale * gradient)


@pytest.mark.parametrize("head", ["shared", "private"])
@pytest.mark.sample("shared")
def test_rounds_of_afl_equal_the_slow_reference(head):
    shared, own = HEADS[head]
    afl = fp.algorithms.afl(SGD, clients=6, mixture_rate=GAMMA, head=head)
    options = {"per_round": 6, "lanes": 3, "epochs": slow_lora.EPOCHS, "bound": slow_lora.MODEL}
    rig = toy.Engine(afl, WITH_EMPTY, **options)
    slow = SlowAgnostic(shared=shared, private=own).run()
    result = slow_lora.rounds(rig)[-1]
    slow_lora.compare(rig, result, slow, atol=1e-5)
    assert_close(result.server["mixture"], slow.mixture, rtol=0, atol=1e-6)
    assert min(slow.mixture) == 0 < sorted(slow.mixture)[-2], "some have a weight, not all"


@pytest.mark.parametrize(
    "x", [[0.2, 0.3, 0.5], [2.0, 1.0, -3.0], [0.7, 0.7, 0.7], [5.0], [9, 1, 9]]
)
def test_the_projection_onto_the_simplex(x):
    x = np.asarray(x, np.float64)
    assert_close(onto_simplex_fast(jnp.float32(x)), onto_simplex(x), rtol=0, atol=1e-6)


FAIR = [
    (fp.algorithms.q_fedavg(SGD, lipschitz=LIPSCHITZ), 0),
    (fp.algorithms.afl(SGD, clients=4), 4),
]


@pytest.mark.parametrize(("made", "more"), FAIR, ids=lambda x: getattr(x, "name", ""))
def test_an_upload_is_the_model_and_one_number(made, more):
    """AFL's clients fetch their weight too."""
    model = toy.lora_model()
    start = {n: model.trainable[n] for n in toy.SHARED}
    ledger = Ledger(model, made, made.server.init(start), 4)
    size = sum(x.nbytes for x in start.values())
    resting = made.traffic.sent_leaves({}, jnp.int32(1))
    assert ledger.up(0, [n for n in resting if not resting[n]]) == size + 4
    assert ledger.down(0) == size + more
