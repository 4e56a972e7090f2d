"""Labelled data sets as instructions, and several of them as one federation."""

import json
from collections import Counter

import numpy as np
import pytest
import tiny_tokenizers
from internals import DATASETS, Table
from refusals import refused

import fedjax_peft as fp
from fedjax_peft.data import templates
from fedjax_peft.data.instructions import FORMS, as_instructions

TOKENIZER = tiny_tokenizers.gpt2()


def load(name, **options):
    return fp.load_dataset(name, tokenizer=TOKENIZER, source="tiny", instructions=True, **options)


@pytest.mark.parametrize("name", FORMS)
def test_forms_fit_their_data_sets(name):
    form, entry = FORMS[name], DATASETS[name]
    assert len(set(form.templates)) == len(form.templates) >= 3
    if entry.label_names is not None and form.answers is not None:
        assert form.answers.keys() == {*entry.label_names}
    data = load(name, max_length=700)
    train = data["train"]
    assert train.task.name == "instruction_tuning"
    assert train.meta["task"].tolist() == [name] * len(train)
    assert not train.meta["cut_tokens"].any()
    assert train.label_names == ()
    if "label" in train.meta:
        words = {(form.answers or {}).get(label, label) for label in train.meta["label"]}
        assert words == {gold for golds in train.references for gold in golds}
    for row in range(3):
        ids, mask = (train.columns[column][row] for column in ("input_ids", "loss_mask"))
        assert TOKENIZER.decode(ids[mask]) == train.references[row][0] + "<|endoftext|>"
    requests = [
        TOKENIZER.decode(ids[mask])
        for ids, mask in zip(train.columns["prompt_ids"], train.columns["prompt_mask"], strict=True)
    ]
    assert not any("{" in request for request in requests)
    starts = {form.templates[i].split("{")[0][:12] for i in range(len(form.templates))}
    found = {start for start in starts if any(start in request for request in requests)}
    assert found == starts


def test_every_template_is_drawn_from_the_seed_and_larger_subsets_hold_smaller_ones():
    def requests(**options):
        data = load("sst2", **options)["train"]
        return [tuple(row) for row in data.columns["input_ids"].tolist()]

    whole = requests()
    assert requests() == whole
    assert requests(seed=1) != whole
    some = requests(train_examples=20)
    assert len(some) == 20
    assert set(some) <= set(requests(train_examples=60)) <= set(whole)


def test_texts_with_braces_stay_as_they_are():
    table = Table("f", {"text": ["{text_pair} {options} {0}"], "text_pair": ["{text}"]})
    table = Table("f", {**table.columns, "label": ["duplicate"]})
    names = ("not_duplicate", "duplicate")
    made = as_instructions("qqp", table, names, part="train", seed=0)
    (request, answer) = made.columns["messages"][0]
    assert "{text_pair} {options} {0}" in request["content"]
    assert answer["content"] == "yes"
    assert made.columns["references"] == [["yes"]]
    assert made.columns["label"] == ["duplicate"]


def test_questions_keep_all_gold_answers():
    columns = {"context": ["Ana won."], "question": ["Who?"], "answers": [["Ana", "Ana won"]]}
    table = Table("f", columns | {"answer_starts": [[0, 0]], "id": ["q"]})
    made = as_instructions("squad", table, (), part="train", seed=0)
    assert made.columns["messages"][0][1]["content"] == "Ana"
    assert made.columns["references"] == [["Ana", "Ana won"]]


def test_own_texts(tmp_path):
    rows = [{"text": f"w{i}", "label": ["good", "bad"][i % 2], "client": i % 3} for i in range(20)]
    (tmp_path / "own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = fp.load_dataset(
        tmp_path / "own.jsonl", tokenizer=TOKENIZER, instructions=True, template="{prompt}\n"
    )
    train = data["train"]
    assert Counter(train.references).keys() == {("good",), ("bad",)}
    assert set(train.meta["client"]) == {"0", "1", "2"}
    ids = train.columns["input_ids"][0][train.columns["attention_mask"][0]]
    assert "bad, good" in TOKENIZER.decode(ids)


@pytest.mark.parametrize(
    ("name", "how", "message"),
    [
        ("wnut17", True, "classified texts and for questions on a context"),
        ("dolly", True, "has instructions already"),
        ("sst2", 1, "instructions = 1 of load_dataset must be true or"),
    ],
)
def test_what_cannot_be_an_instruction(name, how, message):
    refused(message, fp.load_dataset, name, tokenizer=TOKENIZER, source="tiny", instructions=how)


def test_several_data_sets_are_one_federation():
    parts = {name: load(name, max_length=300)["train"] for name in ("sst2", "qqp", "squad")}
    parts["squad"] = load("squad", max_length=500)["train"]
    clients = fp.combine(parts)
    data = clients.data
    assert clients.names == tuple(parts)
    assert data.task == parts["sst2"].task
    assert data.tokenizer is TOKENIZER
    assert "classes" not in data.columns
    for number, (name, part) in enumerate(parts.items()):
        rows = clients.indices[number]
        own = data.take(rows)
        assert set(own.meta["source"]) == set(own.meta["task"]) == {name}
        golds = [data.references[unit] for unit in own.meta["unit"]]
        assert golds == list(part.references)
        for row in (0, len(rows) - 1):
            real = part.columns["attention_mask"][row]
            length = real.sum()
            for kind in ("input_ids", "loss_mask"):
                expected = part.columns[kind][row][real]
                np.testing.assert_array_equal(own.columns[kind][row, :length], expected)
            mask, before = own.columns["prompt_mask"][row], part.columns["prompt_mask"][row]
            expected = part.columns["prompt_ids"][row][before]
            np.testing.assert_array_equal(own.columns["prompt_ids"][row][mask], expected)
            assert mask[-1]
            assert not own.columns["attention_mask"][row, length:].any()
    mixed = fp.partition.dirichlet(data, clients=5, alpha=0.5, by="source", seed=0)
    assert len(mixed) == 5
    packed = clients.pack(500)
    assert packed.weights.tolist() == [120, 120, 120]
    assert len(packed.data) < 0.6 * len(data)


