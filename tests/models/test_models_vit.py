"""ViT equals Hugging Face for images of any size.

Parity of logits, hidden states and gradients at the config's own size: ``test_models_parity.py``.
"""

import jax
import numpy as np
import pytest
import torch
from closeness import EXACT, assert_close
from parity import forward
from torch_reference import VIT_SHAPE, saved, tensors, tiny_model

import fedjax_peft as fp
from fedjax_peft.models.vit import cubic_resize

pytestmark = pytest.mark.slow


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


def test_images_of_other_sizes_interpolate_the_positions(tmp_path):
    """To a larger grid, a smaller one that is not square, and as many patches in another shape."""
    reference = tiny_model("vit", image_size=15, patch_size=3, num_hidden_layers=1)
    model = fp.load_model(saved(reference, tmp_path))
    for size in [(27, 27), (6, 33), (75, 3)]:
        assert_equal(model, reference, images(*size), interpolate_pos_encoding=True)


@pytest.mark.parametrize(("n_in", "n_out"), [(1, 3), (2, 5), (14, 24), (14, 7), (24, 14), (7, 1)])
def test_cubic_resize_is_that_of_torch(n_in, n_out):
    matrix = cubic_resize(n_in, n_out)
    eye = torch.eye(n_in)[None, :, :, None].expand(1, n_in, n_in, 2)
    expected = torch.nn.functional.interpolate(
        eye, size=(n_out, 2), mode="bicubic", align_corners=False
    )
    # Torch has the coordinates, up to n_in, in float32.
    assert_close(matrix.T, expected[0, :, :, 0].numpy(), rtol=0, atol=5e-6)


@pytest.mark.parametrize(
    ("shape", "named"),
    [
        ((2, 3, 18, 16), ["18x16", "4x4"]),
        ((2, 3, 16, 2), ["16x2", "4x4"]),
        ((2, 1, 16, 16), ["[2, 1, 16, 16]", "[batch, 3, height, width]"]),
        ((3, 16, 16), ["[3, 16, 16]"]),
    ],
)
def test_images_that_do_not_fit(shape, named):
    model = fp.random_model({"model_type": "vit", **VIT_SHAPE}, head=fp.heads.classification(3))
    with pytest.raises(fp.InputError) as caught:
        jax.eval_shape(lambda: forward(model, {"pixel_values": np.zeros(shape, np.float32)}))
    assert all(part in str(caught.value) for part in named), caught.value
