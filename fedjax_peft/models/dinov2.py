"""DINOv2 (Oquab et al. 2024, arXiv:2304.07193): ViT whose sublayers are scaled, channel by channel.

Embeddings and attention are ViT's (``vit.py``). A classifier reads the class token beside the mean
of the patches, as in Hugging Face's model, whose module names these are. Checkpoints have older
names, which transformers still writes; they are renamed when loading. The SwiGLU layers of the
giant model and stochastic depth are not implemented.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import Array

from fedjax_peft.contracts import Batch
from fedjax_peft.models import layers
from fedjax_peft.models.blocks import Blocks
from fedjax_peft.models.family import Family, class_kinds
from fedjax_peft.models.heads import Head, SequenceClassifier
from fedjax_peft.models.images import HALF, prepare
from fedjax_peft.models.splits import splits_of
from fedjax_peft.models.vit import Attention, Embeddings, Encoded, Mlp, Pair, PatchConfig, pair
from fedjax_peft.support.errors import InputError


@dataclasses.dataclass(frozen=True)
class Dinov2Config(PatchConfig):
    """The fields of ``config.json`` that shape the model, under their Hugging Face names."""

    layer_norm_eps: float = 1e-6
    patch_size: int | list = 14
    mlp_ratio: int = 4
    """Width of the feed-forward layers over that of the model."""
    image_crop: list | None = dataclasses.field(default=None, hash=False)
    """The processor's ``crop_size``, to which uint8 images are resized; None: ``image_size``."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.grid[0] != self.grid[1]:
            raise InputError(
                f"image_size = {self.image_size} of a dinov2 has {self.grid[0]} x {self.grid[1]}"
                " patches; its learned positions must be a square."
            )

    @property
    def given(self) -> Pair:
        """The size that uint8 images are resized to."""
        return self.image if self.image_crop is None else pair("image_crop", self.image_crop)


class LayerScale(nnx.Module):
    """A learned factor for each channel of a sublayer's output (Touvron et al. 2021)."""

    def __init__(self, width: int):
        self.lambda1 = nnx.Param(jnp.ones((width,)))

    def __call__(self, x: Array) -> Array:
        return x * self.lambda1[...].astype(x.dtype)[None, None]


class Layer(nnx.Module):
    def __init__(self, c: Dinov2Config, dtype: Any):
        n = c.hidden_size
        self.norm1 = layers.layer_norm(n, c.layer_norm_eps, dtype)
        self.attention = Attention(c, dtype)
        self.layer_scale1 = LayerScale(n)
        self.attention_residual = layers.Residual("attention", n)
        self.norm2 = layers.layer_norm(n, c.layer_norm_eps, dtype)
        self.mlp = Mlp(n, n * c.mlp_ratio, c.hidden_act, dtype)
        self.layer_scale2 = LayerScale(n)
        self.output_residual = layers.Residual("feed_forward", n)

    def __call__(self, x: Array) -> Array:
        x = self.attention_residual(self.layer_scale1(self.attention(self.norm1(x), None)), x)
        return self.output_residual(self.layer_scale2(self.mlp(self.norm2(x))), x)


class Encoder(nnx.Module):
    def __init__(self, c: Dinov2Config, dtype: Any):
        self.layer = Blocks([Layer(c, dtype) for _ in range(c.num_hidden_layers)])


class Dinov2Model(nnx.Module):
    """Embeddings, layers and the final layer norm."""

    def __init__(self, c: Dinov2Config, dtype: Any):
        self.channels, self.size = c.num_channels, c.given
        self.mean, self.std = tuple(c.image_mean or HALF), tuple(c.image_std or HALF)
        self.embeddings = Embeddings(c, dtype)
        self.encoder = Encoder(c, dtype)
        self.layernorm = layers.layer_norm(c.hidden_size, c.layer_norm_eps, dtype)

    def __call__(self, batch: Batch) -> Encoded:
        """Returns the hidden states; ``first`` is the class token beside the patches' mean.

        uint8 images are resized to one size; float images may have others.
        """
        pixels = jnp.asarray(batch["pixel_values"])
        scale = {"mean": self.mean, "std": self.std}
        pixels = prepare(pixels, channels=self.channels, size=self.size, **scale)
        states = self.encoder.layer.states(self.embeddings(pixels))
        hidden = self.layernorm(states[-1])
        read = jnp.concatenate([hidden[:, 0], jnp.mean(hidden[:, 1:], axis=1)], axis=-1)
        return Encoded(tuple(states), hidden, read)


class Dinov2ForImageClassification(SequenceClassifier):
    """A classifier on the class token beside the mean of the patches."""

    def __init__(self, c: Dinov2Config, head: Head, dtype: Any):
        width = 2 * c.hidden_size
        super().__init__("dinov2", Dinov2Model(c, dtype), head, width, c.hidden_dropout_prob)
        self.classifier = layers.linear(width, head.classes, jnp.float32)


FAMILY = Family(
    name="Dinov2",
    config=Dinov2Config,
    kinds=class_kinds(Dinov2ForImageClassification, ("classifier",), "ForImageClassification"),
    weights=(
        (r"(.+\.(?:norm[12]|layernorm))\.weight", r"\1.scale", False),
        (r"(.+)\.weight", r"\1.kernel", True),
    ),
    renamed=(
        # A bare encoder's checkpoint lacks the prefix.
        (r"^(embeddings|encoder|layernorm)\.", r"dinov2.\1."),
        # The names in checkpoints -> those of the modules.
        (r"\.attention\.attention\.(q|k|v)(uery|ey|alue)\.", r".attention.\1_proj."),
        (r"\.attention\.output\.dense\.", ".attention.o_proj."),
    ),
    ignored=(r"dinov2\.embeddings\.mask_token",),
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
    refused={"head_dim": None, "use_swiglu_ffn": False, "drop_path_rate": 0.0},
    # transformers 5 has new names for its modules and writes the old ones, which all versions read.
    saved=(
        (r"\.attention\.q_proj\.", ".attention.attention.query."),
        (r"\.attention\.k_proj\.", ".attention.attention.key."),
        (r"\.attention\.v_proj\.", ".attention.attention.value."),
        (r"\.attention\.o_proj\.", ".attention.output.dense."),
    ),
    unused=lambda c: 4 * c.hidden_size,  # the mask token
)
