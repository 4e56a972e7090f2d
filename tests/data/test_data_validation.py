"""Validation splits: the source's own one, or a share of the training rows."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from internals import DATASETS, TEXT, Reading, Table, load_tables

import fedjax_peft as fp
from fedjax_peft.data.encoders.base import Encoder
from fedjax_peft.data.encoders.spans import SPANS
from fedjax_peft.data.held_out import hold_out_validation

OFFICIAL = {"wnut17"}
SINGLE = [name for name, entry in DATASETS.items() if not entry.parts]
ROW_ONLY = Encoder(columns=("text",), encode=None)


def rows_of(table):
    return list(zip(*table.columns.values(), strict=True))


@pytest.mark.parametrize("name", SINGLE)
def test_every_data_set_has_a_validation_split(name):
    _, plain = load_tables(name, Reading(source="tiny"))
    if name in OFFICIAL:
        assert list(plain) == ["train", "validation", "test"]
        with pytest.raises(fp.InputError, match=r"'wnut17' has one: .* Leave validation_share out"):
            load_tables(name, Reading(source="tiny", validation_share=0.1))
        return
    assert list(plain) == ["train", "test"]
    entry, split = load_tables(name, Reading(source="tiny", validation_share=0.1))
    assert list(split) == ["train", "validation", "test"]
    n = len(plain["train"])
    assert len(split["validation"]) == round(n / 10)
    assert len(split["train"]) + len(split["validation"]) == n
    assert str(split["test"].columns) == str(plain["test"].columns)
    assert entry.label_names == (DATASETS[name].label_names or plain["train"].label_names)


def test_glue_silo_has_its_own(stand_in_tokenizer):
    options = {"tokenizer": stand_in_tokenizer, "source": "tiny"}
    data = fp.load_dataset("glue_silo", **options, validation_examples=4)
    tasks = Counter(data["validation"].meta["task"].tolist())
    assert tasks == dict.fromkeys(DATASETS["glue_silo"].parts, 4)
    with pytest.raises(fp.InputError, match="'glue_silo' has one: its split '6:2:2'"):
        fp.load_dataset("glue_silo", source="tiny", validation_share=0.1)


@settings(max_examples=60, deadline=None)
@given(
    labels=st.lists(st.sampled_from("abcde"), min_size=8, max_size=80),
    share=st.floats(0.13, 0.6),
    seed=st.integers(0, 5),
)
def test_a_share_is_stratified_disjoint_and_complete(labels, share, seed):
    table = Table("t", {"text": [str(i) for i in range(len(labels))], "label": labels})
    found = hold_out_validation(table, TEXT, seed, share)
    train, validation = rows_of(found["train"]), rows_of(found["validation"])
    assert sorted(train + validation) == sorted(rows_of(table))
    assert [int(text) for text, _ in train] == sorted(int(text) for text, _ in train)
    held, all_rows = Counter(label for _, label in validation), Counter(labels)
    for label, n in all_rows.items():
        assert abs(held[label] - share * n) < 1 or held[label] == n - 1
        assert held[label] < n, "every class can still be learned"
    if all(n > 3 for n in all_rows.values()):
        assert len(validation) == round(share * len(labels))
    assert rows_of(hold_out_validation(table, TEXT, seed, share)["validation"]) == validation


def test_seeds_draw_different_rows():
    table = Table("t", {"text": [str(i) for i in range(60)]})
    drawn = {
        tuple(rows_of(hold_out_validation(table, ROW_ONLY, s, 0.2)["validation"])) for s in range(5)
    }
    assert len(drawn) == 5
    assert {len(rows) for rows in drawn} == {12}


@settings(max_examples=40, deadline=None)
@given(
    contexts=st.lists(st.integers(0, 9), min_size=12, max_size=60).filter(lambda x: len({*x}) > 3),
    seed=st.integers(0, 5),
)
def test_questions_on_one_context_stay_together(contexts, seed):
    columns = {
        "id": [str(i) for i in range(len(contexts))],
        "context": [f"context {i}" for i in contexts],
    }
    try:
        found = hold_out_validation(Table("t", columns), SPANS, seed, 0.4)
    except fp.InputError:  # one context has most of the questions
        assert max(Counter(contexts).values()) > 0.4 * len(contexts)
        return
    of = {part: {*table.columns["context"]} for part, table in found.items()}
    assert not of["train"] & of["validation"]
    assert sum(map(len, found.values())) == len(contexts)
    largest = max(Counter(contexts).values())
    assert abs(len(found["validation"]) - 0.4 * len(contexts)) <= largest


def test_each_source_gives_its_share():
    sources = ["x"] * 30 + ["y"] * 10
    table = Table("t", {"id": [*range(40)], "context": [*map(str, range(40))], "source": sources})
    held = hold_out_validation(table, SPANS, 0, 0.2)["validation"].columns["source"]
    assert Counter(held) == {"x": 6, "y": 2}


def test_the_end_of_each_client_s_rows_is_held_out():
    clients = ["b", "a", "b", "a", "b", "a", "b", "a", "b", "b", "c"]
    table = Table("t", {"text": [*"0123456789x"], "client": clients, "label": ["0"] * 11})
    for seed in range(4):
        found = hold_out_validation(table, TEXT, seed, 0.5)
        assert found["validation"].columns["text"] == ["5", "6", "7", "8", "9"]
        assert found["train"].columns["text"] == ["0", "1", "2", "3", "4", "x"]


def test_small_clients_give_a_row_here_and_there():
    clients = [str(i // 4) for i in range(120)]
    table = Table("t", {"text": [*map(str, range(120))], "client": clients})
    held = hold_out_validation(table, ROW_ONLY, 0, 0.1)["validation"]
    assert Counter(held.columns["client"]).most_common(1)[0][1] == 1
    assert len(held) == 12
    assert {int(text) % 4 for text in held.columns["text"]} == {3}


def test_a_share_of_the_drawn_users():
    options = {"source": "tiny", "users": 10, "user_examples": 4}
    _, whole = load_tables("shakespeare", Reading(**options))
    _, found = load_tables("shakespeare", Reading(**options, validation_share=0.25))
    assert {*found["validation"].columns["client"]} == {*whole["train"].columns["client"]}
    assert sorted(rows_of(found["train"]) + rows_of(found["validation"])) == sorted(
        rows_of(whole["train"])
    )
    assert rows_of(found["test"]) == rows_of(whole["test"])


def test_a_share_follows_the_test_rows(tmp_path):
    (tmp_path / "all.jsonl").write_text(
        "".join(f'{{"text": "t{i}", "label": {i % 2}, "client": "one"}}\n' for i in range(20))
    )
    _, found = load_tables(str(tmp_path), Reading(test_share=0.25, validation_share=0.2))
    numbers = [
        [int(t[1:]) for t in found[x].columns["text"]] for x in ("train", "validation", "test")
    ]
    assert numbers == [[*range(12)], [12, 13, 14], [*range(15, 20)]]


def test_tags_with_validation_rows_only_are_known(tmp_path):
    tags = ['["O", "B-X"]'] * 7 + ['["O", "B-Y"]']
    lines = [f'{{"tokens": ["w1", "w2"], "tags": {tag}}}\n' for tag in tags]
    (tmp_path / "train.jsonl").write_text("".join(lines))
    (tmp_path / "test.jsonl").write_text(lines[0])
    held = []
    for seed in range(6):
        entry, found = load_tables(str(tmp_path), Reading(seed=seed, validation_share=0.4))
        assert entry.label_names == ("O", "B-X", "I-X", "B-Y", "I-Y")
        held.append(["O", "B-Y"] in found["validation"].columns["tags"])
    assert len({*held}) == 2


def test_examples_are_drawn_from_the_split(stand_in_tokenizer):
    options = {"tokenizer": stand_in_tokenizer, "source": "tiny", "max_length": 24}
    data = fp.load_dataset("sst2", **options, validation_share=0.2, validation_examples=7)
    assert {part: len(x) for part, x in data.items()} == {"train": 96, "validation": 7, "test": 40}
    with pytest.raises(fp.InputError, match=r"validation_examples = 7 .* validation_share = 0.1"):
        fp.load_dataset("sst2", **options, validation_examples=7)
    whole = fp.load_dataset("sst2", **options)
    assert list(whole) == ["train", "test"]
    assert len(whole["train"]) == 120
    ids = whole["train"].columns["input_ids"]
    assert np.isin(data["train"].columns["input_ids"], ids).all()


def test_impossible_shares_are_refused():
    for share in (0.0, 1.0, -0.1):
        with pytest.raises(
            fp.InputError, match=r"validation_share = .* between 0 and 1, such as 0.1"
        ):
            load_tables("sst2", Reading(source="tiny", validation_share=share))
    table = Table("few.csv", {"text": [*"abc"], "label": [*"xyz"]})
    with pytest.raises(fp.InputError, match=r"validation_share = 0.1 .* few.csv .* larger share"):
        hold_out_validation(table, TEXT, 0, 0.1)
