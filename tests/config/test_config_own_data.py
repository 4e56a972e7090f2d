"""A user's table in a config: one file, any column names, paths relative to the config."""

import contextlib
import csv

import numpy as np
import pytest
from internals import config, save_checkpoint, sweeps
from refusals import refused
from small_config import small

import fedjax_peft as fp
from fedjax_peft import testing
from fedjax_peft.config.federation import load_data

ROWS = [(f"w{i} w{i % 7}", i % 3, f"user {i % 4}") for i in range(40)]


def write_csv(path, header=("review", "stars", "who"), rows=ROWS):
    """Writes a table of reviews."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([header, *rows])
    return path


COLUMNS = {"text": "review", "label": "stars"}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """The tokenizer of the tiny checkpoint."""
    return fp.load_tokenizer(testing.write_tiny_checkpoint(tmp_path_factory.mktemp("model")))


@pytest.fixture
def load(tokenizer):
    """``load_dataset`` with the tiny tokenizer and the review's columns."""

    def call(path, columns=COLUMNS, **options):
        return fp.load_dataset(
            str(path), tokenizer=tokenizer, max_length=8, columns=columns, **options
        )

    return call


def test_one_file(load, tmp_path):
    """The rows are split by a seed, columns are renamed, and further columns are keys."""
    path = write_csv(tmp_path / "x.csv")
    data = load(path, test_share=0.25)
    assert (len(data["train"]), len(data["test"])) == (30, 10)
    assert data["train"].label_names == ("0", "1", "2")
    assert set(data["train"].meta["who"]) == {f"user {i}" for i in range(4)}
    same, other = load(path, test_share=0.25), load(path, test_share=0.25, seed=1)
    rows = [d["test"].columns["input_ids"].tolist() for d in (data, same, other)]
    assert rows[0] == rows[1] != rows[2]
    assert len(load(path)["test"]) == 8, "by default a fifth"


def test_a_training_split_alone(load, tmp_path):
    """A training split without a test split needs ``test_share``, which the error says."""
    write_csv(tmp_path / "train.csv")
    refused(r"split 'test'.*test_share = 0\.2", load, tmp_path)
    assert len(load(tmp_path, test_share=0.1)["test"]) == 4
    write_csv(tmp_path / "test.csv")
    refused(r"has one: .*test\.csv.*Leave test_share out", load, tmp_path, test_share=0.1)


@pytest.mark.parametrize(
    ("name", "options", "complaint"),
    [
        ("x.csv", {"columns": {"text": "revew", "label": "stars"}}, r"Did you mean 'review'\?"),
        ("x.csv", {"columns": None}, r"no column 'text', only: review.*columns = \{text = .*label"),
        ("x.csv", {"columns": {"label": "stars"}}, r"no column 'text', only: .*\{text = "),
        *(("x.csv", {"test_share": share}, "between 0 and 1") for share in (0.0, 1.0, -0.2)),
        ("x.xlsx", {}, "must end in .json"),
        ("y.csv", {}, "looked for in"),
    ],
)
def test_tables_that_cannot_be_read(load, tmp_path, name, options, complaint):
    """The error names the nearest column, or says how to map another one."""
    write_csv(tmp_path / "x.csv")
    (tmp_path / "x.xlsx").touch()
    refused(complaint, load, tmp_path / name, **options)


CONFIG = """
rounds = 1
model = "{model}"
partition = {{ name = "natural", by = "who" }}
optimizer = {{ name = "adamw", learning_rate = 1e-3 }}

[data]
name = "{data}"
columns = {{ text = "review", label = "stars" }}
test_share = 0.2
max_length = 8
"""


