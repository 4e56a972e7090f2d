"""The models without pretraining equal torch, and all their weights are trained."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from closeness import EXACT, assert_close, assert_small, roughly
from internals import abstract_module, save_checkpoint
from torch import nn

import fedjax_peft as fp

pytestmark = pytest.mark.slow

WORDS = {"vocab_size": 50, "embedding_size": 12, "hidden_size": 16}
LSTM = {"model_type": "lstm", **WORDS}
CNN = {"model_type": "cnn", "image_size": 13, "num_channels": 2, "hidden_size": 20}
HEADS = {
    "rnn": fp.heads.causal_lm(),
    "lstm": fp.heads.causal_lm(),
    "cnn": fp.heads.classification(3),
}


def randomised(module):
    """Returns the torch module with all parameters drawn afresh; outputs are of order one."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in module.parameters():
            scale = 1.5 / math.sqrt(p[0].numel()) if p.ndim > 1 else 0.2
            p.copy_(scale * torch.randn(p.shape, generator=generator))
    return module


class NextWord(nn.Module):
    def __init__(self, kind, layers=2):
        super().__init__()
        self.embedding = nn.Embedding(50, 12)
        self.cells = {"rnn": nn.RNN, "lstm": nn.LSTM}[kind](12, 16, layers, batch_first=True)
        self.lm_head = nn.Linear(16, 50)

    def forward(self, ids):
        hidden, _ = self.cells(self.embedding(ids))
        return self.lm_head(hidden), hidden

    def leaves(self):
        """Returns our leaves -> this module's parameters."""
        found = {"embedding.embedding": self.embedding.weight}
        for name, p in self.cells.named_parameters():
            what, which, layer = name.split("_")
            leaf = {"weight": "kernel", "bias": "bias"}[what]
            found[f"layers.{layer[1:]}.{ {'ih': 'input', 'hh': 'hidden'}[which] }.{leaf}"] = p
        return found | {"lm_head.kernel": self.lm_head.weight, "lm_head.bias": self.lm_head.bias}


class Images(nn.Module):
    def __init__(self, channels=(32, 64, 128)):
        super().__init__()
        self.layers, side = len(channels), 13 // 2 ** len(channels)
        channels = [2, *channels]
        blocks = [
            nn.Sequential(nn.Conv2d(a, b, 5, padding="same"), nn.ReLU(), nn.MaxPool2d(2))
            for a, b in itertools.pairwise(channels)
        ]
        flat = nn.Linear(channels[-1] * side**2, 20)
        self.features = nn.Sequential(*blocks, nn.Flatten(), flat, nn.ReLU())
        self.classifier = nn.Linear(20, 3)

    def forward(self, pixels):
        hidden = self.features(pixels)
        return self.classifier(hidden), hidden[:, None]

    def leaves(self):
        found = {}
        modules = {f"convolutions.{i}": self.features[i][0] for i in range(self.layers)}
        modules |= {"dense": self.features[self.layers + 1], "classifier": self.classifier}
        for name, module in modules.items():
            found |= {f"{name}.kernel": module.weight, f"{name}.bias": module.bias}
        return found


def flax_order(name, x):
    """Returns a torch array in our order of axes."""
    return x.transpose(2, 3, 1, 0) if x.ndim == 4 else x.T if name.endswith("kernel") else x


def batch_of(kind, seed=0):
    rng = np.random.default_rng(seed)
    if kind == "cnn":
        return {"pixel_values": rng.normal(size=(3, 2, 13, 13)).astype(np.float32)}
    return {"input_ids": rng.integers(0, 50, (3, 7)).astype(np.int32)}


@pytest.mark.parametrize(
    ("kind", "layers"),
    [("rnn", 2), ("rnn", 1), ("lstm", 2), ("lstm", 3), ("cnn", (32, 64, 128)), ("cnn", (3, 5))],
)
@pytest.mark.sample("rnn-1", "lstm-2", "cnn-layers5")
def test_outputs_and_gradients_are_those_of_torch(kind, layers):
    reference = randomised(Images(layers) if kind == "cnn" else NextWord(kind, layers))
    config = CNN if layers == (32, 64, 128) else CNN | {"channels": layers}  # the default
    config = config if kind == "cnn" else LSTM | {"model_type": kind, "num_layers": layers}
    model = fp.random_model(config, head=HEADS[kind])
    params = {
        name: jnp.asarray(flax_order(name, p.detach().numpy()))
        for name, p in reference.leaves().items()
    }
    assert {name: x.shape for name, x in params.items()} == {
        name: x.shape for name, x in model.trainable.items()
    }
    batch = batch_of(kind)
    logits, hidden = reference(*map(torch.tensor, batch.values()))
    weights = np.random.default_rng(1).normal(size=logits.shape).astype(np.float32)
    (logits * torch.tensor(weights)).sum().backward()

    @jax.jit
    @functools.partial(jax.grad, has_aux=True)
    def gradient(params):
        outputs = model.apply({}, params, batch, None, False)
        return (outputs.logits * weights).sum(), outputs

    got, outputs = gradient(params)
    for found, x in zip((outputs.logits, outputs.hidden), (logits, hidden), strict=True):
        expected = x.detach().numpy()
        assert 0.2 < np.abs(expected).max() < 10
        assert_close(found, expected, **EXACT)
    for name, p in reference.leaves().items():
        expected = flax_order(name, p.grad.numpy())
        assert_small(np.linalg.norm(got[name] - expected), 1e-4 * np.linalg.norm(expected), name)


