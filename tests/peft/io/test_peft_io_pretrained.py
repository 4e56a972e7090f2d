"""Training can start from an adapter written by peft or by us: the same leaves and logits."""

import copy
import json
import shutil

import numpy as np
import pytest
import torch
from closeness import EXACT, assert_close
from internals import TINY_BERT, export
from peft import (
    HiraConfig,
    IA3Config,
    LoraConfig,
    MissConfig,
    OFTConfig,
    PromptTuningConfig,
    ShiraConfig,
    VeraConfig,
    get_peft_model,
)
from refusals import refused
from safetensors.torch import load_file, save_file
from tiny import forward, trained
from torch_reference import layers, logits_of, padded_batch, randomised, saved, tensors, tiny_model
from transformers import AutoModel

import fedjax_peft as fp
from fedjax_peft import attach, count, heads, load_model, merge, peft, random_model

pytestmark = pytest.mark.slow


def ours(model, batch, params=None):
    return np.asarray(forward(model, batch, params).logits)


# ------------------------------------------------------------------------------------ round trips

KEPT = {
    "lora": peft.lora(3, alpha=5.0, init="gaussian", dropout=0.1, targets=["query", "dense"]),
    "patterns": peft.lora(
        4,
        alpha=7.0,
        rslora=True,
        rank_pattern={"value": 3},
        alpha_pattern={r"layer\.1\..*query": 5.0},
    ),
    "dora": peft.dora(3, alpha=5.0, rslora=True, rank_pattern={"value": 2}),
    "ia3": peft.ia3(),
    "ia3-none": peft.ia3(targets=["value"], feed_forward=[]),
    "prompt": peft.prompt_tuning(5),
    "houlsby": peft.houlsby(size=4),
    "hira": peft.hira(4),
    "miss": peft.miss(5, dropout=0.1),
    "oft": peft.oft(16, terms=4, block_share=True),
    "shira": peft.shira(3),
    "vera": peft.vera(8, targets=["query", "dense"], d_initial=0.05),
}


@pytest.mark.parametrize("name", KEPT)
def test_round_trip_is_exact(model, name, tmp_path):
    """The scale is exact too, and writing the adapter again gives the same file."""
    adapted = attach(model, KEPT[name])
    params = trained(adapted)
    format = "adapterhub" if name == "houlsby" else "peft"
    first = export(adapted, params, tmp_path / "a", format=format)
    again = attach(model, peft.pretrained(first))
    assert again.kinds == adapted.kinds
    for leaf, value in params.items():
        np.testing.assert_array_equal(again.trainable[leaf], value, err_msg=leaf)
    assert again.method.name == adapted.method.name
    second = export(again, again.trainable, tmp_path / "b", format=format)
    for path in first.iterdir():
        assert (second / path.name).read_bytes() == path.read_bytes()


@pytest.mark.parametrize("name", ["lora", "houlsby"])
def test_a_head_is_brought_into_the_classes_of_the_model(name, tmp_path):
    """The stored order of the classes is not that of the model, or is the only one with names."""

    def named(classes):
        return random_model(TINY_BERT, head=heads.classification(classes))

    format = "adapterhub" if name == "houlsby" else "peft"
    adapted = attach(named(["no", "yes", "perhaps"]), KEPT[name])
    params = trained(adapted)
    stored = export(adapted, params, tmp_path / "a", format=format)
    adapter = peft.pretrained(stored)
    turned = attach(named(["perhaps", "no", "yes"]), adapter)
    assert turned.labels == ("perhaps", "no", "yes")
    for leaf, value in params.items():
        own = value[..., np.array([2, 0, 1])] if leaf.startswith("classifier.") else value
        np.testing.assert_array_equal(turned.trainable[leaf], own, err_msg=leaf)
    assert attach(named(3), adapter).labels == ("no", "yes", "perhaps")
    with pytest.raises(
        fp.InputError, match=r"'never', and the head in .* the classes 'no', 'yes', '"
    ):
        attach(named(["no", "yes", "never"]), adapter)
    again = peft.pretrained(export(turned, turned.trainable, tmp_path / "b", format=format))
    back = attach(named(["no", "yes", "perhaps"]), again)
    for leaf, value in params.items():
        np.testing.assert_array_equal(back.trainable[leaf], value, err_msg=leaf)
    if name == "lora":
        merged = export(adapted, params, tmp_path / "m", format="merged")
        whole = load_model(merged, head=heads.classification(["perhaps", "no", "yes"]))
        first = load_model(merged).trainable["classifier.bias"]
        np.testing.assert_array_equal(whole.trainable["classifier.bias"], np.roll(first, 1))


