"""FedRot-LoRA equals a loop over clients in NumPy float64, written from the authors' formulas."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import slow_lora
from closeness import approx, assert_close, assert_small
from slow_lora import ADAM, A, B, Slow

import fedjax_peft as fp
from fedjax_peft.algorithms.fedrot import _aligned

pytestmark = pytest.mark.slow

aligned = jax.jit(_aligned, static_argnums=4)


def polar(matrix):
    u, _, vt = np.linalg.svd(matrix)
    return u @ vt


class SlowFedRot(Slow):
    """The formulas of the authors' code, which has A as [r, in] and B as [out, r]."""

    def __init__(self, strength=None, first="A"):
        super().__init__()
        self.strength, self.first = strength, first

    def upload(self, leaves, number):
        if number == 1:
            return leaves
        a, b = leaves[A].T, leaves[B].T
        on_a = (number % 2 == 0) == (self.first == "A")
        m = a @ self.leaves[A] if on_a else b.T @ self.leaves[B].T
        u, _, vt = np.linalg.svd(m)
        r = u @ vt
        if self.strength is not None:
            if np.linalg.det(r) < 0:
                vt[-1] *= -1
                r = u @ vt
            r = polar((1 - self.strength) * np.eye(len(r)) + self.strength * r)
        return {**leaves, A: (r.T @ a).T, B: (b @ r).T}


@pytest.mark.parametrize(
    ("options", "slow"),
    [
        ({}, SlowFedRot()),
        ({"first": "B"}, SlowFedRot(first="B")),
        ({"strength": 0.4}, SlowFedRot(0.4)),
    ],
    ids=["hard", "first B", "soft"],
)
@pytest.mark.sample("first B", "soft")
def test_rounds_equal_the_slow_reference(options, slow):
    slow_lora.check(slow_lora.engine(fp.algorithms.fedrot(ADAM, **options)), slow.run())


def turned(rank=4, seed=0, reflect=False):
    """Returns received leaves, and an upload that is the same product in another basis."""
    rng = np.random.default_rng(seed)
    q = np.linalg.qr(rng.normal(size=(rank, rank)))[0]
    if (np.linalg.det(q) < 0) != reflect:
        q[:, 0] *= -1
    received = {A: rng.normal(size=(9, rank)), B: rng.normal(size=(rank, 7))}
    upload = {A: received[A] @ q, B: q.T @ received[B]}
    as_jax = [{n: jnp.asarray(x, jnp.float32) for n, x in x.items()} for x in (upload, received)]
    return *as_jax, q


@pytest.mark.parametrize("on_a", [True, False])
@pytest.mark.parametrize("reflect", [True, False])
def test_the_same_update_in_another_basis_comes_back_as_it_was(on_a, reflect):
    upload, received, _ = turned(reflect=reflect)
    new = aligned(upload, received, {}, jnp.array(on_a), 1.0)
    for n, x in new.items():
        assert_close(x, received[n], rtol=0, atol=1e-5)


@pytest.mark.parametrize("strength", [0.0, 0.3, 1.0])
def test_the_product_stays(strength):
    """With a strength of 0 the factors stay too: this is federated averaging."""
    upload, received, _ = turned(reflect=True)
    upload[A] = upload[A] + 0.3
    new = aligned(upload, received, {}, jnp.array(True), strength)
    assert_close(new[A] @ new[B], upload[A] @ upload[B], rtol=0, atol=2e-5)
    rest = np.abs(new[A] - upload[A]).max()
    if strength:
        assert rest > 0.1
    else:
        assert_small(rest, 1e-5)


def test_half_of_a_turn_in_a_plane_is_a_turn_by_half_the_angle():
    angle = 0.8
    q = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    _, received, _ = turned(rank=2)
    upload = {A: received[A] @ q, B: q.T @ received[B]}
    new = aligned(upload, received, {}, jnp.array(True), 0.5)
    half = np.array(
        [[np.cos(angle / 2), -np.sin(angle / 2)], [np.sin(angle / 2), np.cos(angle / 2)]]
    )
    assert_close(new[A], received[A] @ half, rtol=0, atol=1e-5)


def test_below_a_strength_of_one_a_reflection_becomes_the_best_rotation():
    upload, received, _ = turned(rank=3, reflect=True)
    upload[A] = upload[A] * jnp.array([[3.0, 1.0, 0.5]])  # so that singular values differ
    u, _, vt = np.linalg.svd(np.asarray(upload[A].T @ received[A], np.float64))
    r = u @ np.diag([1, 1, -1]) @ vt
    assert np.linalg.det(r) == approx(1)
    r = polar(0.3 * np.eye(3) + 0.7 * r)
    new = aligned(upload, received, {}, jnp.array(True), 0.7)
    assert_close(new[A], upload[A] @ r, rtol=0, atol=1e-5)


def test_a_client_of_a_smaller_rank_turns_only_among_its_own_directions():
    upload, received, _ = turned(rank=4)
    fixed = {"layer.lora_scale": jnp.array([1.5, 1.5, 0, 0])}
    small = {
        A: upload[A].at[:, 2:].set(received[A][:, 2:]),
        B: upload[B].at[2:].set(received[B][2:]),
    }
    new = aligned(small, received, fixed, jnp.array(True), 1.0)
    for n, rows in ((A, np.s_[:, 2:]), (B, np.s_[2:])):
        assert_close(new[n][rows], received[n][rows], rtol=0, atol=1e-6)
    r = polar(np.asarray(small[A][:, :2].T @ received[A][:, :2]))
    assert_close(new[A][:, :2], small[A][:, :2] @ r, rtol=0, atol=1e-5)


def test_layers_of_different_ranks_are_aligned_together_as_alone():
    one, two = turned(rank=2), turned(rank=4, seed=1)

    def named(leaves, layer):
        return {n.replace("layer", layer): x for n, x in leaves.items()}

    upload = named(one[0], "p") | named(two[0], "q")
    received = named(one[1], "p") | named(two[1], "q")
    new = aligned(upload, received, {}, jnp.array(False), 1.0)
    for n, x in new.items():
        assert_close(x, received[n], rtol=0, atol=1e-5)


def test_the_error_of_the_average_is_smaller_than_without_the_rotation():
    """Clients that learned the same product in different bases: only the rotation averages it."""
    received = turned(rank=3)[1]
    rng, uploads = np.random.default_rng(2), []
    for _ in range(5):
        q = np.linalg.qr(rng.normal(size=(3, 3)))[0]
        uploads.append({A: received[A] @ q, B: q.T @ received[B]})

    def error(uploads):
        a, b = (np.mean([u[n] for u in uploads], axis=0) for n in (A, B))
        return np.abs(a @ b - received[A] @ received[B]).max()

    turned_back = [aligned(u, received, {}, jnp.array(True), 1.0) for u in uploads]
    assert error(uploads) > 0.5
    assert_small(error(turned_back), 1e-4)