def test_glue_silo_as_instructions():
    data = load("glue_silo", template="{prompt} ")
    assert data["train"].task == data["test"].task
    assert set(data["train"].meta["task"]) == {*DATASETS["glue_silo"].parts}
    assert set(data["train"].meta["label"]) >= {"positive", "duplicate", "neutral"}
    other = tiny_tokenizers.roberta()
    plain = fp.load_dataset("glue_silo", tokenizer=other, source="tiny")
    assert len(plain["train"]) == len(data["train"])


def test_long_texts_are_cut_so_that_answers_stay(tmp_path):
    rows = [
        {"text": "The old lighthouse of Marenholm burns oil. " * n, "label": f"w{n % 3}"}
        for n in (1, 5, 40)
    ]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "test.jsonl").write_text(json.dumps(rows[0]) + "\n")
    options = {"tokenizer": TOKENIZER, "instructions": True, "max_length": 120}
    data = fp.load_dataset(str(tmp_path), **options)["train"]
    assert not data.meta["cut_tokens"].any()
    lengths = data.columns["attention_mask"].sum(axis=1)
    assert 115 <= lengths[2] <= 120  # cut, and not by more than is needed
    for row, (gold, *_) in enumerate(data.references):
        ids, mask = (data.columns[column][row] for column in ("input_ids", "loss_mask"))
        assert TOKENIZER.decode(ids[mask]) == gold + "<|endoftext|>"
        assert "lighthouse of Marenholm" in TOKENIZER.decode(ids)
    short = fp.load_dataset(str(tmp_path), **{**options, "max_length": 20})["train"]
    assert short.meta["cut_tokens"].all()  # the request alone is longer than that
    whole = fp.load_dataset(str(tmp_path), **{**options, "max_length": 2000})["train"]
    assert np.array_equal(whole.columns["input_ids"][0, :100], data.columns["input_ids"][0, :100])


@pytest.fixture
def own(tmp_path):
    """The directory of 60 texts of 1 to 60 words for training, and 6 for testing."""
    rng = np.random.default_rng(0)
    for split, n in (("train", 60), ("test", 6)):
        texts = [" ".join(f"w{w}" for w in rng.integers(0, 9, size)) for size in range(n, 0, -1)]
        rows = [{"text": text, "label": f"w{i % 3}"} for i, text in enumerate(texts)]
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / f"{split}.jsonl").write_text(lines)
    return str(tmp_path)


def test_only_kept_rows_are_rendered_and_those_that_fit_once(own, monkeypatch):
    rendered = []

    def counted(tokenizer, template, conversation, *, where):
        rendered.append(where)
        return render(tokenizer, template, conversation, where=where)

    render = templates.render
    monkeypatch.setattr(templates, "render", counted)
    options = {"tokenizer": TOKENIZER, "instructions": True, "train_examples": 30}
    data = fp.load_dataset(own, **options, max_length=400)
    assert len(rendered) == len(set(rendered)) == len(data["train"]) + len(data["test"]) == 36
    rendered.clear()
    fp.load_dataset(own, **options, max_length=90)
    again = [where for where, times in Counter(rendered).items() if times > 1]
    assert len(set(rendered)) == 36
    assert 5 < len(again) < 30


def test_a_row_is_the_same_whatever_other_rows_are_kept(own):
    options = {"tokenizer": TOKENIZER, "instructions": True, "max_length": 90}
    whole, some = (fp.load_dataset(own, **options, train_examples=n)["train"] for n in (None, 10))
    assert not whole.meta["cut_tokens"].any()
    rows = {tuple(row): i for i, row in enumerate(whole.columns["input_ids"].tolist())}
    for row, ids in enumerate(some.columns["input_ids"].tolist()):
        other = rows[tuple(ids)]
        assert some.references[row] == whole.references[other]
        learned = some.columns["loss_mask"][row]
        np.testing.assert_array_equal(learned, whole.columns["loss_mask"][other])
        prompt, same = (
            x.columns["prompt_ids"][i][x.columns["prompt_mask"][i]]
            for x, i in ((some, row), (whole, other))
        )
        np.testing.assert_array_equal(prompt, same)
        answer = learned | ~some.columns["attention_mask"][row]
        np.testing.assert_array_equal(prompt, np.array(ids)[~answer])
    assert whole.columns["prompt_mask"].any(axis=0).all(), "as narrow as the longest prompt"


def test_instructions_as_words(own):
    data = fp.load_dataset(own, instructions=True, vocabulary=60, max_length=90)["train"]
    ids, mask = (data.columns[column][0] for column in ("input_ids", "loss_mask"))
    assert data.tokenizer.decode(ids[mask]) == f"{data.references[0][0]} <eos>"
