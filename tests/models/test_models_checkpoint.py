"""Weights that do not fit raise one clear error; weights that fit survive a round trip."""

import json
import re
import shutil

import numpy as np
import pytest
import torch
import transformers
from huggingface_hub.utils import filter_repo_objects
from internals import registry
from parity import assert_same_leaves
from refusals import refused
from safetensors.torch import load_file, save_file, save_model
from torch_reference import FAMILIES, layers, saved, tiny_model

import fedjax_peft as fp
from fedjax_peft.models.head_classes import reordered
from fedjax_peft.models.stored_head import HeadWarning


@pytest.fixture
def checkpoint(tmp_path):
    return saved(tiny_model("bert"), tmp_path)


def edit_config(directory, **changes):
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_weights(directory, change):
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


def refusal(*arguments, **options) -> str:
    """Returns the message of the InputError that loading raises."""
    with pytest.raises(fp.InputError) as caught:
        fp.load_model(*arguments, **options)
    message = str(caught.value)
    assert "\n" not in message
    return message


# ---------------------------------------------------------------------------------------- config


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "brt"}, ["'brt'", "Did you mean 'bert'"]),
        ({"model_type": "gemma3"}, ["'gemma3' is not", "images", "gemma-3-1b", "is 'gemma3_text'"]),
        ({"model_type": "mixtral"}, ["'mixtral' is not", "mixture of experts", "is 'mistral'"]),
        ({"model_type": None}, ["None", "Known: bert, ", "roberta"]),
        ({"position_embedding_type": "relative_key"}, ["position_embedding_type", "relative_key"]),
        ({"is_decoder": True}, ["is_decoder = True"]),
        ({"hidden_size": "32"}, ["hidden_size = '32'", "int"]),
        ({"num_hidden_layers": 0}, ["num_hidden_layers = 0", "at least 1"]),
        ({"num_attention_heads": 0}, ["num_attention_heads = 0"]),
        ({"num_attention_heads": 5}, ["hidden_size = 32", "num_attention_heads = 5"]),
        ({"hidden_act": "gelu_nwe"}, ["'gelu_nwe'", "'gelu_new'"]),
        ({"id2label": {"zero": "a", "one": "b"}}, ["id2label"]),
    ],
)
def test_config_that_is_not_implemented(checkpoint, changes, named):
    edit_config(checkpoint, **changes)
    message = refusal(checkpoint)
    assert all(part in message for part in named), message


def test_relatives_of_foreign_types_are_supported():
    assert {near for _, near in registry._RELATIVES.values()} <= registry.FAMILIES.keys()
    assert not registry._RELATIVES.keys() & registry.FAMILIES.keys()


def pickled(directory):
    (directory / "model.safetensors").unlink()
    torch.save({}, directory / "pytorch_model.bin")


def cut(directory, kept):
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda d: (d / "config.json").unlink(), "holds no config.json"),
        (lambda d: (d / "config.json").write_text("{"), "config.json is not valid JSON"),
        (lambda d: (d / "config.json").write_text("[]"), "config.json must hold a JSON object"),
        (lambda d: (d / "model.safetensors").unlink(), "holds no model.safetensors"),
        (lambda d: cut(d, 4), "model.safetensors is not a whole .* truncated"),
        (lambda d: cut(d, 200), "model.safetensors is not a whole .* truncated"),
        (lambda d: cut(d, -10), "model.safetensors is not a whole .* truncated"),
        (pickled, r"pytorch_model\.bin.* refused"),
        (shutil.rmtree, "no model directory"),
    ],
)
def test_damaged_directories(checkpoint, damage, named):
    damage(checkpoint)
    assert re.search(named, refusal(checkpoint))


def test_dropout_outside_its_range(checkpoint):
    assert "dropout = 1.5" in refusal(checkpoint, dropout=1.5)


def test_everything_that_does_not_fit_is_reported_at_once(checkpoint):
    layer = "bert.encoder.layer.0"

    def change(tensors):
        tensors[f"{layer}.intermediate.dense.weight"] = torch.zeros(65, 32)
        tensors["bert.embeddings.word_embeddings.weight"] = torch.zeros(99, 32)
        del tensors[f"{layer}.attention.self.query.weight"]
        del tensors["bert.embeddings.LayerNorm.bias"]
        tensors[f"{layer}.attention.self.relative.weight"] = torch.zeros(2, 2)

    edit_weights(checkpoint, change)
    message = refusal(checkpoint)
    for part in (
        "5 mismatches",
        f"{layer}.intermediate.dense.weight is [65, 32], the model needs [64, 32]",
        "bert.embeddings.word_embeddings.weight is [99, 32], the model needs [100, 32]",
        f"{layer}.attention.self.query.weight [32, 32] is missing",
        "bert.embeddings.LayerNorm.bias [32] is missing",
        f"{layer}.attention.self.relative.weight [2, 2] has no place in the model",
    ):
        assert part in message


