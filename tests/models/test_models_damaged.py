"""Errors for damaged checkpoints and tokenizers name the file."""

import json

import numpy as np
import pytest
from internals import is_finite
from ml_dtypes import bfloat16
from refusals import refused
from safetensors.numpy import load_file, save_file

import fedjax_peft as fp
from fedjax_peft import testing


@pytest.fixture
def folder(tmp_path):
    return testing.write_tiny_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("value", "dtype"), [(np.nan, np.float32), (np.inf, np.float16), (-np.inf, bfloat16)]
)
def test_weights_that_are_not_finite_are_refused_by_name(folder, value, dtype):
    path = folder / "model.safetensors"
    tensors = {name: x.astype(dtype) for name, x in load_file(path).items()}
    save_file(tensors, path)
    fp.load_model(folder, head=fp.heads.classification(2))
    name = "encoder.layer.1.output.dense.weight"
    name = next(key for key in tensors if key.endswith(name))
    tensors[name].flat[-1] = value
    save_file(tensors, path)
    refused(rf"not finite.*{name}", fp.load_model, folder, head=fp.heads.classification(2))


def test_whole_numbers_and_the_largest_floats_are_finite():
    assert is_finite(np.array([2**63 - 1]))
    assert is_finite(np.full(70_000, np.finfo(np.float32).max))
    assert is_finite(np.array([], np.float32))
    late = np.zeros(70_000, np.float32)
    late[-1] = np.nan
    assert not is_finite(late)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", "{}"),
        ("tokenizer.json", "not json"),
        ("tokenizer.json", "[]"),
        ("tokenizer.json", '{"version": "1.0", "model": {"type": "WordLevel"}}'),
        ("tokenizer_config.json", "[1]"),
        ("tokenizer_config.json", '{"tokenizer_class": 3}'),
        ("tokenizer_config.json", '{"model_max_length": "long"}'),
        ("tokenizer_config.json", '{"pad_token": [1]}'),
    ],
)
def test_a_damaged_tokenizer_is_one_paragraph(folder, name, content):
    (folder / name).write_text(content)
    refused(r"The tokenizer in .* cannot be read", fp.load_tokenizer, folder)


def test_a_tokenizer_of_another_vocabulary_is_refused(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": 60}))
    refused("ids up to 63, but the model's vocabulary has 60", fp.load_tokenizer, folder)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_size": 10**9, "num_attention_heads": 1}, "needs at least .* of memory"),
        ({"num_hidden_layers": 10**8}, "num_hidden_layers = 100000000; it must be at most 1,000"),
        ({"vocab_size": 2**40}, "vocab_size = 1099511627776; it must be at most"),
        ({"model_type": ["bert"]}, "model type .* is not supported"),
    ],
)
def test_a_model_too_large_is_refused_before_it_is_made(change, words):
    with pytest.raises(fp.InputError, match=words):
        fp.random_model({**testing.TINY_BERT, **change}, head=fp.heads.classification(2))


@pytest.mark.parametrize("name", ["spm.model", "sentencepiece.bpe.model", "tokenizer.model"])
def test_a_tokenizer_of_sentencepiece_comes_with_the_line_that_converts_it(folder, name):
    """The line was tried with transformers 5.23 and sentencepiece, which tests do not install."""
    for file in folder.glob("tokenizer*"):
        file.unlink()
    refused(r"holds no tokenizer \(tokenizer.json\)\.$", fp.load_tokenizer, folder)
    (folder / name).write_bytes(b"")
    line = f"AutoTokenizer.from_pretrained('{folder}').save_pretrained('{folder}')"
    with pytest.raises(fp.InputError) as error:
        fp.load_tokenizer(folder)
    assert f"It has {name}, which" in str(error.value)
    assert str(error.value).endswith(line)
    with pytest.raises(fp.InputError, match="This model has no tokenizer") as error:
        fp.load_model(folder, head=fp.heads.classification(2)).require_tokenizer()
    assert str(error.value).endswith(line)
