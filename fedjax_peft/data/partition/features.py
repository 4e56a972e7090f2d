"""Feature skew: the images of each client are changed by another amount."""

import sys
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from fedjax_peft.contracts.arguments import Count
from fedjax_peft.contracts.part import data_part
from fedjax_peft.data.dataset import Clients, Dataset
from fedjax_peft.data.partition.plain import iid
from fedjax_peft.numerics.random import host_rng
from fedjax_peft.support.errors import InputError, check_known


@data_part
def feature_shift(
    data: Dataset, clients: Count, kind: str, strength: float, *, seed: int = 0
) -> Clients[Dataset]:
    """Deals out images IID, then changes those of client k by an amount that grows with k.

    The images of the result are changed copies. :func:`shift_features` describes the kinds and the
    unit of ``strength``.

    Args:
      data: images.
      clients: number of clients, at most the number of examples.
      kind: ``"rotation"``, ``"noise"``, ``"brightness"`` or ``"contrast"``.
      strength: client k of K, from 0, has ``strength * k / K`` of it; for rotations in degrees.
      seed: the seed of the random streams.

    Raises:
      InputError: an argument out of range, no such kind, or data without images.
    """
    return shift_features(iid(data, clients, seed=seed), kind, strength, seed)


def shift_features(
    clients: Clients[Dataset], kind: str, strength: float, seed: int = 0
) -> Clients[Dataset]:
    """Returns the same federation with images that differ from client to client.

    Client k of K, counted from 0, has a shift of ``strength * k / K``, so client 0 keeps its
    images. It is, by ``kind``:

    * ``rotation``: degrees, counter-clockwise, with the border repeated. With a strength of 360,
      four clients have 0, 90, 180 and 270 degrees, exactly (rotated MNIST as in Ghosh et al. 2020,
      "An Efficient Framework for Clustered Federated Learning").
    * ``noise``: the standard deviation of Gaussian noise, of pixels from 0 to 1 (NIID-Bench, Li et
      al. 2022, "Federated Learning on Non-IID Data Silos: An Experimental Study").
    * ``brightness``, ``contrast``: the share that is lost, at most 1. Pixels move towards black, or
      towards the mean of the image.

    Args:
      clients: a federation of images, uint8; no example may have two owners.
      kind: see above.
      strength: the limit of the shift for large k, in the unit of the kind.
      seed: the seed of the noise.

    Raises:
      InputError: an unknown kind, an impossible strength, or data that are not such images.
    """
    check_known("feature shift", kind, SHIFTS)
    largest = 1 if kind in ("brightness", "contrast") else sys.float_info.max
    if not 0 <= strength <= largest:
        needed = "from 0 to 1" if largest == 1 else "a number that is not negative"
        raise InputError(f"strength = {strength} of the feature shift {kind!r} must be {needed}.")
    pixels = _pixels_of(clients).copy()
    for client, rows in enumerate(clients.indices):
        amount = strength * client / len(clients)
        shifted = SHIFTS[kind](pixels[rows], amount, host_rng(seed, "feature_shift", client))
        pixels[rows] = np.rint(np.clip(shifted, 0, 255))
    columns = {**clients.data.columns, "pixel_values": pixels}
    return replace(clients, data=replace(clients.data, columns=columns))


def _pixels_of(clients: Clients[Dataset]) -> np.ndarray:
    pixels = clients.data.columns.get("pixel_values")
    if pixels is None or pixels.dtype != np.uint8:
        raise InputError(
            f"The data set {clients.data.name!r} has no uint8 images in a column 'pixel_values':"
            " a feature shift is for images."
        )
    owners = np.bincount(clients.rows, minlength=len(pixels))
    if owners.max() > 1:
        raise InputError(
            f"Row {owners.argmax()} belongs to {owners.max()} clients: shifted features need"
            " examples that have one owner."
        )
    return pixels


def _rotated(pixels: np.ndarray, degrees: float, _: np.random.Generator) -> np.ndarray:
    """Returns the images turned about their centre, bilinearly between pixels."""
    height, width = pixels.shape[2:]
    y, x = np.mgrid[:height, :width].astype(np.float64)
    y, x = y - (height - 1) / 2, x - (width - 1) / 2
    cos, sin = np.cos(np.deg2rad(degrees)), np.sin(np.deg2rad(degrees))
    # The source position of each pixel; rows count downwards.
    rows = _taps(cos * y + sin * x + (height - 1) / 2, height)
    columns = _taps(cos * x - sin * y + (width - 1) / 2, width)
    return sum(a * b * pixels[:, :, i, j] for i, a in rows for j, b in columns)


def _taps(place: np.ndarray, size: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns the two pixels next to each position on a line, and their weights."""
    first = np.floor(place).astype(int)
    second = (place - first).astype(np.float32)
    return [(np.clip(first, 0, size - 1), 1 - second), (np.clip(first + 1, 0, size - 1), second)]


def _noisy(pixels: np.ndarray, deviation: float, rng: np.random.Generator) -> np.ndarray:
    return pixels + 255 * deviation * rng.standard_normal(pixels.shape, np.float32)


SHIFTS: dict[str, Callable[[np.ndarray, float, np.random.Generator], np.ndarray]] = {
    "rotation": _rotated,
    "noise": _noisy,
    "brightness": lambda pixels, lost, _: (1 - lost) * pixels,
    "contrast": lambda pixels, lost, _: (
        pixels + lost * (pixels.mean((1, 2, 3), keepdims=True) - pixels)
    ),
}
"""Kind -> (uint8 images ``[n, channels, height, width]``, amount, generator) -> images."""
