"""From stored pixels to a model's input, on the device and batch by batch."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from fedjax_peft.support.errors import InputError

HALF = (0.5,)
"""Mean and deviation that scale images to the range from -1 to 1, as for ImageNet-21k."""


def prepare(
    pixels: Array,
    *,
    channels: int,
    size: tuple[int, int],
    mean: Sequence[float] = HALF,
    std: Sequence[float] = HALF,
) -> Array:
    """Returns stored images as a model's input; float images are returned unchanged.

    Images from 0 to 255 are scaled to the range from 0 to 1, centred and divided, and resized,
    bilinearly, with smoothing where they shrink; grey images are repeated in each channel. Hugging
    Face's ``ViTImageProcessor`` does the same, but resizes first and rounds to whole numbers, so
    the results differ by up to 1 of 255.

    Args:
      pixels: uint8 ``[batch, 1 or channels, height, width]``, or floats of any shape.
      mean: what is taken from all channels, or one number for each.
      std: what they are divided by, likewise.

    Returns:
      float32 ``[batch, channels, height, width]``, or the floats.
    """
    if jnp.issubdtype(pixels.dtype, jnp.floating):
        return pixels
    if pixels.dtype != jnp.uint8 or pixels.ndim != 4 or pixels.shape[1] not in (1, channels):
        raise InputError(
            f"pixel_values is {pixels.dtype} {list(pixels.shape)}; this model needs uint8 [batch,"
            f" {'1' if channels == 1 else f'1 or {channels}'}, height, width], or prepared images"
            " in floats."
        )
    middle, spread = (jnp.asarray(x, jnp.float32).reshape(1, -1, 1, 1) for x in (mean, std))
    x = (pixels.astype(jnp.float32) / 255 - middle) / spread
    x = jax.image.resize(x, (*x.shape[:2], *size), "linear")
    return jnp.broadcast_to(x, (x.shape[0], channels, *size))


def processed(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns ``image_mean``, ``image_std`` and ``image_crop`` of a ``preprocessor_config.json``.

    There are no mean and deviation where the model prepares images so anyway: (x / 255 - 0.5) /
    0.5. A processor that cuts out the middle of an image gives the height and width of the cut.
    """
    cut = fields.get("crop_size") if fields.get("do_center_crop") else None
    sides = [cut.get("height"), cut.get("width")] if isinstance(cut, Mapping) else [cut, cut]
    crop = {"image_crop": sides} if cut else {}
    if fields.get("do_normalize") is False:
        return {"image_mean": [0.0], "image_std": [1.0]} | crop
    given = {name: fields.get(name) for name in ("image_mean", "image_std")}
    found = {name: x if isinstance(x, list) else [x] for name, x in given.items() if x is not None}
    return crop | {name: x for name, x in found.items() if any(number != 0.5 for number in x)}


def processor(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the ``preprocessor_config.json`` with which transformers prepares images like this.

    Args:
      config: of a ViT or DINOv2, ``config.json``'s fields.
    """
    size = config.get("image_crop") or config.get("image_size", 224)
    channels = config.get("num_channels", 3)
    height, width = (size, size) if isinstance(size, int) else size
    scales = {name: config.get(name) or HALF for name in ("image_mean", "image_std")}
    return {
        "image_processor_type": "ViTImageProcessor",
        "size": {"height": height, "width": width},
        "resample": 2,  # bilinear
        **{name: [*x] * (channels if len(x) == 1 else 1) for name, x in scales.items()},
    }
