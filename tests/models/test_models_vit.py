"""ViT equals Hugging Face for images of any size, and LoRA training equals peft.

Parity of logits, hidden states and gradients at the config's own size: ``test_models_parity.py``.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from closeness import assert_close
from flax import nnx
from safetensors.torch import load_file, save_file
from torch_reference import padded_batch, randomised, saved, tensors, tiny_model, torch_outputs
from transformers import AutoModelForImageClassification, ViTModel

from fedjax_peft.models.checkpoint import save_checkpoint
from fedjax_peft.models.heads import classification, two_classifiers
from fedjax_peft.models.hub import load_model
from fedjax_peft.models.layers import PrefixSlot, Residual
from fedjax_peft.models.registry import abstract_module, random_model
from fedjax_peft.models.vit import cubic_resize
from fedjax_peft.support.errors import InputError

pytestmark = pytest.mark.slow

EXACT = {"rtol": 0, "atol": 1e-5}
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


def ours(model, batch, *, key=None, train=False):
    apply = jax.jit(model.apply, static_argnums=4)
    return apply(model.frozen, model.trainable, batch, key, train)


def images(height, width, channels=3, seed=0):
    x = np.random.default_rng(seed).normal(size=(3, channels, height, width))
    return {"pixel_values": x.astype(np.float32)}


def assert_equal(model, reference, batch, **options):
    outputs = ours(model, batch)
    with torch.no_grad():
        expected = reference(**tensors(batch), **options).logits.numpy()
        hidden = reference.vit(**tensors(batch), **options).last_hidden_state.numpy()
    assert np.abs(expected).max() > 0.5
    assert_close(outputs.logits, expected, **EXACT)
    assert_close(outputs.hidden, hidden, **EXACT)


# ----------------------------------------------------------------------------------------- parity


@pytest.mark.parametrize(
    "config",
    [
        {"qkv_bias": False, "layer_norm_eps": 1e-3},
        {"hidden_act": "gelu_new", "num_hidden_layers": 1, "num_attention_heads": 2},
        {"hidden_act": "relu", "num_channels": 5},
        {"image_size": [8, 24], "patch_size": [2, 6]},
        {"image_size": 15, "patch_size": 5},
    ],
    ids=["no_qkv_bias", "gelu_new", "channels", "rectangular", "odd"],
)
def test_configs(config, tmp_path):
    reference = tiny_model("vit", **config)
    model = load_model(saved(reference, tmp_path))
    assert_equal(model, reference, padded_batch(reference.config))


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


def test_bfloat16_compute_is_close_to_float32(tmp_path):
    reference = tiny_model("vit")
    model = load_model(saved(reference, tmp_path), dtype="bfloat16")
    batch = padded_batch(reference.config)
    outputs = ours(model.replace(frozen=model.compute_frozen()), batch)
    assert outputs.hidden.dtype == jnp.bfloat16
    assert outputs.logits.dtype == jnp.float32
    expected, _ = torch_outputs(reference, batch)
    assert_close(outputs.logits, expected, rtol=0, atol=0.05)


def test_half_precision_checkpoint_is_read_as_float32(tmp_path):
    reference = tiny_model("vit").to(torch.bfloat16)
    model = load_model(saved(reference, tmp_path))
    assert {x.dtype for x in {**model.frozen, **model.trainable}.values()} == {jnp.dtype("float32")}
    assert_equal(model, reference.float(), padded_batch(reference.config))


def test_the_separately_computed_class_token_equals_the_hidden_state(model):
    """With dropout too: its masks are the first rows of the others'."""
    outputs = ours(model, images(16, 16), key=jax.random.key(1), train=True)
    dense = model.module().classifier
    assert_close(outputs.logits, dense(outputs.hidden[:, 0]), rtol=0, atol=1e-6)
    assert not np.allclose(outputs.logits, ours(model, images(16, 16)).logits, atol=1e-4)


# ------------------------------------------------------------------------------------ checkpoints


