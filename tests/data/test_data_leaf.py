"""Examples by user, in the formats of LEAF and TFF."""

import gzip
import json

import numpy as np
import pytest
from refusals import refused

import fedjax_peft as fp
from fedjax_peft.data.formats.leaf import read_users


def leaf(examples, **changes):
    """Returns a LEAF file with examples: user -> (x, y)."""
    data = {user: {"x": x, "y": y} for user, (x, y) in examples.items()}
    sizes = [len(y) for _, y in examples.values()]
    return {"users": list(examples), "num_samples": sizes, "user_data": data} | changes


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


def read(folder, content, name="train.json"):
    """Returns the columns of one split."""
    write(folder / name, content)
    return read_users(folder)[name.split(".")[0]].columns


PIXELS = np.arange(2 * 256).reshape(2, 256) % 256
"""Two images of 16x16, with all values."""


@pytest.mark.parametrize(
    ("train", "test"),
    [
        ("data/train/all_data_0_train_9.json", "data/test/all_data_0_test_9.json"),
        ("train/a.json.gz", "test/b.json"),
        ("train.json", "test.json.gz"),
        ("data/train.json", "data/test.json"),
    ],
)
def test_places(tmp_path, train, test):
    write(tmp_path / train, leaf({"u": (["one", "two"], [0, 1]), "v": (["six"], [1])}))
    write(tmp_path / test, leaf({"v": (["ten"], [0])}))
    write(tmp_path / "data/all_data/all_data_0.json", leaf({"w": (["not this"], [0])}))
    splits = read_users(tmp_path)
    assert splits.keys() == {"train", "test"}
    expected = {"text": ["one", "two", "six"], "label": [0, 1, 1], "client": ["u", "u", "v"]}
    assert splits["train"].columns == expected
    assert splits["test"].columns == {"text": ["ten"], "label": [0], "client": ["v"]}


@pytest.mark.parametrize("name", ["all_data.json", "all_data_niid.json.gz", "all_data/part_0.json"])
def test_data_that_are_not_split(tmp_path, name):
    write(tmp_path / "data" / name, leaf({"u": (["one"], [0])}))
    splits = read_users(tmp_path)
    assert splits.keys() == {"all"}
    assert splits["all"].columns["text"] == ["one"]


def test_several_files_make_a_split(tmp_path):
    write(tmp_path / "train/0.json", leaf({"u": (["one"], [0])}))
    write(tmp_path / "train/1.json", leaf({"v": (["two"], [1])}))
    table = read_users(tmp_path)["train"]
    assert table.columns["client"] == ["u", "v"]
    assert "2 files" in table.origin
    write(tmp_path / "train/2.json", leaf({"u": (["six"], [1])}))
    refused(r"The user 'u' is in .*0\.json and in .*2\.json", read_users, tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        b'{"text": "one", "label": 1}\n{"text": "two", "label": 0}\n',
        b'[{"text": "one", "client": "u"}]',
        b'{"version": "1.1", "data": [{"paragraphs": []}]}',
        b'{"id": "1", "answers": {"text": ["one"], "answer_start": [3]}}',
        b"",
    ],
)
def test_other_files_are_not_taken(tmp_path, content):
    assert read_users(tmp_path) is None
    write(tmp_path / "train.json", content)
    assert read_users(tmp_path) is None


def test_next_character_ends_the_text(tmp_path):
    users = {"PLAY_KING": (["to the sea, m", "o the sea, my"], ["y", " "])}
    columns = read(tmp_path, leaf(users))
    assert columns["text"] == ["to the sea, my", "o the sea, my "]
    assert columns.keys() == {"text", "client"}


def test_next_token_ends_the_tokens(tmp_path):
    tokens = ["a", "small", "boat"]
    for successor in ("sinks", ["small", "boat", "sinks"]):
        columns = read(tmp_path, leaf({"u": ([tokens], [successor])}))
        assert columns == {"text": ["a small boat sinks"], "client": ["u"]}


def test_comments_of_reddit(tmp_path):
    """The pieces have equal length; the file's sample counts are those before the split."""
    pieces = [["<BOS>", "so", "it"], ["goes", "<EOS>", "<PAD>"]]
    targets = {"target_tokens": [["so", "it", "goes"], ["<EOS>", "<PAD>", "<PAD>"]], "score": 3}
    columns = read(tmp_path, leaf({"u": ([pieces], [targets])}, num_samples=[5]))
    assert columns == {"text": ["so it goes"], "client": ["u"]}


def test_pixels(tmp_path):
    columns = read(tmp_path, leaf({"w1": (np.round(PIXELS / 255, 6).tolist(), [61, 4])}))
    images = np.stack(columns["image"])
    assert images.dtype == np.uint8
    np.testing.assert_array_equal(images, PIXELS.reshape(2, 16, 16))
    assert columns["label"] == [61, 4]
    assert columns["client"] == ["w1", "w1"]


