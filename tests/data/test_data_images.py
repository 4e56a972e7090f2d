"""Images in all formats, as a column of pixels, and with a feature shift for each client."""

import gzip
import io
import struct
import zlib

import numpy as np
import pytest
import transformers
from closeness import approx, assert_close
from internals import Table
from PIL import Image
from refusals import refusals, refused

import fedjax_peft as fp
from fedjax_peft.data.encoders.pixels import encode_images
from fedjax_peft.data.formats.images import decode, read_images
from fedjax_peft.data.partition.features import shift_features
from fedjax_peft.data.table import label_names


def images(n, *shape, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (n, *shape), dtype=np.uint8)


def encoded(image, form="PNG", **options):
    file = io.BytesIO()
    Image.fromarray(image).save(file, form, **options)
    return file.getvalue()


def assert_is(table, pixels, labels):
    np.testing.assert_array_equal(np.stack(table.columns["image"]), pixels)
    assert list(table.columns["label"]) == labels


def idx(x, magic=None):
    return bytes([0, 0, 8, magic or x.ndim]) + struct.pack(f">{x.ndim}I", *x.shape) + x.tobytes()


def write_idx(folder, splits, prefix="", packed=False):
    folder.mkdir(exist_ok=True)
    for split, (x, y) in splits.items():
        for name, array in (("images-idx3", x), ("labels-idx1", np.array(y, np.uint8))):
            data = gzip.compress(idx(array)) if packed else idx(array)
            ending = ".gz" if packed else ""
            (folder / f"{prefix}{split}-{name}-ubyte{ending}").write_bytes(data)


@pytest.mark.parametrize("packed", [False, True])
def test_idx(tmp_path, packed):
    train, test = images(5, 6, 4), images(2, 6, 4, seed=1)
    write_idx(tmp_path, {"train": (train, [3, 0, 1, 1, 2]), "t10k": (test, [0, 3])}, packed=packed)
    splits = read_images(tmp_path)
    assert splits.keys() == {"train", "test"}
    assert_is(splits["train"], train, [3, 0, 1, 1, 2])
    assert_is(splits["test"], test, [0, 3])
    assert label_names(splits["train"]) == ("0", "1", "2", "3")


def test_emnist_is_turned_upright(tmp_path):
    """The files are in the folder that the archive contains."""
    upright = images(3, 6, 6)
    splits = {"train": (upright.swapaxes(1, 2), [10, 2, 61]), "test": (upright[:1], [2])}
    write_idx(tmp_path / "gzip", splits, prefix="emnist-byclass-", packed=True)
    assert_is(read_images(tmp_path)["train"], upright, [10, 2, 61])


def test_a_file_beside_its_packed_form_is_read_once(tmp_path):
    for packed in (False, True):
        write_idx(tmp_path, {"train": (images(3, 4, 4), [0, 1, 2])}, packed=packed)
    assert len(read_images(tmp_path)["train"]) == 3


PIXELS, LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"


@pytest.mark.parametrize(
    ("file", "content", "named"),
    [
        (PIXELS, b"", f"{PIXELS} does not start like an IDX file of 3"),
        (PIXELS, idx(images(5, 4, 4), magic=1), "does not start like an IDX file of 3"),
        (PIXELS, idx(images(5, 4, 4))[:-1], "5x4x4 bytes, but has 79"),
        (PIXELS, idx(images(5, 4, 4)) + b"a", "5x4x4 bytes, but has 81"),
        (PIXELS, bytes([0, 0, 8, 3]) + b"\xff" * 12, "4294967295x4294967295x4294967295 .* has 0"),
        (LABELS, idx(images(4)), "5 images, but 4 labels"),
        (LABELS, None, f"{LABELS} could not be read: No such file"),
        (
            f"{PIXELS}.gz",
            gzip.compress(idx(images(5, 4, 4)), mtime=0)[:-20],
            "ubyte.gz could not be read",
        ),
        (f"{PIXELS}.gz", b"not gzip", "ubyte.gz could not be read"),
    ],
)
def test_damaged_idx(tmp_path, file, content, named):
    write_idx(tmp_path, {"train": (images(5, 4, 4), [0] * 5)}, packed=file.endswith("gz"))
    (tmp_path / file).unlink()
    if content is not None:
        (tmp_path / file).write_bytes(content)
    refused(named, read_images, tmp_path)


