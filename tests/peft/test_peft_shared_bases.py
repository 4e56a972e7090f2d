"""LoRA-XS's formula, what VeRA and SHiRA draw and send, and where products of LoRA do not apply."""

import jax
import numpy as np
import optax
import pytest
from closeness import ROUNDOFF, assert_close
from flax import nnx
from internals import gradient_start
from refusals import refused
from tiny import tiny

import fedjax_peft as fp

pytestmark = pytest.mark.slow

FEATURES, CLASSES = 6, 3
METHODS = {
    "hira": fp.peft.hira(2, targets=["one"]),
    "lora_xs": fp.peft.lora_xs(2, targets=["one"], sigma=0.1),
    "miss": fp.peft.miss(4, targets=["one"]),
    "oft": fp.peft.oft(3, targets=["one"]),
    "shira": fp.peft.shira(1, targets=["one"]),
    "vera": fp.peft.vera(5, targets=["one"]),
}


class Network(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.one = nnx.Linear(FEATURES, 8, rngs=rngs)
        self.classifier = nnx.Linear(8, CLASSES, rngs=rngs)

    def __call__(self, batch):
        return self.classifier(jax.numpy.tanh(self.one(batch["x"])))


def problem(method):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(40, FEATURES)).astype(np.float32)
    labels = np.argmax(x[:, :CLASSES], 1).astype(np.int32)
    clients = fp.partition.iid(fp.Dataset({"x": x, "labels": labels}, tuple("abc")), clients=4)
    return fp.attach(fp.bind(Network(), head=("classifier",)), METHODS[method]), clients


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.sample("lora_xs", "shira", "vera")  # whose lanes share leaves that do not train
def test_lanes_train_what_a_loop_trains_and_only_what_trains_is_sent(name):
    model, clients = problem(name)
    algorithm = fp.algorithms.fedavg(optax.sgd(0.3))
    options = {"rounds": 1, "clients_per_round": 3, "batch_size": 4}
    lanes, loop = (
        fp.simulate(model, algorithm, clients, **options, placement=fp.Placement(engine=engine))
        for engine in ("compiled", "reference")
    )
    sent = {n: x for n, x in model.trainable.items() if model.kinds[n] != "fixed"}
    for leaf, x in lanes.params.items():
        assert_close(x, loop.params[leaf], rtol=0, atol=64 * ROUNDOFF)
        assert np.any(np.asarray(x) != np.asarray(model.trainable[leaf])) == (leaf in sent), leaf
    assert lanes.metrics[-1]["bytes_up"] == 3 * 4 * sum(x.size for x in sent.values())
    assert model.counts()["adapter"] + model.counts()["head"] == sum(x.size for x in sent.values())


def test_the_products_of_lora_are_not_those_of_other_methods():
    for name in METHODS:
        model, clients = problem(name)
        for aggregator in (fp.aggregators.fra(), fp.aggregators.median(space="product")):
            algorithm = fp.algorithms.fedavg(optax.sgd(0.1), aggregator=aggregator)
            refused("LoRA", fp.session, model, algorithm, clients)
    refused("LoRA", fp.session, *(problem("hira")[0], fp.algorithms.fedex(optax.sgd(0.1)), clients))


def test_the_core_of_lora_xs_is_between_singular_directions():
    plain, model = tiny(), fp.attach(tiny(), fp.peft.lora_xs(4, sigma=0.5))
    merged = fp.merge(model).frozen
    cores = [n.removesuffix(".sb_r") for n in model.trainable if n.endswith(".sb_r")]
    assert model.counts()["adapter"] == 16 * len(cores)
    drawn = np.concatenate([np.ravel(model.trainable[f"{path}.sb_r"]) for path in cores])
    assert 0.3 < drawn.std() < 0.7
    for path in cores:
        kernel = np.asarray(plain.frozen[f"{path}.kernel"], np.float64)
        u, s, vt = np.linalg.svd(kernel)
        # Signs of singular vectors are free: a left one has a positive largest entry.
        sign = np.sign(np.take_along_axis(u, np.abs(u).argmax(0)[None], 0))[0]
        a, b = (u * sign * s)[:, :4], (vt * sign[:, None])[:4]
        expected = kernel + a @ np.asarray(model.trainable[f"{path}.sb_r"]) @ b
        assert_close(merged[f"{path}.kernel"], expected, rtol=0, atol=1e-5)
    refused("lora_sb", gradient_start, model, [{}], fp.tasks.classification(), step=0.1)


def test_layers_share_the_matrices_of_vera_which_follow_from_the_seed():
    method = fp.peft.vera(8, targets=["query", "intermediate.dense", "output.dense"])
    model, other = fp.attach(tiny(), method), fp.attach(tiny(), method, seed=1)
    for end, axis in ((".vera_a", 0), (".vera_b", 1)):
        found = {n: np.asarray(x) for n, x in model.trainable.items() if n.endswith(end)}
        largest = max(found.values(), key=np.size)
        assert len({x.shape for x in found.values()}) == 2
        for name, x in found.items():
            part = largest[: len(x)] if axis == 0 else largest[:, : x.shape[1]]
            np.testing.assert_array_equal(x, part)
            assert model.kinds[name] == "fixed"
            assert np.any(other.trainable[name] != x)
            bound = np.sqrt(6 / (largest.shape[0] if axis == 0 else 8))
            assert 0.9 * bound < np.abs(x).max() <= bound
        again = fp.attach(tiny(), method).trainable
        assert all(np.array_equal(again[name], x) for name, x in found.items())


def test_shira_has_the_places_of_no_other_layer():
    model = fp.attach(tiny(), fp.peft.shira(3))
    places = [np.asarray(x) for n, x in model.trainable.items() if n.endswith(".shira_indices")]
    for found in places:
        assert len({tuple(x) for x in found}) == len(found) == 3 * (32 + 32)
    assert len({x.tobytes() for x in places}) == len(places)
