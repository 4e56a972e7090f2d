"""Log-likelihoods of tokens: equal to those of all logits, and no array of all logits."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closeness import assert_close

import fedjax_peft as fp
from fedjax_peft import tasks
from fedjax_peft.tasks.likelihood import chunk_size, next_tokens, token_scores

pytestmark = pytest.mark.slow

ROWS, LENGTH, WIDTH, WORDS = 3, 9, 8, 37
KEYS = jax.random.split(jax.random.key(0), 5)
HIDDEN = jax.random.normal(KEYS[0], (ROWS, LENGTH, WIDTH))
TABLE = jax.random.normal(KEYS[1], (WORDS, WIDTH))
TARGETS = jax.random.randint(KEYS[2], (ROWS, LENGTH), 0, WORDS)
WEIGHTS = jax.random.normal(KEYS[3], (ROWS, LENGTH))
SOME = jax.random.bernoulli(KEYS[4], 0.4, (ROWS, LENGTH))
NONE = jnp.zeros_like(SOME)
CHUNK = 4  # of 27 positions: seven chunks, the last one not full


def _head(table, hidden):
    return 5 * jnp.tanh(jnp.einsum("...w,vw->...v", hidden, table) / 5)


def _outputs(hidden, table):
    """Returns outputs as a model's, with logits that must not be used."""
    none = jnp.full((1,), jnp.nan)
    return fp.contracts.Outputs(none, hidden, readout=jax.tree_util.Partial(_head, table))


def _plain(hidden, table, counted, weights=WEIGHTS):
    logs = jax.nn.log_softmax(_head(table, hidden), axis=-1)
    chosen = jnp.take_along_axis(logs, TARGETS[..., None], axis=-1)[..., 0]
    return jnp.sum(jnp.where(counted, chosen * weights, 0.0))


def _chunked(hidden, table, counted, weights=WEIGHTS):
    scores = token_scores(_outputs(hidden, table), TARGETS, counted, chunk=CHUNK)
    return jnp.sum(scores.log_likelihood * weights)


@functools.cache
def _derived(f, arguments):
    """Returns the value and the gradients of a loss by some arguments."""
    return jax.jit(jax.value_and_grad(f, arguments))


def _close(found, expected, tolerance=5e-6):
    """Asserts that arrays are equal, as far as sums in chunks are, for the largest number."""
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert_close(x, y, atol=tolerance * np.abs(y).max(initial=1e-30), rtol=0)


@pytest.mark.parametrize("counted", [SOME, ~NONE, NONE], ids=["some", "all", "none"])
@pytest.mark.parametrize("arguments", [(0,), (1,), (0, 1)], ids=["hidden", "head", "both"])
def test_loss_and_gradients_are_those_of_all_logits(counted, arguments):
    found, expected = (_derived(f, arguments)(HIDDEN, TABLE, counted) for f in (_chunked, _plain))
    _close(found, expected)


def test_predictions_are_those_of_all_logits():
    @jax.jit
    def correct(targets):
        return token_scores(_outputs(HIDDEN, TABLE), targets, SOME, chunk=CHUNK).correct

    likely = np.argmax(_head(TABLE, HIDDEN), axis=-1)
    for right in (np.arange(LENGTH) % 2 == 0, np.ones(LENGTH, bool)):
        targets = np.where(right, likely, (likely + 1) % WORDS)
        np.testing.assert_array_equal(correct(targets), SOME & right[None])


def test_the_first_of_equal_logits_is_the_prediction_and_nan_predicts_nothing():
    def correct(logits, targets):
        counted = jnp.ones(logits.shape[:2], bool)
        return token_scores(
            fp.contracts.Outputs(logits), jnp.array([targets]), counted
        ).correct.tolist()

    assert correct(jnp.zeros((1, 2, 4)).at[0, 0, 2].set(1.0), [2, 1]) == [[True, False]]
    rising = jnp.arange(4.0).reshape(1, 1, 4)
    for place in (0, 1, 3):
        assert correct(rising.at[0, 0, place].set(jnp.nan), [3]) == [[False]]


@pytest.mark.parametrize("inner", [(0,), (0, 1)], ids=["hidden", "both"])
def test_second_derivatives(inner):
    """A gradient of a gradient, as through a local step."""

    def outer(f):
        def value(hidden, table):
            slopes = jax.grad(f, inner)(hidden, table, SOME)
            return sum(jnp.sum(jnp.sin(3 * x)) for x in slopes)

        return jax.jit(jax.grad(value, (0, 1)))(HIDDEN, TABLE)

    _close(outer(_chunked), outer(_plain), 1e-5)


