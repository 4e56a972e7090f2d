"""Loss and accuracy of the tokens of answers, against a slow loop."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_peft import tasks
from fedjax_peft.data.dataset import Dataset
from fedjax_peft.errors import InputError
from fedjax_peft.typing import Outputs

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
    return Outputs(jnp.asarray(logits), jnp.asarray(logits), readout=readout)


def slow(rows):
    """Returns (sum of losses, correct predictions, count), one token at a time."""
    loss = right = count = 0.0
    for row in rows:
        for at in range(1, 5):
            if ANSWERS[row, at]:
                x = LOGITS[row, at - 1].astype(np.float64)
                loss += np.log(np.exp(x).sum()) - x[IDS[row, at]]
                right += x.argmax() == IDS[row, at]
                count += 1
    return loss, right, count


def test_only_tokens_of_answers_count():
    loss, right, count = slow(range(3))
    assert count == 5
    metrics = TASK.metrics(outputs(LOGITS), BATCH)
    np.testing.assert_allclose(metrics["loss"], (loss, count), rtol=1e-6)
    np.testing.assert_allclose(metrics["accuracy"], (right, count))
    np.testing.assert_allclose(TASK.loss(outputs(LOGITS), BATCH), (loss, count), rtol=1e-6)


def test_padded_rows_have_no_effect_even_with_nan():
    loss, right, count = slow([1, 2])
    logits = jnp.asarray(LOGITS).at[0].set(jnp.nan)
    batch = BATCH | {"mask": jnp.array([False, True, True])}
    np.testing.assert_allclose(TASK.loss(outputs(logits), batch), (loss, count), rtol=1e-6)
    np.testing.assert_allclose(TASK.metrics(outputs(logits), batch)["accuracy"], (right, count))


def test_prompts_have_no_gradient():
    gradient = jax.grad(lambda x: TASK.loss(outputs(x), BATCH)[0])(jnp.asarray(LOGITS))
    assert np.array_equal(np.any(gradient, axis=-1)[:, :-1], ANSWERS[:, 1:])


def test_perplexity():
    assert TASK.score({"loss": np.log(7.0)}, {}, None)["perplexity"] == pytest.approx(7)
    assert TASK.score({"loss": 1e4}, {}, None)["perplexity"] == np.inf


def test_data_need_tokens_to_learn():
    columns = {"input_ids": IDS, "attention_mask": np.ones_like(IDS, bool)}
    with pytest.raises(InputError, match="training data have no column 'loss_mask'"):
        TASK.check(Dataset(columns), "training")
    with pytest.raises(InputError, match="max_length is too small"):
        TASK.check(Dataset(columns | {"loss_mask": np.zeros_like(IDS, bool)}), "test")