@pytest.mark.parametrize(
    ("family", "kind", "method"),
    [
        ("bert", "classification", peft.lora(4, init="svd", rslora=True, alpha=5.0)),
        ("gpt2", "causal_lm", peft.lora(2, alpha=3.0, parts=["q", "v"])),
        ("llama", "span_classification", peft.lora(2)),
        ("gemma3_text", "causal_lm", peft.prompt_tuning(2)),
        ("vit", "classification", peft.ia3()),
    ],
)
def test_round_trip_of_other_models(family, kind, method, tmp_path):
    """The leaves can differ, but the logits are equal."""
    reference = tiny_model(family, kind=kind, **layers(family, 1))
    model = load_model(saved(reference, tmp_path / "base"))
    adapted = attach(model, method)
    params = trained(adapted)
    again = attach(model, peft.pretrained(export(adapted, params, tmp_path / "a")))
    batch = padded_batch(reference.config)
    assert_close(ours(again, batch), ours(adapted, batch, params), **EXACT)


def test_an_imported_adapter_is_like_an_attached_one(model, tmp_path):
    """It can be counted, merged and trained."""
    adapted = attach(model, peft.lora(4))
    params = trained(adapted)
    method = peft.pretrained(str(export(adapted, params, tmp_path / "a")))
    again = attach(model, method)
    assert count(model.config, method, head=heads.classification(3)) == adapted.counts()
    batch = padded_batch(tiny_model("bert").config)
    assert_close(ours(merge(again), batch), ours(again, batch), **EXACT)
    refused("already has 'lora' attached", attach, again, method)


# ------------------------------------------------------------------------------------- from peft


def written(directory, family, config, to=None, **options):
    """Returns a random adapter that peft wrote, and its model."""
    reference = tiny_model(family, **options)
    reference = get_peft_model(reference, copy.deepcopy(config)).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, x in reference.named_parameters():
            if x.requires_grad:
                mean = 1.0 if "ia3_l" in name or "magnitude" in name else 0.0
                x.copy_(mean + 0.2 * torch.randn(x.shape, generator=generator))
    if to is not None:
        reference = reference.to(to)
    reference.save_pretrained(directory)
    return reference.float()


BOTH = {"task_type": "SEQ_CLS", "target_modules": ["query", "value"]}
CONFIGS = {
    "defaults": LoraConfig(**BOTH),
    "options": LoraConfig(
        **BOTH,
        r=3,
        lora_alpha=7,
        lora_dropout=0.1,
        use_rslora=True,
        rank_pattern={"value": 2, r"layer\.1\.attention\.self\.query": 5},
        alpha_pattern={"^bert.encoder.layer.0.*": 3},
        init_lora_weights="gaussian",
    ),
    "some layers": LoraConfig(
        task_type="SEQ_CLS",
        target_modules=r".*(query|dense)",
        exclude_modules=["bert.pooler.dense"],
        modules_to_save=["bert.pooler"],
    ),
    "one layer": LoraConfig(**BOTH, layers_to_transform=[1], layers_pattern="layer"),
    "dora": LoraConfig(**BOTH, use_dora=True, lora_alpha=5),
    "ia3": IA3Config(
        task_type="SEQ_CLS",
        target_modules=["value", "intermediate.dense"],
        feedforward_modules=["intermediate.dense"],
    ),
    "prompt": PromptTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=4),
    "hira": HiraConfig(**BOTH, r=4, rank_pattern={"value": 2}),  # peft 0.21 does not use it
    "miss": MissConfig(**BOTH, r=5),
    "oft": OFTConfig(**BOTH, oft_block_size=8),
    "oft-exact": OFTConfig(
        **BOTH, oft_block_size=16, block_share=True, use_cayley_neumann=False, module_dropout=0.1
    ),
    "shira": ShiraConfig(**BOTH, r=4, random_seed=1),
    "vera": VeraConfig(task_type="SEQ_CLS", target_modules=["query", "output.dense"], r=9),
}
OF_PEFT = pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # of torch, in peft's SHiRA


