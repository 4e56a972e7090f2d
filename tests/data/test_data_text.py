"""Tokenisation and its cache, with a vocabulary of six words."""

import numpy as np
import pytest
from internals import cache_dir, text, tokenize
from refusals import refused
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "red", "green"]


def make_tokenizer(words=WORDS, **options):
    vocab = {word: i for i, word in enumerate(words)}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    options = {"pad_token": "[PAD]", "unk_token": "[UNK]", **options}
    names = ["input_ids", "token_type_ids", "attention_mask"]
    return PreTrainedTokenizerFast(tokenizer_object=backend, model_input_names=names, **options)


@pytest.fixture
def encodings(monkeypatch):
    """Counts tokenisations that were not read from the cache."""
    calls = []
    encode = text._encode
    monkeypatch.setattr(text, "_encode", lambda *args: calls.append(1) or encode(*args))
    return calls


def cached():
    return sorted((cache_dir() / "tokens").iterdir())


def test_columns():
    left = tokenize(make_tokenizer(padding_side="left"), ["red"], max_length=4)
    assert left["input_ids"].tolist() == [[2, 4, 3, 0]], "padding is always on the right"
    assert tokenize(make_tokenizer(), [], max_length=4)["input_ids"].shape == (0, 4)
    columns = tokenize(make_tokenizer(), ["red green", "blue", "red red red red"], max_length=5)
    assert columns["input_ids"].tolist() == [[2, 4, 5, 3, 0], [2, 1, 3, 0, 0], [2, 4, 4, 4, 3]]
    assert columns["attention_mask"].sum(axis=1).tolist() == [4, 3, 5]
    assert {name: column.dtype for name, column in columns.items()} == {
        "input_ids": np.int32,
        "attention_mask": np.bool_,
    }


def test_pairs_have_token_types():
    columns = tokenize(make_tokenizer(), ["red"], ["green red"], max_length=8)
    assert columns["input_ids"].tolist() == [[2, 4, 3, 5, 4, 3, 0, 0]]
    assert columns["token_type_ids"].tolist() == [[0, 0, 0, 1, 1, 1, 0, 0]]
    assert columns["token_type_ids"].dtype == np.int32


def test_batches_equal_one_call(monkeypatch):
    texts = ["red " * (i % 7) for i in range(50)]
    whole = text._encode(make_tokenizer(), texts, None, 6)
    monkeypatch.setattr(text, "_BATCH", 8)
    parts = text._encode(make_tokenizer(), texts, None, 6)
    for name in whole:
        np.testing.assert_array_equal(whole[name], parts[name])


@pytest.mark.parametrize("limit", [1, 20, 10**9])
def test_batches_are_small_and_cover_all_rows(monkeypatch, limit):
    monkeypatch.setattr(text, "_CHARACTERS", limit)
    monkeypatch.setattr(text, "_BATCH", 4)
    texts, words = ["x" * (7 * i % 30) for i in range(11)], [["ab", "c"]] * 11
    slices = list(text.batches(texts, None, words))
    assert [i for rows in slices for i in range(11)[rows]] == list(range(11))
    for rows in slices:
        sizes = [len(x) + 3 for x in texts[rows]]
        assert len(sizes) <= 4
        assert sum(sizes[:-1]) < limit


