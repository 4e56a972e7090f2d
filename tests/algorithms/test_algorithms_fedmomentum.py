"""FedMomentum equals a loop over clients in NumPy float64 with a dense SVD."""

import functools

import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
import slow_lora
import toy
from closeness import approx, assert_close
from internals import check_method
from slow_lora import KERNEL, MODEL, A, B, S, Slow, average

import fedjax_peft as fp
from fedjax_peft.algorithms.fedmomentum import _split

pytestmark = pytest.mark.slow


SGD = optax.sgd(0.5)


class SlowFedMomentum(Slow):
    optimizer = functools.partial(reference.Sgd, 0.5)

    def __init__(self, energy=0.9999):
        super().__init__()
        self.energy = energy

    def aggregate(self, uploads, weights, number):
        super().aggregate(uploads, weights, number)
        (u, sigma, vt), r = reference.svd(average(uploads, weights)), toy.RANK
        share = np.cumsum(sigma**2) / np.sum(sigma**2)
        q = next((i + 1 for i, x in enumerate(share) if x >= self.energy), len(sigma))
        root = np.sqrt(sigma[:r] / S)
        self.leaves[A], self.leaves[B] = u[:, :r] * root, root[:, None] * vt[:r]
        self.residual = u[:, r:q] @ np.diag(sigma[r:q]) @ vt[r:q]
        self.lost = np.linalg.norm(sigma[max(q, r) :]) / np.array([1.0, np.linalg.norm(sigma)])
        self.kernel = self.kernel + self.residual


@pytest.mark.parametrize("energy", [0.9999, 1.0, 0.995])
@pytest.mark.sample("0.995")
def test_rounds_equal_the_slow_reference(energy):
    rig, slow = (
        slow_lora.engine(fp.algorithms.fedmomentum(SGD, energy=energy)),
        SlowFedMomentum(energy).run(),
    )
    results = slow_lora.check(rig, slow)
    kernel = rig.algorithm.server.merge_into_frozen(results[-1].server, MODEL.frozen)[KERNEL]
    assert_close(kernel, slow.kernel, rtol=0, atol=1e-5)
    measured = results[-1].aggregation
    assert measured["residual"] == approx(np.linalg.norm(slow.residual), abs=1e-5)
    assert 0.9 < measured["spectrum_kept"] < 1
    errors = [measured[f"aggregation_error{kind}"] for kind in ("", "_relative")]
    assert_close(errors, slow.lost, rtol=0, atol=1e-5)
    assert energy > 0.995 or slow.lost[1] > 1e-3, "a part is dropped"


def test_with_all_energy_the_average_is_exact():
    rig = slow_lora.engine(fp.algorithms.fedmomentum(SGD, energy=1.0))
    first, _, _ = slow_lora.rounds(rig)
    model = rig.algorithm.server.model(first.server)
    kernel = rig.algorithm.server.merge_into_frozen(first.server, MODEL.frozen)[KERNEL]
    used = kernel + S * model[A] @ model[B]
    slow = SlowFedMomentum()
    trained = [slow.train(c, 1) for c in slow_lora.COHORTS[1]]
    uploads = [slow.kernel + S * leaves[A] @ leaves[B] for leaves in trained]
    sizes = [slow_lora.SIZES[c] for c in slow_lora.COHORTS[1]]
    assert_close(used, np.average(uploads, axis=0, weights=sizes), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("shape", "tau"), [((40, 30), 0.9), ((6, 5), 0.9999)], ids=["by QR", "dense"]
)
def test_factors_and_residual_are_those_of_the_dense_svd(shape, tau):
    rng, r, clients = np.random.default_rng(0), 3, 4
    a, b = rng.normal(size=(2, clients, shape[0], r)), rng.normal(size=(2, clients, r, shape[1]))
    weights, s = np.array([0.1, 0.2, 0.3, 0.4]), np.array([2.0, 0.5])
    as_jax = [jnp.asarray(x, jnp.float32) for x in (a, b, weights, s)]
    new_a, new_b, fold, lost, energies = _split(*as_jax, tau)
    for i in range(2):
        dense = s[i] * np.einsum("k,kir,kro->io", weights, a[i], b[i])
        u, sigma, vt = np.linalg.svd(dense, full_matrices=False)
        share = np.cumsum(sigma**2) / np.sum(sigma**2)
        q = int(np.argmax(share >= tau)) + 1
        assert q > r
        largest = u[:, :r] * sigma[:r] @ vt[:r]
        assert_close(s[i] * new_a[i] @ new_b[i], largest, rtol=0, atol=1e-4)
        expected = u[:, r:q] * sigma[r:q] @ vt[r:q]
        assert_close(fold[i], expected, rtol=0, atol=1e-4)
        assert_close(fold[i] + lost[i], dense - largest, rtol=0, atol=1e-4)
        expected = [np.sum(sigma[:r] ** 2), np.sum(sigma[r:q] ** 2), np.sum(sigma**2)]
        assert_close(energies[i], expected, rtol=1e-4)


def test_clients_of_different_ranks_are_refused():
    with pytest.raises(fp.InputError, match="different LoRA ranks"):
        check_method(MODEL, fp.algorithms.fedmomentum(SGD), 4, [1, 2], ())
