"""Windows of contexts: answers are recovered from their labels, or the questions are reported."""

import numpy as np
import pytest
import tiny_tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from internals import Table
from refusals import refused

from fedjax_peft.data.encoders.spans import encode_spans, span_text
from fedjax_peft.data.formats.squad import canonical

TOKENIZERS = {
    name: getattr(tiny_tokenizers, name)() for name in ("bert", "roberta", "gpt2")
}  # trained once
CONTEXT = " ".join(tiny_tokenizers.TEXTS)
ANSWERS = [
    "The old lighthouse",
    "1871",
    "Anders and Ib Koldsen.",
    "Café Ølgod",
    "(50% off on Sundays)",
    "50% off on Sundays",
]


def recovered(data):
    """Returns question id -> the text of the labelled tokens, empty if no window has it whole."""
    start, end = data.columns["start_positions"], data.columns["end_positions"]
    texts = {data.references[unit].id: "" for unit in np.unique(data.meta["unit"])}
    for row in np.flatnonzero(data.columns["context_mask"][np.arange(len(data)), start]):
        question = data.references[data.meta["unit"][row]]
        texts[question.id] = span_text(data, int(row), start[row], end[row])
    return texts


def unanswerable(data):
    """Returns the ids of the questions whose labelled text differs from the first answer."""
    first = {question.id: question.answers[0].strip() for question in data.references}
    return [id_ for id_, text in recovered(data).items() if text != first[id_]]


def table(answers=ANSWERS, context=CONTEXT, question="Who built the lighthouse?", starts=None):
    starts = starts or [context.index(answer) for answer in answers]
    return Table(
        "the file",
        {
            "id": [f"q{i}" for i in range(len(answers))],
            "question": [question] * len(answers),
            "context": [context] * len(answers),
            "answers": [[answer] for answer in answers],
            "answer_starts": [[start] for start in starts],
        },
    )


def encode(rows, kind="bert", max_length=64, **options):
    return encode_spans(rows, (), TOKENIZERS[kind], max_length=max_length, name="x", **options)


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("max_length", [32, 64, 512])
def test_answers_come_back_exactly(kind, max_length):
    data = encode(table(), kind, max_length)
    assert recovered(data) == {f"q{i}": answer for i, answer in enumerate(ANSWERS)}
    assert unanswerable(data) == []


@pytest.mark.parametrize("kind", ["bert", "roberta"])
def test_windows_are_those_of_transformers(kind):
    data, tokenizer = encode(table(), kind, 48, doc_stride=9), TOKENIZERS[kind]
    tokens = tokenizer(
        table().columns["question"],
        table().columns["context"],
        truncation="only_second",
        max_length=48,
        stride=9,
        padding="max_length",
        return_overflowing_tokens=True,
        return_offsets_mapping=True,
    )
    np.testing.assert_array_equal(data.meta["unit"], tokens["overflow_to_sample_mapping"])
    for name in ("input_ids", "attention_mask", "token_type_ids"):
        assert (name in data.columns) == (name in tokens)
        if name in tokens:
            np.testing.assert_array_equal(data.columns[name], tokens[name])
    context = np.array([[x == 1 for x in tokens.sequence_ids(i)] for i in range(len(data))])
    np.testing.assert_array_equal(data.columns["context_mask"], context)
    expected = np.where(context[..., None], tokens["offset_mapping"], 0)
    np.testing.assert_array_equal(data.meta["offsets"], expected)


def test_a_window_without_the_whole_answer_points_to_its_first_token():
    data = encode(table(["Anders and Ib Koldsen."]), max_length=32, doc_stride=12)
    start, end = data.columns["start_positions"], data.columns["end_positions"]
    holds = start > 0
    assert 0 < holds.sum() < len(data)
    assert np.all((start == 0) == (end == 0))
    for row in np.flatnonzero(holds):
        assert span_text(data, row, start[row], end[row]) == "Anders and Ib Koldsen."
        assert data.columns["context_mask"][row, start[row] : end[row] + 1].all()
    for row in np.flatnonzero(~holds):
        inside = data.meta["offsets"][row][data.columns["context_mask"][row]]
        answer = CONTEXT.index("Anders")
        assert inside[0, 0] > answer or inside[-1, 1] < answer + len("Anders and Ib Koldsen.")


def test_answers_that_no_window_or_no_token_holds_are_reported():
    data = encode(table([CONTEXT, "1871"]), max_length=32)
    assert recovered(data) == {"q0": "", "q1": "1871"}
    assert unanswerable(data) == ["q0"]
    assert not data.columns["start_positions"][data.meta["unit"] == 0].any()
    inside = encode(table(["light"]), "roberta")  # of a token
    assert "light" in recovered(inside)["q0"] != "light"
    assert unanswerable(inside) == ["q0"]
    assert unanswerable(encode(table(["\u200b\x07"], "The \u200b\x07 lamp burns"))) == ["q0"]


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_spaces_around_an_answer_do_not_count(kind):
    data = encode(table([" 1871 by "]), kind)
    assert recovered(data) == {"q0": "1871 by"}
    assert unanswerable(data) == []


def test_the_first_of_several_answers_is_the_label():
    rows = table(["1871"])
    rows.columns["answers"][0] = ["1871", "in 1871"]
    rows.columns["answer_starts"][0] = [CONTEXT.index("1871"), CONTEXT.index("in 1871")]
    data = encode(rows)
    assert recovered(data) == {"q0": "1871"}
    assert data.references[0].answers == ("1871", "in 1871")


def test_a_repeated_answer_is_found_at_its_start():
    second = CONTEXT.index("lighthouse", CONTEXT.index("lighthouse") + 1)
    data = encode(table(["lighthouse"], starts=[second]), max_length=512)
    row, start = 0, data.columns["start_positions"][0]
    assert data.meta["offsets"][row, start, 0] == second