def test_two_data_sets_in_one_folder(tmp_path):
    for prefix in ("emnist-digits-", "emnist-byclass-"):
        write_idx(tmp_path, {"train": (images(1, 4, 4), [0])}, prefix=prefix)
    refused("several data sets: 'emnist-byclass', 'emnist-digits'", read_images, tmp_path)


def records(pixels, *labels):
    """Returns CIFAR's records of images ``[n, 32, 32, 3]``."""
    planes = pixels.transpose(0, 3, 1, 2).reshape(len(pixels), -1)
    return np.concatenate([np.stack(labels, 1).astype(np.uint8), planes], axis=1).tobytes()


@pytest.fixture
def cifar10(tmp_path):
    """A folder with two images per file; training labels are 0 to 9, test labels 3 and 7."""
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    x = images(12, 32, 32, 3)
    for i in range(5):
        part = slice(2 * i, 2 * i + 2)
        (folder / f"data_batch_{i + 1}.bin").write_bytes(records(x[part], np.arange(10)[part]))
    (folder / "test_batch.bin").write_bytes(records(x[10:], [3, 7]))
    return folder, x


def test_cifar10(cifar10, tmp_path):
    folder, x = cifar10
    for place in (folder, tmp_path):
        splits = read_images(place)
        assert_is(splits["train"], x[:10], list(range(10)))
        assert_is(splits["test"], x[10:], [3, 7])


def test_class_names_are_taken_where_they_are(cifar10):
    folder, _ = cifar10
    names = [f"kind_{i}" for i in range(10)]
    (folder / "batches.meta.txt").write_text("\n".join(names) + "\n\n")
    splits = read_images(folder)
    assert splits["test"].columns["label"] == ["kind_3", "kind_7"]
    assert splits["test"].label_names == tuple(names)
    (folder / "batches.meta.txt").write_text("kind_0")
    refused("has 1 class names instead of 10", read_images, folder)


def test_cifar100(tmp_path):
    x = images(3, 32, 32, 3)
    (tmp_path / "train.bin").write_bytes(records(x, [1, 19, 0], [99, 5, 7]))
    (tmp_path / "test.bin").write_bytes(records(x[:1], [4], [3]))
    splits = read_images(tmp_path)
    assert_is(splits["train"], x, [99, 5, 7])
    assert splits["train"].columns["coarse_label"] == [1, 19, 0]
    assert_is(splits["test"], x[:1], [3])


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"", "data_batch_4.bin .* has 0 bytes"),
        (records(images(2, 32, 32, 3), [0, 1])[:-1], "has 6145 bytes, .* have 3073"),
        (records(images(2, 32, 32, 3), [0, 10]), "Image 2 of .*_4.bin .* label 10, .* 10 classes"),
        (None, "data_batch_4.bin could not be read"),
    ],
)
def test_damaged_cifar(cifar10, content, named):
    path = cifar10[0] / "data_batch_4.bin"
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    refused(named, read_images, cifar10[0])


@pytest.mark.parametrize("name", ["cifar-10-batches-py", "cifar-100-python.tar.gz"])
def test_pickles_are_refused(tmp_path, name):
    path = tmp_path / name
    path.mkdir() if "." not in name else path.write_bytes(b"")
    refused(r"a pickle, .* Download the \"binary version", read_images, tmp_path)
    if path.is_dir():
        refused("a pickle", read_images, path)


@pytest.mark.parametrize(
    "names", [("x_{}", "y_{}"), ("{}_images", "{}_labels"), ("{}_image", "{}_label")]
)
def test_npz(tmp_path, names):
    x, y = images(3, 5, 4), np.array([2, 0, 1])
    arrays = {}
    for split, rows in (("train", slice(3)), ("test", slice(1))):
        for name, array in zip(names, (x, y), strict=True):
            arrays[name.format(split)] = array[rows]
    np.savez(tmp_path / "some.npz", **arrays)
    splits = read_images(tmp_path)
    assert_is(splits["train"], x, [2, 0, 1])
    assert_is(splits["test"], x[:1], [2])


X, Y = images(3, 5, 4), np.arange(3)