def assert_reads(base, adapter, reference, **options):
    """Asserts that an adapter gives peft's logits here."""
    model = attach(load_model(base, **options), peft.pretrained(adapter))
    batch = padded_batch(reference.config)
    with torch.no_grad():
        expected = logits_of(reference(**tensors(batch))).numpy()
    assert_close(ours(model, batch), expected[:, -ours(model, batch).shape[1] :], **EXACT)
    return model


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.sample("options", "some layers", "one layer", "dora", "ia3", "prompt")
@OF_PEFT
def test_logits_are_those_of_peft(base, name, tmp_path):
    reference = written(tmp_path, "bert", CONFIGS[name])
    model = assert_reads(base, tmp_path, reference)
    options = model.method.options
    if name == "options":
        expected = {"rank": 3, "alpha": 7.0, "dropout": 0.1, "rslora": True}
        assert {key: options[key] for key in expected} == expected
    if name == "one layer":
        assert not any("layer.0" in leaf for leaf, kind in model.kinds.items() if kind == "adapter")


def test_gpt2(tmp_path):
    """Its kernels are stored transposed, and the config can say so or not."""
    base = saved(tiny_model("gpt2", kind="causal_lm"), tmp_path / "base")
    config = LoraConfig(
        task_type="CAUSAL_LM", target_modules=["c_attn", "c_fc"], fan_in_fan_out=True
    )
    reference = written(tmp_path / "a", "gpt2", config, kind="causal_lm")
    assert_reads(base, tmp_path / "a", reference)


def test_a_head_that_the_adapter_lacks_stays(base, tmp_path):
    """Here the pooler: peft trains only the classifier."""
    fresh = load_model(base)
    written(tmp_path, "bert", LoraConfig(**BOTH))
    model = attach(fresh, peft.pretrained(tmp_path))
    for leaf in ("bert.pooler.dense.kernel", "bert.pooler.dense.bias"):
        np.testing.assert_array_equal(model.trainable[leaf], fresh.trainable[leaf])
    changed = np.abs(model.trainable["classifier.kernel"] - fresh.trainable["classifier.kernel"])
    assert changed.max() > 0.1


def test_adapter_of_a_bare_encoder(base, model, tmp_path):
    """Its paths lack the prefix, and it has no head."""
    encoder = randomised(AutoModel.from_pretrained(base))
    reference = get_peft_model(
        encoder, LoraConfig(target_modules=["query"], init_lora_weights=False)
    )
    reference.save_pretrained(tmp_path)
    again = attach(model, peft.pretrained(tmp_path))
    assert all(".query.lora" in leaf for leaf, kind in again.kinds.items() if kind == "adapter")
    site = "encoder.layer.1.attention.self.query"
    stored = load_file(tmp_path / "adapter_model.safetensors")
    np.testing.assert_array_equal(
        again.trainable[f"bert.{site}.lora_b"],
        stored[f"base_model.model.{site}.lora_B.weight"].numpy().T,
    )


