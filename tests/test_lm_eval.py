"""The harness's three questions, answered as torch ``transformers`` answers them.

The harness itself is used if it is installed. Otherwise a class with its constructor stands in for
its base class, which is all that the adapter uses.
"""

import sys
import types
from typing import NamedTuple

import pytest
import torch
from closeness import approx
from internals import lm_eval
from refusals import refused
from torch_reference import log_likelihood
from transformers import AutoModelForCausalLM, AutoTokenizer

import fedjax_peft as fp


class Request(NamedTuple):
    args: tuple


def requests(*rows):
    return [Request(row) for row in rows]


@pytest.fixture(scope="module", autouse=True)
def harness():
    """Puts a stand-in in the harness's place where it is not installed."""
    names = ("lm_eval", "lm_eval.api", "lm_eval.api.model")
    try:
        import lm_eval.api.model  # noqa: F401
    except ImportError:
        for name in names:
            sys.modules[name] = types.ModuleType(name)
        sys.modules[names[-1]].LM = type("LM", (), {})
        yield
        for name in names:
            del sys.modules[name]
    else:
        yield


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return fp.testing.write_tiny_language_model(
        tmp_path_factory.mktemp("m"), initializer_range=0.5, num_hidden_layers=1
    )


@pytest.fixture(scope="module")
def lm(path):
    model = fp.load_model(path, head=fp.heads.causal_lm())
    return lm_eval.of_model(model, max_length=24, max_new_tokens=8)


@pytest.fixture(scope="module")
def reference(path):
    return AutoModelForCausalLM.from_pretrained(path).eval(), AutoTokenizer.from_pretrained(path)


def ids(reference, text):
    return reference[1](text, add_special_tokens=False)["input_ids"]


def test_log_likelihoods_of_continuations(lm, reference):
    rows = [("The sea", " is blue"), ("The sea ", "is blue"), ("", "red"), ("x" * 40, "yes no")]
    got = lm.loglikelihood(requests(*rows))
    end = reference[1].eos_token_id
    expected = [
        (ids(reference, "The sea"), ids(reference, " is blue")),
        (ids(reference, "The sea"), ids(reference, " is blue")),
        ([end], ids(reference, "red")),
        (ids(reference, "x" * 40)[-(25 - 6) :], ids(reference, "yes no")),
    ]
    for (total, greedy), (context, then) in zip(got, expected, strict=True):
        wanted = log_likelihood(reference[0], context, then)
        assert total == approx(wanted[0], abs=2e-4)
        assert greedy == wanted[1]


def test_log_likelihoods_of_whole_texts(lm, reference):
    long = "Sankt Pauls Harbour is far, and the lamp burns oil."
    got = lm.loglikelihood_rolling(requests((long,), ("red",), ("",)))
    tokens, end = ids(reference, long), reference[1].eos_token_id
    assert len(tokens) == 51
    windows = [([end], tokens[:24]), (tokens[23:24], tokens[24:48]), (tokens[26:48], tokens[48:])]
    expected = sum(log_likelihood(reference[0], *window)[0] for window in windows)
    assert got[0] == approx(expected, abs=5e-4)
    assert got[1] == approx(log_likelihood(reference[0], [end], ids(reference, "red"))[0], abs=2e-4)
    assert got[2] == 0


def test_completions_end_at_stop_words(lm, reference):
    prompts = ["The sea", "a", "Who built it?"]
    with torch.no_grad():
        whole = [
            reference[0].generate(
                torch.tensor([ids(reference, text)]), max_new_tokens=6, do_sample=False
            )[0, len(ids(reference, text)) :]
            for text in prompts
        ]
    texts = [reference[1].decode(x, skip_special_tokens=True) for x in whole]
    how = {"until": [], "max_gen_toks": 6, "do_sample": False, "temperature": 0.0}
    assert lm.generate_until(requests(*[(text, how) for text in prompts])) == texts
    stop = texts[0][3]
    stopped = lm.generate_until(requests((prompts[0], how | {"until": ["", stop]})))
    assert stopped == [texts[0].split(stop)[0]]
    free = lm.generate_until(requests((prompts[1], {"until": "zzz"})))
    assert free[0].startswith(texts[1])
    drawn = how | {"do_sample": True, "temperature": 1.0}
    assert lm.generate_until(requests((prompts[0], drawn))) != [texts[0]]


def test_the_positions_of_the_model_bound_the_texts(lm, path):
    model = fp.load_model(path, head=fp.heads.causal_lm())
    short = model.replace(config={**model.config, "max_position_embeddings": 24})
    other = lm_eval.of_model(short, max_length=1000, max_new_tokens=8)
    text = requests(("Sankt Pauls Harbour is far, and the lamp burns oil.",))
    (expected,) = lm.loglikelihood_rolling(text)
    assert other.loglikelihood_rolling(text) == [approx(expected, abs=5e-4)]


def test_chat_templates_are_the_tokenizer_s(lm):
    talk = [{"role": "user", "content": "Hi"}]
    assert lm.apply_chat_template(talk) == "<|user|>Hi<|end|><|assistant|>"


def test_what_is_missing_is_named(monkeypatch):
    refused("has no tokenizer", lm_eval.of_model, fp.testing.tiny_model())
    monkeypatch.setitem(sys.modules, "lm_eval.api.model", None)
    refused("pip install 'lm-eval", lm_eval.of_model, fp.testing.tiny_model())