@pytest.mark.parametrize(
    ("arrays", "named"),
    [
        ({"a": X, "b": Y}, "some.npz needs arrays named x_train and y_train.* it has: a, b"),
        ({"x_train": X.astype(float), "y_train": Y}, r"some.npz .*float64 \[3, 5, 4\].* be uint8"),
        ({"x_train": X[0], "y_train": Y}, r"uint8 \[5, 4\]"),
        ({"x_train": X, "y_train": Y[:2]}, "3 images, but 2 labels"),
        ({"x_train": X, "y_train": np.eye(3)}, r"float64 \[3, 3\], not a number or name"),
        ({"x_train": X, "y_train": np.array([None, 1, 2])}, "some.npz could not be read.*pickle"),
    ],
)
def test_npz_that_does_not_fit(tmp_path, arrays, named):
    np.savez(tmp_path / "some.npz", **arrays)
    refused(named, read_images, tmp_path)


def test_damaged_npz_and_npy_of_its_name(tmp_path):
    path, npy = tmp_path / "some.npz", io.BytesIO()
    np.savez(path, x_train=X, y_train=Y)
    np.save(npy, X)
    for content in (path.read_bytes()[:-30], npy.getvalue()):
        path.write_bytes(content)
        refused(r"some\.npz could not be read", read_images, tmp_path)