def test_both_forms_of_checkpoint_names(tmp_path):
    """Transformers writes the older names, and reads its present module names too."""
    reference = tiny_model("vit")
    batch = padded_batch(reference.config)
    file = saved(reference, tmp_path) / "model.safetensors"
    written = load_file(file)
    assert "vit.encoder.layer.0.attention.attention.query.weight" in written
    old = load_model(tmp_path)
    modules = {name: x.clone() for name, x in reference.state_dict().items()}
    assert "vit.layers.0.attention.q_proj.weight" in modules
    save_file(modules, file)
    new = load_model(tmp_path)
    assert_equal(new, reference, batch)
    np.testing.assert_array_equal(ours(old, batch).logits, ours(new, batch).logits)


@pytest.mark.parametrize("form", ["written", "modules"])
def test_bare_encoder_gets_a_fresh_head(form, tmp_path):
    encoder = randomised(ViTModel(tiny_model("vit").config).eval())
    file = saved(encoder, tmp_path) / "model.safetensors"
    if form == "modules":
        save_file({name: x.clone() for name, x in encoder.state_dict().items()}, file)
    assert "pooler.dense.weight" in load_file(file)
    model = load_model(tmp_path, head=classification(3))
    batch = padded_batch(encoder.config)
    with torch.no_grad():
        expected = encoder(**tensors(batch)).last_hidden_state.numpy()
    assert_close(ours(model, batch).hidden, expected, **EXACT)
    assert model.kinds == {"classifier.bias": "head", "classifier.kernel": "head"}
    assert model.tokenizer is None


def test_saved_checkpoint_is_read_by_transformers(tmp_path):
    model = load_model(saved(tiny_model("vit"), tmp_path / "in"))
    labels = ("cat", "dog", "eel")
    save_checkpoint({**model.frozen, **model.trainable}, model.config, tmp_path / "out", labels)
    reference = AutoModelForImageClassification.from_pretrained(tmp_path / "out").eval()
    assert reference.config.id2label == dict(enumerate(labels))
    assert_equal(model, reference, padded_batch(reference.config))
    assert load_model(tmp_path / "out").labels == labels
    # Under the names that transformers itself writes, for older versions.
    names = [load_file(tmp_path / d / "model.safetensors").keys() for d in ("in", "out")]
    assert names[0] == names[1]


def test_two_classifiers(tmp_path):
    model = load_model(saved(tiny_model("vit"), tmp_path), head=two_classifiers(3))
    outputs = ours(model, images(16, 16))
    assert outputs.logits.shape == outputs.second.shape == (3, 3)
    assert not np.allclose(outputs.logits, outputs.second)
    assert {name.split(".")[0] for name in model.kinds} == {"classifier", "second_classifier"}


# --------------------------------------------------------------------------------- config, sizes


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"head_dim": 16}, ["head_dim = 16"]),
        ({"num_attention_heads": 5}, ["hidden_size = 32", "num_attention_heads = 5"]),
        ({"image_size": [16, 16, 16]}, ["image_size = [16, 16, 16]", "height and width"]),
        ({"patch_size": [4, 0]}, ["patch_size = [4, 0]"]),
        ({"patch_size": "4"}, ["patch_size = '4'", "int or list"]),
        ({"patch_size": 0}, ["patch_size = 0"]),
        ({"patch_size": 32}, ["image_size = 16", "patch_size = 32"]),
    ],
)
def test_config_that_is_not_implemented(changes, named):
    with pytest.raises(InputError) as caught:
        abstract_module(TINY | changes, classification(3))
    assert all(part in str(caught.value) for part in named), caught.value


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
        ours(model, {"pixel_values": np.zeros(shape, np.float32)})
    assert all(part in str(caught.value) for part in named), caught.value


# ------------------------------------------------------------------------------------------- PEFT


def test_every_sublayer_has_its_slots():
    modules = [m for _, m in nnx.iter_modules(abstract_module(TINY, classification(3)))]
    places = [m.place for m in modules if isinstance(m, Residual)]
    assert sorted(places) == ["attention", "feed_forward"]
    assert sum(isinstance(m, PrefixSlot) for m in modules) == 1
