"""``fp.generate`` and likelihoods, beside torch ``transformers``."""

import functools
import json
import shutil

import numpy as np
import pytest
import torch
from closeness import approx
from internals import answer, complete, end_tokens, generation, likelihoods, with_options
from refusals import refused
from torch_reference import log_likelihood
from transformers import AutoModelForCausalLM, AutoTokenizer

import fedjax_peft as fp

pytestmark = pytest.mark.slow

PROMPTS = ["Give three tips.", "a", "Where is the lighthouse of Marenholm, and who built it?", "!"]


@functools.cache
def directory(root):
    # Large weights: a random model then says more than one word.
    return fp.testing.write_tiny_language_model(root, initializer_range=0.5, num_hidden_layers=1)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return directory(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def model(path):
    return fp.load_model(path, head=fp.heads.causal_lm())


@pytest.fixture(scope="module")
def reference(path):
    tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
    return AutoModelForCausalLM.from_pretrained(path).eval(), tokenizer


def torch_completed(reference, prompts, new):
    torch_model, tokenizer = reference
    given = tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False)
    given.pop("token_type_ids", None)
    with torch.no_grad():
        out = torch_model.generate(**given, max_new_tokens=new, do_sample=False)
    return tokenizer.batch_decode(out[:, given["input_ids"].shape[1] :], skip_special_tokens=True)


def test_greedy_texts_are_those_of_transformers(model, reference):
    got = fp.generate(model, model.trainable, PROMPTS, max_new_tokens=10, batch_size=2)
    assert got == torch_completed(reference, PROMPTS, 10)
    assert len({*got}) == len(PROMPTS)


def test_drawn_texts_depend_on_seed_and_place_but_not_on_batches(model):
    def texts(prompts=("Hi.", "a", "Who?", "!"), **more):
        how = {"max_new_tokens": 10, "temperature": 0.9, "top_p": 0.95, "seed": 3} | more
        return fp.generate(model, model.trainable, prompts, **how)

    first = texts()
    assert texts(batch_size=2) == first
    assert texts(["Hi.", "a"], batch_size=2) == first[:2]
    assert texts(seed=4, batch_size=2) != first
    same = texts(["a"] * 4, batch_size=2)
    assert len({*same}) > 1  # samples of one prompt differ, as pass@k needs


def test_lengths_share_programs(model):
    # Prompts of 1 to 16 tokens have one padded length, and 17 to 32 the next.
    how = fp.contracts.Sampling(4)
    run = generation._completing(model.apply, how)
    for lengths in ((3, 5, 16), (1, 2, 9), (17, 30, 2, 4)):
        rows = [np.arange(n) + 10 for n in lengths]
        complete(model, model.trainable, rows, how, batch_size=2)
    assert run._cache_size() == 2


def test_likelihoods_are_those_of_transformers(model, reference):
    torch_model, tokenizer = reference
    pairs = [("Give three", " tips."), ("a", "b"), ("Who built", " it? Anders and Ib")]
    rows = [
        tuple(tokenizer(text, add_special_tokens=False)["input_ids"] for text in pair)
        for pair in pairs
    ]
    context, _ = rows[1]
    with torch.no_grad():
        likeliest = torch_model(torch.tensor([context])).logits[0, -1].argmax().item()
    rows.append((context, [likeliest]))
    got = likelihoods(model, model.trainable, rows, batch_size=4)
    for (first, then), found in zip(rows, got, strict=True):
        total, greedy = log_likelihood(torch_model, first, then)
        assert found.total == approx(total, abs=2e-5 * len(then))
        assert found.greedy == greedy
        assert found.tokens == len(then)
    assert got[-1].greedy
    assert not got[0].greedy


def test_an_empty_prompt_begins_with_the_token_before_a_text(model):
    (end,) = end_tokens(model)[:1]
    got = complete(model, model.trainable, [[], [end]], fp.contracts.Sampling(10))
    np.testing.assert_array_equal(got[0], got[1])
    assert likelihoods(model, model.trainable, [((), (5,))])[0].tokens == 1


