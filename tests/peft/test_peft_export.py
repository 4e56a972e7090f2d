"""An exported adapter is what Hugging Face PEFT reads: our logits, on the original checkpoint."""

import json
import os

import numpy as np
import pytest
from flax import nnx
from peft import PeftModel
from safetensors.numpy import load_file
from torch_reference import padded_batch, randomised, saved, tiny_model, torch_outputs
from transformers import AutoModel, AutoModelForSequenceClassification

from fedjax_peft.errors import InputError
from fedjax_peft.models.base import bind
from fedjax_peft.models.heads import classification
from fedjax_peft.models.hf import load_model
from fedjax_peft.peft import lora
from fedjax_peft.peft.base import attach
from fedjax_peft.peft.io import export_peft

CLASSES = 3

# peft 0.21 asks transformers 5 for an attribute that it has renamed.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")


def trained(model, seed=1):
    """Returns trainable leaves as after a run: all moved, the fixed ones as they were."""
    rng = np.random.default_rng(seed)
    return {
        name: x if model.kinds[name] == "fixed" else x + rng.normal(0, 0.2, x.shape).astype("f4")
        for name, x in model.trainable.items()
    }


def logits(model, params, batch):
    return np.asarray(model.apply(model.frozen, params, batch, None, False).logits)


def peft_model(base, adapter):
    classifier = AutoModelForSequenceClassification.from_pretrained(base, num_labels=CLASSES)
    return PeftModel.from_pretrained(classifier, adapter).eval()


METHODS = {
    "kaiming": lora(4),
    "alpha": lora(4, alpha=6.0, dropout=0.1, targets=["query", "key", "dense"]),
    "rslora": lora(4, alpha=6.0, rslora=True),
    "svd": lora(4, init="svd"),
    "svd-alpha": lora(3, init="svd", alpha=5.0, targets=r".*layer\.1.*(value|output\.dense)"),
    "svd-rslora": lora(4, init="svd", alpha=6.0, rslora=True),
}


@pytest.mark.parametrize("family", ["bert", "roberta"])
@pytest.mark.parametrize("method", METHODS)
def test_peft_gives_our_logits(family, method, tmp_path):
    base = saved(tiny_model(family, classes=CLASSES), tmp_path / "base")
    model = attach(load_model(base), METHODS[method])
    params = trained(model)
    adapter = export_peft(model, params, tmp_path / "adapter")
    reference = peft_model(base, adapter)

    batch = padded_batch(reference.config)
    expected, _ = torch_outputs(reference, batch)
    np.testing.assert_allclose(logits(model, params, batch), expected, rtol=0, atol=1e-5)
    assert np.abs(logits(model, model.trainable, batch) - expected).max() > 0.1

    # And peft writes the same tensors under the same names.
    reference.save_pretrained(tmp_path / "again")
    ours, theirs = (
        load_file(d / "adapter_model.safetensors") for d in (adapter, tmp_path / "again")
    )
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        np.testing.assert_array_equal(tensor, theirs[name])


def test_fresh_head_of_a_bare_encoder_is_exported_with_its_pooler(tmp_path):
    config = tiny_model("bert").config
    encoder = randomised(AutoModel.from_config(config, add_pooling_layer=False))
    base = saved(encoder, tmp_path / "base")
    model = attach(load_model(base, head=classification(CLASSES)), lora(4))
    params = trained(model)
    adapter = export_peft(model, params, tmp_path / "adapter")
    written = load_file(adapter / "adapter_model.safetensors")
    assert "base_model.model.bert.pooler.dense.weight" in written
    batch = padded_batch(config)
    expected, _ = torch_outputs(peft_model(base, adapter), batch)
    np.testing.assert_allclose(logits(model, params, batch), expected, rtol=0, atol=1e-5)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load_model(saved(tiny_model("bert"), tmp_path_factory.mktemp("base")))


@pytest.mark.parametrize(("init", "rank"), [("kaiming", 4), ("svd", 8)])
def test_config(model, init, rank, tmp_path):
    adapted = attach(model, lora(4, alpha=6.0, rslora=True, init=init))
    export_peft(adapted, trained(adapted), tmp_path, base_model="google/base")
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["r"] == rank
    assert config["lora_alpha"] / rank == 6.0 / np.sqrt(4)
    assert config["use_rslora"] is False
    assert config["init_lora_weights"] is True
    assert config["task_type"] == "SEQ_CLS"
    assert config["modules_to_save"] == ["bert.pooler", "classifier"]
    assert config["base_model_name_or_path"] == "google/base"
    assert len(config["target_modules"]) == 4
    export_peft(adapted, trained(adapted), tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == model.name


def test_untrained_svd_adapter_adds_nothing(model, tmp_path):
    adapted = attach(model, lora(4, init="svd"))
    export_peft(adapted, adapted.trainable, tmp_path)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    for name, a in tensors.items():
        if "lora_A" in name:
            b = tensors[name.replace("lora_A", "lora_B")]
            np.testing.assert_allclose(b @ a, 0, atol=1e-6)


def test_same_parameters_give_the_same_bytes(model, tmp_path):
    adapted = attach(model, lora(4, init="svd"))
    one, other = (export_peft(adapted, trained(adapted), tmp_path / n) for n in "ab")
    names = ["adapter_config.json", "adapter_model.safetensors"]
    assert sorted(p.name for p in one.iterdir()) == names
    for name in names:
        assert (one / name).read_bytes() == (other / name).read_bytes()


def test_interrupted_export_leaves_the_old_file(model, tmp_path, monkeypatch):
    adapted = attach(model, lora(4))
    export_peft(adapted, trained(adapted), tmp_path)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}

    def fail(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(KeyboardInterrupt):
        export_peft(adapted, trained(adapted, seed=2), tmp_path)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


def test_directions_that_a_client_does_not_own_are_written_as_zero(model, tmp_path):
    adapted = attach(model, lora(4))
    params = trained(adapted)
    site = "bert.encoder.layer.0.attention.self.query"
    params[f"{site}.lora_scale"] = params[f"{site}.lora_scale"].at[2:].set(0)
    export_peft(adapted, params, tmp_path)
    b = load_file(tmp_path / "adapter_model.safetensors")[f"base_model.model.{site}.lora_B.weight"]
    np.testing.assert_array_equal(b[:, :2], params[f"{site}.lora_b"][:2].T)
    assert not b[:, 2:].any()


# -------------------------------------------------------------------------------------- refusals


def test_model_without_lora(model, tmp_path):
    with pytest.raises(InputError, match=r"Only LoRA .* no method"):
        export_peft(model, model.trainable, tmp_path)
    other = attach(model, lora(4)).replace(method=lora(4)._replace(name="bitfit"))
    with pytest.raises(InputError, match="'bitfit'"):
        export_peft(other, other.trainable, tmp_path)


def test_model_that_is_not_from_hugging_face(tmp_path):
    module = nnx.Dict(dense=nnx.Linear(4, 4, rngs=nnx.Rngs(0)))
    own = attach(bind(module), lora(2, targets=["dense"]))
    with pytest.raises(InputError, match="Hugging Face model"):
        export_peft(own, own.trainable, tmp_path)


def test_parameters_of_another_model(model, tmp_path):
    adapted = attach(model, lora(4))
    half = {name: x for name, x in adapted.trainable.items() if "query" in name}
    with pytest.raises(InputError, match=r"'bert.encoder.layer.0.attention.self.value.lora_a'"):
        export_peft(adapted, half, tmp_path)
    assert not any(tmp_path.iterdir())
