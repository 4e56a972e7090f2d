"""Completions equal those of torch ``transformers``, and samples follow the probabilities."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from peft import PrefixTuningConfig, PromptTuningConfig, get_peft_model
from refusals import refusals
from torch_reference import left_padded, saved, tiny_model

import fedjax_peft as fp
from fedjax_peft.models.decoding import check_sampling, decode, next_tokens

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::UserWarning:peft")]

LENGTHS = (9, 4, 1, 6)
NEW = 12
FAMILIES = ("gpt2", "llama", "mistral", "qwen2", "qwen3", "smollm3", "gemma2", "gemma3_text")


@functools.cache
def program(apply, how, ends):
    def forward(frozen, trainable, batch):
        return apply(frozen, trainable, batch, None, False)

    def run(frozen, trainable, ids, mask, keys):
        tokens = jnp.full((len(ids), 1), ends, jnp.int32)
        bound = functools.partial(forward, frozen, trainable)
        return decode(bound, ids, mask, how, keys, ends=tokens)

    return jax.jit(run)


GREEDY = fp.contracts.Sampling(NEW)


def completed(model, ids, mask, how=GREEDY, keys=None, ends=4):
    run = program(model.apply, how, ends)
    return np.asarray(run(model.frozen, model.trainable, ids, mask, keys))


def torch_completed(reference, ids, mask, ends=4):
    """Returns greedy completions of ``generate``, with -1 after the end token."""
    with torch.no_grad():
        out = reference.generate(
            input_ids=torch.tensor(ids, dtype=torch.long),
            attention_mask=torch.tensor(mask, dtype=torch.long),
            max_new_tokens=NEW,
            do_sample=False,
            eos_token_id=ends,
            pad_token_id=3,
        ).numpy()[:, ids.shape[1] :]
    ended = np.cumsum(out == ends, axis=1) - (out == ends) > 0
    full = np.full((len(ids), NEW), -1)
    full[:, : out.shape[1]] = np.where(ended, -1, out)
    return full


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.sample("gpt2", "gemma3_text")
def test_greedy_completions_are_those_of_transformers(family, tmp_path):
    reference = tiny_model(family, kind="causal_lm")
    model = fp.load_model(saved(reference, tmp_path))
    ids, mask = left_padded(LENGTHS)
    free = torch_completed(reference, ids, mask, ends=99)
    got = completed(model, ids, mask, ends=99)
    np.testing.assert_array_equal(got, free)
    assert len(np.unique(got)) > 4  # completions say something
    # A token that ends some rows early, and others not.
    end = next(int(token) for token in free[0, :-1] if not (free == token).any(axis=1).all())
    expected = torch_completed(reference, ids, mask, ends=end)
    np.testing.assert_array_equal(completed(model, ids, mask, ends=end), expected)
    assert (expected == -1).any()
    assert (expected[:, -1] >= 0).any()


def torch_adapted(reference, config):
    """Returns the torch model with a random adapter."""
    adapted = get_peft_model(reference, config).eval()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, x in adapted.named_parameters():
            if "prompt" in name:
                x.copy_(0.3 * torch.randn(x.shape, generator=generator))
    return adapted


def leaves_of(model, adapted, method):
    """Returns our leaves with the values of the torch adapter."""
    values = {n: x.detach().numpy() for n, x in adapted.named_parameters()}
    leaves = dict(model.trainable)
    if method == "prompt":
        (name,) = leaves
        leaves[name] = jnp.asarray(values["prompt_encoder.default.embedding.weight"])
    else:  # [tokens, layers * 2 * width]: keys and values of one layer after the other
        table = values["prompt_encoder.default.embedding.weight"]
        parts = np.split(table, table.shape[1] // 32, axis=1)
        for layer in range(2):
            for i, part in enumerate(("key", "value")):
                name = f"transformer.h.{layer}.attn.prefix.prefix_{part}"
                leaves[name] = jnp.asarray(parts[2 * layer + i])
    return leaves


ADAPTERS = {
    "prompt": (
        fp.peft.prompt_tuning(3),
        PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    ),
    "prefix": (
        fp.peft.prefix_tuning(3),
        PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    ),
}


@pytest.mark.parametrize("method", ADAPTERS)
def test_greedy_completions_with_an_adapter_are_those_of_peft(method, tmp_path):
    """For learned tokens PEFT counts the padding as positions, so texts are of one length here.

    PEFT also counts a prefix, which takes no position here: torch gets its table moved by as much.
    """
    reference = tiny_model("gpt2", kind="causal_lm", resid_pdrop=0.0)
    model = fp.load_model(saved(reference, tmp_path))
    ours, theirs = ADAPTERS[method]
    model = fp.attach(model, ours)
    if method == "prefix":
        with torch.no_grad():
            table = reference.transformer.wpe.weight
            table[3:] = table[:-3].clone()
    adapted = torch_adapted(reference, theirs)
    model = model.replace(trainable=leaves_of(model, adapted, method))
    ids, mask = left_padded((6, 6, 6))
    expected = torch_completed(adapted, ids, mask)
    plain = completed(
        model.replace(trainable=fp.attach(fp.load_model(tmp_path), ours).trainable), ids, mask
    )
    got = completed(model, ids, mask)
    np.testing.assert_array_equal(got, expected)
    assert (got != plain).any()  # the adapter matters


# ------------------------------------------------------------------------------------- rows apart


def test_clients_are_mapped_and_the_loop_ends_when_all_have_ended(tmp_path):
    """Under vmap the loop's condition stays one scalar, so the cache is not copied by a select."""
    model = fp.load_model(saved(tiny_model("gpt2", kind="causal_lm", n_layer=1), tmp_path))
    model = fp.attach(model, fp.lora(rank=2))
    ids, mask = left_padded((5, 3))
    rng = np.random.default_rng(0)
    stacked = {
        n: jnp.asarray(0.3 * rng.normal(size=(3, *x.shape)), x.dtype)
        for n, x in model.trainable.items()
    }

    def one(trainable):
        def forward(batch):
            return model.apply(model.frozen, trainable, batch, None, False)

        return decode(forward, ids, mask, fp.contracts.Sampling(6), ends=jnp.full((2, 1), 10))

    mapped, single = jax.jit(jax.vmap(one)), jax.jit(one)
    got = np.asarray(mapped(stacked))
    for i in range(3):
        alone = single(jax.tree.map(lambda x, i=i: x[i], stacked))
        np.testing.assert_array_equal(got[i], alone)
    assert len({x.tobytes() for x in got}) > 1
    (loop,) = [
        e for e in jax.make_jaxpr(jax.vmap(one))(stacked).eqns if e.primitive.name == "while"
    ]
    assert loop.params["cond_jaxpr"].out_avals[0].shape == ()
    body = [e.primitive.name for e in loop.params["body_jaxpr"].jaxpr.eqns]
    assert body.count("select_n") <= 6  # none for each layer's keys and values