def test_folders_of_classes(tmp_path):
    x = images(4, 6, 5, 3)
    for i, place in enumerate(["train/owl/a.png", "train/elk/b.PNG", "test/owl/c.png"]):
        path = tmp_path / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encoded(x[i]))
    (tmp_path / "train/owl/notes.txt").write_text("not an image")
    splits = read_images(tmp_path)
    assert_is(splits["train"], x[[1, 0]], ["elk", "owl"])
    assert_is(splits["test"], x[[2]], ["owl"])
    (tmp_path / "train/owl/z.png").write_bytes(b"GIF89a but not really")
    refused(r"owl/z\.png could not be decoded", read_images, tmp_path)
    for file in ("train/.cache/a.webp", "train/.cache/a.png", "train/fox/.hidden"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_bytes(b"")
    (tmp_path / "train/owl/z.png").unlink()
    assert_is(read_images(tmp_path)["train"], x[[1, 0]], ["elk", "owl"])
    (tmp_path / "train/fox/a.webp").write_bytes(b"")
    refused(r"train/fox has files, but none .* \.png, \.jpg, \.jpeg", read_images, tmp_path)


def test_other_folders_are_not_taken(tmp_path):
    assert read_images(tmp_path) is None
    (tmp_path / "train.jsonl").write_text('{"text": "no image", "label": 1}')
    (tmp_path / "train").mkdir()
    assert read_images(tmp_path) is None
    assert read_images(tmp_path / "absent") is None


@pytest.mark.parametrize("shape", [(6, 5), (6, 5, 3)], ids=["grey", "colour"])
def test_images_of_every_form_are_decoded(tmp_path, shape):
    (x,) = images(1, *shape)
    path = tmp_path / "image.png"
    path.write_bytes(encoded(x))
    forms = [x, Image.fromarray(x), encoded(x), encoded(x, "BMP")]
    forms += [{"bytes": encoded(x), "path": "no.png"}, {"bytes": None, "path": str(path)}]
    for value in forms:
        np.testing.assert_array_equal(decode(value), x)
    assert_close(decode(encoded(x // 16 + 100, "JPEG")), x // 16 + 100.0, atol=16)


def test_unusual_modes_become_grey_or_rgb():
    grey, alpha = images(2, 6, 5)
    np.testing.assert_array_equal(decode(encoded(np.stack([grey, alpha], -1))), grey)  # LA
    np.testing.assert_array_equal(decode(grey[:, :, None]), grey)
    rgba = images(1, 6, 5, 4)[0]
    np.testing.assert_array_equal(decode(encoded(rgba)), rgba[:, :, :3])
    black = Image.fromarray(grey > 99)
    assert black.mode == "1"
    np.testing.assert_array_equal(decode(black), 255 * (grey > 99))
    palette = Image.fromarray(grey).convert("P")
    np.testing.assert_array_equal(decode(palette)[:, :, 0], grey)


def enlarged_png(side=60_000):
    """Returns a small PNG whose header claims a huge size."""
    data = bytearray(encoded(images(1, 4, 4)[0]))
    data[16:24] = struct.pack(">II", side, side)
    data[29:33] = struct.pack(">I", zlib.crc32(data[12:29]))
    return bytes(data)


POSTSCRIPT = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n"


@pytest.mark.parametrize(
    "value",
    [
        encoded(images(1, 64, 64)[0])[:-2000],
        encoded(images(1, 64, 64)[0], "JPEG")[:500],
        b"",
        b"\x89PNG\r\n\x1a\n" + b"\0" * 50,
        POSTSCRIPT,
        enlarged_png(10_000),
        enlarged_png(60_000),
        {"bytes": None, "path": None},
        {"bytes": None, "path": "/nowhere/image.png"},
        encoded(images(1, 4, 4)[0].astype(np.uint16)),
        "image.png",
        None,
        np.zeros((4, 4)),
        np.zeros((4, 4, 2), np.uint8),
        np.zeros((0, 4), np.uint8),
    ],
    ids=repr,
)
def test_images_that_cannot_be_used(value):
    with pytest.raises(fp.InputError) as caught:
        decode(value, "The image in row 7 of that file")
    assert "row 7 of that file" in str(caught.value) or "/nowhere" in str(caught.value)


def test_dangerous_images_are_not_even_begun():
    for value, reason in (
        (enlarged_png(10_000), "DecompressionBomb"),
        (POSTSCRIPT, "cannot ident"),
    ):
        refused(reason, decode, value)


def test_encoded_data_set():
    x = images(3, 6, 5, 3)
    forms = [x[0], encoded(x[1]), Image.fromarray(x[2])]
    table = Table("a file", {"image": forms, "label": [7, 0, 7]})
    data = encode_images(table, label_names(table), None, max_length=8, name="some")
    pixels = data.columns["pixel_values"]
    assert (pixels.dtype, pixels.shape) == (np.uint8, (3, 3, 6, 5))
    np.testing.assert_array_equal(pixels, x.transpose(0, 3, 1, 2))
    assert data.labels.tolist() == [1, 0, 1]
    assert data.labels.dtype == np.int32
    assert (data.label_names, data.name) == (("0", "7"), "some")


def test_grey_images_have_one_channel_unless_some_have_colours():
    grey, colour = images(2, 6, 5), images(1, 6, 5, 3)[0]
    alone = encode_images(Table("a", {"image": list(grey), "label": [0, 1]}), ("0", "1"), name="a")
    assert alone.columns["pixel_values"].shape == (2, 1, 6, 5)
    mixed = Table("a", {"image": [grey[0], colour], "label": [0, 1]})
    pixels = encode_images(mixed, ("0", "1"), name="a").columns["pixel_values"]
    np.testing.assert_array_equal(pixels, np.stack([[grey[0]] * 3, colour.transpose(2, 0, 1)]))


def test_images_of_several_sizes_are_resized_with_a_note():
    """As ``ViTImageProcessor`` resizes them; of one size, they stay."""
    grey, colour, same = images(1, 6, 5)[0], images(1, 300, 451, 3)[0], images(2, 6, 5)
    table = Table("a file", {"image": [grey, encoded(colour)], "label": [0, 1]})
    data = encode_images(table, ("0", "1"), name="a")
    processor = transformers.ViTImageProcessorPil(do_normalize=False, do_rescale=False)
    expected = [
        processor(Image.fromarray(x).convert("RGB")).pixel_values[0] for x in (grey, colour)
    ]
    np.testing.assert_array_equal(data.columns["pixel_values"], np.stack(expected))
    assert data.notes == (
        "The 2 images of a file have 2 sizes, such as 6 x 5 and 300 x 451, and are resized to"
        " 224 x 224 pixels.",
    )
    plain = Table("a file", {"image": [*same], "label": [0, 1]})
    assert encode_images(plain, ("0", "1"), name="a").notes == ()


test_tables_that_cannot_be_encoded = refusals(
    lambda columns: encode_images(Table("a file", columns), ("0", "1"), name="some"),
    ({"image": [X[0], b"?"], "label": [0, 1]}, "row 2 of a file could not be decoded"),
    ({"image": [X[0], X[1]], "label": [0, 2]}, "Row 2 of a file has the label '2'"),
    ({"img": [X[0]], "label": [0]}, "no column 'image'.* img"),
    ({"image": [], "label": []}, "a file has no images"),
)


def federation(pixels, clients):
    labels = np.zeros(len(pixels), np.int32)
    data = fp.Dataset({"pixel_values": pixels, "labels": labels}, ("a",), "some")
    # Interleaved, and the last row is nobody's.
    rows = [np.arange(k, len(pixels) - 1, clients, dtype=np.int32) for k in range(clients)]
    return fp.Clients(data, tuple(rows))


def shifted(clients, *settings):
    """Returns the images of each client before and after; checks that nothing else has changed."""
    before, result = clients.data.columns["pixel_values"].copy(), shift_features(clients, *settings)
    after = result.data.columns["pixel_values"]
    assert (after.dtype, after.shape) == (np.uint8, before.shape)
    np.testing.assert_array_equal(clients.data.columns["pixel_values"], before)
    np.testing.assert_array_equal(after[-1], before[-1])
    assert result.data.columns["labels"] is clients.data.columns["labels"]
    for old, new in zip(clients.indices, result.indices, strict=True):
        np.testing.assert_array_equal(old, new)
    return [(before[i].astype(float), after[i].astype(float)) for i in clients.indices]


@pytest.mark.parametrize("side", [8, 7])
def test_quarter_turns_are_exact(side):
    clients = federation(images(9, 3, side, side), 4)
    for k, (before, after) in enumerate(shifted(clients, "rotation", 360)):
        np.testing.assert_array_equal(after, np.rot90(before, k, axes=(2, 3)))


def test_other_angles_are_those_of_pil():
    """The angle is 45 degrees; only the circle that stays in the frame is compared."""
    y, x = np.mgrid[:24, :20]
    smooth = np.clip(128 + 5 * (x - 9) + 3 * (y - 12), 0, 255).astype(np.uint8)
    clients = federation(np.broadcast_to(smooth, (5, 1, 24, 20)).copy(), 2)
    _, after = shifted(clients, "rotation", 90)[1]
    turned = Image.fromarray(smooth).rotate(45, Image.Resampling.BILINEAR)
    inside = (y - 11.5) ** 2 + (x - 9.5) ** 2 < 81
    difference = after[0, 0] - np.asarray(turned)
    assert np.abs(difference[inside]).max() <= 1
    assert np.abs(after[0, 0] - smooth)[inside].max() > 30
    assert (after[0, 0][[0, -1], [0, -1]] > 0).all()  # the border goes on


def test_noise_grows_from_client_to_client():
    clients = federation(np.full((401, 1, 8, 8), 128, np.uint8), 4)
    changes = [after - before for before, after in shifted(clients, "noise", 0.2)]
    assert not changes[0].any()
    for k, change in enumerate(changes):
        assert change.std() == approx(255 * 0.2 * k / 4, rel=0.03, abs=1e-9)
        assert abs(change.mean()) < 1.5
    first, again, other = (
        shift_features(clients, "noise", 0.2, seed).data.columns["pixel_values"]
        for seed in (0, 0, 1)
    )
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()
    dark = federation(np.zeros((9, 1, 8, 8), np.uint8), 2)
    _, after = shifted(dark, "noise", 3.0)[1]
    assert (after == 0).mean() == approx(0.5, abs=0.1)  # it stays within the range
    assert (after == 255).any()


def test_brightness_and_contrast_fade():
    clients = federation(images(9, 3, 8, 8), 4)
    for k, (before, after) in enumerate(shifted(clients, "brightness", 0.8)):
        assert_close(after, (1 - 0.2 * k) * before, rtol=0, atol=0.51)
    for k, (before, after) in enumerate(shifted(clients, "contrast", 1)):
        mean = before.mean((1, 2, 3), keepdims=True)
        expected = mean + (1 - k / 4) * (before - mean)
        assert_close(after, expected, rtol=0, atol=0.51)


SHIFTABLE = federation(images(9, 3, 8, 8), 4)
FLOATS = {**SHIFTABLE.data.columns, "pixel_values": np.zeros((9, 3, 8, 8), np.float32)}


test_shifts_that_are_impossible = refusals(
    shift_features,
    (SHIFTABLE, "rotate", 90, "Did you mean 'rotation'"),
    (SHIFTABLE, "noise", -1.0, "not negative"),
    (SHIFTABLE, "noise", np.nan, "not negative"),
    (SHIFTABLE, "noise", np.inf, "not negative"),
    (SHIFTABLE, "contrast", 1.5, "from 0 to 1"),
    (
        fp.Clients(SHIFTABLE.data, (np.array([0, 3]), np.array([3]))),
        "noise",
        0.1,
        "belongs to 2",
    ),
    (
        fp.Clients(fp.Dataset(FLOATS, ("a",)), SHIFTABLE.indices),
        "noise",
        0.1,
        "has no uint8 images",
    ),
    (
        fp.Clients(fp.Dataset({"x": np.zeros(9)}), SHIFTABLE.indices),
        "noise",
        0.1,
        "no uint8 images",
    ),
)