@pytest.mark.parametrize("kind", TOKENIZERS)
@settings(max_examples=40, deadline=None)
@given(
    words=st.lists(
        st.sampled_from([*CONTEXT.split(), "🙂🏽", "שלום", "\x07", "e\u0301"]), min_size=1
    ),
    ends=st.tuples(st.integers(0, 200), st.integers(0, 200)),
    max_length=st.integers(16, 40),
)
def test_all_answerable_answers_are_recovered(kind, words, ends, max_length):
    context = " ".join(words)
    first, last = sorted(x % len(words) for x in ends)
    answer = " ".join(words[first : last + 1])
    start = len(" ".join([*words[:first], ""]))
    data = encode(table([answer], context, "Who?", [start]), kind, max_length)
    text = recovered(data)["q0"]
    assert text in (answer, "") or unanswerable(data) == ["q0"]
    whole = recovered(encode(table([answer], context, "Who?", [start]), kind, 10_000))["q0"]
    assert text in (whole, "")
    # A window shares at least a third of its context with the next: short answers are in one.
    if len(TOKENIZERS[kind].tokenize(answer)) <= 2:
        assert text == whole


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize(
    ("context", "answer", "question"),
    [
        ("red " * 24_999 + "boat", "boat", "Who?"),
        ("a red boat", "boat", "why " * 25_000),
        ("x", "x", ""),
        ("a\ud800b 🙂🏽 end", "end", "🙂"),
        ("שלום عالم", "عالم", "\x07"),
        ("a\x00b \x07 end", "end", "\ud800"),
    ],
    ids=range(6),
)
def test_hostile_texts(kind, context, answer, question):
    data = encode(table([answer], context, question), kind, 64)
    assert recovered(data) == {"q0": answer}


def test_a_long_question_leaves_the_context_half_of_the_room():
    data = encode(table(question="lamp " * 100), max_length=33)
    assert data.columns["context_mask"][0].sum() == 15  # (33 - 3 special tokens) / 2
    data = encode(table(question="lamp " * 100), max_length=512)
    assert data.columns["token_type_ids"][0].argmax() == 1 + 64 + 1


def test_offsets_are_small_and_large_enough():
    assert encode(table([])).columns["input_ids"].shape == (0, 64)
    assert encode(table()).meta["offsets"].dtype == np.uint16
    long = encode(table(["boat"], "red " * 20_000 + "boat"))
    assert long.meta["offsets"].max() == 80_004


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"doc_stride": 128}, r"stride is 128, .* 31 tokens of a context"),
        ({"doc_stride": -1}, "stride is -1"),
        ({"max_length": 4}, "no room for both"),
        ({"kind": "none"}, "not a fast tokenizer"),
    ],
)
def test_lengths_and_strides_that_do_not_fit_are_refused(options, message, monkeypatch):
    monkeypatch.setitem(TOKENIZERS, "none", object())
    refused(message, encode, table(), **options)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"answer_starts": [0]}, "Row 2 .* answer '1871' at character 0 .* stands 'The '"),
        ({"answer_starts": [9_999]}, "Row 2 .* at character 9999 .* stands ''"),
        ({"answer_starts": [-1]}, "Row 2 .* at character -1"),
        ({"answer_starts": ["x"]}, "Row 2 .* for its answers"),
        ({"answer_starts": []}, "Row 2 .* for its answers"),
        ({"answers": [], "answer_starts": []}, "Row 2 .* no answer"),
        ({"answers": [""]}, r"Row 2 .* no answer.*question_answering\(unanswerable=True\)"),
        ({"answers": [float("nan")]}, "Row 2 .* for its answers"),
        ({"context": None}, "Row 2 .* None in place of a context"),
        ({"question": 3}, "Row 2 .* 3 in place of a question"),
    ],
)
def test_rows_that_are_refused(change, message):
    rows = table(["1871", "1871"])
    for name, value in change.items():
        rows.columns[name][1] = value
    refused(message, encode, rows)


NONE = [
    {"answers": {"text": [], "answer_start": []}},  # of the hub
    {"answers": []},  # of SQuAD 2's own file
    {"answers": [{"text": " ", "answer_start": 0}]},
    {"answer": None, "answer_start": None},
    {"answer": "", "answer_start": -1},
]


@pytest.mark.parametrize("form", NONE)
def test_questions_without_an_answer(form):
    """All windows are labelled with the first token, as in transformers' run_qa."""
    (name, value), *more = form.items()
    other = {"answers": {"text": ["1871"], "answer_start": [CONTEXT.index("1871")]}}
    start = [other["answers"]["answer_start"][0], more[0][1]] if more else []
    rows = Table(
        "the file",
        {
            "question": ["When?"] * 2,
            "context": [CONTEXT] * 2,
            name: ["1871" if more else other["answers"], value],
            **({"answer_start": start} if more else {}),
        },
    )
    refused("Row 2 of the file has no answer", encode, canonical(rows))
    data = encode(canonical(rows), unanswerable=True)
    assert [question.answers for question in data.references] == [("1871",), ("",)]
    assert recovered(data) == {"1": "1871", "2": ""}
    none = data.meta["unit"] == 1
    assert none.sum() > 1
    assert not data.columns["start_positions"][none].any()
    assert not data.columns["end_positions"][none].any()


def test_blank_answers_beside_others_are_left_out():
    rows = table(["1871"])
    rows.columns["answers"][0] = ["", "1871"]
    rows.columns["answer_starts"][0] = [0, CONTEXT.index("1871")]
    assert encode(rows).references[0].answers == ("1871",)