@pytest.mark.parametrize("where", ["config", "working", "override", "override beside"])
def test_paths_of_a_config(tmp_path, monkeypatch, where):
    """A path is searched beside the config, then in the working directory.

    The path of an override is searched in the working directory, then beside the config.
    """
    here, there = tmp_path / "here", tmp_path / "there"
    there.mkdir()
    place = here if where in ("working", "override") else there
    testing.write_tiny_checkpoint(place / "model")
    write_csv(place / "x.csv")
    given = "nowhere.csv" if "override" in where else "x.csv"
    (there / "config.toml").write_text(CONFIG.format(model="model", data=given))
    here.mkdir(exist_ok=True)
    monkeypatch.chdir(here)
    overrides = ["data.name=x.csv"] if "override" in where else []
    (raw,) = config.methods(*sweeps.read("../there/config.toml", overrides)).values()
    resolved = config.resolve(raw)
    if where != "working":  # the relative path is unchanged, because it can also be a name
        assert resolved["data"]["name"] == str(place / "x.csv")
    data, clients = config.federation(resolved)
    assert len(data["train"]) == 32
    assert len(clients) == 4


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("data=x.csv", 'data="{there}/x.csv"'),
        ("data.name='x.csv'", 'data.name="{there}/x.csv"'),
        ("data={name='x.csv', max_length=4}", 'data={{name = "{there}/x.csv", max_length = 4}}'),
        ("data.name=x.csv,both.csv", 'data.name="{there}/x.csv","{here}/both.csv"'),
        ("methods.a.b.model=model", 'methods.a.b.model="{there}/model"'),
        ("methods.a.b.algorithm.name=own:f", 'methods.a.b.algorithm.name="{there}/own.py:f"'),
        ("transforms=own:f", 'transforms={{"{there}/own.py:f" = {{}}}}'),
        ("transforms.own:f.share=0.1", "transforms.{there}/own.py:f.share=0.1"),
        # Nothing is found, or there is nothing to find.
        ("data=none.csv", "data=none.csv"),
        ("transforms=clip", "transforms=clip"),
        ("data.source=hub", "data.source=hub"),
        ("seed=0..4", "seed=0..4"),
        ("data.name=", "data.name="),
        ("data", "data"),
    ],
)
def test_paths_of_overrides(tmp_path, monkeypatch, text, expected):
    """They are completed in the working directory, then beside the config; others stay."""
    here, there = tmp_path / "here", tmp_path / "there"
    for folder, names in ((here, ["both.csv"]), (there, ["both.csv", "x.csv", "model", "own.py"])):
        folder.mkdir()
        for name in names:
            (folder / name).touch()
    (there / "config.toml").write_text("[methods.'a.b']\nrounds = 1\n")
    monkeypatch.chdir(here)
    assert sweeps.read(there / "config.toml", [text])[1] == [
        expected.format(here=here, there=there)
    ]


def test_names_of_data_sets_take_precedence_over_folders(tmp_path):
    """``sst2`` is the data set, even if a folder with this name lies beside the config."""
    (tmp_path / "sst2").mkdir()
    (tmp_path / "c.toml").write_text('data = "sst2"\nmethods.a.model = "sst2"\n')
    raw = config.load(tmp_path / "c.toml")
    assert raw["data"]["name"] == "sst2"
    assert raw["methods"]["a"]["model"]["name"] == "sst2"


def test_a_config_reads_labels_by_the_names_that_it_lists(tmp_path):
    """And it gives classes that a checkpoint's head does not know a head of their own."""
    checkpoint = testing.write_tiny_checkpoint(tmp_path / "model")
    model = testing.tiny_model(3, seed=1)
    values = {**model.frozen, **model.trainable}
    save_checkpoint(values, model.config, checkpoint, ("1", "2", "other"))
    write_csv(tmp_path / "x.csv")
    tables = {
        "model": {"name": str(checkpoint)},
        "data": {"name": str(tmp_path / "x.csv"), "columns": COLUMNS, "max_length": 8},
    }
    tables["data"]["label_names"] = ["poor", "fair", "good"]
    resolved = config.resolve(small(**tables))
    names = load_data(resolved)["train"].label_names
    assert names == ("poor", "fair", "good")
    kernels = []
    for fresh, message in ((None, "which get the names poor, fair, good"), (True, None)):
        resolved["model"]["fresh_head"] = fresh
        with pytest.warns(UserWarning, match=message) if message else contextlib.nullcontext():
            kernels.append(config.build_model(resolved, names).trainable["classifier.kernel"])
    np.testing.assert_array_equal(kernels[0], model.trainable["classifier.kernel"])
    assert not np.array_equal(*kernels)
    with pytest.raises(
        fp.InputError, match=r"'poor', and the head in .*fresh_head = true of .model"
    ):
        config.build_model(config.resolve(small(**tables)), ("1", "2", "poor"))
