"""LoRA-A² equals a loop over clients in NumPy float64, written from the paper's formulas."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
import slow_lora
import toy
from closeness import assert_small
from options import run_options
from slow_lora import MODEL, A, B, Slow

import fedjax_peft as fp
from fedjax_peft import simulate
from fedjax_peft.algorithms.lora_a2 import _selected

pytestmark = pytest.mark.slow

RATE = 0.1
SGD = optax.sgd(RATE)


class SlowLoRAA2(Slow):
    """``budgets`` by client, cycled."""

    optimizer = functools.partial(reference.Sgd, RATE)

    def __init__(self, budgets=(1,), ratio=1.0):
        super().__init__()
        self.budgets, self.ratio = budgets, ratio

    def gradient(self, leaves, batch, client, number):
        by = super().gradient(leaves, batch, client, number)
        return by | ({A: 0 * by[A], B: self.ratio * by[B]} if number % 2 else {B: 0 * by[B]})

    def train(self, client, number):
        leaves, on_b = super().train(client, number), number % 2 == 1
        scores = []
        for i in range(toy.RANK):
            if on_b:
                change = np.outer(self.leaves[A][:, i], leaves[B][i] - self.leaves[B][i])
            else:
                change = np.outer(leaves[A][:, i] - self.leaves[A][:, i], self.leaves[B][i])
            scores.append(np.linalg.norm(change))
        budget = self.budgets[client % len(self.budgets)]
        for i in np.argsort(scores)[::-1][budget:]:
            leaves[A], leaves[B] = leaves[A].copy(), leaves[B].copy()
            leaves[A][:, i], leaves[B][i] = self.leaves[A][:, i], self.leaves[B][i]
        return leaves


@pytest.mark.parametrize(
    ("options", "slow"),
    [
        ({"budget": 1}, SlowLoRAA2()),
        ({"budget": [1, 2], "rate_ratio": 4.0}, SlowLoRAA2((1, 2), 4.0)),
    ],
    ids=["one", "mixed"],
)
@pytest.mark.sample("mixed")
def test_rounds_equal_the_slow_reference(options, slow):
    results = slow_lora.check(slow_lora.engine(fp.algorithms.lora_a2(SGD, **options)), slow.run())
    for result, rests in zip(results, (A, B, A), strict=True):
        assert not result.sent_leaves[rests]
        assert_small(result.aggregation["aggregation_error"], 1e-6)


@pytest.mark.parametrize("on_b", [True, False])
@pytest.mark.parametrize("budget", [1, 2, 3, 2**31 - 1])
def test_directions_of_all_matrices_compete(on_b, budget):
    """With a budget of the whole rank, here 3, or more, all directions are sent: as in RoLoRA."""
    rng, shapes = np.random.default_rng(budget), {"p": (5, 2, 3), "q": (4, 3, 6), "r": (7, 4, 2)}
    received, upload, changes = {}, {}, {}
    for path, (n_in, r, n_out) in shapes.items():
        a, b = rng.normal(size=(n_in, r)), rng.normal(size=(r, n_out))
        received |= {f"{path}.lora_a": a, f"{path}.lora_b": b}
        new = b + rng.normal(size=b.shape) if on_b else a + rng.normal(size=a.shape)
        upload |= {f"{path}.lora_a": a, f"{path}.lora_b": b}
        upload[f"{path}.lora_{'b' if on_b else 'a'}"] = new
        for i in range(r):
            moved = (
                np.outer(a[:, i], new[i] - b[i]) if on_b else np.outer(new[:, i] - a[:, i], b[i])
            )
            changes[path, i] = np.linalg.norm(moved)
    best = sorted(changes, key=changes.get, reverse=True)[: budget * len(shapes)]
    as_jax = [{n: jnp.asarray(x, jnp.float32) for n, x in x.items()} for x in (upload, received)]
    new = jax.jit(_selected)(*as_jax, jnp.int32(budget), jnp.array(on_b))
    factor, axis = ("lora_b", 1) if on_b else ("lora_a", 0)
    for path, (_, r, _) in shapes.items():
        name = f"{path}.{factor}"
        moved = np.any(new[name] != as_jax[1][name], axis=axis)
        np.testing.assert_array_equal(moved, [(path, i) in best for i in range(r)])


def test_the_bytes_of_an_upload_are_those_of_its_directions():
    """The head, one of two directions, and a byte that says which: B has rows of 6, A of 5."""
    federation = toy.clients([4, 3, 5])
    options = {"rounds": 2, "batch_size": 4, "lanes": 1}
    rows = simulate(
        MODEL, fp.algorithms.lora_a2(SGD, budget=1), federation, **run_options(**options)
    ).metrics
    head = sum(MODEL.trainable[n].nbytes for n in toy.HEAD)
    assert [row["bytes_up"] for row in rows[1:]] == [3 * (head + 4 * n + 1) for n in (6, 5)]
