"""Prompt and prefix tuning: the added tokens, initial values and errors."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closeness import assert_close
from internals import TINY_BERT, Dropout, PrefixSlot, TokenEmbed

import fedjax_peft as fp
from fedjax_peft.models.attention import attention
from fedjax_peft.peft.prefix import Prefix
from fedjax_peft.peft.prompt import PromptEmbed

pytestmark = pytest.mark.slow

KEY = jax.random.key(3)
WORDS = "bert.embeddings.word_embeddings"
SLOT = "bert.encoder.layer.{}.attention.self.prefix"


@functools.cache
def tiny(family="bert"):
    config = {**TINY_BERT, "model_type": family}
    return (
        fp.testing.tiny_model(3)
        if family == "bert"
        else fp.random_model(config, head=fp.heads.token_classification(3))
    )


def batch_of(length):
    ids = np.arange(2 * length, dtype=np.int32).reshape(2, length) % 50 + 5
    mask = np.arange(length)[None] < np.array([length, length - 1])[:, None]
    return {"input_ids": np.where(mask, ids, 0), "attention_mask": mask}


def outputs(model, batch, trainable=None):
    trainable = model.trainable if trainable is None else trainable
    return jax.jit(model.apply, static_argnums=4)(model.frozen, trainable, batch, None, False)


def adapters(model):
    return {n: x.shape for n, x in model.trainable.items() if model.kinds[n] == "adapter"}


def test_prompt_comes_before_the_embeddings():
    table = TokenEmbed(20, 6, jnp.float32)
    prompt = jax.random.normal(KEY, (3, 6))
    module = PromptEmbed(table, prompt)
    ids = jnp.arange(8).reshape(2, 4)
    np.testing.assert_array_equal(module(ids)[:, :3], jnp.stack([prompt, prompt]))
    np.testing.assert_array_equal(module(ids)[:, 3:], table(ids))
    x = jax.random.normal(KEY, (2, 6))
    np.testing.assert_array_equal(module.attend(x), table.attend(x))
    assert PromptEmbed(TokenEmbed(20, 6, jnp.bfloat16), prompt)(ids).dtype == jnp.bfloat16


def test_starts_of_a_prompt():
    model = fp.attach(tiny(), fp.peft.prompt_tuning(100))
    prompt = np.asarray(model.trainable[f"{WORDS}.prompt"])
    assert prompt.shape == (100, 32)
    assert abs(prompt.mean()) < 0.1
    assert abs(prompt.std() - 1) < 0.05
    words = fp.peft.prompt_tuning(100, init="vocabulary")
    drawn = np.asarray(fp.attach(tiny(), words).trainable[f"{WORDS}.prompt"])
    table = np.asarray(tiny().frozen[f"{WORDS}.embedding"])
    rows = [np.flatnonzero((table == row).all(axis=1)) for row in drawn]
    assert all(len(row) == 1 for row in rows)
    assert len({int(row[0]) for row in rows}) > 30
    other = fp.attach(tiny(), words, seed=1).trainable[f"{WORDS}.prompt"]
    assert not np.array_equal(drawn, other)


@pytest.mark.parametrize(("family", "positions"), [("bert", 32), ("roberta", 30)])
def test_text_and_prompt_must_have_positions(family, positions):
    # RoBERTa's first two of the table are no token's: padding's, and the one before it.
    config = {**TINY_BERT, "model_type": family, "pad_token_id": int(family == "roberta")}
    plain = fp.random_model(config, head=fp.heads.token_classification(3))
    model = fp.attach(plain, fp.peft.prompt_tuning(4))
    for m, longest in ((plain, positions), (model, positions - 4)):
        shape = jax.eval_shape(lambda m=m, n=longest: outputs(m, batch_of(n)).logits)
        assert shape.shape == (2, longest, 3)
    with pytest.raises(fp.InputError) as caught:
        jax.eval_shape(lambda: outputs(model, batch_of(positions)))
    for part in (
        f"text of {positions} tokens and a prompt of 4",
        f"has {positions} (max_position_embeddings)",
    ):
        assert part in str(caught.value)
    assert f"to {positions - 4} tokens" in str(caught.value)
    with pytest.raises(fp.InputError, match=rf"text of {positions + 1} tokens needs"):
        jax.eval_shape(lambda: outputs(plain, batch_of(positions + 1)))


MASKS = {
    "padding": np.array([[1, 1, 1, 1], [1, 1, 0, 0]], bool)[:, None, None, :],
    "causal": np.tril(np.ones((4, 4), bool))[None, None],
    "whole": np.ones((2, 3, 4, 4), bool),
    "heads": np.random.default_rng(0).random((1, 3, 4, 4)) < 0.7,
}


@pytest.mark.parametrize("kind", MASKS)
def test_attention_over_prefix_and_text(kind):
    q, k, v = np.random.default_rng(1).normal(size=(3, 2, 4, 3, 5)).astype(np.float32)
    pk, pv = np.random.default_rng(2).normal(size=(2, 6, 15)).astype(np.float32)
    slot = Prefix(PrefixSlot(15), jnp.asarray(pk), jnp.asarray(pv))
    got = attention(q, *slot(k, v, jnp.asarray(MASKS[kind])), Dropout(0.0))

    mask = np.broadcast_to(MASKS[kind], (2, 3, 4, 4))
    expected = np.zeros_like(q)
    for b in range(2):
        for h in range(3):
            part = slice(5 * h, 5 * h + 5)
            keys = np.concatenate([pk[:, part], k[b, :, h]])
            values = np.concatenate([pv[:, part], v[b, :, h]])
            for i in range(4):
                seen = np.concatenate([np.ones(6, bool), mask[b, h, i]])
                weight = np.exp(keys[seen] @ q[b, i, h] / np.sqrt(5))
                expected[b, i, h] = weight @ values[seen] / weight.sum()
    assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_every_layer_has_a_prefix_of_its_own():
    model = fp.attach(tiny(), fp.peft.prefix_tuning(5))
    names = [f"{SLOT.format(i)}.prefix_{n}" for i in (0, 1) for n in ("key", "value")]
    assert adapters(model) == dict.fromkeys(names, (5, 32))
    values = np.concatenate([model.trainable[n] for n in names])
    assert abs(values.std() - 1) < 0.1
    assert len(np.unique(values)) == values.size


def test_padding_is_not_seen_and_no_position_is_taken():
    model, batch = fp.attach(tiny(), fp.peft.prefix_tuning(5)), batch_of(6)
    other = batch | {"input_ids": np.where(batch["attention_mask"], batch["input_ids"], 9)}
    assert_close(outputs(model, batch).logits, outputs(model, other).logits, rtol=0, atol=1e-5)
    assert jax.eval_shape(lambda: outputs(model, batch_of(32)).hidden).shape == (2, 32, 32)
