"""The key-value cache: tokens one at a time give what a whole text gives; packed rows; readout."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from closeness import assert_close
from parity import forward, one_at_a_time
from refusals import refused
from tiny import trained
from torch_reference import GEMMA, left_padded

import fedjax_peft as fp
from fedjax_peft.models.cache import Cache, empty, view, window

pytestmark = pytest.mark.slow

TINY = {
    "gpt2": {"vocab_size": 60, "n_positions": 24, "n_embd": 16, "n_layer": 3, "n_head": 2},
    "gemma3_text": GEMMA | {"sliding_window_pattern": 2},
}
texts = functools.partial(left_padded, vocabulary=60)
METHODS = {
    "none": None,
    "lora": fp.lora(rank=2),
    "prefix": fp.peft.prefix_tuning(3),
    "prompt": fp.peft.prompt_tuning(3),
}


@functools.cache
def tiny(method="none", family="gpt2"):
    config = {"model_type": family, **TINY[family], "initializer_range": 0.3}
    scan = method == "lora"  # whose blocks a cache reads one by one
    model = fp.random_model(config, head=fp.heads.causal_lm(), dropout=0.0, scan_layers=scan)
    if METHODS[method] is None:
        return model
    model = fp.attach(model, METHODS[method])
    return model.replace(trainable=trained(model))


def alone(model, rows):
    """Returns the logits of each text of its own; no token sees the padding after a text."""
    mask = np.arange(max(map(len, rows)))[None] < np.array([[len(row)] for row in rows])
    ids = np.zeros(mask.shape, np.int32)
    ids[mask] = np.concatenate(rows)
    logits = np.asarray(forward(model, {"input_ids": ids, "attention_mask": mask}).logits)
    return [x[: len(row)] for x, row in zip(logits, rows, strict=True)]


NONE = pytest.param("none", marks=pytest.mark.exhaustive)  # LoRA's model is one with more


@pytest.mark.parametrize(
    ("family", "method"),
    [
        *[("gpt2", method) for method in ("lora", "prefix", "prompt")],
        *[("gemma3_text", method) for method in ("prefix", "prompt")],
    ],
)
@pytest.mark.sample("gpt2-lora", "gemma3_text-*")
def test_tokens_one_at_a_time_give_the_logits_of_the_whole_text(family, method):
    """Left padding takes no position: each row equals the text alone, without a cache.

    Gemma has windows and two rotations; there is padding after a prompt too.
    """
    model, (ids, mask) = tiny(method, family), texts((9, 4))

    got = one_at_a_time(model, ids, mask, 7)
    for row, expected in zip(got, alone(model, [ids[0], ids[1, -4:]]), strict=True):
        assert_close(row[-len(expected) :], expected, rtol=0, atol=1e-5)


def test_readout_gives_the_logits():
    ids, mask = texts((5, 3))
    out = forward(tiny("prompt"), {"input_ids": ids, "attention_mask": mask})
    assert_close(out.readout(out.hidden), out.logits, rtol=0, atol=1e-5)
    assert out.cache is None


@pytest.mark.parametrize("method", [NONE, "lora", "prefix"])
def test_a_packed_row_equals_its_texts_apart(method):
    model, lengths = tiny(method), (5, 3, 4)
    ids, _ = texts((14,))
    segments = np.repeat([1, 2, 3, 0], [*lengths, 2])[None].astype(np.int32)
    places = np.concatenate([np.arange(n) for n in (*lengths, 2)])[None].astype(np.int32)
    packed = {
        "input_ids": ids,
        "attention_mask": segments > 0,
        "segment_ids": segments,
        "position_ids": places,
    }
    got = np.asarray(forward(model, packed).logits[0])
    rows = np.split(ids[0], np.cumsum(lengths))[:3]
    assert_close(got[: sum(lengths)], np.concatenate(alone(model, rows)), rtol=0, atol=1e-5)


@pytest.mark.parametrize(("extra", "named"), [("prompt", "learned tokens"), ("cache", "a cache")])
def test_packed_rows_refuse_a_prompt_and_a_cache(extra, named):
    ids, mask = texts((4,))
    batch = {"input_ids": ids, "attention_mask": mask, "segment_ids": mask.astype(np.int32)}
    if extra == "cache":
        batch["cache"] = empty(1, 8)
    refused(named, forward, tiny("prompt" if extra == "prompt" else "none"), batch)


def test_a_cache_beyond_the_positions_of_the_model_is_refused():
    ids, mask = texts((4,))
    batch = {"input_ids": ids, "attention_mask": mask, "cache": empty(1, 25)}
    refused("25 positions, and the model has 24", forward, tiny(), batch)


def test_window_counts_the_token_itself():
    batch = {"input_ids": np.zeros((1, 4), np.int32), "attention_mask": np.ones((1, 4), bool)}
    expected = np.tril(np.ones((4, 4), bool)) & ~np.tril(np.ones((4, 4), bool), -2)
    np.testing.assert_array_equal(window(view(batch, 4), 2)[0, 0], expected)
    seen = view(batch | {"cache": Cache((), jnp.arange(8)[None] < 3, jnp.int32(3))}, 4)
    own = window(seen, 2)[0, 0]
    assert [np.flatnonzero(row).tolist() for row in np.asarray(own)] == [
        [2, 3], [3, 4], [4, 5], [5, 6]
    ]  # fmt: skip