def test_older_names_of_vit(tmp_path):
    """Those of transformers 4, which has other module names."""
    base = saved(tiny_model("vit"), tmp_path / "base")
    config = LoraConfig(
        target_modules=["q_proj", "o_proj", "fc1"],
        rank_pattern={"fc1": 3},
        modules_to_save=["classifier"],
    )
    reference = written(tmp_path / "a", "vit", config)
    file = tmp_path / "a" / "adapter_model.safetensors"
    old = {
        "vit.layers.": "vit.encoder.layer.",
        "attention.q_proj": "attention.attention.query",
        "attention.o_proj": "attention.output.dense",
        "mlp.fc1": "intermediate.dense",
    }

    def renamed(name):
        for new, before in old.items():
            name = name.replace(new, before)
        return name

    save_file({renamed(name): x for name, x in load_file(file).items()}, file)
    edit(tmp_path / "a", rank_pattern={"intermediate.dense": 3}, target_modules=["query"])
    assert_reads(base, tmp_path / "a", reference)


# ---------------------------------------------------------------- layers of the head, and copies

POOLER = {"task_type": "SEQ_CLS", "target_modules": ["value", "pooler.dense"]}
IN_HEAD = {
    "all linear": LoraConfig(
        task_type="SEQ_CLS",
        target_modules="all-linear",
        lora_alpha=7,
        use_rslora=True,
        rank_pattern={"pooler.dense": 2},
        alpha_pattern={"pooler.dense": 3},
    ),
    "dora": LoraConfig(**POOLER, use_dora=True, lora_alpha=5),
    "ia3": IA3Config(**POOLER, feedforward_modules=[]),
    "ia3 of inputs": IA3Config(**POOLER, feedforward_modules=["pooler.dense"]),
    "above its side": LoraConfig(target_modules=["query", "classifier", "pooler.dense"], r=4),
    "alone": LoraConfig(task_type="SEQ_CLS", target_modules=["pooler.dense"], r=4),
    "oft": OFTConfig(**POOLER, oft_block_size=8),
    "vera": VeraConfig(**POOLER, r=9),
}


@pytest.mark.parametrize("name", IN_HEAD)
def test_an_adapter_inside_the_head_becomes_its_start(base, name, tmp_path):
    """The head is trained whole here, so the sum is its start; the logits are peft's."""
    reference = written(tmp_path, "bert", IN_HEAD[name])
    model = assert_reads(base, tmp_path, reference)
    kinds = {leaf: kind for leaf, kind in model.kinds.items() if "pooler" in leaf}
    assert kinds == dict.fromkeys(("bert.pooler.dense.bias", "bert.pooler.dense.kernel"), "head")
    named = {"alone": "head_only", "dora": "dora", "oft": "oft", "vera": "vera"}
    assert model.method.name == named.get(name, "ia3" if "ia3" in name else "lora")
    format = "merged" if name == "alone" else "peft"
    again = export(model, model.trainable, tmp_path / "again", format=format)
    if format == "peft":  # whose method has no place in the head any more
        for leaf, x in attach(load_model(base), peft.pretrained(again)).trainable.items():
            np.testing.assert_array_equal(x, model.trainable[leaf])


def test_the_pooler_of_deberta(tmp_path):
    base = saved(tiny_model("deberta-v2"), tmp_path / "base")
    config = LoraConfig(task_type="SEQ_CLS", target_modules=["query_proj", "pooler.dense"])
    assert_reads(base, tmp_path / "a", written(tmp_path / "a", "deberta-v2", config))


def test_a_layer_of_the_head_whose_weights_are_not_there(base, tmp_path):
    """A copy of them in the file stands for those of the checkpoint."""
    reference = written(tmp_path, "bert", IN_HEAD["all linear"])
    bare = load_model(base).replace(fresh=("bert.pooler", "classifier"))
    with pytest.raises(fp.InputError, match=r"changes bert.pooler.dense by an update of low rank"):
        attach(bare, peft.pretrained(tmp_path))
    file = tmp_path / "adapter_model.safetensors"
    save_file(plain(reference.state_dict()), file)
    assert attach(bare, peft.pretrained(tmp_path)).fresh == ()


def plain(tensors):
    """Returns tensors that do not share memory."""
    return {name: x.detach().clone().contiguous() for name, x in tensors.items()}


def prefixed(before):
    return lambda reference, stored: {before + name: x for name, x in stored.items()}


