"""Image formats: IDX, CIFAR's binary version, npz, folders of image files.

Pickles are never read, because a pickle can run any code.
"""

import io
import math
import re
import warnings
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_peft.data.formats.files import only, read_bytes
from fedjax_peft.data.table import Table
from fedjax_peft.support.errors import InputError

_PLACES = (".", "cifar-10-batches-bin", "cifar-100-binary", "gzip")
"""Where the files may be in a folder: archives unpack to a folder of their own (EMNIST: gzip)."""


def read_images(folder: Path) -> dict[str, Table] | None:
    """Returns the splits of a folder of images by name, None if the folder has no images.

    The folder, or the folder inside it that an archive unpacks to, may have:

    * IDX files, MNIST's format, perhaps gzipped: ``train-images-idx3-ubyte`` and
      ``train-labels-idx1-ubyte``, ``t10k-...`` or ``test-...``, perhaps with a name in front;
    * CIFAR's binary version: ``data_batch_1.bin`` to 5 and ``test_batch.bin`` of CIFAR-10,
      ``train.bin`` and ``test.bin`` of CIFAR-100, whose coarse labels are a column too;
    * one npz file with ``x_train`` and ``y_train``, or ``train_images`` and ``train_labels`` (or in
      the singular), and the same of ``test``;
    * ``train/CLASS/FILE`` and ``test/CLASS/FILE`` with the ending png, jpg or jpeg.

    Raises:
      InputError: a file is missing, damaged, or in another format than its name says; or the
        folder has CIFAR's python version, which is a pickle.
    """
    for place in _PLACES:
        for read in (_read_idx, _read_cifar, _read_npz, _read_class_folders):
            splits = read(folder / place)
            if splits:
                return splits
    _refuse_pickles(folder)
    return None


def _labelled(
    origin: str,
    images: np.ndarray,
    labels: np.ndarray,
    names: tuple[str, ...] | None = None,
    **further: list[int],
) -> Table:
    """Returns a table of images ``[n, height, width, ...]`` and as many labels."""
    if len(images) != len(labels):
        raise InputError(f"{origin} has {len(images)} images, but {len(labels)} labels.")
    values = labels.tolist()
    if names is not None:
        values = [names[label] for label in values]
    return Table(origin, {"image": list(images), "label": values, **further}, names)


# IDX (MNIST, Fashion-MNIST, EMNIST).

_IDX = re.compile(r"(?P<set>.*?)(?P<split>train|test|t10k)-images[-.]idx3-ubyte(\.gz)?")
_IDX_SPLITS = {"train": "train", "test": "test", "t10k": "test"}


def _read_idx(folder: Path) -> dict[str, Table]:
    paths = sorted(folder.iterdir()) if folder.is_dir() else []
    matches = [match for path in paths if (match := _IDX.fullmatch(path.name))]
    sets = sorted({match["set"].rstrip("-") for match in matches})
    if len(sets) > 1:
        found = ", ".join(map(repr, sets))
        raise InputError(f"{folder} has the images of several data sets: {found}. Keep one.")
    # If a file and its packed form exist, one of them is used.
    names = {_IDX_SPLITS[match["split"]]: match[0] for match in matches}
    return {split: _idx_pair(folder, name) for split, name in names.items()}


def _idx_pair(folder: Path, name: str) -> Table:
    images = _idx(folder / name, 3)
    labels = _idx(folder / re.sub(r"images([-.])idx3", r"labels\1idx1", name), 1)
    if name.startswith("emnist"):
        images = images.swapaxes(1, 2)  # stored column by column
    return _labelled(str(folder / name), images, labels)


def _idx(path: Path, dimensions: int) -> np.ndarray:
    """Returns the array of bytes in an IDX file: magic number, sizes, then the values."""
    data, start = read_bytes(path), 4 + 4 * dimensions
    # Two zeros, 8 for unsigned bytes, and the number of dimensions.
    if len(data) < start or data[:4] != bytes([0, 0, 8, dimensions]):
        raise InputError(f"{path} does not start like an IDX file of {dimensions} dimensions.")
    shape = np.frombuffer(data[4:start], ">u4").tolist()
    values = np.frombuffer(data, np.uint8, offset=start)
    if len(values) != math.prod(shape):
        size = "x".join(map(str, shape))
        raise InputError(f"{path} claims {size} bytes, but has {len(values)}: it is damaged.")
    return values.reshape(shape)