def test_users_without_examples_are_left_out(tmp_path):
    """LEAF omits users without a split from ``users``, but keeps their empty lists."""
    content = leaf({"u": (["one"], [0]), "v": ([], [])})
    content["user_data"]["w"] = {"x": [], "y": []}
    assert read(tmp_path, content)["client"] == ["u"]


@pytest.mark.parametrize(
    ("record", "columns"),
    [
        ({"tokens": ["how to", "why"], "creation_date": [1, 2]}, {"text": ["how to", "why"]}),
        ({"tokens": [["how", "to"], ["why"]]}, {"text": ["how to", "why"]}),
        ({"snippets": ["Good night."]}, {"text": ["Good night."]}),
        ({"text": ["x", "z"], "label": [*"yn"]}, {"text": ["x", "z"], "label": [*"yn"]}),
    ],
    ids=["tokens", "lists", "snippets", "labels"],
)
def test_texts_of_tff(tmp_path, record, columns):
    n = len(columns["text"])
    assert read(tmp_path, {"00001": record}) == columns | {"client": ["00001"] * n}


@pytest.mark.parametrize("flat", [False, True])
def test_images_of_tff(tmp_path, flat):
    pixels = (PIXELS / 255 if flat else PIXELS.reshape(2, 16, 16) / 255).tolist()
    columns = read(tmp_path, {"f0": {"label": [1, 0], "pixels": pixels}})
    np.testing.assert_array_equal(np.stack(columns["image"]), PIXELS.reshape(2, 16, 16))
    assert columns["label"] == [1, 0]


def test_colour_images_of_tff(tmp_path):
    x = np.random.default_rng(0).integers(0, 256, (2, 4, 5, 3), dtype=np.uint8)
    columns = read(tmp_path, {"c": {"image": x.tolist(), "label": [1, 0]}})
    np.testing.assert_array_equal(np.stack(columns["image"]), x)


FLAT = [[0.0, 0.5, 0.5, 1.0]]


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (leaf({"u": (["one", "two"], [0])}), ["'u'", "2 values in 'x', but 1 in 'y'"]),
        (leaf({"u": (["one"], [0])}, user_data=[3]), ["no examples by user"]),
        (leaf({}, user_data=[]), ["no examples by user"]),
        (leaf({"u": (["one"], [0])}, user_data={"u": {"x": ["one"]}}), ["'u'", "no list 'y'"]),
        (leaf({"u": (["one", 2], [0, 1])}), ["'u'", "'x'", "value 2", "a text"]),
        (leaf({"u": (["one", "two"], ["a", 1])}), ["'u'", "'y'", "value 2", "successor"]),
        (leaf({"u": (FLAT, [0]), "v": (["one"], [0])}), ["'v'", "text, label", "image, label"]),
        (leaf({"u": (FLAT, [0]), "v": ([[0.5]], [0])}), ["'v'", "[1, 1]", "[2, 2]"]),
        (leaf({"u": ([[0.5, float("nan")]], [0])}), ["'u'", "'x'", "value 1", "nan", "0 to 1"]),
        (leaf({"u": ([*FLAT, [0, 0, 0, 1.5]], [0, 1])}), ["'u'", "'x'", "value 2", "1.5"]),
        (leaf({"u": ([[0, 300, 0, 0]], [0])}), ["'u'", "'x'", "300", "0 to 255"]),
        (leaf({"u": ([[0.5, 0.5, 0.5]], [0])}), ["'u'", "'x'", "[3]", "neither a square image"]),
        (leaf({"u": ([*FLAT, [0.5]], [0, 1])}), ["'u'", "'x'", "different sizes"]),
        (leaf({"u": ([[1.0, "a", 0, 0]], [0])}), ["'u'", "'x'", "other than numbers"]),
        (leaf({"u": ([None], [0])}), ["'u'", "'x'", "other than numbers"]),
        (leaf({}), ["no examples"]),
        ({"c": {"tokens": ["one"]}, "d": {"type": ["q"]}}, ["'d'", "no list 'tokens'"]),
        ({"c": {"tokens": ["one"], "label": []}}, ["'c'", "1 values in 'tokens'", "'label'"]),
        ({"c": {"tokens": ["one"]}, "d": 3}, ["'d'", "no list 'tokens'"]),
        (json.dumps(leaf({"u": (["one"], [0])})).encode()[:-5], ["JSON"]),
        (b'{"users": ["\xff\xfe"]}', ["JSON"]),
    ],
)
def test_files_that_contradict_themselves(tmp_path, content, named):
    with pytest.raises(fp.InputError) as caught:
        read(tmp_path, content)
    assert all(part in str(caught.value) for part in ["train.json", *named]), caught.value


def test_a_file_cut_short(tmp_path):
    users = {f"user {i}": ([f"text {i * j}" for j in range(20)], [0] * 20) for i in range(90)}
    path = tmp_path / "train.json.gz"
    write(path, leaf(users))
    whole = path.read_bytes()
    for size in (30, len(whole) - 100):
        path.write_bytes(whole[:size])
        refused(r"train\.json\.gz could not be read", read_users, tmp_path)