def test_clients_of_different_lengths_share_a_loop():
    """Under vmap the loop runs to the longest lane, and each lane has its own gradient."""
    hidden = jnp.stack([HIDDEN, 2 * HIDDEN, 3 * HIDDEN])
    counted = jnp.stack([SOME, ~NONE, NONE])

    def gradients(f):
        of_each = jax.vmap(jax.value_and_grad(f, (0, 1)), (0, None, 0))
        return jax.jit(of_each)(hidden, TABLE, counted)

    _close(gradients(_chunked), gradients(_plain))


def test_positions_that_do_not_count_may_be_nan():
    hidden = HIDDEN.at[1].set(jnp.nan)
    counted = SOME.at[1].set(False)
    value, slopes = _derived(_chunked, (0, 1))(hidden, TABLE, counted)
    assert np.isfinite(value)
    assert all(np.isfinite(x).all() for x in slopes)
    assert not np.any(slopes[0][1])


def test_half_precision_gives_half_precision_gradients():
    hidden = HIDDEN.astype(jnp.bfloat16)
    _, slopes = _derived(_chunked, (0, 1))(hidden, TABLE, SOME)
    assert [x.dtype for x in slopes] == [jnp.bfloat16, jnp.float32]
    _, (expected, _) = _derived(_plain, (0, 1))(HIDDEN, TABLE, SOME)
    _close(slopes[0].astype(jnp.float32), expected, 2**-6)


def test_targets_are_in_one_segment():
    batch = {
        "input_ids": jnp.array([[5, 6, 7, 8, 0]]),
        "segment_ids": jnp.array([[1, 1, 2, 2, 0]]),
        "mask": jnp.array([True]),
    }
    targets, counted = next_tokens(batch, jnp.array([[1, 1, 1, 1, 0]]))
    assert targets.tolist() == [[6, 7, 8, 0, 0]]
    assert counted.tolist() == [[True, False, True, False, False]]


@pytest.mark.parametrize("words", [2, 37, 32_000, 50_257, 151_936, 10**9])
def test_chunks_have_a_bounded_number_of_logits(words):
    size = chunk_size(words)
    assert size >= 16
    assert size == 16 or size * words <= 1 << 23 < 2 * size * words


# --------------------------------------------------------------- what the compiled programs hold

LARGE = {"model_type": "gpt2", "vocab_size": 40_000, "n_positions": 128}
LARGE |= {"n_embd": 16, "n_layer": 1, "n_head": 2}
SHAPE = (8, 128)
ALL_LOGITS = 8 * 127 * 40_000
"""The number of logits of a batch: 163 MB in float32."""


def _step(model):
    context = fp.contracts.ClientContext(
        lambda params, batch, key, train: model.apply(model.frozen, params, batch, key, train),
        tasks.next_token(),
        {},
        jnp.int32(1),
    )
    return jax.grad(lambda params, batch: context.objective(params, batch, None), has_aux=True)


def _evaluation(model):
    def metrics(params, batch):
        outputs = model.apply(model.frozen, params, batch, None, False)
        return tasks.next_token().metrics(outputs, batch)

    return metrics


@pytest.mark.parametrize(
    ("program", "head"),
    [(_step, False), (_step, True), (_evaluation, False)],
    ids=["training", "training of the head", "evaluation"],
)
def test_no_array_of_all_logits(program, head):
    model = fp.attach(
        fp.random_model(LARGE, head=fp.heads.causal_lm(), dropout=0.0), fp.lora(rank=2)
    )
    trainable = model.trainable
    if head:
        name = "transformer.wte.embedding"
        trainable = {**trainable, name: model.frozen[name]}
    batch = {
        "input_ids": jax.ShapeDtypeStruct(SHAPE, jnp.int32),
        "attention_mask": jax.ShapeDtypeStruct(SHAPE, bool),
    }
    compiled = jax.jit(program(model)).lower(trainable, batch).compile()
    shapes = re.findall(r"\b[a-z]+\d*\[([\d,]+)\]", compiled.as_text())
    sizes = [np.prod([int(n) for n in shape.split(",")]) for shape in set(shapes)]
    chunk = chunk_size(40_000) * 40_000
    table = 16 * 40_000
    assert max(sizes) <= chunk < ALL_LOGITS / 7
    # A few arrays of a chunk's size at once, and with a trained head two tables.
    held = compiled.memory_analysis().temp_size_in_bytes
    assert held < 4 * (4 * chunk + (2 * table if head else 0)) < 4 * ALL_LOGITS