# CIFAR's binary version: records of one or two labels and 3x32x32 pixels.

_CIFAR = (
    ([f"data_batch_{i}.bin" for i in range(1, 6)], "test_batch.bin", "batches.meta.txt", [10]),
    (["train.bin"], "test.bin", "fine_label_names.txt", [20, 100]),
)
"""Training files, test file, file of class names, and the classes of each label of a record."""


def _read_cifar(folder: Path) -> dict[str, Table]:
    for train, test, names, classes in _CIFAR:
        if (folder / train[0]).exists():
            known = _class_names(folder / names, classes[-1])
            files = {"train": train, "test": [test]}
            return {split: _cifar(folder, own, classes, known) for split, own in files.items()}
    return {}


def _class_names(path: Path, classes: int) -> tuple[str, ...] | None:
    """Returns the class names in a file, None if the file does not exist."""
    if not path.exists():
        return None
    names = tuple(read_bytes(path).decode(errors="replace").split())
    if len(names) != classes:
        raise InputError(f"{path} has {len(names)} class names instead of {classes}.")
    return names


def _cifar(
    folder: Path, files: list[str], classes: list[int], names: tuple[str, ...] | None
) -> Table:
    """Returns one split; ``classes`` are those of each label of a record, the finest last."""
    records = np.concatenate([_cifar_records(folder / file, classes) for file in files])
    labels, pixels = records[:, : len(classes)], records[:, len(classes) :]
    coarse = {"coarse_label": labels[:, 0].tolist()} if len(classes) == 2 else {}
    origin = str(folder / files[0]) if len(files) == 1 else f"{folder / files[0]} to {files[-1]}"
    images = pixels.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return _labelled(origin, images, labels[:, -1], names, **coarse)


def _cifar_records(path: Path, classes: list[int]) -> np.ndarray:
    values = np.frombuffer(read_bytes(path), np.uint8)
    size = len(classes) + 3072
    if len(values) == 0 or len(values) % size:
        raise InputError(
            f"{path} is damaged: it has {len(values)} bytes, and CIFAR's records have {size} each."
        )
    records = values.reshape(-1, size)
    wrong = np.argwhere(records[:, : len(classes)] >= classes)
    if len(wrong):
        row, label = wrong[0]
        raise InputError(
            f"Image {row + 1} of {path} has the label {records[row, label]}, but there are"
            f" {classes[label]} classes: the file is damaged, or of another data set."
        )
    return records


_PICKLED = re.compile(r"cifar-100?-(batches-py|python.*)|data_batch_1")


def _refuse_pickles(folder: Path) -> None:
    paths = [folder, *(sorted(folder.iterdir()) if folder.is_dir() else [])]
    found = next((path for path in paths if _PICKLED.fullmatch(path.name)), None)
    if found is not None:
        raise InputError(
            f"{found} is the python version of CIFAR, a pickle, which could run any code and is"
            ' not read. Download the "binary version (suitable for C programs)" from'
            " https://www.cs.toronto.edu/~kriz/cifar.html and unpack it here."
        )


# npz.

_NPZ_NAMES = (("x_{}", "y_{}"), ("{}_images", "{}_labels"), ("{}_image", "{}_label"))
_SPLITS = ("train", "val", "validation", "test")


def _read_npz(folder: Path) -> dict[str, Table]:
    path = only(folder, folder.glob("*.npz"), "npz files")
    if path is None:
        return {}
    arrays = _npz(path)
    pairs = {
        split: (arrays[x.format(split)], arrays[y.format(split)])
        for split in _SPLITS
        for x, y in _NPZ_NAMES
        if x.format(split) in arrays and y.format(split) in arrays
    }
    if "train" not in pairs:
        raise InputError(
            f"{path} needs arrays named x_train and y_train, or train_images and train_labels"
            f" (and of test); it has: {', '.join(arrays) or 'none'}."
        )
    return {split: _npz_table(f"{path} ({split})", *pair) for split, pair in pairs.items()}


