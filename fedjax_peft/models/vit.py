"""ViT: the pre-layer-norm image encoder and its classifier.

Module names are those of Hugging Face's torch model in transformers 5.23. Checkpoints have older
names, which transformers still writes; they are renamed when loading.
"""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from fedjax_peft.contracts import Batch
from fedjax_peft.models import layers
from fedjax_peft.models.attention import EncoderAttention
from fedjax_peft.models.blocks import Blocks
from fedjax_peft.models.family import Family, check_heads, class_kinds
from fedjax_peft.models.heads import Head, SequenceClassifier
from fedjax_peft.models.images import HALF, prepare
from fedjax_peft.models.splits import splits_of
from fedjax_peft.support.errors import InputError

Pair = tuple[int, int]
"""(height, width) of an image or of a grid of patches."""


@dataclasses.dataclass(frozen=True)
class PatchConfig:
    """The fields that ViT and DINOv2 have in common, under their Hugging Face names."""

    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    hidden_act: str = "gelu"
    hidden_dropout_prob: float = 0.0
    attention_probs_dropout_prob: float = 0.0
    layer_norm_eps: float = 1e-12
    image_size: int | list = 224
    patch_size: int | list = 16
    num_channels: int = 3
    qkv_bias: bool = True
    initializer_range: float = 0.02
    image_mean: list | None = dataclasses.field(default=None, hash=False)
    """The processor's, see :func:`fedjax_peft.models.images.prepare`; None: 0.5."""
    image_std: list | None = dataclasses.field(default=None, hash=False)

    def __post_init__(self) -> None:
        check_heads(self, "hidden_size", "num_attention_heads")
        for name in ("image_mean", "image_std"):
            _check_channels(name, getattr(self, name), self.num_channels)
        if not all(self.grid):
            raise InputError(
                f"image_size = {self.image_size} is smaller than patch_size = {self.patch_size}."
            )

    @property
    def patch(self) -> Pair:
        """The size of a patch."""
        return pair("patch_size", self.patch_size)

    @property
    def image(self) -> Pair:
        """The size of an image."""
        return pair("image_size", self.image_size)

    @property
    def grid(self) -> Pair:
        """The numbers of patches of an image, by height and by width."""
        height, width = self.image
        return height // self.patch[0], width // self.patch[1]


@dataclasses.dataclass(frozen=True)
class ViTConfig(PatchConfig):
    """The fields of ``config.json`` that shape the model, under their Hugging Face names."""

    intermediate_size: int = 3072


def _check_channels(field: str, values: list | None, channels: int) -> None:
    """Raises InputError unless there are one number or ``channels``, above 0 for a deviation."""
    if values is None:
        return
    numbers = all(isinstance(x, int | float) and (x > 0 or field == "image_mean") for x in values)
    if len(values) not in (1, channels) or not numbers:
        raise InputError(
            f"The processor of the images has {field} = {values!r}; it must be one number, or one"
            f" for each of {channels} channels, and a deviation must be positive."
        )


def pair(field: str, value: int | list) -> Pair:
    """Returns the height and width that a field of a config gives."""
    sides = [value, value] if isinstance(value, int) else value
    if len(sides) != 2 or not all(isinstance(side, int) and side > 0 for side in sides):
        raise InputError(
            f"The model config has {field} = {value!r}; it must be a positive number, or two:"
            " height and width."
        )
    return sides[0], sides[1]


def cubic_resize(n_in: int, n_out: int) -> np.ndarray:
    """Returns ``[n_out, n_in]``, the matrix that resizes a line of ``n_in`` samples to ``n_out``.

    The method is cubic convolution (Keys 1981, Eq 4, with a = -0.75) at the centres of the new
    samples. The border is repeated, and there is no smoothing when the line shrinks. It equals
    torch's ``interpolate(mode="bicubic")``.
    """
    centre = (np.arange(n_out) + 0.5) * n_in / n_out - 0.5
    taps = np.floor(centre)[:, None] + np.arange(-1, 3)
    d, a = np.abs(centre[:, None] - taps), -0.75
    near = ((a + 2) * d - (a + 3)) * d**2 + 1
    far = ((d - 5) * d + 8) * d * a - 4 * a
    matrix = np.zeros((n_out, n_in))
    rows = np.arange(n_out)[:, None]
    np.add.at(matrix, (rows, np.clip(taps, 0, n_in - 1).astype(int)), np.where(d <= 1, near, far))
    return matrix.astype(np.float32)


