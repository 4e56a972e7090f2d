"""Tagged words: labels at first tokens, keys for partitions, and errors for invalid rows."""

from dataclasses import replace

import numpy as np
import pytest
import tiny_tokenizers
from internals import IGNORE, Table
from refusals import refused
from seqeval import scheme as schemes
from seqeval.scheme import Entities

from fedjax_peft.data.encoders.tags import encode_tags, tag_names, tag_set, type_set
from fedjax_peft.data.iob import iob2, sentences

NAMES = ("O", "B-LOC", "I-LOC", "B-PER", "I-PER")
ROWS = [
    (["Anders", "Koldsen", "left", "Marenholm", "."], ["B-PER", "I-PER", "O", "B-LOC", "O"]),
    (["the", "lamp", "burns"], ["O", "O", "O"]),
    (["Sankt", "Pauls", "Harbour", ",", "Ib"], ["B-LOC", "I-LOC", "I-LOC", "O", "B-PER"]),
]
TOKENIZERS = [tiny_tokenizers.bert, tiny_tokenizers.roberta, tiny_tokenizers.gpt2]


def table(rows=ROWS, **more):
    columns = {"tokens": [words for words, _ in rows], "tags": [tags for _, tags in rows]}
    return Table("the file", {**columns, **more})


def encode(rows=ROWS, tokenizer=None, max_length=64, **options):
    tokenizer = tokenizer or tiny_tokenizers.bert()
    return encode_tags(table(rows), NAMES, tokenizer, max_length=max_length, name="x", **options)


@pytest.mark.parametrize("make", TOKENIZERS)
def test_each_word_is_labelled_once_at_its_first_token(make):
    tokenizer = make()
    data = encode(tokenizer=tokenizer)
    for row, (words, tags) in enumerate(ROWS):
        real = data.columns["attention_mask"][row]
        ids, labels = data.columns["input_ids"][row, real], data.labels[row, real]
        at = np.flatnonzero(labels != IGNORE)
        assert [NAMES[i] for i in labels[at]] == tags
        parts = [tokenizer.decode(part, skip_special_tokens=True) for part in np.split(ids, at)[1:]]
        assert [part.strip().lower() for part in parts] == [word.lower() for word in words]


@pytest.mark.parametrize("make", TOKENIZERS[:2])
def test_labels_equal_those_of_transformers(make):
    tokenizer = make()
    data = encode(tokenizer=tokenizer)
    if make is tiny_tokenizers.roberta:  # as transformers asks for
        tokenizer.backend_tokenizer.pre_tokenizer.add_prefix_space = True
    words = [words for words, _ in ROWS]
    tokens = tokenizer(words, is_split_into_words=True, padding="max_length", max_length=64)
    np.testing.assert_array_equal(data.columns["input_ids"], tokens["input_ids"])
    np.testing.assert_array_equal(data.columns["attention_mask"], tokens["attention_mask"])
    for row, (_, tags) in enumerate(ROWS):
        expected, before = [], None
        for word in tokens.word_ids(row):
            new = word is not None and word != before
            expected.append(NAMES.index(tags[word]) if new else IGNORE)
            before = word
        assert data.labels[row].tolist() == expected


def test_truncated_words_stay_in_the_references():
    data, whole = encode(max_length=6), encode()
    assert encode([]).labels.shape == (0, 64)
    np.testing.assert_array_equal(data.labels[:, :5], whole.labels[:, :5])
    assert np.all(data.labels[:, 5] == IGNORE)
    assert data.references == whole.references == tuple(tuple(tags) for _, tags in ROWS)
    assert data.meta["unit"].tolist() == [0, 1, 2]
    assert data.label_names == NAMES


def test_words_without_tokens_do_not_shift_labels():
    data = encode([(["\x07", "Ib", "\u200b", "\x00", "burns"], ["O", "B-PER", "I-PER", "O", "O"])])
    assert [NAMES[i] for i in data.labels[0] if i != IGNORE] == ["B-PER", "O"]


@pytest.mark.parametrize("make", TOKENIZERS)
def test_hostile_sentences(make):
    rows = [
        ([], []),
        (["x"], ["O"]),
        (["w" * 100_000, "Ib"], ["O", "B-PER"]),
        (["Ib"] * 20_000, ["B-PER"] * 20_000),
        (["שלום", "عالم", "🙂🏽", "\ud800", "a b", ""], ["O"] * 6),
    ]
    data = encode(rows, make(), max_length=32)
    assert np.all(data.labels[0] == IGNORE)
    assert {len(x) for x in data.columns.values()} == {5}
    assert not np.any((data.labels != IGNORE) & ~data.columns["attention_mask"])
    assert np.sum(data.labels[3] == NAMES.index("B-PER")) > 5


