"""Other libraries get our logits from our exports, as an adapter or merged into the model."""

import json
import os

import numpy as np
import pytest
from closeness import EXACT, assert_close
from flax import nnx
from internals import export
from peft import PeftModel
from refusals import refused
from safetensors.numpy import load_file
from tiny import forward, trained
from torch_reference import (
    FAMILIES,
    HEADS,
    layers,
    logits_of,
    padded_batch,
    randomised,
    saved,
    tensors,
    tiny_model,
)
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

import fedjax_peft as fp
from fedjax_peft import peft
from fedjax_peft.peft.io.export import export_clients

CLASSES = 3

pytestmark = pytest.mark.slow


def ours(model, params, batch):
    return np.asarray(forward(model, batch, params).logits)


def theirs(reference, batch):
    return logits_of(reference.eval()(**tensors(batch))).detach().numpy()


def assert_same(got, expected, batch):
    """Asserts that logits are equal, without those of padding and of peft's prompt."""
    if got.ndim == 3:
        expected = expected[:, -got.shape[1] :]
        real = batch["attention_mask"].astype(bool)
        got, expected = got[real], expected[real]
    assert_close(got, expected, **EXACT)


AUTO = {
    "classification": AutoModelForSequenceClassification,
    "token_classification": AutoModelForTokenClassification,
    "span_classification": AutoModelForQuestionAnswering,
    "causal_lm": AutoModelForCausalLM,
}


def auto(family, kind):
    return AUTO[kind] if FAMILIES[family].embeddings else AutoModelForImageClassification


# ------------------------------------------------------------------------------------------- PEFT


def assert_peft_reads(directory, method, tmp_path, *, family="bert", kind="classification"):
    """Asserts that peft has our logits on a base checkpoint, and writes the same file."""
    model = fp.attach(fp.load_model(directory), method)
    params = trained(model)
    adapter = export(model, params, tmp_path / "adapter")
    reference = auto(family, kind).from_pretrained(directory, attn_implementation="eager")
    batch = padded_batch(reference.config)
    if kind == "span_classification":  # peft 0.21 does not hand token types on there
        batch.pop("token_type_ids", None)
    reference = PeftModel.from_pretrained(reference, adapter)
    got = ours(model, params, batch)
    assert_same(got, theirs(reference, batch), batch)
    assert np.abs(ours(model, model.trainable, batch) - got).max() > 0.1

    reference.save_pretrained(tmp_path / "again")
    written, again = (
        load_file(d / "adapter_model.safetensors") for d in (adapter, tmp_path / "again")
    )
    assert written.keys() == again.keys()
    for name, tensor in written.items():
        np.testing.assert_array_equal(tensor, again[name])
    return json.loads((adapter / "adapter_config.json").read_text())


LORA = {
    "alpha": peft.lora(4, alpha=6.0, dropout=0.1, targets=["query", "key", "dense"]),
    "rslora": peft.lora(4, alpha=6.0, rslora=True),
    "svd-alpha": peft.lora(3, init="svd", alpha=5.0, targets=r".*layer\.1.*(value|output\.dense)"),
    "qr": peft.lora(4, init="qr", alpha=6.0),
    "patterns-svd": peft.lora(
        4, init="svd", rslora=True, rank_pattern={"value": 2}, alpha_pattern={"query": 3.0}
    ),
    "dora": peft.dora(4, alpha=6.0, rslora=True, targets=["key", "dense"], rank_pattern={"key": 2}),
    "ia3": peft.ia3(targets=["value", "intermediate.dense"], feed_forward=[]),
    "prompt": peft.prompt_tuning(5),
    "hira": peft.hira(4, dropout=0.1),
    "miss": peft.miss(5, targets=["query", "dense"]),
    "oft": peft.oft(8, terms=7),
    "oft-exact": peft.oft(16, block_share=True, neumann=False),
    "shira": peft.shira(4, targets=["query", "dense"]),
    "vera": peft.vera(48, targets=["query", "dense"]),  # of three sizes
}


@pytest.mark.parametrize("name", LORA)
@pytest.mark.sample("rslora", "svd-alpha", "patterns-svd", "dora", "ia3", "prompt")
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # of torch, in peft's SHiRA
def test_peft_reads_every_method(base, name, tmp_path):
    assert_peft_reads(base, LORA[name], tmp_path)


TASKS = {
    "classification": "SEQ_CLS",
    "token_classification": "TOKEN_CLS",
    "span_classification": "QUESTION_ANS",
    "causal_lm": "CAUSAL_LM",
}


