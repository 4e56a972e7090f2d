"""Multiple choice: encoded rows, likelihoods beside torch, and scores by hand."""

import jax
import numpy as np
import pytest
import torch
from closeness import approx, assert_close
from internals import Table, encode, inference
from refusals import refused
from transformers import AutoModelForCausalLM

import fedjax_peft as fp
from fedjax_peft import tasks

pytestmark = pytest.mark.slow

COLUMNS = ("input_ids", "attention_mask", "loss_mask")
ROWS = {
    "question": ["Which is red? ", "Two and two make", "Who?"],
    "choices": [["a rose", "the sea"], ["four", "five", "nothing at all"], ["I", "you"]],
    "answer": ["B", 2, "you"],
}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return fp.testing.write_tiny_language_model(
        tmp_path_factory.mktemp("m"), initializer_range=0.3, num_hidden_layers=1
    )


@pytest.fixture(scope="module")
def model(path):
    return fp.load_model(path, head=fp.heads.causal_lm())


def encoded(model, rows=ROWS, style="text", max_length=48):
    task = tasks.multiple_choice(style)
    table = Table("rows", rows)
    return encode(task, table, (), model.tokenizer, max_length=max_length, name="rows")


def test_each_choice_is_an_example(model):
    data = encoded(model)
    assert [q.answer for q in data.references] == [1, 2, 1]
    assert data.meta["unit"].tolist() == [0, 0, 1, 1, 1, 2, 2]
    assert data.meta["choice"].tolist() == [0, 1, 0, 1, 2, 0, 1]
    assert data.columns["is_answer"].tolist() == [False, True, False, False, True, False, True]
    decode = model.tokenizer.decode
    for row, text in enumerate([" a rose", " the sea", " four"]):
        ids, loss = data.columns["input_ids"][row], data.columns["loss_mask"][row]
        assert decode(ids[loss]) == text
        assert data.meta["characters"][row] == len(text) - 1
    whole = decode(data.columns["input_ids"][0][data.columns["attention_mask"][0]])
    assert whole == "Which is red? a rose"


def test_letters_stand_in_the_question(model):
    data = encoded(model, style="letters", max_length=96)
    ids, mask = data.columns["input_ids"][1], data.columns["attention_mask"][1]
    text = "Which is red?\nA. a rose\nB. the sea\nAnswer: B"
    assert model.tokenizer.decode(ids[mask]) == text
    assert model.tokenizer.decode(ids[data.columns["loss_mask"][1]]) == " B"


def test_long_questions_lose_their_beginning(model):
    data = encoded(model, {"question": ["x" * 90], "choices": [["yes", "no"]], "answer": [0]})
    decode = model.tokenizer.decode
    for row, text in enumerate([" yes", " no"]):
        assert decode(data.columns["input_ids"][row][data.columns["loss_mask"][row]]) == text
        assert data.columns["attention_mask"][row].all()


def test_likelihoods_and_accuracies_are_those_of_torch(model, path):
    """Both accuracies by a slow loop over torch's log-probabilities."""
    data = encoded(model)
    reference = AutoModelForCausalLM.from_pretrained(path).eval()
    sums = []
    for ids, mask, loss in zip(*map(data.columns.get, COLUMNS), strict=True):
        with torch.no_grad():
            logits = reference(torch.tensor(ids[mask][None]).long()).logits[0]
        log = torch.log_softmax(logits, -1).numpy()
        places = np.flatnonzero(loss)
        sums.append(log[places - 1, ids[places]].sum())
    task = data.task
    batch = {name: np.asarray(x) for name, x in data.columns.items()}
    apply = jax.jit(model.apply, static_argnums=(3, 4))
    outputs = apply(model.frozen, model.trainable, batch, None, False)
    found = task.predict(outputs, batch)
    assert_close(found["log_likelihood"], sums, atol=2e-4)
    right, right_norm, start = [], [], 0
    for choices, answer in zip(ROWS["choices"], (1, 2, 1), strict=True):
        own = np.array(sums[start : start + len(choices)])
        right.append(own.argmax() == answer)
        right_norm.append((own / [len(text) for text in choices]).argmax() == answer)
        start += len(choices)
    scores = task.score({}, {"log_likelihood": np.array(sums)}, data)
    assert scores == approx({"accuracy": np.mean(right), "accuracy_norm": np.mean(right_norm)})
    golds = data.columns["is_answer"]
    tokens = data.columns["loss_mask"][golds].sum()
    expected = (-np.array(sums)[golds].sum(), tokens)
    assert_close(task.loss(outputs, batch), expected, rtol=1e-5)
    rows = [{"question": q, "choices": c} for q, c in zip(*[*ROWS.values()][:2], strict=True)]
    answers = inference.answer(model, model.trainable, rows, task=task, max_length=48)
    assert_close(np.concatenate([a["log_likelihoods"] for a in answers]), sums, atol=2e-4)
    for found, choices in zip(answers, ROWS["choices"], strict=True):
        assert found["choice"] == choices[int(np.argmax(found["log_likelihoods"]))]


def test_the_length_of_a_choice_can_decide(model):
    data = encoded(model)
    # Choices of 6 and 7 letters; 4, 4 and 14 letters; 1 and 3 letters.
    sums = np.array([-1.0, -2.0, -4.0, -4.1, -5.0, -3.0, -3.1])
    got = data.task.score({}, {"log_likelihood": sums}, data)
    assert got == {"accuracy": 0.0, "accuracy_norm": approx(2 / 3)}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"answer": [2]}, "Row 1 of rows has the answer 2"),
        ({"answer": ["C"]}, "nor a letter"),
        ({"answer": ["blue"]}, "nor one of the choices"),
        ({"choices": [["one"]]}, "at least 2 choices"),
        ({"choices": [["one", ""]]}, "at least 2 choices"),
    ],
)
def test_rows_that_cannot_be_used(model, changes, named):
    row = {"question": ["Which?"], "choices": [["one", "two"]], "answer": [0], **changes}
    refused(named, encoded, model, row)


def test_digits_are_numbers_unless_a_choice_is_one(model):
    rows = {"question": ["2 + 1 =", "Which?"], "choices": [[*"123"], [*"xy"]], "answer": ["3", "1"]}
    assert [q.answer for q in encoded(model, rows).references] == [2, 1]


def test_unknown_style_and_missing_columns():
    refused("style = 'numbers'", tasks.multiple_choice, "numbers")
    data = fp.Dataset({"input_ids": np.zeros((1, 2), np.int32)})
    with pytest.raises(fp.InputError, match="no column"):
        tasks.multiple_choice().check(data, "test")