def with_base(dtype):
    """Returns the edit that writes the whole state dict of peft, its base in another dtype."""

    def change(reference, stored):
        given = plain(reference.state_dict())
        return {n: x if "lora" in n or "to_save" in n else x.to(dtype) for n, x in given.items()}

    return change


def test_other_names_in_the_file_are_read(base, tmp_path):
    """Wrappers of torch, the state dict of a peft model, and copies of the base's tensors."""
    reference = written(tmp_path, "bert", CONFIGS["defaults"])
    model, file = load_model(base), tmp_path / "adapter_model.safetensors"
    expected, stored = attach(model, peft.pretrained(tmp_path)).trainable, load_file(file)
    edits = {
        "compiled": prefixed("_orig_mod."),
        "parallel": prefixed("module._orig_mod."),
        "in parts": lambda _, s: {
            n.replace(".layer.", "._orig_mod.layer."): x for n, x in s.items()
        },
        "nested": prefixed("base_model.model."),
        "elsewhere": prefixed("student.encoder."),
        "in a module": prefixed("model."),
        "fsdp": prefixed("_fsdp_wrapped_module."),
        "bare": lambda _, s: {n.removeprefix("base_model.model."): x for n, x in s.items()},
        **{
            str(dtype): with_base(dtype) for dtype in (torch.float32, torch.float16, torch.bfloat16)
        },
    }
    for name, change in edits.items():
        save_file(change(reference, stored), file)
        for loaded in (model, load_model(base, dtype="bfloat16", scan_layers=True)):
            found = attach(loaded, peft.pretrained(tmp_path)).trainable
            assert found.keys() == expected.keys(), name
            for leaf, x in expected.items():
                np.testing.assert_array_equal(found[leaf], x, f"{name}: {leaf}")


