"""AdapterHub's files: files of ``adapters`` give its outputs, and equal the files that we write.

The golden files are those of ``tests/golden/adapters_golden.py``.
"""

import functools
import itertools
import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
import torch
from closeness import assert_close
from internals import describe, export_adapterhub
from refusals import refused
from safetensors.numpy import load_file, save_file
from safetensors.torch import save_file as save_torch
from tiny import trained

import fedjax_peft as fp
from fedjax_peft.peft.io.adapterhub import load_adapterhub

pytestmark = pytest.mark.slow

GOLDEN = Path(__file__).parents[2] / "golden" / "adapters"
FAMILIES = ["bert", "roberta", "distilbert", "deberta-v2", "gpt2", "gpt2-classifier", "vit"]
NAMES = ["houlsby", "pfeiffer"]


@functools.cache
def base(family="bert"):
    return fp.load_model(GOLDEN / family)


def read(path):
    return json.loads(path.read_text())


# ------------------------------------------------------------------- against adapters' own files


# Pfeiffer's adapters have one of the two places of Houlsby's, with a norm after it or before it.
PRODUCT = [*itertools.product(FAMILIES, NAMES)]
RUNS = ("*-houlsby", "bert-pfeiffer", "gpt2-pfeiffer")


@pytest.mark.parametrize(("family", "name"), PRODUCT)
@pytest.mark.sample(*RUNS)
def test_files_of_adapters_give_its_logits_and_hidden_states(family, name):
    directory = GOLDEN / family
    model = fp.attach(base(family), load_adapterhub(directory / name))
    batch = load_file(directory / "inputs.safetensors")
    expected = load_file(directory / name / "outputs.safetensors")
    apply = jax.jit(model.apply, static_argnums=4)
    outputs = apply(model.frozen, model.trainable, batch, None, False)
    got = {"logits": outputs.logits} | {f"states.{i}": x for i, x in enumerate(outputs.states)}
    assert got.keys() == expected.keys()
    for what, x in got.items():
        rows = batch["attention_mask"].astype(bool) if x.ndim == 3 and family != "vit" else ...
        assert_close(np.asarray(x)[rows], expected[what][rows], rtol=0, atol=1e-5, err_msg=what)


@pytest.mark.parametrize(("family", "name"), PRODUCT)
@pytest.mark.sample(*RUNS)
def test_our_files_equal_those_of_adapters(family, name, tmp_path):
    golden = GOLDEN / family / name
    model = fp.attach(base(family), load_adapterhub(golden))
    export_adapterhub(model, model.trainable, tmp_path, name=name, base_model="")
    assert read(tmp_path / "adapter_config.json") == read(golden / "adapter_config.json")
    theirs = load_file(golden / "adapter.safetensors")
    ours = load_file(tmp_path / "adapter.safetensors")
    assert ours.keys() == theirs.keys()
    for tensor, x in theirs.items():
        np.testing.assert_array_equal(ours[tensor], x)
    if family == "gpt2":  # its head is the table of tokens, which is not trained
        assert not (tmp_path / "model_head.safetensors").exists()
        return
    assert read(tmp_path / "head_config.json") == read(golden / "head_config.json")
    theirs = load_file(golden / "model_head.safetensors")
    ours = load_file(tmp_path / "model_head.safetensors")
    # The pooler is part of our head, and of adapters' frozen base model.
    pooler = {"bert.pooler.dense.weight", "bert.pooler.dense.bias"} if family == "bert" else set()
    assert ours.keys() == theirs.keys() | pooler
    for tensor, x in theirs.items():
        np.testing.assert_array_equal(ours[tensor], x)


# -------------------------------------------------------------------------------------- round trip


