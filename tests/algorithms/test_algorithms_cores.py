"""Fed-SB, RAVAN and SLoRA equal loops over clients in NumPy float64, written from the papers."""

import jax
import numpy as np
import optax
import pytest
import reference
import toy
import toy_cores
from closeness import assert_close

from fedjax_peft.algorithms import fedsb, ravan, slora
from fedjax_peft.engine.plan import Cohort
from fedjax_peft.simulation.ledger import Ledger
from fedjax_peft.support.errors import InputError

pytestmark = pytest.mark.slow

SIZES = (7, 4, 12, 1, 9)
FEDERATION = toy.clients(SIZES)
RATE, EPOCHS = 0.1, 2
COHORTS = {1: (0, 2, 3), 2: (0, 1, 2, 3, 4)}  # partial, then full
SGD = optax.sgd(RATE)


def by_kernel(kernel, leaves, x, labels, kept):
    """Returns the gradients by the adapted kernel and by the head, from the slow reference.

    A product of rank ``in`` that is zero has the derivative of the kernel by its second factor.
    """
    n_in, n_out = kernel.shape
    given = {
        "layer.lora_a": np.eye(n_in),
        "layer.lora_b": np.zeros((n_in, n_out)),
        "layer.lora_scale": np.ones(n_in),
        **{n: leaves[n] for n in toy.HEAD},
    }
    by = reference.gradients({"layer.kernel": kernel}, given, x, labels, kept)
    return by["layer.lora_b"], {n: by[n] for n in toy.HEAD}


class SlowSB:
    """LoRA-SB's layer: the gradient of R is the projection of the kernel's."""

    trained, model = ("layer.sb_r",), staticmethod(toy_cores.sb_model)

    def __init__(self):
        model = self.model()
        self.kernel = np.asarray(model.frozen["layer.base.kernel"], float)
        self.leaves = reference.leaves64(model.trainable)

    def change(self, p):
        return p["layer.sb_a"] @ p["layer.sb_r"] @ p["layer.sb_b"]

    def by_adapter(self, p, g):
        return {"layer.sb_r": p["layer.sb_a"].T @ g @ p["layer.sb_b"].T}

    def received(self):
        return self.leaves

    def upload(self, p):
        return p

    def run(self):
        for number, members in COHORTS.items():
            uploads = []
            for client in members:
                p = self.received()
                batches = reference.local_batches(
                    FEDERATION, client, number, batch_size=4, epochs=EPOCHS
                )
                for x, labels, kept in batches:
                    kernel = self.kernel + self.change(p)
                    g, head = by_kernel(kernel, p, x, labels, kept)
                    by = {**head, **self.by_adapter(p, g)}
                    p = {**p, **{n: p[n] - RATE * by[n] for n in by}}
                uploads.append(self.upload(p))
            self.aggregate(uploads, members)
        return self

    def aggregate(self, uploads, members):
        for name in (*toy.HEAD, *self.trained):
            self.leaves[name] = np.mean([u[name] for u in uploads], axis=0)


class SlowRavan(SlowSB):
    """RAVAN's Algorithm 1, head by head."""

    trained, model = ("layer.ravan_h",), staticmethod(toy_cores.ravan_model)

    def __init__(self):
        super().__init__()
        self.leaves = self.upload(self.leaves)  # the model may come with scales that are not 1

    def change(self, p):
        a, b, h, s = (p[f"layer.ravan_{n}"] for n in "abhs")
        return sum(s[i] * a[i] @ h[i] @ b[i] for i in range(len(s)))

    def by_adapter(self, p, g):
        a, b, h, s = (p[f"layer.ravan_{n}"] for n in "abhs")
        by_h = [s[i] * a[i].T @ g @ b[i].T for i in range(len(s))]
        by_s = [(g * (a[i] @ h[i] @ b[i])).sum() for i in range(len(s))]
        return {"layer.ravan_h": np.array(by_h), "layer.ravan_s": np.array(by_s)}

    def received(self):
        return {**self.leaves, "layer.ravan_s": np.ones(toy_cores.HEADS)}

    def upload(self, p):
        cores = [s * h for s, h in zip(p["layer.ravan_s"], p["layer.ravan_h"], strict=True)]
        return {**p, "layer.ravan_h": np.array(cores)}


class SlowSLoRA(SlowSB):
    """One round of stage 1, then the SVD, then a round of stage 2; clients count by size."""

    trained, model = (
        ("layer.lora_a", "layer.lora_b", "layer.sparse_values"),
        staticmethod(toy_cores.slora_model),
    )

    def __init__(self):
        super().__init__()
        self.round = 1

    def sparse(self, p):
        dense = np.zeros(self.kernel.size)
        dense[p["layer.sparse_index"].astype(int)] = p["layer.sparse_values"]
        return dense.reshape(self.kernel.shape)

    def change(self, p):
        return self.sparse(p) + 1.5 * p["layer.lora_a"] @ p["layer.lora_b"]

    def by_adapter(self, p, g):
        if self.round == 1:
            places = p["layer.sparse_index"].astype(int)
            return {"layer.sparse_values": g.reshape(-1)[places]}
        return {
            "layer.lora_a": 1.5 * g @ p["layer.lora_b"].T,
            "layer.lora_b": 1.5 * p["layer.lora_a"].T @ g,
        }

    def aggregate(self, uploads, members):
        sizes = [SIZES[c] for c in members]
        for name in (*toy.HEAD, *self.trained):
            self.leaves[name] = np.average([u[name] for u in uploads], axis=0, weights=sizes)
        if self.round == 1:
            u, sigma, vt = np.linalg.svd(self.change(self.leaves))
            u, sigma, vt = u[:, : toy.RANK], sigma[: toy.RANK], vt[: toy.RANK]
            sign = np.sign(u[np.abs(u).argmax(axis=0), range(toy.RANK)])
            self.leaves["layer.lora_a"] = u * sign
            self.leaves["layer.lora_b"] = np.diag(sigma / 1.5) @ (vt * sign[:, None])
            self.leaves["layer.sparse_values"] = 0 * self.leaves["layer.sparse_values"]
        self.round += 1