def test_a_long_list_of_mismatches_is_cut_and_has_its_cause(checkpoint):
    tensors = load_file(checkpoint / "model.safetensors")
    save_file({f"teacher.{n}": x for n, x in tensors.items()}, checkpoint / "model.safetensors")
    fp.load_model(checkpoint)
    two = {f"{who}.{n}": x.clone() for n, x in tensors.items() for who in ("teacher", "pupil")}
    for part, cause in (
        (two, "begin with 'pupil.', the model's with 'bert.'"),
        (
            tensors | {"bert.encoder.layer.0.output.dense.lora_A.a.weight": torch.ones(1)},
            "merge_and_unload",
        ),
    ):
        save_file(part, checkpoint / "model.safetensors")
        message = refusal(checkpoint, head=fp.heads.classification(3))
        assert cause in message
        assert len(message) < 1200


FSDP = "_fsdp_wrapped_module"
WRAPPED = {
    "compiled": lambda name: f"_orig_mod.{name}",
    "parallel and compiled": lambda name: f"module._orig_mod.{name}",
    "compiled in parts": lambda name: name.replace("layer.1.", "layer.1._orig_mod."),
    "fsdp": lambda name: f"{FSDP}.{name.replace('layer.', f'{FSDP}.layer.')}",
    "merged adapter": lambda name: f"base_model.model.{name}",
    "lightning": lambda name: f"model.{name}",
    "twice": lambda name: f"model.model.{name}",
}


@pytest.mark.parametrize("family", ["bert", "llama"])
def test_names_of_wrappers_are_read(family, tmp_path):
    kind = "causal_lm" if family == "llama" else "classification"
    checkpoint = saved(tiny_model(family, kind=kind), tmp_path)
    tensors, plain = load_file(checkpoint / "model.safetensors"), fp.load_model(checkpoint)
    for name, wrap in WRAPPED.items():
        wrapped = {wrap(key): x for key, x in tensors.items()}
        assert wrapped.keys() != tensors.keys() or (family, name) == ("llama", "compiled in parts")
        save_file(wrapped, checkpoint / "model.safetensors")
        model = fp.load_model(checkpoint)
        assert_same_leaves(model.frozen, plain.frozen)
        assert_same_leaves(model.trainable, plain.trainable)


def test_two_names_of_one_tensor(checkpoint):
    def change(tensors):
        tensors["_orig_mod.classifier.bias"] = torch.zeros(3)

    edit_weights(checkpoint, change)
    message = refusal(checkpoint)
    assert "holds both classifier.bias and _orig_mod.classifier.bias" in message or (
        "holds both _orig_mod.classifier.bias and classifier.bias" in message
    )


TIED = {
    **dict.fromkeys(("bert", "roberta", "distilbert", "deberta-v2"), "ForMaskedLM"),
    **{"modernbert": "ForMaskedLM", "gpt2": "LMHeadModel"},
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "smollm3"), "ForCausalLM"),
    **dict.fromkeys(("gemma2", "gemma3_text"), "ForCausalLM"),
}


@pytest.mark.filterwarnings("ignore::fedjax_peft.models.stored_head.HeadWarning")
@pytest.mark.parametrize("family", TIED)
def test_a_tied_table_under_the_name_of_the_output_layer(family, tmp_path):
    """``safetensors.torch.save_model`` keeps one of the two names."""
    of = FAMILIES[family]
    torch_class = getattr(transformers, of.name + TIED[family])
    tied = {**of.shape, "tie_word_embeddings": True, **layers(family, 1)}
    reference = torch_class(of.config(**tied))
    head = fp.heads.causal_lm() if "causal_lm" in of.kinds else fp.heads.classification(2)
    plain = fp.load_model(saved(reference, tmp_path), head=head)
    save_model(reference, str(tmp_path / "model.safetensors"))
    stored = load_file(tmp_path / "model.safetensors")
    output, table = registry.FAMILIES[family].tied
    if table in stored:
        stored[output] = stored.pop(table)
        save_file(stored, tmp_path / "model.safetensors")
    assert_same_leaves(fp.load_model(tmp_path, head=head).frozen, plain.frozen)
    edit_config(tmp_path, tie_word_embeddings=False)
    if family != "gpt2":
        assert f"{table} " in refusal(tmp_path, head=head)


# ---------------------------------------------------------------------------------------- shards


@pytest.fixture
def shards(tmp_path):
    directory = tmp_path / "sharded"
    tiny_model("bert").save_pretrained(directory, max_shard_size="30KB")
    return directory


