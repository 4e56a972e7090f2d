"""The tokens of answers are learned. ``test_tasks_next_token.py`` has the loss and the accuracy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closeness import approx
from internals import Table, encode_conversations
from refusals import refused

import fedjax_peft as fp
from fedjax_peft import load_tokenizer, tasks

TASK = tasks.instruction_tuning()
RNG = np.random.default_rng(0)
IDS = RNG.integers(0, 6, (3, 5)).astype(np.int32)
LOGITS = RNG.normal(size=(3, 5, 6)).astype(np.float32)
ANSWERS = np.array([[0, 0, 1, 1, 1], [0, 1, 0, 0, 1], [0, 0, 0, 0, 0]], bool)
BATCH = {
    "input_ids": jnp.asarray(IDS),
    "attention_mask": jnp.ones((3, 5), bool),
    "loss_mask": jnp.asarray(ANSWERS),
}


def outputs(logits):
    """Returns outputs whose logits are also a linear readout of the hidden states."""
    readout = jax.tree_util.Partial(lambda x: x)
    return fp.contracts.Outputs(jnp.asarray(logits), jnp.asarray(logits), readout=readout)


def test_prompts_have_no_gradient():
    gradient = jax.grad(lambda x: TASK.loss(outputs(x), BATCH)[0])(jnp.asarray(LOGITS))
    assert np.array_equal(np.any(gradient, axis=-1)[:, :-1], ANSWERS[:, 1:])


def test_data_need_tokens_to_learn():
    columns = {"input_ids": IDS, "attention_mask": np.ones_like(IDS, bool)}
    refused("training data have no column 'loss_mask'", TASK.check, fp.Dataset(columns), "training")
    with pytest.raises(fp.InputError, match="max_length is too small"):
        TASK.check(fp.Dataset(columns | {"loss_mask": np.zeros_like(IDS, bool)}), "test")


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """Returns conversations with answers of rising length, and their tokenizer."""
    root = tmp_path_factory.mktemp("told")
    fp.testing.write_tiny_language_model(root)
    answers = ["a", "red and blue", "one two three four"]
    prompt = {"role": "user", "content": "Say"}
    talks = [[prompt, {"role": "assistant", "content": answer}] for answer in answers]
    table = Table("test", {"messages": talks})
    tokenizer = load_tokenizer(root)
    data = encode_conversations(table, (), tokenizer, max_length=64, name="told")
    return dataclasses.replace(data, tokenizer=tokenizer), tokenizer


def lengths(tokenizer, data):
    return [len(tokenizer(x, add_special_tokens=False)["input_ids"]) for x in data.references]


@pytest.mark.parametrize("metric", ["exact_match", "gsm8k"])
def test_gold_answers_that_cannot_be_generated_are_warned_of(told, metric):
    data, tokenizer = told
    sizes = lengths(tokenizer, data)
    assert sizes[0] < sizes[1] < sizes[2]
    tight = tasks.instruction_tuning(metric, max_new_tokens=sizes[1] - 1)
    said = rf"2 of 3 test examples have more than max_new_tokens = {sizes[1] - 1} .* {sizes[2]} "
    with pytest.warns(UserWarning, match=said):
        tight.check(data, "test")
    tight.check(data, "training")  # nothing is generated for it
    tasks.instruction_tuning("rouge_l", max_new_tokens=1).check(data, "test")
    tasks.instruction_tuning(metric, max_new_tokens=sizes[2]).check(data, "test")


def test_gold_answers_without_a_word_are_refused_by_number(told):
    data, _ = told
    odd = dataclasses.replace(data, references=("a", ("...", "b"), ("!!!", "")))
    for metric in ("exact_match", "rouge_l", "gsm8k"):
        task = tasks.instruction_tuning(metric)
        task.check(odd, "training")
        refused(r"1 of 3 test examples have no word.*'!!!', of example 3", task.check, odd, "test")
    tasks.instruction_tuning().check(odd, "test")  # nothing is generated
    hindi = dataclasses.replace(data, references=("a", "b", "नमस्ते"))
    tasks.instruction_tuning("f1").check(hindi, "test")
    ascii_only = tasks.instruction_tuning("f1", tokenizer="rouge_score")
    refused(r"of example 3.*a to z and 0 to 9 only: use 'unicode'", ascii_only.check, hindi, "test")
    refused("Did you mean 'unicode'", tasks.instruction_tuning, "f1", tokenizer="unicod")


def test_rows_name_the_rule_for_words(told):
    data, _ = told
    task, hindi = tasks.instruction_tuning("f1"), ("a", "b", "नमस्ते")
    assert task.words(data) == "rouge_score"
    assert task.words(dataclasses.replace(data, references=hindi)) == "unicode"
    assert task.words(dataclasses.replace(data, references=())) is None
    assert tasks.instruction_tuning().words is None
    predictions = {"completions": np.full((3, 1), -1)}
    for tokenizer, score in (("unicode", 1 / 3), ("rouge_score", 0)):
        task = tasks.instruction_tuning("rouge_l", tokenizer=tokenizer)
        one = dataclasses.replace(data, references=hindi, tokenizer=Written("x", "y", "नमस्ते"))
        found = task.score({"loss": 1.0}, predictions, one)
        assert found["rouge_l"] == approx(score)


class Written:
    """A tokenizer that reads given texts in any tokens."""

    def __init__(self, *texts):
        self.texts = texts

    def batch_decode(self, rows, **options):
        return self.texts


def test_the_shortest_of_several_gold_answers_counts(told):
    data, tokenizer = told
    short, middle, long = data.references
    several = dataclasses.replace(data, references=((short, long), (middle, short), (long, long)))
    task = tasks.instruction_tuning("exact_match", max_new_tokens=lengths(tokenizer, data)[0])
    with pytest.warns(UserWarning, match="1 of 3 test examples"):
        task.check(several, "test")