@pytest.mark.parametrize(("family", "kind"), HEADS)
@pytest.mark.sample(
    *("deberta-v2-class*", "roberta-token*", "roberta-span*", "distilbert-class*", "gpt2-class*"),
    *("llama-*", "gemma3_text-*", "vit-*", "modernbert-span*", "dinov2-*"),
)
def test_lora_of_every_head(family, kind, tmp_path):
    base = saved(tiny_model(family, kind=kind, **layers(family, 1)), tmp_path / "base")
    config = assert_peft_reads(base, peft.lora(2), tmp_path, family=family, kind=kind)
    image = FAMILIES[family].embeddings is None
    assert config["task_type"] == (None if image else TASKS[kind])
    assert config["fan_in_fan_out"] == (family == "gpt2")


@pytest.mark.parametrize(
    "method",
    [
        *(peft.lora(2, init="svd", alpha=3.0, rslora=True, parts=["v", "q"]), peft.dora(2)),
        *(peft.ia3(), peft.hira(2), peft.vera(2, targets=["c_attn", "c_fc"])),
    ],
    ids=["parts", "dora", "ia3", "hira", "vera"],
)
def test_gpt2(method, tmp_path):
    base = saved(tiny_model("gpt2", kind="causal_lm", n_layer=1), tmp_path / "base")
    assert_peft_reads(base, method, tmp_path, family="gpt2", kind="causal_lm")


@pytest.mark.parametrize("name", ["miss", "oft", "shira"])
def test_methods_that_peft_does_not_have_for_conv1d(name, tmp_path):
    plain = fp.testing.tiny_model(3, model_type="gpt2")
    adapted = fp.attach(plain, getattr(peft, name)(4, targets=["c_attn"]))
    message = rf"{name.upper()} for torch.nn.Linear alone.* gpt2 .*format='merged'"
    refused(message, export, adapted, adapted.trainable, tmp_path)


def test_fresh_head_of_a_bare_encoder_is_exported_with_its_pooler(tmp_path):
    config = tiny_model("bert").config
    encoder = randomised(AutoModel.from_config(config, add_pooling_layer=False))
    base = saved(encoder, tmp_path / "base")
    with pytest.warns(UserWarning, match="does not hold bert.pooler and classifier"):
        model = fp.attach(fp.load_model(base, head=fp.heads.classification(CLASSES)), peft.lora(4))
    params = trained(model)
    adapter = export(model, params, tmp_path / "adapter")
    written = load_file(adapter / "adapter_model.safetensors")
    assert "base_model.model.bert.pooler.dense.weight" in written
    batch = padded_batch(config)
    classifier = AutoModelForSequenceClassification.from_pretrained(base, num_labels=CLASSES)
    expected = theirs(PeftModel.from_pretrained(classifier, adapter), batch)
    assert_close(ours(model, params, batch), expected, **EXACT)


@pytest.mark.parametrize(("init", "rank"), [("kaiming", 4), ("svd", 8)])
def test_config(model, init, rank, tmp_path):
    adapted = fp.attach(model, peft.lora(4, alpha=6.0, rslora=True, init=init))
    export(adapted, trained(adapted), tmp_path, base_model="google/base")
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["r"] == rank
    # rsLoRA stays rsLoRA, but its scale after an SVD start is that of the trained rank.
    assert config["use_rslora"] is (init == "kaiming")
    assert config["lora_alpha"] == 6.0 if init == "kaiming" else 6.0 / np.sqrt(4) * rank
    assert config["init_lora_weights"] is True
    assert config["modules_to_save"] == ["bert.pooler", "classifier"]
    assert config["base_model_name_or_path"] == "google/base"
    assert len(config["target_modules"]) == 4
    export(adapted, trained(adapted), tmp_path, overwrite=True)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == model.name


def test_directions_that_a_client_does_not_own_are_written_as_zero(model, tmp_path):
    adapted = fp.attach(model, peft.lora(4))
    params = trained(adapted)
    site = "bert.encoder.layer.0.attention.self.query"
    params[f"{site}.lora_scale"] = params[f"{site}.lora_scale"].at[2:].set(0)
    export(adapted, params, tmp_path)
    b = load_file(tmp_path / "adapter_model.safetensors")[f"base_model.model.{site}.lora_B.weight"]
    np.testing.assert_array_equal(b[:, :2], params[f"{site}.lora_b"][:2].T)
    assert not b[:, 2:].any()


# ----------------------------------------------------------------------------------- whole or not


def contents(directory):
    return {p: p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()}


def test_same_parameters_give_the_same_bytes(model, tmp_path):
    adapted = fp.attach(model, peft.lora(4, init="svd"))
    one, other = (export(adapted, trained(adapted), tmp_path / n) for n in "ab")
    names = ["README.md", "adapter_config.json", "adapter_model.safetensors", "labels.json"]
    assert sorted(p.name for p in one.iterdir()) == names
    for name in names:
        assert (one / name).read_bytes() == (other / name).read_bytes()


