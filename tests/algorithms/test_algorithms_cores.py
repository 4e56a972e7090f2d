"""Fed-SB, RAVAN and SLoRA equal loops over clients in NumPy float64, written from the papers."""

import functools

import jax
import numpy as np
import optax
import pytest
import reference
import slow_lora
import toy
import toy_cores
from closeness import assert_close
from internals import Cohort, Ledger
from slow_lora import Slow

import fedjax_peft as fp

pytestmark = pytest.mark.slow

RATE = 0.1
COHORTS = {n: slow_lora.COHORTS[n] for n in (1, 2)}  # partial, then full
SGD = optax.sgd(RATE)


class SlowSB(Slow):
    """LoRA-SB's layer: the gradient of R is the projection of the kernel's."""

    shared, model, size_weights = (*toy.HEAD, "layer.sb_r"), toy_cores.sb_model(), False
    optimizer = functools.partial(reference.Sgd, RATE)

    def change(self, p):
        return p["layer.sb_a"] @ p["layer.sb_r"] @ p["layer.sb_b"]

    def by_adapter(self, p, g, number):
        return {"layer.sb_r": p["layer.sb_a"].T @ g @ p["layer.sb_b"].T}

    def gradient(self, p, batch, client, number):
        g, head = reference.by_kernel(self.kernel + self.change(p), p, *batch)
        return {**head, **self.by_adapter(p, g, number)}


class SlowRavan(SlowSB):
    """RAVAN's Algorithm 1, head by head."""

    shared, model = (*toy.HEAD, "layer.ravan_h"), toy_cores.ravan_model()

    def __init__(self):
        super().__init__()
        self.leaves = self.upload(self.leaves, 0)  # the model may come with scales that are not 1

    def change(self, p):
        a, b, h, s = (p[f"layer.ravan_{n}"] for n in "abhs")
        return sum(s[i] * a[i] @ h[i] @ b[i] for i in range(len(s)))

    def by_adapter(self, p, g, number):
        a, b, h, s = (p[f"layer.ravan_{n}"] for n in "abhs")
        by_h = [s[i] * a[i].T @ g @ b[i].T for i in range(len(s))]
        by_s = [(g * (a[i] @ h[i] @ b[i])).sum() for i in range(len(s))]
        return {"layer.ravan_h": np.array(by_h), "layer.ravan_s": np.array(by_s)}

    def start(self, client, number):
        return {**self.leaves, "layer.ravan_s": np.ones(toy_cores.HEADS)}

    def upload(self, p, number):
        cores = [s * h for s, h in zip(p["layer.ravan_s"], p["layer.ravan_h"], strict=True)]
        return {**p, "layer.ravan_h": np.array(cores)}


class SlowSLoRA(SlowSB):
    """One round of stage 1, then the SVD, then a round of stage 2; clients count by size."""

    shared = (*toy.SHARED, "layer.sparse_values")
    model, size_weights = toy_cores.slora_model(), True

    def change(self, p):
        dense = np.zeros(self.kernel.size)
        dense[p["layer.sparse_index"].astype(int)] = p["layer.sparse_values"]
        return dense.reshape(self.kernel.shape) + 1.5 * p["layer.lora_a"] @ p["layer.lora_b"]

    def by_adapter(self, p, g, number):
        if number == 1:
            return {"layer.sparse_values": g.ravel()[p["layer.sparse_index"].astype(int)]}
        by_a, by_b = 1.5 * g @ p["layer.lora_b"].T, 1.5 * p["layer.lora_a"].T @ g
        return {"layer.lora_a": by_a, "layer.lora_b": by_b}

    def aggregate(self, uploads, weights, number):
        super().aggregate(uploads, weights, number)
        if number == 1:
            u, sigma, vt = reference.svd(self.change(self.leaves), toy.RANK)
            values = 0 * self.leaves["layer.sparse_values"]
            self.leaves |= {"layer.lora_a": u, "layer.lora_b": np.diag(sigma / 1.5) @ vt}
            self.leaves["layer.sparse_values"] = values


def two_stages(optimizer, **options):
    return fp.algorithms.slora(optimizer, sparse_rounds=1, **options)


CASES = {
    "fedsb": (fp.algorithms.fedsb, SlowSB),
    "ravan": (fp.algorithms.ravan, SlowRavan),
    "slora": (two_stages, SlowSLoRA),
}


def rounds_of(algorithm, model, lanes=1):
    rig = slow_lora.engine(algorithm, lanes, model)
    return slow_lora.rounds(rig, COHORTS), rig


@functools.cache
def played(method):
    return rounds_of(CASES[method][0](SGD), toy_cores.MODELS[method](), 3)


@pytest.mark.parametrize("method", CASES)
def test_rounds_equal_the_slow_reference(method):
    results, rig = played(method)
    model = rig.algorithm.server.model(results[-1].server)
    expected = CASES[method][1]().run(COHORTS)
    for name in expected.shared:
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
    results, rig = played("ravan")
    server = rig.algorithm.server
    assert "layer.ravan_s" not in server.broadcast(results[0].server)
    np.testing.assert_array_equal(server.model(results[0].server)["layer.ravan_s"], 1)
    still = {**model.trainable, "layer.ravan_s": np.zeros(toy_cores.HEADS, np.float32)}
    start = server.init({n: still[n] for n in ("layer.ravan_h", "layer.ravan_s")})
    np.testing.assert_array_equal(start["layer.ravan_h"], 0)  # scales are folded in at the start


def test_slora_sends_the_leaves_of_its_stage_and_waits_for_an_upload():
    factors, values = ["layer.lora_a", "layer.lora_b"], "layer.sparse_values"
    results, rig = played("slora")
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


def test_slora_pays_for_its_svds_in_one_round_only():
    model, algorithm = toy_cores.slora_model(), fp.algorithms.slora(optax.sgd(0.1), sparse_rounds=1)
    fixed = {n: x for n, x in model.trainable.items() if n.endswith((".scale", ".sparse_index"))}
    update = functools.partial(
        algorithm.server.update, context=toy.context(1)._replace(fixed=fixed)
    )
    state = algorithm.server.init({n: x for n, x in model.trainable.items() if n not in fixed})
    steps = jax.make_jaxpr(update)(state, state["model"]).eqns
    chosen = [step for step in steps if step.primitive.name == "cond"]
    assert ["svd" in str(step) for step in chosen] == [True]
    assert not [step for step in steps if step not in chosen and "svd" in str(step)]


def test_slora_keeps_a_lora_that_was_trained_before():
    """Without learning the start of stage 2 is the product that the model had."""
    model = toy_cores.slora_model()
    values = {"layer.sparse_values": 0 * model.trainable["layer.sparse_values"]}
    model = model.replace(trainable=model.trainable | values)
    results, _ = rounds_of(two_stages(optax.sgd(0.0)), model)
    before, after = (
        p["layer.lora_a"] @ p["layer.lora_b"] for p in (model.trainable, results[0].server["model"])
    )
    assert_close(after, before, atol=1e-6)