def two_stages(optimizer, **options):
    return slora(optimizer, sparse_rounds=1, **options)


CASES = {"fedsb": (fedsb, SlowSB), "ravan": (ravan, SlowRavan), "slora": (two_stages, SlowSLoRA)}


def rounds_of(algorithm, model, lanes):
    rig = toy.Engine(*(algorithm, FEDERATION), per_round=5, lanes=lanes, epochs=EPOCHS, bound=model)
    results, state = [], rig.start()
    for number, members in COHORTS.items():
        clients, weights, work = rig.schedule.cohort(number)
        rows = [i for i, c in enumerate(clients) if c in members]
        cohort = Cohort(*([part[i] for i in rows] for part in (clients, weights, work)))
        results.append(rig.run(cohort, number, jax.tree.map(jax.numpy.array, state)))
        state = (results[-1].server, results[-1].client_state)
    return results, rig


@pytest.mark.parametrize("lanes", [1, 3])
@pytest.mark.parametrize("method", CASES)
def test_rounds_equal_the_slow_reference(method, lanes):
    make, slow = CASES[method]
    results, rig = rounds_of(make(SGD), toy_cores.MODELS[method](), lanes)
    expected = slow().run()
    model = rig.algorithm.server.model(results[-1].server)
    for name in (*toy.HEAD, *expected.trained):
        assert_close(model[name], expected.leaves[name], rtol=0, atol=1e-5)


def test_clients_send_only_the_cores_and_the_head():
    for name, cores in (("fedsb", ["layer.sb_r"]), ("ravan", ["layer.ravan_h"])):
        model = toy_cores.MODELS[name]()
        algorithm = CASES[name][0](SGD, head="frozen")
        shared = {n: x for n, x in model.trainable.items() if model.kinds[n] == "adapter"}
        ledger = Ledger(model, algorithm, algorithm.server.init(shared), 4)
        size = sum(4 * model.trainable[n].size for n in cores)
        assert (ledger.up(0), ledger.down(0)) == (size, size)


def test_scales_of_ravan_are_trained_and_start_at_one_in_every_round():
    model = toy_cores.ravan_model()
    results, rig = rounds_of(ravan(SGD), model, 1)
    server = rig.algorithm.server
    assert "layer.ravan_s" not in server.broadcast(results[0].server)
    np.testing.assert_array_equal(server.model(results[0].server)["layer.ravan_s"], 1)
    still = {**model.trainable, "layer.ravan_s": np.zeros(toy_cores.HEADS, np.float32)}
    start = server.init({n: still[n] for n in ("layer.ravan_h", "layer.ravan_s")})
    np.testing.assert_array_equal(start["layer.ravan_h"], 0)  # scales are folded in at the start


def test_slora_sends_the_leaves_of_its_stage_and_waits_for_an_upload():
    model = toy_cores.slora_model()
    factors, values = ["layer.lora_a", "layer.lora_b"], "layer.sparse_values"
    results, rig = rounds_of(two_stages(SGD), model, 1)
    for result, stage in zip(results, (1, 2), strict=True):
        assert [bool(result.sent_leaves[n]) for n in factors] == [stage == 2] * 2
        assert bool(result.sent_leaves[values]) == (stage == 1)
    np.testing.assert_array_equal(results[-1].server["model"][values], 0)
    nobody = rig.run(Cohort([], [], []), 1)
    assert not nobody.server["primed"]
    late = rig.run(rig.schedule.cohort(3), 3, (nobody.server, nobody.client_state))
    assert late.server["primed"]
    a = late.server["model"][factors[0]]
    assert_close(a.T @ a, np.eye(toy.RANK), rtol=0, atol=1e-6)


def test_slora_keeps_a_lora_that_was_trained_before():
    """Without learning the start of stage 2 is the product that the model had."""
    model = toy_cores.slora_model()
    values = {"layer.sparse_values": 0 * model.trainable["layer.sparse_values"]}
    model = model.replace(trainable=model.trainable | values)
    results, _ = rounds_of(two_stages(optax.sgd(0.0)), model, 1)
    before, after = (
        p["layer.lora_a"] @ p["layer.lora_b"] for p in (model.trainable, results[0].server["model"])
    )
    assert_close(after, before, atol=1e-6)


def test_other_models_are_refused_with_the_method_to_attach():
    for make, name in ((fedsb, "lora_sb"), (ravan, "ravan"), (two_stages, "slora")):
        with pytest.raises(InputError, match=rf"fp\.peft\.{name}\(\)"):
            make(SGD).check(toy.lora_model().kinds, 4)