def _npz(path: Path) -> Mapping[str, np.ndarray]:
    try:
        # Not np.load(), which also takes the one array of an npy file.
        with path.open("rb") as file, np.lib.npyio.NpzFile(file, allow_pickle=False) as arrays:
            return dict(arrays)
    # numpy raises these for a damaged file, and for a pickle in it.
    except (OSError, ValueError, EOFError, zlib.error, zipfile.BadZipFile) as error:
        raise InputError(f"{path} could not be read: {error}") from error


def _npz_table(origin: str, images: np.ndarray, labels: np.ndarray) -> Table:
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.ndim != 1 or labels.dtype.kind not in "iuU":
        found = f"{labels.dtype} {list(labels.shape)}"
        raise InputError(
            f"The labels of {origin} are {found}, not a number or name for each image."
        )
    if images.dtype != np.uint8 or images.ndim not in (3, 4):
        raise InputError(
            f"The images of {origin} are {images.dtype} {list(images.shape)}; they must be uint8"
            " [images, height, width] or [images, height, width, 3]."
        )
    return _labelled(origin, images, labels)


# Folders of image files.

_ENDINGS = (".png", ".jpg", ".jpeg")


def _read_class_folders(folder: Path) -> dict[str, Table]:
    splits = {split: _class_folders(folder / split) for split in _SPLITS}
    return {split: table for split, table in splits.items() if table is not None}


def _class_folders(folder: Path) -> Table | None:
    files = [
        path
        for path in sorted(folder.glob("*/*"))
        if not path.name.startswith(".") and not path.parent.name.startswith(".")
    ]
    paths = [path for path in files if path.suffix.lower() in _ENDINGS]
    if not paths:
        return None
    unread = sorted({path.parent for path in files} - {path.parent for path in paths})
    if unread:
        raise InputError(
            f"{unread[0]} has files, but none with the ending {', '.join(_ENDINGS)}: its class"
            " would be missing."
        )
    images = [decode(read_bytes(path), str(path)) for path in paths]
    return Table(str(folder), {"image": images, "label": [path.parent.name for path in paths]})


# One image.

_DECODERS = ("PNG", "JPEG", "GIF", "BMP", "WEBP", "TIFF")
"""Only these of PIL's decoders: some others start programs."""
_GREY = ("1", "L", "LA")
_COLOUR = ("RGB", "RGBA", "P", "PA", "CMYK", "YCbCr", "HSV", "LAB")


def decode(value: Any, origin: str = "The image") -> np.ndarray:
    """Returns an image as uint8 ``[height, width]``, or ``[height, width, 3]`` if it has colours.

    Args:
      value: an array, an image of PIL, encoded bytes (PNG, JPEG, GIF, BMP, WebP, TIFF), or what
        ``datasets`` has in their place: a dict of ``bytes`` or ``path``. Transparency is dropped.
      origin: which image it is; the messages start with it.

    Raises:
      InputError: ``value`` is none of these, or the image is damaged or far too large.
    """
    if isinstance(value, np.ndarray):
        return _array(value, origin)
    try:
        if isinstance(value, Mapping):
            value = value.get("bytes") or Path(value["path"]).read_bytes()
        return _pixels(value)
    except Exception as error:  # a decoder may raise anything for damaged bytes
        raise InputError(
            f"{origin} could not be decoded: {type(error).__name__}: {error}"
        ) from error


def _array(image: np.ndarray, origin: str) -> np.ndarray:
    if image.ndim == 3 and image.shape[2] == 1:
        image = image[:, :, 0]
    fits = image.ndim == 2 or (image.ndim == 3 and image.shape[2] == 3)
    if image.dtype != np.uint8 or not fits or not image.size:
        found = f"{image.dtype} {list(image.shape)}"
        raise InputError(f"{origin} is {found}, not uint8 [height, width] or [height, width, 3].")
    return image


def _pixels(value: Any) -> np.ndarray:
    """Returns the pixels of encoded bytes or of an image of PIL."""
    from PIL import Image

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        if isinstance(value, bytes):
            value = Image.open(io.BytesIO(value), formats=_DECODERS)
        if not isinstance(value, Image.Image):
            raise TypeError(f"it is {type(value).__name__}, not an image.")
        if value.mode not in _GREY + _COLOUR:
            raise ValueError(f"its mode {value.mode!r} has no 8 bits a channel.")
        return np.asarray(value.convert("L" if value.mode in _GREY else "RGB"))
