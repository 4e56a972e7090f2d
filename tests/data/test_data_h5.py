"""TFF's HDF5 files of examples by user."""

import h5py
import numpy as np
import pytest
from refusals import refused

import fedjax_peft as fp
from fedjax_peft.data.formats.h5 import read_h5
from fedjax_peft.data.formats.leaf import read_users


def write(path, clients):
    """Writes a file with ``clients``: name -> field -> array."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, "w") as file:
        group = file.create_group("examples")
        for name, fields in clients.items():
            for field, values in fields.items():
                group[f"{name}/{field}"] = values


def texts(*values):
    """Returns texts as TFF stores them: bytes of any length."""
    return np.array([value.encode() for value in values], h5py.string_dtype())


def speeches(roles):
    """Returns clients with a speech for each of their numbers."""
    return {
        name: {"snippets": texts(*(f"{name} speaks {i}" for i in range(n)))}
        for name, n in roles.items()
    }


def ids(*values):
    """Returns lists of numbers, of any length each."""
    found = np.empty(len(values), h5py.vlen_dtype(np.int64))
    found[:] = [np.array(one) for one in values]
    return found


PIXELS = np.linspace(0, 1, 2 * 28 * 28, dtype=np.float32).reshape(2, 28, 28)


def test_stack_overflow(tmp_path):
    post = {
        "tokens": texts("how do i", "café"),
        "creation_date": texts("2010", "2011"),
        "score": np.array([1, 2]),
        "tags": texts("a|b", ""),
        "title": texts("x", "y"),
        "type": texts("question", "answer"),
    }
    write(tmp_path / "stackoverflow_train.h5", {"00000002": post})
    write(tmp_path / "stackoverflow_held_out.h5", {"00000009": post})
    write(tmp_path / "stackoverflow_test.h5", {"00000002": {"tokens": texts("thanks")}})
    splits = read_h5(tmp_path)
    assert splits.keys() == {"train", "validation", "test"}
    expected = {"text": ["how do i", "café"], "client": ["00000002"] * 2}
    assert splits["train"].columns == expected
    assert splits["test"].columns == {"text": ["thanks"], "client": ["00000002"]}
    assert read_users(tmp_path) is None


def test_emnist_and_cifar100(tmp_path):
    labels = np.array([3, 61], np.int32)
    write(tmp_path / "a/fed_emnist_train.h5", {"f0000_14": {"label": labels, "pixels": PIXELS}})
    columns = read_h5(tmp_path / "a")["train"].columns
    assert columns["label"] == [3, 61]
    np.testing.assert_array_equal(columns["image"], np.rint(255 * PIXELS).astype(np.uint8))
    assert columns["image"][0].dtype == np.uint8

    photo = np.arange(32 * 32 * 3).reshape(1, 32, 32, 3).astype(np.uint8)
    fields = {"coarse_label": np.array([1]), "image": photo, "label": np.array([99])}
    write(tmp_path / "b/fed_cifar100_test.h5", {"7": fields})
    columns = read_h5(tmp_path / "b")["test"].columns
    np.testing.assert_array_equal(columns["image"], photo)
    assert (columns["label"], columns["client"]) == ([99], ["7"])


def test_a_named_data_set_from_h5(tmp_path):
    roles = {"HAMLET": 3, "OPHELIA": 2}
    write(tmp_path / "shakespeare_train.h5", speeches(roles))
    write(tmp_path / "shakespeare_test.h5", speeches({"HAMLET": 1, "GHOST": 1}))
    data = fp.load_dataset("shakespeare", source=tmp_path, vocabulary=20, max_length=8)
    assert len(data["train"]) == 5
    clients = fp.partition.natural(data["train"])
    assert (clients.names, clients.sizes.tolist()) == (("HAMLET", "OPHELIA"), [3, 2])
    assert set(data["test"].meta["client"]) == {"HAMLET", "GHOST"}


def test_only_the_drawn_users_are_read(tmp_path, monkeypatch):
    sizes = {f"role {i:02d}": 1 + i % 5 for i in range(40)}
    write(tmp_path / "shakespeare_train.h5", speeches(sizes))
    write(tmp_path / "shakespeare_test.h5", speeches(dict.fromkeys([*sizes][:30], 1)))
    write(tmp_path / "shakespeare_held_out.h5", speeches({"another": 1}))
    read = []
    values = h5py.Dataset.__getitem__
    monkeypatch.setattr(
        h5py.Dataset, "__getitem__", lambda self, key: read.append(self) or values(self, key)
    )
    splits = read_h5(tmp_path, users=4, user_examples=3, seed=1)
    assert len(read) == 8
    drawn = set(splits["train"].columns["client"])
    assert drawn == set(splits["test"].columns["client"])
    assert splits.keys() == {"train", "test"}
    assert len(drawn) == 4
    assert all(sizes[name] >= 3 and name in [*sizes][:30] for name in drawn)

    def again(users, seed):
        splits = read_h5(tmp_path, users=users, user_examples=3, seed=seed)
        return {*splits["train"].columns["client"]}

    assert again(9, 1) > drawn != again(4, 2)
    options = {"source": tmp_path, "users": 4, "user_examples": 3, "seed": 1}
    data = fp.load_dataset("shakespeare", vocabulary=20, **options)
    assert {*data["train"].meta["client"]} == {*data["test"].meta["client"]} == drawn
    with pytest.raises(fp.InputError, match=r"at least 5 training examples .* there are 6 "):
        read_h5(tmp_path, users=7, user_examples=5)


def test_truncated_and_foreign_files(tmp_path):
    path = tmp_path / "train.h5"
    labels = np.array([0, 1])
    write(path, {f"c{i}": {"label": labels, "pixels": PIXELS} for i in range(3)})
    whole = path.read_bytes()
    assert read_h5(tmp_path)["train"].columns["label"] == [0, 1] * 3
    for size in (0, 7, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        refused(r"train\.h5 cannot be read as an HDF5 file", read_h5, tmp_path)
    path.write_bytes(b'{"a": {"tokens": []}}')
    refused("cannot be read as an HDF5 file", read_h5, tmp_path)
    assert read_h5(tmp_path / "nothing") is None
    write(tmp_path / "other_train.h5", {})
    refused(r"several files .*: other_train\.h5, train\.h5", read_h5, tmp_path)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"score": np.array([1])}, "has the fields score, and none of tokens"),
        ({"tokens": np.float32(1)}, "has no list 'tokens'"),
        ({"tokens": np.array([b"\xff\xfe"])}, "a text that is not UTF-8"),
        ({"pixels": PIXELS, "label": np.array([1])}, r"labels of shape \[1\] .* for 2 examples"),
        ({"pixels": PIXELS, "label": np.array([0.5, 1.0])}, "labels of shape .* float64"),
        ({"pixels": 2 * PIXELS}, "pixels are from 0 to 1"),
        ({"pixels": PIXELS.astype(complex)}, "neither numbers nor a list of texts"),
        ({"tokens": np.array([[b"a"]])}, "neither numbers nor a list of texts"),
        ({"tokens": ids([5, 6, 7], [8])}, "neither numbers nor a list of texts"),
    ],
)
def test_damaged_clients(tmp_path, fields, message):
    write(tmp_path / "train.h5", {"one": fields})
    refused(f"the client 'one'.*{message}", read_h5, tmp_path)


def of_another_form(kind, file, secret):
    """Fills a file that is not of this form, or that points to another place."""
    if kind == "other group":
        file["data"] = [1]
    elif kind == "array":
        file["examples"] = [1]
    elif kind == "array of a client":
        file["examples/one"] = [1]
    elif kind == "external examples":
        file["examples"] = h5py.ExternalLink(str(secret), "/examples")
    elif kind == "external client":
        link = h5py.ExternalLink(str(secret), "/examples/private")
        file.create_group("examples")["one"] = link
    elif kind == "soft link":
        file["examples/one/tokens"] = h5py.SoftLink("/examples/one")
    elif kind == "external array":
        places = [(str(secret), 0, 8)]
        file.create_group("examples/one").create_dataset("pixels", (8,), "u1", external=places)
    else:
        layout = h5py.VirtualLayout((1,), "u1")
        layout[0] = h5py.VirtualSource(str(secret), "x", (1,))[0]
        file.create_group("examples/one").create_virtual_dataset("pixels", layout)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("other group", "no group 'examples' .* only: data"),
        ("array", "no group 'examples'"),
        ("array of a client", "no group 'one'"),
        ("external examples", "no group 'examples' of its own"),
        ("external client", "no group 'one' of its own"),
        ("soft link", "no dataset 'tokens' of its own"),
        ("external array", "in another file"),
        ("virtual array", "in another file"),
    ],
)
def test_no_file_of_another_form_or_that_reads_another_one(tmp_path, kind, message):
    write(tmp_path / "secret" / "secret.h5", speeches({"private": 1}))
    with h5py.File(tmp_path / "train.h5", "w") as file:
        of_another_form(kind, file, tmp_path / "secret" / "secret.h5")
    refused(message, read_h5, tmp_path)


def test_a_file_without_examples(tmp_path):
    write(tmp_path / "train.h5", {"one": {"tokens": texts()}})
    refused("has no examples", read_h5, tmp_path)


@pytest.mark.parametrize("shape", [(10**9, 28, 28), (10**7,)])
def test_an_array_that_the_file_does_not_hold(tmp_path, shape):
    with h5py.File(tmp_path / "train.h5", "w") as file:
        group = file.create_group("examples/one")
        group.create_dataset("pixels", shape, "f4", chunks=True)
    refused(r"claims [\d,]+ bytes of 'pixels', but the file has 0", read_h5, tmp_path)


def test_an_array_that_memory_does_not_hold(tmp_path, monkeypatch):
    with h5py.File(tmp_path / "train.h5", "w") as file:
        group = file.create_group("examples/one")
        zeros = np.zeros((500, 28, 28), np.float32)
        group.create_dataset("pixels", data=zeros, compression="gzip")
    assert len(read_h5(tmp_path)["train"]) == 500
    monkeypatch.setattr("fedjax_peft.support.memory.available", lambda: 10**6)
    refused(r"'pixels' of shape \[500, 28, 28\], needs .* fewer user", read_h5, tmp_path)


def test_without_h5py(tmp_path, monkeypatch):
    write(tmp_path / "train.h5", speeches({"one": 1}))
    monkeypatch.setitem(__import__("sys").modules, "h5py", None)
    refused(r"pip install 'h5py", read_h5, tmp_path)
