"""Images as a column of pixels."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from fedjax_peft.data.dataset import Dataset
from fedjax_peft.data.encoders.base import (
    Encoder,
    StandIn,
    balanced_classes,
    needing,
    recognising,
)
from fedjax_peft.data.formats.images import decode
from fedjax_peft.data.table import Table, label_ids, label_names
from fedjax_peft.numerics.random import host_rng
from fedjax_peft.support.errors import InputError, nearest

_SIDE = 224
"""Pixels of an image's height and width where a data set has images of several sizes."""


def encode_images(
    table: Table,
    names: Sequence[str],
    tokenizer: Any = None,
    *,
    max_length: int | None = None,
    name: str,
) -> Dataset:
    """Returns the images as uint8. Models scale and resize them on the device.

    Images of one size stay as they are. Of several sizes, all become 224 x 224 pixels, the size of
    most vision transformers, by PIL's bilinear filter (as with ``ViTImageProcessor``); a note of
    the data set says so.

    The table has columns ``image``, in a form that :func:`fedjax_peft.data.formats.images.decode`
    reads, and ``label``. Other arguments are those of :class:`Encode`; ``tokenizer`` and
    ``max_length`` are not used.

    Returns:
      ``pixel_values`` uint8 ``[n, channels, height, width]``, with 1 channel if all images are grey
      and else 3, and ``labels`` int32 ``[n]``.

    Raises:
      InputError: an image (with its row) cannot be read, or a label is not in ``names``.
    """
    if "image" not in table.columns:
        raise InputError(f"{table.lacks('image')} {nearest('image', table.columns)}")
    labels = label_ids(table, names)
    images = _decoded(table)
    sizes = {image.shape[:2] for image in images}
    notes: tuple[str, ...] = ()
    if len(sizes) > 1:
        images = [_resized(image) for image in images]
        smallest, largest = (f"{h} x {w}" for h, w in (min(sizes), max(sizes)))
        notes = (
            f"The {len(images):,} images of {table.origin} have {len(sizes)} sizes, such as"
            f" {smallest} and {largest}, and are resized to {_SIDE} x {_SIDE} pixels.",
        )
    columns = {"pixel_values": _stacked(table, images), "labels": labels}
    return Dataset(columns, tuple(names), name, notes=notes)


def _resized(image: np.ndarray) -> np.ndarray:
    from PIL import Image

    size = (_SIDE, _SIDE)
    return np.asarray(Image.fromarray(image).resize(size, Image.Resampling.BILINEAR))


def _stacked(table: Table, images: list[np.ndarray]) -> np.ndarray:
    """Returns images with channels first; a grey one among others gets three equal channels."""
    if not images:
        raise InputError(f"{table.origin} has no images.")
    channels = max(1 if image.ndim == 2 else 3 for image in images)
    pixels = np.empty((len(images), channels, *images[0].shape[:2]), np.uint8)
    for place, image in zip(pixels, images, strict=True):
        place[:] = image if image.ndim == 2 else image.transpose(2, 0, 1)
    return pixels


def _decoded(table: Table) -> list[np.ndarray]:
    return [
        decode(value, f"The image in row {row} of {table.origin}")
        for row, value in table.numbered(table.columns["image"])
    ]


def _prepare(table: Table) -> Table:
    if "image" not in table.columns:
        return table
    return replace(table, columns={**table.columns, "image": _decoded(table)})


def _check(table: Table, names: Sequence[str]) -> None:
    label_ids(table, names)


def _stand_in(rng: np.random.Generator, n: int, wanted: StandIn) -> dict[str, Any]:
    """Returns noisy images. The image of a class is made of coarse squares."""
    labels = balanced_classes(rng, n, len(wanted.names))
    height, width, *channels = wanted.shape
    coarse = (len(wanted.names), height // 4, width // 4, *channels)
    pictures = host_rng(0, "tiny:pictures").integers(0, 2, coarse) * 128
    pictures = pictures.repeat(4, axis=1).repeat(4, axis=2)
    noise = rng.integers(0, 128, (n, *wanted.shape))
    images = (pictures[labels] + noise).astype(np.uint8)
    return {"image": list(images), "label": [wanted.names[label] for label in labels]}


PIXELS = Encoder(
    columns=("image", "label"),
    encode=encode_images,
    recognises=recognising("image"),
    label_column="label",
    needed=needing("image", "label"),
    class_names=label_names,
    prepare=_prepare,
    check=_check,
    needs_tokenizer=False,
    stand_in=_stand_in,
)