# -------------------------------------------------------------------------------------- sampling


LOGITS = np.array([2.0, 1.5, 1.0, 0.0, -1.0, -3.0], np.float32)


@pytest.mark.parametrize(
    ("how", "kept"),
    [
        (fp.contracts.Sampling(1, temperature=0.7), 6),
        (fp.contracts.Sampling(1, temperature=1.5, top_k=3), 3),
        (fp.contracts.Sampling(1, temperature=1.0, top_p=0.7), 2),
        (fp.contracts.Sampling(1, temperature=1.0, top_p=1e-6), 1),
        (fp.contracts.Sampling(1, temperature=1.0, top_k=2, top_p=0.5), 1),
    ],
)
def test_samples_follow_the_probabilities(how, kept):
    """20,000 draws within 4 standard deviations of p computed in float64; others never appear."""
    n = 20_000
    logits = jnp.broadcast_to(jnp.asarray(LOGITS[[3, 0, 5, 1, 4, 2]]), (n, 6))
    keys = jax.random.split(jax.random.key(0), n)
    drawn = np.asarray(jax.jit(next_tokens, static_argnums=1)(logits, how, keys))
    shares = (np.bincount(drawn, minlength=6) / n)[[1, 3, 5, 0, 4, 2]]
    p = np.exp(LOGITS.astype(np.float64) / how.temperature)
    p[kept:] = 0
    p /= p.sum()
    assert (np.abs(shares - p) <= 4 * np.sqrt(p * (1 - p) / n)).all()


def test_which_tokens_can_be_drawn_is_what_transformers_says():
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    rows = np.random.default_rng(0).normal(size=(40, 12)).astype(np.float32) * 2
    scores = TemperatureLogitsWarper(0.8)(None, torch.tensor(rows))
    scores = TopPLogitsWarper(0.7)(None, TopKLogitsWarper(5)(None, scores))
    possible = np.isfinite(scores.numpy())
    settings = fp.contracts.Sampling(1, temperature=0.8, top_k=5, top_p=0.7)

    def draws(key):
        return next_tokens(jnp.asarray(rows), settings, jax.random.split(key, len(rows)))

    drawn = np.asarray(jax.jit(jax.vmap(draws))(jax.random.split(jax.random.key(0), 3000)))
    seen = np.stack([np.bincount(x, minlength=12) for x in drawn.T]) > 0
    assert not (seen & ~possible).any()
    likely = torch.softmax(scores, -1).numpy() > 0.01
    assert seen[likely].all()


test_impossible_settings = refusals(
    check_sampling,
    (fp.contracts.Sampling(0), "max_new_tokens = 0"),
    (fp.contracts.Sampling(1, temperature=-1.0), "temperature = -1.0"),
    (fp.contracts.Sampling(1, temperature=float("nan")), "temperature = nan"),
    (fp.contracts.Sampling(1, top_p=0.0), "top_p = 0.0"),
    (fp.contracts.Sampling(1, top_p=1.1), "top_p = 1.1"),
    (fp.contracts.Sampling(1, top_k=-1), "top_k = -1"),
)