def test_dropout_is_between_the_layers():
    model = fp.random_model(LSTM | {"dropout": 0.5}, head=fp.heads.causal_lm(), dtype="bfloat16")
    batch = batch_of("lstm")

    def hidden(model, train):
        return np.asarray(model.apply({}, model.trainable, batch, jax.random.key(0), train).hidden)

    assert np.abs(hidden(model, True) - hidden(model, False)).max() > 1e-2
    assert (hidden(model, True) != 0).all()  # none on the last layer's
    without = fp.random_model(LSTM | {"dropout": 0.5}, head=fp.heads.causal_lm(), dropout=0.0)
    assert_close(hidden(without, True), hidden(model, False), rtol=0, atol=0.05)
    assert hidden(model, False).dtype == jnp.bfloat16


@pytest.mark.parametrize("config", [LSTM | {"model_type": "rnn"}, LSTM, CNN], ids=str)
def test_everything_is_trained_and_survives_a_round_trip(config, tmp_path):
    model = fp.random_model(config, head=HEADS[config["model_type"]], seed=3)
    assert not model.frozen
    assert set(model.kinds.values()) == {"head"}
    save_checkpoint(model.trainable, model.config, tmp_path, model.labels)
    again = fp.load_model(tmp_path)
    assert again.labels == model.labels
    assert again.tokenizer is None
    assert again.trainable.keys() == model.trainable.keys()
    for name, x in model.trainable.items():
        np.testing.assert_array_equal(again.trainable[name], x)


def test_names_in_another_order_move_the_classes_alone(tmp_path):
    """Not the channels, of which there are as many here, though all layers are the head."""
    head = fp.heads.classification(["a", "b", "c"])
    stored = fp.random_model(CNN | {"channels": [2, 3]}, head=head)
    save_checkpoint(stored.trainable, stored.config, tmp_path, stored.labels)
    model = fp.load_model(tmp_path, head=fp.heads.classification(["b", "a", "c"]))
    for name, x in stored.trainable.items():
        own = x[..., np.array([1, 0, 2])] if name.startswith("classifier") else x
        np.testing.assert_array_equal(model.trainable[name], own, name)


def test_random_values_have_the_scale_of_their_layer():
    model = fp.random_model(
        CNN | {"image_size": 16, "hidden_size": 300}, head=fp.heads.classification(3)
    )
    inputs = {"convolutions.1": 25 * 32, "convolutions.2": 25 * 64, "dense": 4 * 128}
    for name, n in inputs.items():
        kernel = model.trainable[f"{name}.kernel"]
        assert kernel.std() == roughly(1 / math.sqrt(n), rel=0.05)
        assert not model.trainable[f"{name}.bias"].any()
    words = fp.random_model(LSTM, head=fp.heads.causal_lm()).trainable
    assert words["embedding.embedding"].std() == roughly(1, rel=0.1)
    given = fp.random_model(LSTM | {"initializer_range": 0.02}, head=fp.heads.causal_lm()).trainable
    assert given["embedding.embedding"].std() == roughly(0.02, rel=0.1)


@pytest.mark.parametrize(
    ("config", "head", "named"),
    [
        (CNN | {"image_size": 7}, fp.heads.classification(3), ["image_size = 7", "at least 8"]),
        (
            CNN | {"channels": []},
            fp.heads.classification(3),
            ["channels = []", "a list of positive"],
        ),
        (
            CNN | {"channels": [8, 0]},
            fp.heads.classification(3),
            ["channels = [8, 0]", "a list of positive"],
        ),
        (CNN | {"channels": 8}, fp.heads.classification(3), ["channels = 8", "list"]),
        (
            CNN | {"channels": [8] * 4},
            fp.heads.classification(3),
            ["image_size = 13", "at least 16"],
        ),
        (CNN | {"chanels": [8]}, fp.heads.classification(3), ["chanels = [8]", "mean 'channels'"]),
        (LSTM | {"hidden": 8}, fp.heads.causal_lm(), ["hidden = 8", "'hidden_size'"]),
        (CNN | {"image_size": [8, 8]}, fp.heads.classification(3), ["image_size = [8, 8]", "int"]),
        (CNN, fp.heads.causal_lm(), ["no causal_lm head for cnn", "classification"]),
        (LSTM, fp.heads.classification(3), ["no classification head for lstm", "causal_lm"]),
        (LSTM | {"num_layers": 0}, fp.heads.causal_lm(), ["num_layers = 0"]),
    ],
)
def test_refusals(config, head, named):
    with pytest.raises(fp.InputError) as caught:
        abstract_module(config, head)
    assert all(part in str(caught.value) for part in named), caught.value


@pytest.mark.parametrize("shape", [(3, 3, 13, 13), (3, 2, 13, 14), (2, 13, 13)])
def test_images_that_do_not_fit(shape):
    model = fp.random_model(CNN, head=fp.heads.classification(3))
    with pytest.raises(fp.InputError, match=r"this model needs \[batch, 2, 13, 13\]"):
        model.apply({}, model.trainable, {"pixel_values": np.zeros(shape)}, None, False)
