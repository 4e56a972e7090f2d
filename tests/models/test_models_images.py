"""Stored images become the model input that Hugging Face's processor makes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from closeness import assert_close
from internals import export
from PIL import Image
from refusals import refused
from torch_reference import VIT_SHAPE, saved, tiny_model
from transformers import AutoImageProcessor, ViTImageProcessorPil

import fedjax_peft as fp
from fedjax_peft.models.images import prepare

pytestmark = pytest.mark.slow

VIT = {"model_type": "vit", **VIT_SHAPE, "image_size": [16, 24], "num_hidden_layers": 1}
CNN = {"model_type": "cnn", "image_size": 16, "hidden_size": 20}
SIZES = [(224, 224), (56, 20), (13, 9), (32, 28)]
"""Of images of 32x28: larger, one side smaller, smaller, and the same."""


def stored(channels=3, seed=0):
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (3, channels, 32, 28), dtype=np.uint8)


@functools.cache
def program(apply):
    return jax.jit(apply, static_argnums=4)


def logits(model, pixels):
    leaves = (model.frozen, model.trainable)
    return np.asarray(program(model.apply)(*leaves, {"pixel_values": pixels}, None, False).logits)


@pytest.mark.parametrize("size", SIZES)
def test_it_is_torchs_interpolation_and_hugging_faces_processor(size):
    """The processor rounds to whole numbers after each direction: up to 1 of 255 in all."""
    pixels = stored()
    got = prepare(jnp.asarray(pixels), channels=3, size=size)
    assert got.dtype == jnp.float32
    expected = torch.nn.functional.interpolate(
        torch.tensor(pixels / np.float32(255)), size=size, mode="bilinear", antialias=True
    )
    assert_close(got, 2 * expected.numpy() - 1, rtol=0, atol=1e-5)
    processor = ViTImageProcessorPil(size={"height": size[0], "width": size[1]})
    images = [Image.fromarray(x.transpose(1, 2, 0)) for x in pixels]
    expected = processor(images, return_tensors="np")["pixel_values"]
    assert np.abs(got - expected).max() < 2 / 255 + 1e-5


def test_grey_images_are_the_same_in_all_channels():
    grey = stored(channels=1)
    got = prepare(jnp.asarray(grey), channels=3, size=(40, 40))
    colour = prepare(jnp.asarray(np.repeat(grey, 3, axis=1)), channels=3, size=(40, 40))
    assert_close(got, colour, rtol=0, atol=1e-6)
    assert prepare(jnp.asarray(grey), channels=1, size=(40, 40)).shape == (3, 1, 40, 40)


@pytest.mark.parametrize(("config", "channels"), [(VIT, 1), (CNN, 3)], ids=["vit", "cnn"])
def test_models_take_stored_images_of_any_size(config, channels):
    model = fp.random_model(config, head=fp.heads.classification(3))
    pixels = stored(channels)
    size = (16, 24) if config is VIT else (16, 16)
    prepared = prepare(jnp.asarray(pixels), channels=3, size=size)
    got = logits(model, pixels)
    assert got.shape == (3, 3)
    assert_close(got, logits(model, prepared), rtol=0, atol=1e-6)
    assert np.abs(got - logits(model, stored(channels, seed=1))).max() > 1e-3


IMAGENET = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}


@pytest.mark.parametrize("fields", [IMAGENET, {"do_normalize": False}, {"image_std": 0.25}])
def test_images_are_scaled_as_the_checkpoints_processor_does(fields, tmp_path):
    reference = tiny_model("vit", image_size=16, num_hidden_layers=1)
    size = {"height": 16, "width": 16}
    processor = ViTImageProcessorPil(size=size, do_resize=False, **fields)
    processor.save_pretrained(tmp_path)
    model = fp.load_model(saved(reference, tmp_path))
    pixels = stored()[:, :, :16, :16]
    images = [Image.fromarray(x.transpose(1, 2, 0)) for x in pixels]
    with torch.no_grad():
        expected = reference(**processor(images, return_tensors="pt")).logits.numpy()
    assert_close(logits(model, pixels), expected, rtol=0, atol=1e-4)
    export(model, model.trainable, tmp_path / "merged", format="merged")
    exported = AutoImageProcessor.from_pretrained(tmp_path / "merged", backend="pil")
    prepared = [each(images, return_tensors="np")["pixel_values"] for each in (exported, processor)]
    assert_close(*prepared, rtol=0, atol=1e-6)
    (tmp_path / "preprocessor_config.json").write_text('{"image_std": [1.0, 0.0, 1.0]}')
    refused(r"image_std = \[1.0, 0.0, 1.0\]", fp.load_model, tmp_path)


def test_floats_stay_as_they_are():
    pixels = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 8, 8)), jnp.bfloat16)
    assert prepare(pixels, channels=3, size=(16, 24)) is pixels


@pytest.mark.parametrize(
    ("shape", "dtype", "channels", "named"),
    [
        ((2, 2, 8, 8), np.uint8, 3, ["uint8 [2, 2, 8, 8]", "[batch, 1 or 3, height, width]"]),
        ((2, 8, 8), np.uint8, 3, ["uint8 [2, 8, 8]"]),
        ((2, 3, 8, 8), np.int32, 3, ["int32 [2, 3, 8, 8]", "floats"]),
        ((2, 3, 8, 8), np.uint8, 1, ["uint8 [2, 3, 8, 8]", "[batch, 1, height, width]"]),
    ],
)
def test_images_that_do_not_fit(shape, dtype, channels, named):
    with pytest.raises(fp.InputError) as caught:
        prepare(jnp.zeros(shape, dtype), channels=channels, size=(8, 8))
    assert all(part in str(caught.value) for part in named), caught.value