@pytest.mark.parametrize(("format", "allowed"), [("peft", 1), ("merged", 0)])
def test_interrupted_export_leaves_the_old_one(model, format, allowed, tmp_path, monkeypatch):
    """The interrupt comes at the first rename, or between the renames of the two directories."""
    adapted = fp.attach(model, peft.lora(4))
    export(adapted, trained(adapted), tmp_path / "a", format=format)
    before = contents(tmp_path)
    replace, done = os.replace, []

    def fail(source, target):
        if len(done) == allowed:
            done.append(None)
            raise KeyboardInterrupt
        if os.path.isdir(source):
            done.append(None)
        return replace(source, target)

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(KeyboardInterrupt):
        export(adapted, trained(adapted, seed=2), tmp_path / "a", format=format, overwrite=True)
    assert contents(tmp_path) == before


def test_a_directory_that_is_not_an_export_is_not_changed(model, tmp_path):
    adapted = fp.attach(model, peft.lora(4))
    (tmp_path / "a").mkdir()
    export(adapted, trained(adapted), tmp_path / "a")
    before = contents(tmp_path)
    with pytest.raises(
        fp.InputError, match=r"holds 'adapter_config.json', which this export would"
    ):
        export(adapted, trained(adapted), tmp_path / "a", format="merged", overwrite=True)
    assert contents(tmp_path) == before
    refused("is a file", export, adapted, trained(adapted), tmp_path / "a" / "adapter_config.json")
    with pytest.raises(fp.InputError, match="cannot be written"):
        export(adapted, trained(adapted), tmp_path / "a" / "adapter_config.json" / "b")
    assert contents(tmp_path) == before
    # Another adapter is replaced on request only; the same one may be written again.
    export(adapted, trained(adapted), tmp_path / "a")
    with pytest.raises(fp.InputError, match=r"already holds another export.*--overwrite"):
        export(adapted, trained(adapted, seed=2), tmp_path / "a")
    assert contents(tmp_path) == before
    export(adapted, trained(adapted, seed=2), tmp_path / "a", overwrite=True)
    assert contents(tmp_path).keys() == before.keys()
    assert contents(tmp_path) != before


def test_one_export_for_each_client(model, tmp_path):
    adapted = fp.attach(model, peft.lora(4))
    clients = {c: trained(adapted, seed=c) for c in (0, 12)}
    out = export_clients(adapted, clients.items(), tmp_path / "new" / "clients")
    assert sorted(p.name for p in out.iterdir()) == ["client_0000", "client_0012"]
    for client, params in clients.items():
        alone = export(adapted, params, tmp_path / f"alone{client}")
        name = "adapter_model.safetensors"
        assert (out / f"client_{client:04d}" / name).read_bytes() == (alone / name).read_bytes()

    def failing():
        yield 0, clients[0]
        raise fp.InputError("no")

    with pytest.raises(fp.InputError):
        export_clients(adapted, failing(), tmp_path / "other" / "clients")
    assert not (tmp_path / "other").exists()


# -------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("method", "format", "complaint"),
    [
        (peft.bitfit(), "peft", r"'peft' cannot hold 'bitfit'; .* Use 'merged'\."),
        (peft.lora(2), "adapterhub", r"cannot hold 'lora'; .* Use 'peft' or 'merged'\."),
        (peft.houlsby(size=4), "merged", r"cannot hold 'houlsby'; .* Use 'adapterhub'\."),
        (peft.prompt_tuning(2), "merged", r"cannot hold 'prompt_tuning'; .* Use 'peft'\."),
        (peft.prefix_tuning(2), "merged", r"cannot hold 'prefix_tuning'; .* No other format can"),
        (None, "peft", r"no method attached, .* Use 'merged'\."),
        (peft.lora(2), "peff", r"'peff' is unknown. Did you mean 'peft'\?"),
    ],
)
def test_formats_that_lack_a_method_are_errors(model, method, format, complaint, tmp_path):
    adapted = model if method is None else fp.attach(model, method)
    refused(complaint, export, adapted, adapted.trainable, tmp_path / "a", format=format)
    assert not any(tmp_path.iterdir())


def test_model_that_is_not_from_hugging_face(tmp_path):
    module = nnx.Dict(dense=nnx.Linear(4, 4, rngs=nnx.Rngs(0)))
    own = fp.attach(fp.bind(module), peft.lora(2, targets=["dense"]))
    refused("Hugging Face model", export, own, own.trainable, tmp_path)


def test_parameters_of_another_model(model, base, tmp_path):
    adapted = fp.attach(model, peft.lora(4))
    half = {name: x for name, x in adapted.trainable.items() if "query" in name}
    refused(r"'bert.encoder.layer.0.attention.self.value.lora_a'", export, adapted, half, tmp_path)
    other = fp.attach(
        fp.load_model(base, head=fp.heads.token_classification(2, fresh=True)), peft.lora(4)
    )
    refused("are not this model's", export, adapted, other.trainable, tmp_path)
    assert not any(tmp_path.iterdir())