@pytest.mark.parametrize(
    ("family", "method"),
    [
        ("bert", fp.peft.pfeiffer(size=3, activation="gelu_new", scaling=1.5, init="houlsby")),
        ("bert", fp.peft.bottleneck(2.5, places=["attention"], after_norm=True)),
        ("gpt2-classifier", fp.peft.houlsby(4)),
    ],
    ids=["pfeiffer", "attention", "houlsby"],
)
def test_round_trip_is_exact(family, method, tmp_path):
    model = fp.attach(base(family), method)
    params = trained(model)
    again = fp.attach(base(family), load_adapterhub(export_adapterhub(model, params, tmp_path)))
    assert again.trainable.keys() == params.keys()
    for name, x in params.items():
        np.testing.assert_array_equal(again.trainable[name], x)
    for name, x in base(family).frozen.items():
        np.testing.assert_array_equal(again.frozen[name], x)
    assert again.method.name == method.name
    for option in ("places", "after_norm", "activation", "scaling", "init"):
        assert again.method.options[option] == method.options[option]
    # And it can be written again, byte for byte.
    other = export_adapterhub(again, again.trainable, tmp_path / "again")
    for file in ("adapter_config.json", "adapter.safetensors", "model_head.safetensors"):
        assert (other / file).read_bytes() == (tmp_path / file).read_bytes()


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16])
def test_half_precision_is_read_as_float32(stored, tmp_path):
    file = changed(tmp_path) / "adapter.safetensors"
    exact = load_file(file)
    save_torch({name: torch.tensor(x).to(stored) for name, x in exact.items()}, file)
    model = fp.attach(base(), load_adapterhub(tmp_path))
    site = "bert.encoder.layer.0.output"
    got = model.trainable[f"{site}.residual.adapter.up.kernel"]
    assert got.dtype == np.float32
    expected = torch.tensor(exact[f"{site}.adapters.houlsby.adapter_up.weight"].T).to(stored)
    np.testing.assert_array_equal(got, expected.float().numpy())


def test_head_of_tokens_is_exported_under_its_own_class(tmp_path):
    model = fp.load_model(
        GOLDEN / "bert", head=fp.heads.token_classification(["O", "B"], fresh=True)
    )
    model = fp.attach(model, fp.peft.pfeiffer(4))
    export_adapterhub(model, trained(model), tmp_path, base_model="google/base")
    head_config = read(tmp_path / "head_config.json")
    assert head_config["model_class"] == "BertForTokenClassification"
    assert head_config["label2id"] == {"O": 0, "B": 1}
    assert head_config["model_name"] == read(tmp_path / "adapter_config.json")["model_name"]
    assert head_config["model_name"] == "google/base"


def test_the_printed_lines_read_the_file_that_is_written():
    """``adapters`` looks for a pickle unless it is asked for safetensors."""
    lines = describe.snippet(fp.attach(base(), fp.peft.pfeiffer(4)), "out", "adapterhub")
    assert "model.load_adapter('out', set_active=True, use_safetensors=True)" in lines


@pytest.mark.parametrize(("written", "meant"), [("gelu", "gelu_new"), ("gelu_orig", "gelu")])
def test_activations_of_old_files(written, meant, tmp_path):
    directory = changed(tmp_path, {"non_linearity": written}, version=None)
    assert load_adapterhub(directory).options["activation"] == meant
    directory = changed(tmp_path / "new", {"non_linearity": written.upper()})
    if written == "gelu":
        assert load_adapterhub(directory).options["activation"] == "gelu"


# -------------------------------------------------------------------------------- refused: reading


def changed(directory, fields=None, **head_config):
    """Returns a copy of a golden adapter with changed config fields; None removes one."""
    shutil.copytree(GOLDEN / "bert" / "houlsby", directory, dirs_exist_ok=True)
    file = directory / "adapter_config.json"
    whole = read(file)
    whole["config"] |= fields or {}
    whole = {key: x for key, x in (whole | head_config).items() if x is not None}
    file.write_text(json.dumps(whole))
    return directory


