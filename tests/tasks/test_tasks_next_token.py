"""Next-token prediction: targets and perplexity; instruction tuning counts in the same way."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closeness import approx, assert_close

import fedjax_peft as fp
from fedjax_peft import tasks

IDS = jnp.array([[3, 1, 4, 0], [2, 0, 0, 0], [1, 1, 5, 2]])
REAL = jnp.array([[1, 1, 1, 1], [1, 0, 0, 0], [1, 1, 1, 0]], bool)
LOGITS = jnp.array(np.random.default_rng(0).normal(size=(3, 4, 6)), jnp.float32)
TARGETS = [(0, 1), (0, 2), (0, 3), (2, 1), (2, 2)]  # row, position of the target
TASKS = [(tasks.next_token(), "attention_mask"), (tasks.instruction_tuning(), "loss_mask")]
"""Tasks and the column that marks what they count."""


def outputs(logits=LOGITS):
    return fp.contracts.Outputs(logits, logits)


def expected(pairs):
    logs = np.asarray(jax.nn.log_softmax(LOGITS))
    log_probabilities = [(logs[row, at - 1], int(IDS[row, at])) for row, at in pairs]
    return -sum(log[token] for log, token in log_probabilities), sum(
        log.argmax() == token for log, token in log_probabilities
    )


@pytest.mark.parametrize(("task", "column"), TASKS)
def test_targets_are_the_real_tokens_after_the_first(task, column):
    batch = {"input_ids": IDS, column: REAL}
    metrics = task.metrics(outputs(), batch)
    loss, right = expected(TARGETS)
    assert_close(metrics["loss"], (loss, 5), rtol=1e-6)
    assert_close(metrics["accuracy"], (right, 5))
    assert_close(task.loss(outputs(), batch), (loss, 5), rtol=1e-6)


def test_the_true_next_token_is_right():
    logits = 9.0 * jax.nn.one_hot(jnp.roll(IDS, -1, axis=1), 6)
    batch = {"input_ids": IDS, "attention_mask": REAL}
    accuracy = tasks.next_token().metrics(outputs(logits), batch)["accuracy"]
    assert [float(x) for x in accuracy] == [5, 5]


@pytest.mark.parametrize(("task", "column"), TASKS)
def test_masked_rows_have_no_effect_even_with_nan(task, column):
    batch = {"input_ids": IDS, column: REAL, "mask": jnp.array([True, True, False])}
    loss, right = expected(TARGETS[:3])
    metrics = task.metrics(outputs(LOGITS.at[2].set(jnp.nan)), batch)
    assert_close(metrics["loss"], (loss, 3), rtol=1e-6)
    assert_close(metrics["accuracy"], (right, 3))
    gradient = jax.grad(lambda x: task.loss(outputs(x), batch)[0])(LOGITS)
    assert np.isfinite(gradient).all()
    assert not np.any(gradient[2])


def test_texts_of_one_token_have_no_target():
    batch = {"input_ids": IDS[1:2], "attention_mask": REAL[1:2]}
    metrics = tasks.next_token().metrics(outputs(LOGITS[1:2]), batch)
    assert_close([metrics["loss"], metrics["accuracy"]], [[0, 0], [0, 0]])


def test_perplexity():
    score = tasks.next_token().score
    assert score({"loss": np.log(7.0)}, {}, None) == {"perplexity": approx(7)}
    assert score({"loss": 1e4}, {}, None) == {"perplexity": np.inf}
