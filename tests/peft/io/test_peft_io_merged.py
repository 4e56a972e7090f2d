"""A model with all trained leaves merged is a plain Hugging Face checkpoint."""

import json

import pytest
from closeness import EXACT, assert_close
from internals import export
from safetensors.numpy import load_file
from test_peft_io_export import CLASSES, assert_same, auto, ours, theirs
from tiny import trained
from torch_reference import layers, padded_batch, saved, tiny_model
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import fedjax_peft as fp
from fedjax_peft import peft, testing

pytestmark = pytest.mark.slow


MERGED = {
    "svd": peft.lora(4, init="svd", alpha=6.0, targets=["query", "dense"]),
    "dora": peft.dora(4, alpha=6.0),
    "ia3": peft.ia3(),
    "full": peft.full(),
}


def assert_merges(directory, method, tmp_path, *, family="bert", kind="classification"):
    """Asserts that transformers and we get the same model from the merged checkpoint."""
    model = fp.attach(fp.load_model(directory), method)
    params = trained(model)
    out = export(model, params, tmp_path / "merged", format="merged")
    reference = auto(family, kind).from_pretrained(out, attn_implementation="eager")
    batch = padded_batch(reference.config)
    expected = ours(model, params, batch)
    assert_same(theirs(reference, batch), expected, batch)
    again = fp.load_model(out)
    assert_same(ours(again, again.trainable, batch), expected, batch)
    config = json.loads((out / "config.json").read_text())
    assert config["architectures"] == [type(reference).__name__]
    assert len({path.stat().st_mode for path in out.iterdir()}) == 1
    assert load_file(out / "model.safetensors").keys() == (
        load_file(directory / "model.safetensors").keys()
    )
    return config


@pytest.mark.parametrize("name", MERGED)
def test_merged(base, name, tmp_path):
    config = assert_merges(base, MERGED[name], tmp_path)
    assert config["id2label"] == {str(i): f"LABEL_{i}" for i in range(CLASSES)}


@pytest.mark.parametrize(
    ("family", "kind", "method"),
    [
        ("roberta", "token_classification", peft.lora(2)),
        ("distilbert", "span_classification", peft.lora(2)),
        ("gpt2", "causal_lm", peft.lora(2, parts=["v"])),
        ("vit", "classification", peft.lora(2)),
        ("gemma2", "causal_lm", peft.full()),
        ("llama", "span_classification", peft.lora(2)),
    ],
)
@pytest.mark.sample("distilbert-*", "gpt2-*", "gemma2-*", "llama-*")
def test_merged_of_other_families(family, kind, method, tmp_path):
    base = saved(tiny_model(family, kind=kind, **layers(family, 1)), tmp_path / "base")
    assert_merges(base, method, tmp_path, family=family, kind=kind)


def test_merged_checkpoint_has_the_tokenizer(tmp_path):
    base = testing.write_tiny_checkpoint(tmp_path / "base")
    labels = ["red", "green", "blue"]
    model = fp.attach(fp.load_model(base, head=fp.heads.classification(labels)), peft.lora(2))
    out = export(model, trained(model), tmp_path / "merged", format="merged")
    text = "w1 w2 w50"
    assert AutoTokenizer.from_pretrained(out)(text) == AutoTokenizer.from_pretrained(base)(text)
    config = AutoModelForSequenceClassification.from_pretrained(out).config
    assert config.id2label == dict(enumerate(labels))
    assert config.label2id == {"red": 0, "green": 1, "blue": 2}


def test_merged_checkpoint_says_float32(tmp_path):
    """Transformers would cast it to the dtype that the original config names."""
    half = tiny_model("bert").half()
    model = fp.attach(fp.load_model(saved(half, tmp_path / "base")), peft.bitfit())
    out = export(model, trained(model), tmp_path / "merged", format="merged")
    reference = AutoModelForSequenceClassification.from_pretrained(out)
    batch = padded_batch(reference.config)
    assert_close(theirs(reference, batch), ours(model, trained(model), batch), **EXACT)