def test_sets_of_tags():
    tags = ["O", "I-PER", "B-PER", "O", "B-LOC"]
    assert tag_set(tags) == tag_set(tags[::-1]) == "B-LOC-B-PER-I-PER"
    assert tag_set(tags, "first_seen") == "B-PER-I-PER-B-LOC"
    assert type_set(tags) == "LOC-PER"
    assert tag_set(["O", "O"]) == tag_set([]) == type_set(["O"]) == "O"


def test_keys_to_partition_by():
    rows = table(source=["web", "news", "web"])
    options = {"max_length": 16, "name": "x", "order": "first_seen"}
    data = encode_tags(rows, NAMES, tiny_tokenizers.bert(), **options)
    sets = ["B-PER-I-PER-B-LOC", "O", "B-LOC-I-LOC-B-PER"]
    assert data.meta["tag_set"].tolist() == sets
    assert data.meta["source_tag_set"].tolist() == [f"web-{sets[0]}", "news-O", f"web-{sets[2]}"]
    assert data.meta["type_set"].tolist() == ["LOC-PER", "O", "LOC-PER"]
    assert data.meta["source_type_set"].tolist() == ["web-LOC-PER", "news-O", "web-LOC-PER"]
    assert "source_tag_set" not in encode().meta


def test_names_are_the_sources_or_both_tags_of_every_type():
    assert tag_names(table([(["a"], ["I-PER"]), (["b"], ["B-LOC"])])) == NAMES
    assert tag_names(replace(table(), label_names=("B-LOC", "O"))) == ("B-LOC", "O")


FORMS = {  # seqeval's name of the scheme -> one sentence
    "IOB1": ["I-A", "I-A", "B-A", "O", "I-B", "I-A"],
    "IOBES": ["B-A", "E-A", "S-A", "O", "S-B", "S-A"],
    "BILOU": ["B-A", "L-A", "U-A", "O", "U-B", "U-A"],
    "BMES": ["B-A", "E-A", "S-A", "O", "S-B", "S-A"],
}


@pytest.mark.parametrize("form", FORMS)
def test_tags_of_other_schemes_name_the_same_entities(form):
    """The entities are those that seqeval's strict reader of the scheme finds."""
    tags = FORMS[form]
    expected = ["B-A", "I-A", "B-A", "O", "B-B", "B-A"]
    (read,) = sentences(table([(list("uvwxyz"), tags)]))[1]
    assert read == expected
    if form != "BMES":  # which seqeval does not know
        given, ours = (
            Entities([x], scheme=scheme).entities
            for x, scheme in ((tags, getattr(schemes, form)), (read, schemes.IOB2))
        )
        assert [e.to_tuple() for e in given[0]] == [e.to_tuple() for e in ours[0]]
    assert iob2(["B-A", "M-A", "M-A", "E-A"]) == ["B-A", "I-A", "I-A", "I-A"]


def test_names_of_other_schemes_are_those_of_the_tags_that_are_read():
    listed = ("O", "S-PER", "B-PER", "I-PER", "E-PER")
    rows = replace(table([(["Ib", "burns"], ["S-PER", "O"])]), label_names=listed)
    assert tag_names(rows) == ("O", "B-PER", "I-PER")


def test_the_cache_does_not_depend_on_the_tags():
    tokenizer = tiny_tokenizers.bert()
    first = encode(ROWS[:1], tokenizer)
    words, tags = ROWS[0]
    other = encode([(words, tags[::-1])], tokenizer)
    assert [NAMES[i] for i in other.labels[0] if i >= 0] == iob2(tags[::-1])
    np.testing.assert_array_equal(other.columns["input_ids"], first.columns["input_ids"])
    other = encode([(words[::-1], tags)], tokenizer)
    assert np.any(other.columns["input_ids"] != first.columns["input_ids"])


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ((["a", "b"], ["O"]), "Row 2 of the file has 2 words but 1 tags"),
        ((["a"], ["B-"]), r"Row 2 .* tag 'B-' at the word 'a'.* \(IOB2\)"),
        ((["a"], ["X-PER"]), "IOB2.*BIOES"),
        ((["a"], [3]), r"Row 2 .* tag 3 at .*Numbers need .* label_names = \[\.\.\.\]"),
        ((["a"], [float("nan")]), "Row 2 .* tag nan at"),
        (([None], ["O"]), "Row 2 .* None in place of a word"),
        (("a", ["O"]), "Row 2 .* 'a' in place of a list of words"),
        ((["a"], None), "Row 2 .* None in place of a list of tags"),
        ((["a"], ["B-PERS"]), "Row 2 .* tag 'B-PERS', which .* Did you mean 'B-PER'"),
    ],
)
def test_rows_that_are_refused(row, message):
    refused(message, encode, [ROWS[0], row])
    refused("Did you mean 'sorted'", encode, order="sort")
