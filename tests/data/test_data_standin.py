"""Stand-ins have the form of their data set and are made from a seed only."""

from itertools import pairwise

import numpy as np
import pytest
from internals import DATASETS, Reading, load_tables

import fedjax_peft as fp

NAMES = [name for name, entry in DATASETS.items() if not entry.parts]


@pytest.mark.parametrize("name", NAMES)
def test_stand_ins_have_the_form_of_their_data_set(stand_in_tokenizer, name):
    entry = DATASETS[name]
    # The words of another template are none of the tokenizer's.
    task = fp.tasks.find(entry.task)()
    talks = "messages" in task.encoder.columns
    template = {"template": "{prompt} "} if talks else {}
    data = fp.load_dataset(name, tokenizer=stand_in_tokenizer, source="tiny", **template)
    least = {"train": 120, "test": 40} | ({} if entry.validation is None else {"validation": 40})
    assert data.keys() == least.keys()
    assert all(len(data[part]) >= n for part, n in least.items())
    for part in data.values():
        assert part.task.name == entry.task
        assert talks or part.task == task
        assert part.name == name
        for key, values in entry.keys.items():
            assert len(set(part.meta[key])) == (len(values) or 30)
        if "input_ids" in part.columns:
            assert part.columns["input_ids"].shape[1] == (96 if talks else 24)
            unknown = stand_in_tokenizer.unk_token_id
            assert not np.any(part.columns["input_ids"] == unknown)
        if "labels" in part.columns:
            names = entry.label_names or part.label_names
            assert part.label_names == names
            labels = part.labels
            assert set(labels[labels >= 0]) == set(range(len(names)))
        if entry.shape:
            channels = (*entry.shape, 1)[2]
            assert part.columns["pixel_values"].shape[1:] == (channels, *entry.shape[:2])


@pytest.mark.parametrize("name", ["mnli", "wnut17", "squad", "shakespeare", "emnist"])
def test_rows_follow_from_the_seed(name):
    def rows(seed, part="train"):
        table = load_tables(name, Reading(source="tiny", seed=seed))[1][part]
        return {column: np.array(values).tolist() for column, values in table.columns.items()}

    assert rows(0) == rows(0)
    assert rows(0) != rows(1)
    assert rows(0) != rows(0, "test")


def tiny(name, seed=0):
    return load_tables(name, Reading("tiny", seed))[1]


def test_every_kind_can_be_learned():
    tables = {name: tiny(name) for name in ("rte", "wnut17", "squad")}
    seen = {}
    for table in tables["rte"].values():  # the first word tells the class
        for text, label in zip(table.columns["text"], table.columns["label"], strict=True):
            assert seen.setdefault(text.split()[0], label) == label
    seen = {}
    for table in tables["wnut17"].values():
        for words, tags in zip(table.columns["tokens"], table.columns["tags"], strict=True):
            for word, tag in zip(words, tags, strict=True):
                assert seen.setdefault(word, tag) == tag
    columns = tables["squad"]["test"].columns
    for question, context, (answer,), (start,) in zip(
        *(columns[name] for name in ("question", "context", "answers", "answer_starts")),
        strict=True,
    ):
        words = context.split()
        assert words[words.index(question) + 1] == answer
        assert context[start:].split()[0] == answer


def test_words_and_pictures_do_not_change_with_the_seed():
    follows = {}
    pictures = {}
    for seed in range(2):
        for text in tiny("shakespeare", seed)["train"].columns["text"]:
            words = text.split()
            for a, b in pairwise(words):
                assert follows.setdefault(a, b) == b
        columns = tiny("cifar10", seed)["train"].columns
        for image, label in zip(columns["image"], columns["label"], strict=True):
            bright = (image >= 128).tobytes()
            assert pictures.setdefault(label, bright) == bright
    assert len(follows) == 59
    assert len(set(pictures.values())) == 10
