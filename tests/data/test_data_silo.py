"""The GLUE silo: sizes and shares of its two splits, and the combined columns."""

from collections import Counter

import numpy as np
import pytest
from closeness import approx
from internals import Table
from refusals import refused

import fedjax_peft as fp
from fedjax_peft.data.silo import divide

TASKS = ("rte", "mrpc", "sst2", "qnli", "qqp", "mnli")


def table(n, share=0.3, start=0):
    """Returns n numbered rows, of which ``share`` have the label yes."""
    labels = ["yes" if i < share * n else "no" for i in range(n)]
    return Table("rows", {"text": [str(start + i) for i in range(n)], "label": labels})


def tables(train, test):
    return {"train": table(train), "test": table(test, start=train)}


def share(part):
    return Counter(part.columns["label"])["yes"] / len(part)


@pytest.mark.parametrize(
    ("rule", "train", "test", "sizes"),
    [
        ("6:2:2", 3668, 408, (2445, 815, 816)),  # MRPC
        ("6:2:2", 9000, 500, (2445, 815, 816)),
        ("6:2:2", 2490, 277, (1660, 553, 554)),  # RTE
        ("fedpetuning", 3668, 408, (3668, 204, 204)),
        ("fedpetuning", 2490, 277, (2490, 138, 139)),
        ("fedpetuning", 9000, 5000, (3668, 204, 204)),
    ],
)
def test_sizes_and_shares(rule, train, test, sizes):
    parts = divide("rte", tables(train, test), rule, 0)
    assert list(parts) == ["train", "validation", "test"]
    assert tuple(map(len, parts.values())) == sizes
    rows = [text for part in parts.values() for text in part.columns["text"]]
    assert len(rows) == len(set(rows))
    for part in parts.values():
        assert share(part) == approx(0.3, abs=1 / len(part) + 0.001)
    if rule == "fedpetuning":
        assert all(int(text) < train for text in parts["train"].columns["text"])
        assert all(int(text) >= train for text in parts["test"].columns["text"])


def test_rows_follow_from_seed_and_task():
    def rows(task, seed):
        return divide(task, tables(500, 50), "6:2:2", seed)["train"].columns["text"]

    assert rows("rte", 0) == rows("rte", 0)
    assert rows("rte", 0) != rows("rte", 1)
    assert rows("rte", 0) != rows("mrpc", 0)


def test_six_tasks_are_one_data_set(stand_in_tokenizer):
    data = fp.load_dataset(
        "glue_silo", tokenizer=stand_in_tokenizer, source="tiny", test_examples=5
    )
    assert list(data) == ["train", "validation", "test"]
    train = data["train"]
    assert dict(Counter(train.meta["task"].tolist())) == dict.fromkeys(TASKS, 96)
    assert Counter(data["test"].meta["task"].tolist()) == dict.fromkeys(TASKS, 5)
    assert set(train.columns["classes"][train.meta["task"] == "mnli"]) == {3}
    assert set(train.columns["classes"][train.meta["task"] != "mnli"]) == {2}
    assert np.all(train.labels < train.columns["classes"])
    cut = fp.load_dataset(
        "glue_silo", tokenizer=stand_in_tokenizer, source="tiny", split="fedpetuning"
    )
    assert [len(x) for x in cut.values()] == [720, 120, 120]


def test_a_folder_for_each_task(tmp_path, stand_in_tokenizer, monkeypatch):
    names = {"sst2": ("sentence",), "qnli": ("question", "sentence")}
    names |= dict.fromkeys(("mrpc", "rte"), ("sentence1", "sentence2"))
    names |= {"qqp": ("question1", "question2"), "mnli": ("premise", "hypothesis")}
    for task, columns in names.items():
        (tmp_path / "glue_silo" / task).mkdir(parents=True)
        dev = "validation_matched" if task == "mnli" else "dev"
        for split in ("train", dev):
            lines = [",".join([*columns, "label"]), *(f"{','.join('w1' for _ in columns)},1",) * 10]
            (tmp_path / "glue_silo" / task / f"{split}.csv").write_text("\n".join(lines))
    options = {"tokenizer": stand_in_tokenizer, "max_length": 8}
    data = fp.load_dataset("glue_silo", source=str(tmp_path / "glue_silo"), **options)
    assert [len(x) for x in data.values()] == [6 * 12, 6 * 4, 6 * 4]
    monkeypatch.setenv("FEDJAX_PEFT_DATA", str(tmp_path))
    again = fp.load_dataset("glue_silo", **options)
    np.testing.assert_array_equal(again["test"].labels, data["test"].labels)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("glue_silo", {"split": "fedpetunning"}, "split = 'fedpetunning' .*mean 'fedpetuning'"),
        ("glue_silo", {"clusters": 3}, "clusters = 3 means nothing to the data set 'glue_silo'"),
        ("glue_silo", {"doc_stride": 8}, "doc_stride = 8 means nothing"),
        ("glue_silo", {"template": "plain"}, "template = 'plain' means nothing"),
        ("rte", {"split": "fedpetuning"}, "split = 'fedpetuning' means nothing"),
        ("rte", {"doc_stride": 8}, "doc_stride = 8 means nothing"),
    ],
)
def test_rules_and_options_of_other_data_sets_are_refused(
    name, options, message, stand_in_tokenizer
):
    refused(message, fp.load_dataset, name, tokenizer=stand_in_tokenizer, source="tiny", **options)