def test_missing_shard_is_named(shards):
    first = min(shards.glob("model-*.safetensors"))
    first.unlink()
    assert f"The shard {first} is missing" in refusal(shards)


@pytest.mark.parametrize("escape", ["../outside.safetensors", "{absolute}"])
def test_index_cannot_lead_out_of_the_directory(shards, escape):
    first = min(shards.glob("model-*.safetensors"))
    outside = shards.parent / "outside.safetensors"
    outside.write_bytes(first.read_bytes())
    path = shards / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    target = escape.format(absolute=outside)
    changed = {
        tensor: target if file == first.name else file
        for tensor, file in index["weight_map"].items()
    }
    path.write_text(json.dumps(index | {"weight_map": changed}))
    assert f"The shard {shards / 'outside.safetensors'} is missing" in refusal(shards)


@pytest.mark.parametrize("weight_map", [None, [], {"a": ".."}, {"a": ["x"]}, {"a": 3}])
def test_index_that_makes_no_sense(shards, weight_map):
    path = shards / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": weight_map}))
    assert str(shards) in refusal(shards)


# ------------------------------------------------------------------------------------------ head


def test_head_with_another_number_of_classes(checkpoint):
    message = refusal(checkpoint, head=fp.heads.classification(7))
    assert "is [3, 32], the model needs [7, 32]" in message
    assert "fresh=True" in message
    model = fp.load_model(checkpoint, head=fp.heads.classification(7, fresh=True))
    shapes = {x.shape for name, x in model.trainable.items() if name.startswith("classifier")}
    assert (32, 7) in shapes
    assert model.labels == tuple(f"LABEL_{i}" for i in range(7))


def test_head_is_needed_where_the_checkpoint_has_none(checkpoint):
    def change(tensors):
        del tensors["classifier.weight"], tensors["classifier.bias"]

    edit_weights(checkpoint, change)
    assert "holds no head" in refusal(checkpoint)


def test_a_head_for_several_labels_at_once_is_not_taken_for_one_of_classes(checkpoint):
    edit_config(checkpoint, problem_type="multi_label_classification")
    assert "is one for multi_label_classification (problem_type)" in refusal(checkpoint)
    fp.load_model(checkpoint, head=fp.heads.classification(3))
    edit_config(checkpoint, problem_type="single_label_classification")
    fp.load_model(checkpoint)


def test_too_few_classes():
    refused("at least 2 classes", fp.heads.classification, 1)
    with pytest.raises(fp.InputError, match=r"'positive' of .* must be a whole number or a list"):
        fp.heads.classification("positive")
    refused("Two classes have the name 'no'", fp.heads.classification, ["no", "yes", "no"])
    assert fp.heads.classification(100_000).classes == 100_000


def test_labels_come_from_the_config(checkpoint):
    # In numerical order, whatever the order in the file.
    edit_config(checkpoint, id2label={"2": "good", "0": "bad", "1": "so-so"})
    assert fp.load_model(checkpoint).labels == ("bad", "so-so", "good")
    # A head by number gets its names.
    assert fp.load_model(checkpoint, head=fp.heads.classification(3)).labels == (
        "bad",
        "so-so",
        "good",
    )
    assert (
        fp.load_model(checkpoint, head=fp.heads.classification(3, fresh=True)).labels[0]
        == "LABEL_0"
    )
    with pytest.warns(UserWarning, match="has the classes bad, so-so, good, which get the names x"):
        renamed = fp.load_model(checkpoint, head=fp.heads.classification(["x", "y", "z"]))
    assert renamed.labels == ("x", "y", "z")
    message = refusal(checkpoint, head=fp.heads.classification(["bad", "so-so", "best"]))
    assert "has the class 'best', and the head in" in message
    assert "fresh=True" in message
    fp.load_model(checkpoint, head=fp.heads.classification(["bad", "so-so", "best"], fresh=True))


def test_names_in_another_order_move_the_classes_of_the_head(checkpoint):
    edit_config(checkpoint, id2label={"0": "bad", "1": "so-so", "2": "good"})
    stored = fp.load_model(checkpoint)
    model = fp.load_model(checkpoint, head=fp.heads.classification(["good", "bad", "so-so"]))
    assert model.labels == ("good", "bad", "so-so")
    for leaf, value in stored.trainable.items():
        own = value[..., np.array([2, 0, 1])] if "classifier" in leaf else value
        np.testing.assert_array_equal(model.trainable[leaf], own, err_msg=leaf)
    order = np.array([1, 0, 2])
    moved = reordered("x", {"classifier.kernel": np.eye(3)[:2]}, ["classifier"], order)
    assert moved["classifier.kernel"].tolist() == [[0, 1, 0], [1, 0, 0]]
    several = {f"head.{name}.kernel": np.ones((2, 3)) for name in ("dense", "output")}
    for leaves in ({"head.dense.kernel": np.eye(3)}, several):
        message = r"layers of the width 3.*in the order of the stored head"
        refused(message, reordered, "x", leaves, ["head"], order)