def test_the_generation_config_names_the_end_tokens(path, tmp_path):
    """As in transformers. Gemma 2's chat models have their end of a turn in this file only."""
    shutil.copytree(path, tmp_path, dirs_exist_ok=True)
    ends = {"eos_token_id": [1, 7]}
    (tmp_path / "generation_config.json").write_text(json.dumps(ends), encoding="utf-8")
    assert end_tokens(fp.load_model(tmp_path, head=fp.heads.causal_lm())) == [1, 7]
    (tmp_path / "generation_config.json").write_text("{}", encoding="utf-8")
    assert end_tokens(fp.load_model(tmp_path, head=fp.heads.causal_lm())) == [1]


def test_templates_and_cut_prompts(model):
    how = {"max_new_tokens": 10}
    told = fp.generate(model, model.trainable, ["Hi", "a"], template="chat", **how)
    talk = [[{"role": "user", "content": text}] for text in ("Hi", "a")]
    assert fp.generate(model, model.trainable, talk, template="chat", **how) == told
    plain = fp.generate(model, model.trainable, ["xxHi there", "a"], max_length=8, **how)
    assert plain == fp.generate(model, model.trainable, ["Hi there", "a"], **how)


def test_prompts_of_a_task_take_as_much_room_as_they_need(model, tmp_path, monkeypatch):
    """Whole prompts, also where the template is longer than the guess, of a model for a million."""
    monkeypatch.setenv("FEDJAX_PEFT_CACHE", str(tmp_path))
    long = model.replace(config={**model.config, "max_position_embeddings": 1 << 20})
    longer = "A template of more letters than the first guess has. " * 4 + "{prompt}"
    for template in ("plain", longer):
        task = with_options(fp.tasks.instruction_tuning(), template=template)
        texts = fp.generate(long, long.trainable, ["Hi", "a"], task=task, max_new_tokens=3)
        how = {"template": template, "max_new_tokens": 3}
        assert texts == fp.generate(long, long.trainable, ["Hi", "a"], **how)
    assert max(x.stat().st_size for x in tmp_path.rglob("*.npz")) < 100_000


def test_prompts_that_cannot_be_completed(model):
    params = model.trainable
    assert fp.generate(model, params, []) == []
    refused("a list of texts", fp.generate, model, params, "one text")
    refused("not a list", fp.generate, model, params, [[{"role": "user", "content": "Hi"}]])
    refused("has no tokenizer", fp.generate, model.replace(tokenizer=None), params, ["a"])
    for wrong in (
        {"temperature": -1},
        {"temperature": None},
        {"top_k": 2.5},
        {"max_new_tokens": 4.0},
        {"batch_size": 0},
        {"batch_size": -1},
    ):
        (name,) = wrong
        refused(f"{name} = {wrong[name]} of", fp.generate, model, params, ["a"], **wrong)
    task = fp.tasks.instruction_tuning()
    refused("batch_size = 0", answer, model, params, [{"prompt": "a"}], task=task, batch_size=0)
    long = ["a", "ab" * 150]
    said = r"prompt 2 has 300 tokens, .* needs 3 more, and .* at most 256\. Cut it to 253"
    refused(said, fp.generate, model, params, long, max_new_tokens=4)
    assert len(fp.generate(model, params, long, max_new_tokens=4, max_length=253)) == 2
    with pytest.raises(fp.InputError, match=r"row 1 has 257 tokens, and the model .* 256"):
        likelihoods(model, params, [([5] * 257, [6])])
    assert likelihoods(model, params, [([5] * 256, [6])])[0].tokens == 1
    stretches = {**model.config, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}
    assert model.replace(config=stretches).longest_text > 1 << 20
    config = {"model_type": "lstm", "vocab_size": 300, "embedding_size": 8, "hidden_size": 8}
    lstm = fp.random_model(config, head=fp.heads.causal_lm()).replace(tokenizer=model.tokenizer)
    refused(r"rnn, lstm\) and keeps no cache", fp.generate, lstm, lstm.trainable, ["a"])
    other = fp.testing.tiny_model()
    refused("causal_lm", complete, other, other.trainable, [[1, 2]], fp.contracts.Sampling(2))
    refused("causal_lm", likelihoods, other, other.trainable, [((1,), (2,))])