def test_tensors_that_are_no_copies_are_named(base, model, tmp_path):
    reference = written(tmp_path, "bert", CONFIGS["defaults"])
    file, key = tmp_path / "adapter_model.safetensors", "bert.encoder.layer.1.output.dense.weight"
    stored = plain(reference.state_dict())
    for factor, size in ((1.001, 32), (1, 31)):
        change = {f"base_model.model.{key}": factor * stored[f"base_model.model.{key}"][:size]}
        save_file(plain({**stored, **change}), file)
        problem = "was trained whole" if size == 32 else r"is \[31, 64\], and that of the model"
        refused(rf"\(1 mismatches\): {key} {problem}", attach, model, peft.pretrained(tmp_path))
    two = {n.replace(".default.", ".other."): x for n, x in stored.items()}
    save_file(plain({**two, **stored}), file)
    refused(r"several adapters \(default, other\)", peft.pretrained, tmp_path)


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`")
def test_an_output_layer_in_the_file(tmp_path):
    """Of a tied model it is the table of tokens; peft writes one that it has adapted."""
    for tied, targets in ((True, ["q_proj"]), (False, ["q_proj", "lm_head"])):
        options = {"kind": "causal_lm", "tie_word_embeddings": tied}
        base = saved(tiny_model("llama", **options), tmp_path / f"base {tied}")
        config = LoraConfig(task_type="CAUSAL_LM", target_modules=targets)
        reference = written(tmp_path / f"a {tied}", "llama", config, **options)
        if tied:
            file = tmp_path / "a True" / "adapter_model.safetensors"
            copy = reference.state_dict()["base_model.model.lm_head.weight"]
            save_file(plain({**load_file(file), "base_model.model.lm_head.weight": copy}), file)
        else:
            assert "base_layer" in str([*load_file(tmp_path / "a False/adapter_model.safetensors")])
        assert_reads(base, tmp_path / f"a {tied}", reference)


# -------------------------------------------------------------------------------------- refusals


def edit(directory, **fields):
    """Changes fields of a config; those that are None are removed."""
    path = directory / "adapter_config.json"
    config = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


@pytest.fixture(scope="module")
def adapter(model, tmp_path_factory):
    adapted = attach(model, peft.lora(4))
    return export(adapted, trained(adapted), tmp_path_factory.mktemp("adapter") / "a")


@pytest.fixture
def spare(adapter, tmp_path):
    """A copy of a LoRA adapter, which tests damage."""
    return shutil.copytree(adapter, tmp_path / "spare")


@pytest.mark.parametrize(
    "fields",
    [
        {"bias": "lora_only"},
        {"layer_replication": [[0, 2], [1, 2]]},
        {"megatron_config": {"a": 1}},
        {"use_dora": True, "lora_bias": True},
        {"of_a_later_peft": 3},
    ],
    ids=lambda fields: "+".join(fields),
)
def test_options_that_change_the_maths(spare, fields):
    edit(spare, **fields)
    name, value = list(fields.items())[-1]
    with pytest.raises(fp.InputError) as error:
        peft.pretrained(spare)
    assert f"{name} = {value!r}" in str(error.value)
    assert "not implemented" in str(error.value)


@pytest.mark.parametrize("start", ["pissa_niter_4", "olora"])
def test_starts_that_changed_the_base(spare, start):
    edit(spare, init_lora_weights=start)
    refused(f"init_lora_weights = '{start}'.*weight_conversion", peft.pretrained, spare)


def test_every_field_of_peft_is_decided(model, tmp_path):
    """Every field of the config that ``get_peft_model`` writes is read."""
    for name in ("defaults", "ia3", "prompt", "hira", "miss", "oft", "shira", "vera"):
        written(tmp_path / name, "bert", CONFIGS[name])
        peft.pretrained(tmp_path / name)


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        (
            {"peft_type": "LOHA"},
            r"peft_type = 'LOHA', .*\(LORA, IA3, PROMPT_TUNING, HIRA, .* are\)",
        ),
        ({"peft_type": None}, r"peft_type = None"),
        ({"r": 5}, r"query.lora_A.weight is \[4, 32\], but its config has rank 5"),
        ({"r": "4"}, r"has r = '4'"),
        ({"rank_pattern": {"query": "x"}}, r"rank_pattern\['query'\] = 'x'"),
        ({"alpha_pattern": {"(": 1}}, r"alpha_pattern for '\(', which is not a regular expression"),
        ({"lora_alpha": -1}, "alpha = -1 of lora"),
        ({"use_dora": True}, r"lora_magnitude_vector is missing"),
        ({"peft_type": "IA3"}, r"has init_lora_weights = True, lora_alpha = 4\.0, r = 4, which"),
    ],
)
def test_config_that_does_not_fit_the_tensors(spare, fields, complaint):
    edit(spare, **fields)
    refused(complaint, peft.pretrained, spare)


@pytest.mark.parametrize(
    ("config", "fields", "complaint"),
    [
        (MissConfig(**BOTH, r=4, init_weights="bat"), {}, "init_weights = 'bat'. Only True"),
        (MissConfig(**BOTH, r=4, init_weights="mini"), {}, "init_weights = 'mini'"),
        (OFTConfig(**BOTH, oft_block_size=8, coft=True), {}, "coft = True. Only False"),
        (OFTConfig(**BOTH, oft_block_size=0, r=4), {}, "r = 4. Only 0"),
        (VeraConfig(**BOTH, r=4), {"save_projection": False}, "save_projection = False. Only True"),
        (ShiraConfig(**BOTH, r=4), {"r": 5}, r"shira_weight is \[256\], and by .* be \[320\]"),
        (MissConfig(**BOTH, r=4), {"r": 5}, r"miss_block is \[4, 32\], and by .* be \[5, 32\]"),
        (OFTConfig(**BOTH, oft_block_size=8), {"oft_block_size": 16}, r"oft_R.weight is \[4, 28\]"),
        (HiraConfig(**BOTH, r=4), {"r": "4"}, "has r = '4'"),
        (HiraConfig(**BOTH, r=4), {"r": 2}, r"hira_A is \[4, 32\], and by .* be \[2, 32\]"),
        (HiraConfig(**BOTH, r=4), {"later": 1}, "later = 1, which is not implemented"),
    ],
)
@OF_PEFT
def test_other_methods_that_cannot_be_read(model, config, fields, complaint, tmp_path):
    written(tmp_path, "bert", config)
    edit(tmp_path, **fields)
    with pytest.raises(fp.InputError, match=complaint):
        attach(model, peft.pretrained(tmp_path))


def test_places_outside_of_a_layer(model, tmp_path):
    written(tmp_path, "bert", CONFIGS["shira"])

    def change(stored):
        next(x for n, x in stored.items() if n.endswith("shira_indices"))[1, 3] = 32

    refused("shira_indices has places outside", attach, model, spoil(tmp_path, change))


def test_files(spare, tmp_path):
    """More in ``test_peft_io_adapterhub.py``."""
    file = spare / "adapter_model.safetensors"
    file.write_bytes(b"hello")
    refused("not a whole safetensors file", peft.pretrained, spare)
    file.rename(spare / "adapter_model.bin")
    refused(r"only as pickle \(adapter_model.bin\)", peft.pretrained, spare)
    (spare / "adapter_config.json").unlink()
    refused(r"holds no adapter_config.json", peft.pretrained, spare)
    refused("is not a directory", peft.pretrained, tmp_path / "nowhere")


def spoil(spare, change):
    file = spare / "adapter_model.safetensors"
    stored = load_file(file)
    change(stored)
    save_file(stored, file)
    return peft.pretrained(spare)


def test_tensors_that_do_not_belong(model, spare):
    """The error gives the number of tensors that do not fit, and names the first ones."""
    prefix = "base_model.model."

    def change(stored):
        stored[f"{prefix}bert.embeddings.word_embeddings.weight"] = torch.zeros(100, 32)
        stored[f"{prefix}elsewhere.weight"] = torch.zeros(2)
        stored[f"{prefix}classifier.weight"] = torch.zeros(5, 32)
        del stored[f"{prefix}classifier.bias"]

    with pytest.raises(fp.InputError, match=r"\(4 mismatches\)") as error:
        attach(model, spoil(spare, change))
    for text in (
        "word_embeddings.weight was trained whole, and is not part of the model's head",
        "classifier.weight is [5, 32], the model's head needs [3, 32]",
        "elsewhere.weight [2] has no place",
    ):
        assert text in str(error.value)
    assert f"made for {model.name!r}" in str(error.value)


def test_half_an_update(spare):
    site = "bert.encoder.layer.1.attention.self.value"
    with pytest.raises(fp.InputError, match=rf"{site}.lora_B.weight is missing"):
        spoil(spare, lambda stored: stored.pop(f"base_model.model.{site}.lora_B.weight"))


def test_adapter_of_another_model(base, adapter, tmp_path):
    """Another family, another width, another head."""
    roberta = load_model(saved(tiny_model("roberta"), tmp_path / "roberta"))
    with pytest.raises(fp.InputError, match=r"\(8 mismatches\): there is no linear layer bert"):
        attach(roberta, peft.pretrained(adapter))
    narrow = load_model(saved(tiny_model("bert", hidden_size=16), tmp_path / "narrow"))
    with pytest.raises(
        fp.InputError, match=r"lora_A.weight is \[4, 32\], the model needs \[4, 16\]"
    ):
        attach(narrow, peft.pretrained(adapter))
    for head, complaint in (
        (
            heads.classification(7, fresh=True),
            r"classifier.weight is \[3, 32\], .* needs \[7, 32\]",
        ),
        (heads.span_classification(fresh=True), r"classifier.bias \[3\] has no place"),
    ):
        refused(complaint, attach, load_model(base, head=head), peft.pretrained(adapter))


def test_prompt_of_another_width(model, tmp_path):
    written(tmp_path, "bert", CONFIGS["prompt"], hidden_size=16)
    refused(r"does not fit this model", attach, model, peft.pretrained(tmp_path))
    file = tmp_path / "adapter_model.safetensors"
    save_file({"prompt_embeddings": load_file(file)["prompt_embeddings"]}, file)
    with pytest.raises(fp.InputError, match=r"prompt_embeddings are \[4, 16\], .* needs \[4, 32\]"):
        attach(model, peft.pretrained(tmp_path))