def cut_tensors(directory, *without, **new):
    def change(tensors):
        for name in [n for n in tensors if n.startswith(without)]:
            del tensors[name]
        tensors.update({name.replace("_dot_", "."): x for name, x in new.items()})

    edit_weights(directory, change)
    return directory


OTHER = {
    "pooler": (("bert.pooler",), {}, r"does not hold bert\.pooler, which get"),
    "both": (
        ("bert.pooler", "classifier"),
        {},
        r"does not hold bert\.pooler and classifier, which",
    ),
    "decoder's": (
        ("classifier",),
        {"score_dot_weight": torch.zeros(3, 32)},
        r"hold classifier, which get new random values\. Its own head \(score\.weight\) is not",
    ),
    "answers": (
        ("classifier",),
        {"qa_outputs_dot_weight": torch.zeros(2, 32)},
        r"does not hold classifier, .* \(qa_outputs\.weight\) is not used",
    ),
    "of another form": (
        ("classifier",),
        {"classifier_dot_dense_dot_weight": torch.zeros(32, 32)},
        r"does not hold classifier, .* \(classifier\.dense\.weight\) is not used",
    ),
}


@pytest.mark.parametrize("name", OTHER)
def test_a_head_that_is_made_anew_is_named(checkpoint, name):
    without, new, message = OTHER[name]
    cut_tensors(checkpoint, *without, **new)
    with pytest.warns(HeadWarning, match=message):
        model = fp.load_model(checkpoint, head=fp.heads.classification(3))
    assert model.fresh == without
    assert repr(model).endswith(f"; new values: {', '.join(without)})")
    assert fp.attach(model, fp.peft.bitfit()).fresh == model.fresh


def test_a_head_that_was_asked_for_gives_no_warning(checkpoint):
    assert fp.load_model(checkpoint).fresh == ()
    assert fp.load_model(checkpoint, head=fp.heads.classification(7, fresh=True)).fresh == (
        "classifier",
    )
    assert fp.load_model(checkpoint, head=fp.heads.two_classifiers(3)).fresh == (
        "second_classifier",
    )
    cut_tensors(checkpoint, "classifier")  # a bare encoder
    assert fp.load_model(checkpoint, head=fp.heads.classification(5)).fresh == ("classifier",)


def test_a_head_of_another_task_is_named(tmp_path):
    saved(tiny_model("bert", kind="token_classification"), tmp_path)
    cut_tensors(tmp_path, **{"bert_dot_pooler_dot_dense_dot_weight": torch.zeros(32, 32)})
    cut_tensors(tmp_path, **{"bert_dot_pooler_dot_dense_dot_bias": torch.zeros(32)})
    with pytest.warns(HeadWarning, match="is a BertForTokenClassification: its classifier was"):
        fp.load_model(tmp_path, head=fp.heads.classification(3))
    fp.load_model(tmp_path, head=fp.heads.classification(3, fresh=True))


def test_fresh_head_follows_from_the_seed(checkpoint):
    def kernel(seed):
        head = fp.heads.classification(4, fresh=True)
        return fp.load_model(checkpoint, head=head, seed=seed).trainable["classifier.kernel"]

    np.testing.assert_array_equal(kernel(0), kernel(0))
    assert not np.array_equal(kernel(0), kernel(1))


def test_a_download_has_the_file_of_the_chat_template(checkpoint, tmp_path_factory, monkeypatch):
    """Newer repositories have no template in ``tokenizer_config.json``."""
    got = tmp_path_factory.mktemp("got")
    (checkpoint / "chat_template.jinja").write_text("{{ messages }}", encoding="utf-8")

    def download(hub_id, allow_patterns, **options):
        names = [path.name for path in checkpoint.iterdir()]
        for name in filter_repo_objects(names, allow_patterns=allow_patterns):
            shutil.copy(checkpoint / name, got)
        return str(got)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    fp.load_model("some/model", source="hub")
    assert (got / "chat_template.jinja").is_file()


def test_a_model_that_the_hub_does_not_give(monkeypatch):
    """The error gives the reason, and the closest name that needs no hub."""

    def offline(*arguments, **options):
        raise OSError("no route to the hub\nmore")

    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    message = refusal("minilm", head=fp.heads.classification(2))
    assert "no route to the hub" in message
    assert "Did you mean 'minilm-l6'" in message
