"""A table of one's own, from a config: one file, any column names, paths beside the config."""

import csv

import pytest

from fedjax_peft import testing
from fedjax_peft.config import config
from fedjax_peft.data import load_dataset
from fedjax_peft.errors import InputError
from fedjax_peft.models.hub import load_tokenizer

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
    """The tiny checkpoint's."""
    return load_tokenizer(testing.write_tiny_checkpoint(tmp_path_factory.mktemp("model")))


@pytest.fixture
def load(tokenizer):
    """``load_dataset`` with the tiny tokenizer and the review's columns."""

    def call(path, columns=COLUMNS, **options):
        return load_dataset(
            str(path), tokenizer=tokenizer, max_length=8, columns=columns, **options
        )

    return call


def test_one_file(load, tmp_path):
    """It is split by a seed; columns are renamed, further ones are keys."""
    path = write_csv(tmp_path / "x.csv")
    data = load(path, test_share=0.25)
    assert (len(data["train"]), len(data["test"])) == (30, 10)
    assert data["train"].label_names == ("0", "1", "2")
    assert set(data["train"].meta["who"]) == {f"user {i}" for i in range(4)}
    same, other = load(path, test_share=0.25), load(path, test_share=0.25, seed=1)
    rows = [d["test"].columns["input_ids"].tolist() for d in (data, same, other)]
    assert rows[0] == rows[1] != rows[2]
    assert len(load(path)["test"]) == 8, "a fifth, as of all.csv"


def test_a_training_split_alone(load, tmp_path):
    """Needs a share to test on, and the message says so."""
    write_csv(tmp_path / "train.csv")
    with pytest.raises(InputError, match=r"split 'test'.*test_share = 0\.2"):
        load(tmp_path)
    assert len(load(tmp_path, test_share=0.1)["test"]) == 4
    write_csv(tmp_path / "test.csv")
    with pytest.raises(InputError, match=r"has one: .*test\.csv.*Leave test_share out"):
        load(tmp_path, test_share=0.1)


def test_columns_that_are_not_there(load, tmp_path):
    """The nearest one is named, and a missing one says how to map another."""
    path = write_csv(tmp_path / "x.csv")
    with pytest.raises(InputError, match=r"Did you mean 'review'\?"):
        load(path, {"text": "revew", "label": "stars"})
    with pytest.raises(InputError, match=r"neither.*only: review.*columns = \{text = .*label"):
        load(path, None)
    with pytest.raises(InputError, match=r"no column 'text', only: .*columns = \{text = "):
        load(path, {"label": "stars"})


@pytest.mark.parametrize("share", [0.0, 1.0, -0.2])
def test_a_share_is_between_0_and_1(load, tmp_path, share):
    """Nobody trains on nothing."""
    with pytest.raises(InputError, match="between 0 and 1"):
        load(write_csv(tmp_path / "x.csv"), test_share=share)


@pytest.mark.parametrize(
    ("name", "complaint"), [("x.xlsx", "must end in .json"), ("y.csv", "looked for in")]
)
def test_files_that_cannot_be_read(load, tmp_path, name, complaint):
    """By their endings, or because they are not there."""
    (tmp_path / "x.xlsx").touch()
    with pytest.raises(InputError, match=complaint):
        load(tmp_path / name)


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


@pytest.mark.parametrize("where", ["config", "working", "override"])
def test_paths_of_a_config(tmp_path, monkeypatch, where):
    """Beside the config first, then in the working directory; an override: in that only."""
    here, there = tmp_path / "here", tmp_path / "there"
    there.mkdir()
    place = there if where == "config" else here
    testing.write_tiny_checkpoint(place / "model")
    write_csv(place / "x.csv")
    given = "nowhere.csv" if where == "override" else "x.csv"
    (there / "config.toml").write_text(CONFIG.format(model="model", data=given))
    here.mkdir(exist_ok=True)
    monkeypatch.chdir(here)
    overrides = ["data.name=x.csv"] if where == "override" else []
    (raw,) = config.methods(config.load("../there/config.toml"), overrides).values()
    resolved = config.resolve(raw)
    if where != "working":  # as before: it may also be the name of something
        assert resolved["data"]["name"] == str(place / "x.csv")
    data, clients = config.federation(resolved)
    assert len(data["train"]) == 32
    assert len(clients) == 4


def test_what_is_beside_a_config_hides_no_data_set(tmp_path):
    """A named data set goes before a folder of that name."""
    (tmp_path / "sst2").mkdir()
    (tmp_path / "c.toml").write_text('data = "sst2"\nmethods.a.model = "sst2"\n')
    raw = config.load(tmp_path / "c.toml")
    assert raw["data"]["name"] == "sst2"
    assert raw["methods"]["a"]["model"]["name"] == "sst2"
