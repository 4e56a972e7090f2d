"""ViT equals Hugging Face for images of any size.

Parity of logits, hidden states and gradients at the config's own size: ``test_models_parity.py``.
"""

import numpy as np
import pytest
import torch
from closeness import assert_close
from flax import nnx
from parity import EXACT, forward
from torch_reference import saved, tensors, tiny_model

from fedjax_peft.models.heads import classification, two_classifiers
from fedjax_peft.models.hub import load_model
from fedjax_peft.models.layers import PrefixSlot, Residual
from fedjax_peft.models.registry import abstract_module, random_model
from fedjax_peft.models.vit import cubic_resize
from fedjax_peft.support.errors import InputError

pytestmark = pytest.mark.slow
TINY = {
    "model_type": "vit",
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "image_size": 16,
    "patch_size": 4,
}


@pytest.fixture(scope="module")
def model():
    """A random model with one layer."""
    return random_model(TINY, head=classification(3), dropout=0.3)


def images(height, width, channels=3, seed=0):
    x = np.random.default_rng(seed).normal(size=(3, channels, height, width))
    return {"pixel_values": x.astype(np.float32)}


def assert_equal(model, reference, batch, **options):
    outputs = forward(model, batch)
    with torch.no_grad():
        expected = reference(**tensors(batch), **options).logits.numpy()
        hidden = reference.vit(**tensors(batch), **options).last_hidden_state.numpy()
    assert np.abs(expected).max() > 0.5
    assert_close(outputs.logits, expected, **EXACT)
    assert_close(outputs.hidden, hidden, **EXACT)


# ----------------------------------------------------------------------------------------- parity


def test_images_of_other_sizes_interpolate_the_positions(tmp_path):
    reference = tiny_model("vit")
    model = load_model(saved(reference, tmp_path))
    # Larger, smaller, not square, and as many patches in another shape.
    for size in [(28, 28), (8, 8), (36, 12), (8, 32)]:
        assert_equal(model, reference, images(*size), interpolate_pos_encoding=True)


def test_odd_grid_interpolates_the_positions(tmp_path):
    reference = tiny_model("vit", image_size=15, patch_size=3)
    model = load_model(saved(reference, tmp_path))
    assert_equal(model, reference, images(6, 33), interpolate_pos_encoding=True)


@pytest.mark.parametrize(("n_in", "n_out"), [(1, 3), (2, 5), (14, 24), (14, 7), (24, 14), (7, 1)])
def test_cubic_resize_is_that_of_torch(n_in, n_out):
    matrix = cubic_resize(n_in, n_out)
    eye = torch.eye(n_in)[None, :, :, None].expand(1, n_in, n_in, 2)
    expected = torch.nn.functional.interpolate(
        eye, size=(n_out, 2), mode="bicubic", align_corners=False
    )
    # Torch has the coordinates, up to n_in, in float32.
    assert_close(matrix.T, expected[0, :, :, 0].numpy(), rtol=0, atol=5e-6)


def test_two_classifiers(tmp_path):
    model = load_model(saved(tiny_model("vit"), tmp_path), head=two_classifiers(3))
    outputs = forward(model, images(16, 16))
    assert outputs.logits.shape == outputs.second.shape == (3, 3)
    assert not np.allclose(outputs.logits, outputs.second)
    assert {name.split(".")[0] for name in model.kinds} == {"classifier", "second_classifier"}


# --------------------------------------------------------------------------------- config, sizes


@pytest.mark.parametrize(
    ("shape", "named"),
    [
        ((2, 3, 18, 16), ["18x16", "4x4"]),
        ((2, 3, 16, 2), ["16x2", "4x4"]),
        ((2, 1, 16, 16), ["[2, 1, 16, 16]", "[batch, 3, height, width]"]),
        ((2, 16, 16, 3), ["[2, 16, 16, 3]"]),
        ((3, 16, 16), ["[3, 16, 16]"]),
    ],
)
def test_images_that_do_not_fit(model, shape, named):
    with pytest.raises(InputError) as caught:
        forward(model, {"pixel_values": np.zeros(shape, np.float32)})
    assert all(part in str(caught.value) for part in named), caught.value


# ------------------------------------------------------------------------------------------- PEFT


def test_every_sublayer_has_its_slots():
    modules = [m for _, m in nnx.iter_modules(abstract_module(TINY, classification(3)))]
    places = [m.place for m in modules if isinstance(m, Residual)]
    assert sorted(places) == ["attention", "feed_forward"]
    assert sum(isinstance(m, PrefixSlot) for m in modules) == 1
