"""Texts are cut into blocks of tokens."""

import numpy as np
import pytest
import tiny_tokenizers
from internals import Table
from refusals import refusals

from fedjax_peft.data.encoders.language import encode_language


def encode(texts, tokenizer=None, max_length=8):
    tokenizer = tokenizer or tiny_tokenizers.gpt2()
    table = Table("the file", {"text": texts})
    return encode_language(table, (), tokenizer, max_length=max_length, name="x")


@pytest.mark.parametrize("make", [tiny_tokenizers.gpt2, tiny_tokenizers.roberta])
def test_concatenated_blocks_are_the_text_and_the_end_token(make):
    tokenizer = make()
    texts = [*tiny_tokenizers.TEXTS, "", "x", "שלום عالم 🙂🏽\x00\x07"]
    data = encode(texts, tokenizer)
    ids, mask, unit = data.columns["input_ids"], data.columns["attention_mask"], data.meta["unit"]
    for number, text in enumerate(texts):
        tokens = ids[unit == number][mask[unit == number]]
        assert tokens[-1] == tokenizer.eos_token_id
        assert tokenizer.decode(tokens[:-1]) == text
        full = mask[unit == number].all(axis=1)
        assert full[:-1].all()  # only the last is padded
    assert np.all(np.diff(mask.astype(int), axis=1) <= 0)
    assert np.all(np.diff(unit) >= 0)
    assert (ids.dtype, mask.dtype) == (np.int32, np.bool_)


def test_padding_is_the_end_token_without_a_pad_token():
    data = encode(["", "x"], max_length=4)
    assert data.columns["attention_mask"].sum(axis=1).tolist() == [1, 2]
    assert data.columns["input_ids"][0].tolist() == [0, 0, 0, 0]
    more = encode(["", "x", "x"], max_length=4)
    assert more.columns["attention_mask"].sum(axis=1).tolist() == [1, 2, 2]
    other = encode(["", "x"], tiny_tokenizers.roberta(), max_length=4)
    assert other.columns["input_ids"][0].tolist() == [2, 1, 1, 1]


def test_a_text_as_long_as_a_block_needs_another_for_its_end():
    tokens = tiny_tokenizers.gpt2()(tiny_tokenizers.TEXTS[0])["input_ids"]
    data = encode(tiny_tokenizers.TEXTS[:1], max_length=len(tokens))
    assert data.columns["attention_mask"].sum(axis=1).tolist() == [len(tokens), 1]


def test_a_very_long_text_a_lone_surrogate_and_none():
    data = encode(["red " * 25_000, "a\ud800b"], max_length=256)
    assert np.sum(data.meta["unit"] == 0) > 100
    assert data.meta["unit"][-1] == 1
    assert encode([]).columns["input_ids"].shape == (0, 8)


test_data_that_cannot_be_used_are_named = refusals(
    lambda texts, options: encode(texts, **options),
    (["x"], {"tokenizer": tiny_tokenizers.bert()}, "no token for the end of a text"),
    (["x", None], {}, "Row 2 of the file has None"),
    (["x"], {"max_length": 1}, "max_length is 1"),
    (["x"], {"tokenizer": object()}, "not a fast tokenizer"),
)