@pytest.mark.parametrize(
    "config",
    [
        {"original_ln_after": False},
        {"residual_before_ln": "post_add"},
        {"inv_adapter": "nice"},
        {"leave_out": [0]},
        {"dropout": 0.1},
        {"scaling": "learned"},
        {"scaling": True},
        {"reduction_factor": {"0": 8, "default": 16}},
        {"non_linearity": None},
        {"mh_adapter": "yes"},
        {"architecture": "lora"},
        {"new_attention_norm": True},
    ],
    ids=lambda config: "-".join(config),
)
def test_config_fields_that_change_the_maths(config, tmp_path):
    ((field, value),) = config.items()
    with pytest.raises(fp.InputError) as caught:
        load_adapterhub(changed(tmp_path, config))
    assert f"{field} = {value!r}" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("config", "head_config", "message"),
    [
        ({"non_linearity": "leakyrelu"}, {}, "'leakyrelu' is not implemented"),
        ({"reduction_factor": 0}, {}, "reduction_factor = 0"),
        ({"mh_adapter": False, "output_adapter": False}, {}, r"places = \(\)"),
        ({}, {"model_type": "robert"}, r"'robert'.*'roberta'"),
        ({}, {"config": "seq_bn"}, "no table 'config'"),
    ],
    ids=["activation", "factor", "no places", "model type", "config"],
)
def test_invalid_configs_are_errors(config, head_config, message, tmp_path):
    refused(message, load_adapterhub, changed(tmp_path, config, **head_config))


def test_missing_or_broken_files_are_errors(tmp_path):
    refused(r"holds no adapter_config.json", load_adapterhub, tmp_path)
    weights = changed(tmp_path) / "adapter.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    refused(r"not a whole safetensors file", load_adapterhub, tmp_path)
    weights.unlink()
    refused(r"holds no adapter.safetensors", load_adapterhub, tmp_path)
    (tmp_path / "pytorch_adapter.bin").write_bytes(b"")
    refused(r"pickle \(pytorch_adapter.bin\).*refused", load_adapterhub, tmp_path)
    (tmp_path / "adapter_config.json").write_text("{")
    refused("not valid JSON", load_adapterhub, tmp_path)


def test_all_that_does_not_fit_is_one_message(tmp_path):
    file = changed(tmp_path) / "adapter.safetensors"
    tensors = load_file(file)
    layer = "bert.encoder.layer.1.output.adapters.houlsby"
    tensors[f"{layer}.adapter_up.weight"] = np.zeros((16, 5), np.float32)
    del tensors[f"{layer}.adapter_down.0.bias"]
    tensors[f"{layer}.gate.weight"] = np.zeros((1, 16), np.float32)
    save_file(tensors, file)
    save_file({"classifier.weight": np.zeros((5, 16), "f4")}, tmp_path / "model_head.safetensors")
    with pytest.raises(fp.InputError) as caught:
        fp.attach(base(), load_adapterhub(tmp_path))
    message = str(caught.value)
    assert "(5 mismatches)" in message
    assert f"{layer}.adapter_up.weight is [16, 5], the model needs [16, 4]" in message
    assert f"{layer}.adapter_down.0.bias [4] is missing" in message
    assert f"{layer}.gate.weight [1, 16] has no place in the model" in message
    assert "classifier" in message


def test_adapter_of_another_family_or_depth(tmp_path):
    # 16 tensors without a place, four sites that are none of RoBERTa's, and a head of other form.
    method = load_adapterhub(GOLDEN / "roberta" / "houlsby")
    refused(r"roberta adapter .* \(24 mismatches\).*and 20 more", fp.attach, base(), method)
    config = read(GOLDEN / "bert" / "config.json") | {"num_hidden_layers": 1}
    shutil.copytree(GOLDEN / "bert", tmp_path, dirs_exist_ok=True)
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = load_file(tmp_path / "model.safetensors")
    kept = {name: x for name, x in tensors.items() if ".layer.1." not in name}
    save_file(kept, tmp_path / "model.safetensors")
    with pytest.raises(fp.InputError, match=r"\(8 mismatches\).*layer.1.*has no place"):
        fp.attach(fp.load_model(tmp_path), load_adapterhub(GOLDEN / "bert" / "houlsby"))


# -------------------------------------------------------------------------------- refused: writing


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (fp.peft.houlsby(4, targets=["query"]), r"in all layers.*query' has one"),
        (
            fp.peft.pfeiffer(4, targets=r".*layer\.1\.output\.residual"),
            r"layer.0.output.residual' has none",
        ),
    ],
    ids=["linear", "one layer"],
)
def test_places_that_the_format_does_not_have(method, message, tmp_path):
    """For methods see ``test_peft_io_export.py``, for families ``test_models_decoders.py``."""
    model = fp.attach(base(), method)
    refused(message, export_adapterhub, model, model.trainable, tmp_path)
    assert not any(tmp_path.iterdir())