class Patches(nnx.Module):
    """A convolution whose stride equals its kernel size, computed as one matrix product.

    The kernel is ``[height, width, channels, out]``, as in ``nnx.Conv``.
    """

    def __init__(self, c: PatchConfig, dtype: Any):
        self.dtype = dtype
        self.kernel = nnx.Param(jnp.zeros((*c.patch, c.num_channels, c.hidden_size)))
        self.bias = nnx.Param(jnp.zeros((c.hidden_size,)))

    def __call__(self, pixels: Array) -> Array:
        """Returns ``[batch, rows, columns, out]`` of ``[batch, channels, height, width]``."""
        high, wide, channels, _ = self.kernel.shape
        if pixels.ndim != 4 or pixels.shape[1] != channels:
            raise InputError(
                f"pixel_values is {list(pixels.shape)}; this model needs [batch, {channels},"
                " height, width]."
            )
        n, _, height, width = pixels.shape
        if height % high or width % wide:
            raise InputError(
                f"An image of {height}x{width} pixels cannot be cut into patches of {high}x{wide}:"
                " its sides must be multiples of the patch's."
            )
        split = pixels.reshape(n, channels, height // high, high, width // wide, wide)
        kernel, bias = self.kernel[...].astype(self.dtype), self.bias[...].astype(self.dtype)
        x = jnp.einsum("bcyhxw,hwcd->byxd", split.astype(self.dtype), kernel)
        return x + bias[None, None, None]


class PatchEmbeddings(nnx.Module):
    def __init__(self, c: PatchConfig, dtype: Any):
        self.projection = Patches(c, dtype)

    def __call__(self, pixels: Array) -> Array:
        return self.projection(pixels)


class Embeddings(nnx.Module):
    """The class token and the patches, with learned positions."""

    def __init__(self, c: PatchConfig, dtype: Any):
        self.grid = c.grid
        self.cls_token = nnx.Param(jnp.zeros((1, 1, c.hidden_size)))
        self.patch_embeddings = PatchEmbeddings(c, dtype)
        n = c.grid[0] * c.grid[1]
        self.position_embeddings = nnx.Param(jnp.zeros((1, 1 + n, c.hidden_size)))
        self.dropout = layers.Dropout(c.hidden_dropout_prob)

    def positions(self, grid: Pair) -> Array:
        """Returns the embeddings ``[1, 1 + patches, width]`` of a grid's positions.

        For a grid other than the config's they are interpolated (``interpolate_pos_encoding``).
        """
        table = self.position_embeddings[...]
        if grid == self.grid:
            return table
        rows, columns = (cubic_resize(*sizes) for sizes in zip(self.grid, grid, strict=True))
        learned = table[0, 1:].reshape(*self.grid, -1)
        resized = jnp.einsum("yi,xj,ijd->yxd", rows, columns, learned, precision="highest")
        return jnp.concatenate([table[:, :1], resized.reshape(1, -1, table.shape[-1])], axis=1)

    def __call__(self, pixels: Array) -> Array:
        patches = self.patch_embeddings(pixels)
        n, rows, columns, width = patches.shape
        token = self.cls_token[...].astype(patches.dtype)
        x = jnp.concatenate(
            [jnp.broadcast_to(token, (n, 1, width)), patches.reshape(n, -1, width)], axis=1
        )
        return self.dropout(x + self.positions((rows, columns)).astype(x.dtype))


class Attention(EncoderAttention):
    names = ("q_proj", "k_proj", "v_proj")

    def __init__(self, c: PatchConfig, dtype: Any):
        rate = c.attention_probs_dropout_prob
        super().__init__(c.hidden_size, c.num_attention_heads, rate, dtype, bias=c.qkv_bias)
        self.o_proj = layers.linear(c.hidden_size, c.hidden_size, dtype)

    def __call__(self, x: Array, queries: int | None) -> Array:
        return self.o_proj(self.attend(x, None, queries))


class Mlp(nnx.Module):
    def __init__(self, width: int, inner: int, act: str, dtype: Any):
        self.fc1 = layers.linear(width, inner, dtype)
        self.fc2 = layers.linear(inner, width, dtype)
        self.act = layers.activation(act)

    def __call__(self, x: Array) -> Array:
        return self.fc2(self.act(self.fc1(x)))


class Layer(nnx.Module):
    def __init__(self, c: ViTConfig, dtype: Any):
        self.layernorm_before = layers.layer_norm(c.hidden_size, c.layer_norm_eps, dtype)
        self.attention = Attention(c, dtype)
        self.attention_dropout = layers.Dropout(c.hidden_dropout_prob)
        self.attention_residual = layers.Residual("attention", c.hidden_size)
        self.layernorm_after = layers.layer_norm(c.hidden_size, c.layer_norm_eps, dtype)
        self.mlp = Mlp(c.hidden_size, c.intermediate_size, c.hidden_act, dtype)
        self.output_dropout = layers.Dropout(c.hidden_dropout_prob)
        self.output_residual = layers.Residual("feed_forward", c.hidden_size)

    def __call__(self, x: Array, queries: int | None = None) -> Array:
        h = self.attention(self.layernorm_before(x), queries)
        x = self.attention_residual(self.attention_dropout(h), x[:, :queries])
        h = self.mlp(self.layernorm_after(x))
        return self.output_residual(self.output_dropout(h), x)


class Encoded(NamedTuple):
    """The encoder's result: ``layers.Encoded`` with a layer norm after the last state."""

    states: tuple[Array, ...]
    """Hidden states ``[batch, 1 + patches, width]`` of the embeddings and of every layer, the last
    before the final layer norm, as Hugging Face's ``hidden_states``."""
    hidden: Array
    """The last of them after the final layer norm."""
    first: Array
    """The class token's ``hidden``, ``[batch, width]``."""
    last: Array | None = None
    """Always None, because ViT is not a causal model."""


class ViTModel(nnx.Module):
    """Embeddings, layers and the final layer norm."""

    def __init__(self, c: ViTConfig, dtype: Any):
        self.channels, self.size = c.num_channels, c.image
        self.mean, self.std = tuple(c.image_mean or HALF), tuple(c.image_std or HALF)
        self.embeddings = Embeddings(c, dtype)
        self.layers = Blocks([Layer(c, dtype) for _ in range(c.num_hidden_layers)])
        self.layernorm = layers.layer_norm(c.hidden_size, c.layer_norm_eps, dtype)

    def __call__(self, batch: Batch) -> Encoded:
        """Returns the hidden states.

        uint8 images are resized to the config's size; float images may have other sizes. The last
        layer of the class token is computed separately, as in :class:`bert.Encoder`.
        """
        pixels = jnp.asarray(batch["pixel_values"])
        scale = {"mean": self.mean, "std": self.std}
        pixels = prepare(pixels, channels=self.channels, size=self.size, **scale)
        states = self.layers.states_before_last(self.embeddings(pixels))
        first = self.layers.last(states[-1], 1)[:, 0]
        states.append(self.layers.last(states[-1]))
        return Encoded(tuple(states), self.layernorm(states[-1]), self.layernorm(first))


class ViTForImageClassification(SequenceClassifier):
    """A classifier on the class token."""

    def __init__(self, c: ViTConfig, head: Head, dtype: Any):
        super().__init__("vit", ViTModel(c, dtype), head, c.hidden_size, c.hidden_dropout_prob)
        self.classifier = layers.linear(c.hidden_size, head.classes, jnp.float32)


FAMILY = Family(
    name="ViT",
    config=ViTConfig,
    kinds=class_kinds(ViTForImageClassification, ("classifier",), "ForImageClassification"),
    weights=(
        (r"(.+\.layernorm(?:_before|_after)?)\.weight", r"\1.scale", False),
        (r"(.+)\.weight", r"\1.kernel", True),
    ),
    renamed=(
        # A bare encoder's checkpoint lacks the prefix.
        (r"^(embeddings|encoder|layers|layernorm|pooler)\.", r"vit.\1."),
        # The names in checkpoints -> those of the modules.
        (r"^vit\.encoder\.layer\.", "vit.layers."),
        (r"\.attention\.attention\.(q|k|v)(uery|ey|alue)\.", r".attention.\1_proj."),
        (r"\.attention\.output\.dense\.", ".attention.o_proj."),
        (r"\.intermediate\.dense\.", ".mlp.fc1."),
        (r"\.output\.dense\.", ".mlp.fc2."),
    ),
    # Masked image modelling has a mask token and a decoder.
    ignored=(r"vit\.pooler\..+", r"vit\.embeddings\.mask_token", r"decoder\..+"),
    splits=splits_of(
        (r".+\.attention\.[qkv]_proj", "outputs"),
        (r".+\.attention\.o_proj", "inputs"),
        (r".+\.mlp\.fc1", "outputs"),
        (r".+\.mlp\.fc2", "inputs"),
    ),
    targets={
        "lora": ("q_proj", "v_proj"),
        "ia3": ("k_proj", "v_proj", "fc2"),
        "ia3_feed_forward": ("fc2",),
        "opendelta": ("o_proj", "fc2"),
    },
    refused={"head_dim": None},
    # transformers 5 has new names for its modules and writes the old ones, which all versions read.
    saved=(
        (r"^vit\.layers\.", "vit.encoder.layer."),
        (r"\.attention\.q_proj\.", ".attention.attention.query."),
        (r"\.attention\.k_proj\.", ".attention.attention.key."),
        (r"\.attention\.v_proj\.", ".attention.attention.value."),
        (r"\.attention\.o_proj\.", ".attention.output.dense."),
        (r"\.mlp\.fc1\.", ".intermediate.dense."),
        (r"\.mlp\.fc2\.", ".output.dense."),
    ),
    unused=lambda c: 4 * (c.hidden_size + 1) * c.hidden_size,  # the pooler's kernel and bias
)