HOSTILE = {
    "empty": "",
    "blank": " \t\n\u3000 ",
    "control": "red \x00\x07\x1b green",
    "right to left": "\u05e9\u05dc\u05d5\u05dd \u202ered",
    "emoji": "red \U0001f469\u200d\U0001f680 green",
    "lone surrogate": "red \ud83d green",
    "long": "red " * 25_000,
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_texts(kind):
    columns = tokenize(make_tokenizer(), ["red", HOSTILE[kind]], ["green", "red"], max_length=9)
    assert columns["input_ids"].shape == (2, 9)
    assert columns["input_ids"][0].tolist() == [2, 4, 3, 5, 3, 0, 0, 0, 0]
    assert columns["attention_mask"][1].sum() >= 4


def test_lone_surrogates_are_replaced_one_for_one():
    assert text.clean("a\ud83db\udc00") == "a\ufffdb\ufffd"
    assert text.clean("\U0001f680 \u05d0") == "\U0001f680 \u05d0"


def test_cache_is_used_and_equal(encodings):
    tokenizer = make_tokenizer()
    first = tokenize(tokenizer, ["red", "green"], max_length=5)
    # The call above has left its padding in the tokenizer; that is not part of the key.
    second = tokenize(tokenizer, ["red", "green"], max_length=5)
    assert len(encodings) == 1
    assert first.keys() == second.keys()
    for name in first:
        np.testing.assert_array_equal(first[name], second[name])
        assert first[name].dtype == second[name].dtype
    assert [path.suffix for path in cached()] == [".npz"]


def test_the_cache_key_contains_all_inputs(encodings):
    calls = [
        (make_tokenizer(), ["red", "green"], None, 5),
        (make_tokenizer(), ["red", "green"], None, 6),
        (make_tokenizer(), ["redgr", "een"], None, 5),
        (make_tokenizer(), ["red"], ["green"], 5),
        (make_tokenizer([*WORDS, "blue"]), ["red", "green"], None, 5),
        (make_tokenizer(pad_token="red"), ["red", "green"], None, 5),
        (make_tokenizer(truncation_side="left"), ["red", "green"], None, 5),
    ]
    for tokenizer, texts, pairs, max_length in calls:
        tokenize(tokenizer, texts, pairs, max_length=max_length)
    assert len(encodings) == len(cached()) == len(calls)


def test_cached_columns_belong_to_their_key():
    made = []

    def make(value):
        made.append(value)
        return {"x": np.array([value], np.int16)}

    keys = [["a", 1], ["a", "1"], ["a1"], ["a", [1]], ["a", 1, "b"], ["a", {"c": None}]]
    for _ in range(2):
        for i, key in enumerate(keys):
            columns = text.cached(iter(key), lambda i=i: make(i))
            assert columns["x"].tolist() == [i]
            assert columns["x"].dtype == np.int16
    assert made == list(range(len(keys)))


@pytest.mark.parametrize("damage", ["empty", "truncated", "flipped", "junk"])
def test_damaged_cache_file_is_replaced(encodings, damage):
    tokenize(make_tokenizer(), ["red"] * 50, max_length=5)
    (path,) = cached()
    good = path.read_bytes()
    flipped = bytearray(good)
    flipped[300] ^= 0xFF
    path.write_bytes(
        {"empty": b"", "truncated": good[:-200], "flipped": flipped, "junk": b"junk"}[damage]
    )
    columns = tokenize(make_tokenizer(), ["red"] * 50, max_length=5)
    assert np.all(columns["input_ids"] == [2, 4, 3, 0, 0])
    assert len(encodings) == 2
    assert path.read_bytes() == good
    tokenize(make_tokenizer(), ["red"] * 50, max_length=5)
    assert len(encodings) == 2


def test_a_cache_that_cannot_be_written_is_no_error(monkeypatch, tmp_path):
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("FEDJAX_PEFT_CACHE", str(file))
    assert tokenize(make_tokenizer(), ["red"], max_length=4)["input_ids"].tolist() == [[2, 4, 3, 0]]


def test_an_interrupted_write_leaves_no_file(monkeypatch):
    def stop(*_args, **_columns):
        raise KeyboardInterrupt

    monkeypatch.setattr(np, "savez", stop)
    with pytest.raises(KeyboardInterrupt):
        tokenize(make_tokenizer(), ["red"], max_length=4)
    assert cached() == []


@pytest.mark.parametrize("given", [("one text",), (["a", "b"], "ab")])
def test_one_text_is_no_list_of_texts(given):
    """It would be read as one text for each of its characters."""
    refused("a list of texts, not one text", tokenize, make_tokenizer(), *given, max_length=8)


@pytest.mark.parametrize(
    ("tokenizer", "pairs", "max_length", "message"),
    [
        (make_tokenizer(pad_token=None), None, 4, "no padding token"),
        (object(), None, 4, "object is not a fast tokenizer"),
        (make_tokenizer(model_max_length=8), None, 9, "max_length is 9, .* at most 8"),
        (make_tokenizer(), None, 2, "2 special tokens"),
        (make_tokenizer(), ["red", "green"], 9, "1 texts but 2 second texts"),
    ],
)
def test_unusable_tokenizers_and_lengths_are_named(tokenizer, pairs, max_length, message):
    refused(message, tokenize, tokenizer, ["red"], pairs, max_length=max_length)
