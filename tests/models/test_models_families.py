"""What the model families have in common: configs, forms of checkpoints, types, heads, prompts.

Logits, hidden states and gradients of every family and head: ``test_models_parity.py``.
"""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from closeness import EXACT, assert_close
from flax import nnx
from internals import (
    PrefixSlot,
    Residual,
    abstract_model,
    abstract_module,
    export,
    registry,
    save_checkpoint,
)
from parity import assert_equal, assert_same_leaves, flipped, forward
from peft import LoraConfig, get_peft_model
from refusals import refused
from safetensors.torch import load_file, save_file
from torch_reference import (
    FAMILIES,
    RENAMED,
    layers,
    logits_of,
    padded_batch,
    saved,
    tensors,
    tiny_model,
    torch_outputs,
    torch_states,
)
from transformers import DynamicCache

import fedjax_peft as fp
from fedjax_peft.models.layers import RMSNorm
from fedjax_peft.models.modules import is_inside, submodule, submodules
from fedjax_peft.models.registry import parse_config

pytestmark = pytest.mark.slow

AUTO = {
    "classification": transformers.AutoModelForSequenceClassification,
    "causal_lm": transformers.AutoModelForCausalLM,
    "image": transformers.AutoModelForImageClassification,
}


def leaves(model):
    return {**model.frozen, **model.trainable}


def random(*shape):
    return np.random.default_rng(5).normal(size=shape).astype(np.float32)


def tiny_config(family, **changes):
    """Returns the config of a small model with random weights."""
    return {"model_type": family, **FAMILIES[family].shape, "initializer_range": 0.2, **changes}


# ---------------------------------------------------------------------------------------- configs

PAD = {"pad_token_id": 4, "type_vocab_size": 3, "classifier_dropout": 0.3}
VARIANTS = {
    "bert": PAD | {"hidden_act": "gelu_new", "layer_norm_eps": 1e-3},
    "roberta": PAD | {"hidden_act": "relu", "num_hidden_layers": 1, "num_attention_heads": 2},
    "gpt2": {
        "activation_function": "gelu",
        "n_inner": 24,
        "n_head": 2,
        "layer_norm_epsilon": 1e-3,
        "scale_attn_by_inverse_layer_idx": True,
        "reorder_and_upcast_attn": True,
    },
    "distilbert": {"activation": "relu", "n_layers": 1, "n_heads": 2, "sinusoidal_pos_embds": True},
    "modernbert": {
        "classifier_pooling": "mean",
        "classifier_activation": "silu",
        "hidden_activation": "relu",
        "num_hidden_layers": 4,
        "norm_eps": 1e-3,
        **dict.fromkeys(("norm_bias", "attention_bias", "mlp_bias", "classifier_bias"), True),
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 300.0},
            "sliding_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 20.0},
        },
    },
    "dinov2": {
        "hidden_act": "relu",
        "num_attention_heads": 2,
        "num_channels": 5,
        "qkv_bias": False,
        "layer_norm_eps": 1e-3,
        "image_size": [9, 18],
        "patch_size": [3, 6],
        "mlp_ratio": 3,
        "use_mask_token": True,
    },
    "vit": {
        "hidden_act": "relu",
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_channels": 5,
        "qkv_bias": False,
        "layer_norm_eps": 1e-3,
        "image_size": [9, 24],
        "patch_size": [3, 6],
    },
}
"""Every field that shapes a model, at a value that is not the default."""


@pytest.mark.parametrize("family", VARIANTS)
def test_config_variants(family, tmp_path):
    kind = "causal_lm" if family == "gpt2" else "classification"
    reference = tiny_model(family, kind=kind, **VARIANTS[family])
    model = fp.load_model(saved(reference, tmp_path))
    batch = padded_batch(reference.config)
    if family == "gpt2":  # whose token types are looked up in the table of tokens
        batch["token_type_ids"] = batch["input_ids"] % 2
    assert_equal(model, reference, batch, everywhere=family in ("bert", "roberta"))


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("xlm-roberta", "classification"),
        ("xlm-roberta", "span_classification"),
        ("camembert", "classification"),
        ("camembert", "token_classification"),
    ],
)
def test_roberta_under_other_names(family, kind, tmp_path):
    """Logits, states and a peft adapter; the export is of the same type."""
    reference = tiny_model(family, kind=kind, pad_token_id=4, num_hidden_layers=1)
    model = fp.load_model(saved(reference, tmp_path / "base"))
    batch = padded_batch(reference.config)
    assert_equal(model, reference, batch, everywhere=True)
    tuned = get_peft_model(reference, LoraConfig(target_modules=["query"], init_lora_weights=False))
    tuned.eval().save_pretrained(tmp_path / "a")
    adapted = fp.attach(model, fp.peft.pretrained(tmp_path / "a"))
    with torch.no_grad():
        expected = logits_of(tuned(**tensors(batch))).numpy()
    assert_close(forward(adapted, batch).logits, expected, **EXACT)
    export(adapted, adapted.trainable, tmp_path / "merged", format="merged")
    again = type(reference).from_pretrained(tmp_path / "merged")
    assert again.config.model_type == family
    with torch.no_grad():
        assert_close(logits_of(again(**tensors(batch))).numpy(), expected, **EXACT)


@pytest.mark.parametrize("family", RENAMED)
def test_defaults_of_the_other_names_are_those_of_transformers(family):
    ours, theirs = parse_config({"model_type": family})[1], RENAMED[family].config()
    shared = dataclasses.asdict(ours).items()
    assert {name: x for name, x in shared if getattr(theirs, name) != x} == {}


@pytest.mark.parametrize("family", ["gpt2", "distilbert"])
def test_general_names_of_fields_are_those_of_transformers(family):
    made = transformers.AutoConfig.for_model(family)
    other = registry.FAMILIES[family].other_names
    assert other == made.attribute_map
    general = {"model_type": family, "hidden_size": 24, "num_attention_heads": 2}
    found = parse_config({**general, "num_hidden_layers": 3})[1]
    assert [getattr(found, other[f"num_{x}"]) for x in ("attention_heads", "hidden_layers")] == [
        2,
        3,
    ]
    assert getattr(found, other["hidden_size"]) == 24


REFUSED = {
    "gpt2": [
        ({"scale_attn_weights": False}, "scale_attn_weights = False"),
        ({"add_cross_attention": True}, "add_cross_attention = True"),
        ({"is_causal": False}, "is_causal = False"),
        ({"n_head": 3}, "n_embd = 32 is not a multiple of n_head = 3"),
        ({"n_inner": "64"}, "n_inner = '64'; it must be of type int or NoneType"),
        ({"n_inner": 0}, "n_inner = 0; it must be at least 1"),
        ({"activation_function": "gelu_nwe"}, "'gelu_new'"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings = False"),
    ],
    "distilbert": [
        ({"n_heads": 3}, "dim = 32 is not a multiple of n_heads = 3"),
        ({"n_layers": 0}, "n_layers = 0; it must be at least 1"),
        ({"activation": "gelu_nwe"}, "'gelu_new'"),
        ({"dropout": "0.1"}, "dropout = '0.1'; it must be of type float"),
    ],
    "deberta-v2": [
        ({"conv_kernel_size": 3}, "conv_kernel_size = 3.*not implemented"),
        ({"embedding_size": 16}, "embedding_size = 16.*only 32"),
        ({"attention_head_size": 16}, "attention_head_size = 16.*only 8"),
        ({"pooler_hidden_size": 64}, "pooler_hidden_size = 64.*only 32"),
        ({"pos_att_type": "p2c|c2q"}, r"pos_att_type = 'p2c\|c2q'.*'c2q'.*Did you mean 'c2p'"),
        ({"pos_att_type": ["p2p"]}, r"pos_att_type = \['p2p'\].*'p2p'"),
        ({"norm_rel_ebd": "rms_norm"}, "norm_rel_ebd.*'rms_norm'.*'layer_norm'"),
        ({"position_buckets": 1}, "position_buckets = 1.*at least 2"),
        ({"position_buckets": 256}, "position_buckets = 256.*40 - 1"),
        ({"position_buckets": "256"}, "position_buckets = '256'.*int"),
        ({"type_vocab_size": -1}, "type_vocab_size = -1.*at least 0"),
        ({"num_attention_heads": 5}, "hidden_size = 32.*num_attention_heads = 5"),
    ],
    "modernbert": [
        ({"classifier_pooling": "max"}, "'max'.*classifier_pooling"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries for 2 layers"),
        ({"rope_parameters": {"full_attention": 3}}, "no table for 'full_attention', but 3"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling"),
        ({"num_attention_heads": 5}, "hidden_size = 32.*num_attention_heads = 5"),
    ],
    "dinov2": [
        ({"use_swiglu_ffn": True}, "use_swiglu_ffn = True"),
        ({"drop_path_rate": 0.1}, "drop_path_rate = 0.1"),
        ({"image_size": [16, 8]}, "4 x 2 patches"),
        ({"image_crop": [8]}, r"image_crop = \[8\]"),
    ],
    "vit": [
        ({"head_dim": 16}, "head_dim = 16"),
        ({"num_attention_heads": 5}, "hidden_size = 32.*num_attention_heads = 5"),
        ({"image_size": [16, 16, 16]}, r"image_size = \[16, 16, 16\].*height and width"),
        ({"patch_size": [4, 0]}, r"patch_size = \[4, 0\]"),
        ({"patch_size": "4"}, "patch_size = '4'.*int or list"),
        ({"patch_size": 0}, "patch_size = 0"),
        ({"patch_size": 32}, "image_size = 16.*patch_size = 32"),
    ],
}


@pytest.mark.parametrize("family", REFUSED)
def test_config_that_is_not_implemented(family):
    head = fp.heads.causal_lm() if family == "gpt2" else fp.heads.classification(3)
    for changes, named in REFUSED[family]:
        refused(named, abstract_module, tiny_config(family, **changes), head)


@pytest.mark.parametrize(
    ("family", "field"), [("distilbert", "max_position_embeddings"), ("gpt2", "n_positions")]
)
def test_a_sequence_that_is_too_long_is_refused(family, field):
    """For BERT and RoBERTa see ``test_peft_prompt.py``."""
    model = abstract_model(tiny_config(family, **{field: 14}), head=fp.heads.classification(3))

    def shape(length):
        ids = jax.ShapeDtypeStruct((2, length), jnp.int32)
        batch = {"input_ids": ids, "attention_mask": ids}
        apply = lambda *given: model.apply(*given, None, False)  # noqa: E731
        return jax.eval_shape(apply, model.frozen, model.trainable, batch).hidden.shape

    assert shape(14) == (2, 14, 32)
    refused(rf"15 positions, and the model has 14 \({field}", shape, 15)


TOKENS = fp.heads.token_classification(2)
RATES = {
    "bert": (
        fp.heads.classification(3),
        {"hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0.05},
        {
            "bert.embeddings": 0.2,
            "bert.encoder.layer.0.attention.self": 0.05,
            "bert.encoder.layer.0.output": 0.2,
            "": 0.2,
        },
    ),
    "bert, classifier": (fp.heads.classification(3), {"classifier_dropout": 0.3}, {"": 0.3}),
    "deberta-v2": (
        fp.heads.classification(3),
        {"attention_probs_dropout_prob": 0.05, "pooler_dropout": 0.15, "cls_dropout": 0.3},
        {"deberta.encoder.layer.0.attention.self": 0.05, "pooler": 0.15, "": 0.3},
    ),
    "distilbert": (
        fp.heads.classification(3),
        {"dropout": 0.15, "attention_dropout": 0.2, "seq_classif_dropout": 0.4},
        {
            "distilbert.embeddings": 0.15,
            "distilbert.transformer.layer.0.attention": 0.2,
            "distilbert.transformer.layer.0.ffn": 0.15,
            "": 0.4,
        },
    ),
    "distilbert, spans": (fp.heads.span_classification(), {"qa_dropout": 0.3}, {"": 0.3}),
    "distilbert, tokens": (TOKENS, {"dropout": 0.2}, {"": 0.2}),
    "gpt2": (
        TOKENS,
        {"resid_pdrop": 0.2, "embd_pdrop": 0.3},
        {"transformer.drop": 0.3, "transformer.h.0.mlp": 0.2, "": 0.1},
    ),
    "gpt2, hidden": (TOKENS, {"hidden_dropout": 0.5}, {"": 0.5}),
    "llama": (
        TOKENS,
        {"attention_dropout": 0.2},
        {"model.layers.0.self_attn": 0.2, "": 0.1},
    ),
    "llama, classifier": (TOKENS, {"classifier_dropout": 0.4}, {"": 0.4}),
}
"""Family -> (head, rates of the config, module whose dropout has a rate -> the rate)."""


@pytest.mark.parametrize("name", RATES)
def test_dropout_rates_are_those_of_the_config(name):
    head, given, rates = RATES[name]
    config = tiny_config(name.partition(",")[0], **given)
    for dropout, expected in ((None, rates), (0.0, dict.fromkeys(rates, 0.0))):
        module = abstract_module(config, head, dropout=dropout)
        found = {path: submodule(module, path) for path in rates}
        found = {path: getattr(x, "dropout", x).rate for path, x in found.items()}
        assert found == expected


# ------------------------------------------------------------------------------------ checkpoints


@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_checkpoint_is_read_by_transformers(family, tmp_path):
    """To the bit, under the names that transformers itself writes, and with the labels."""
    kind = "causal_lm" if "causal_lm" in FAMILIES[family].kinds else "classification"
    reference = tiny_model(family, kind=kind)
    model = fp.load_model(saved(reference, tmp_path / "in"))
    labels = () if kind == "causal_lm" else ("bad", "so-so", "good")
    config = {**model.config, "num_labels": 2, "problem_type": "multi_label_classification"}
    save_checkpoint(leaves(model), config, tmp_path / "out", labels)
    auto = AUTO["image" if FAMILIES[family].embeddings is None else kind]
    again = auto.from_pretrained(tmp_path / "out")
    assert type(again) is type(reference)
    found = again.state_dict()
    for name, x in reference.state_dict().items():
        np.testing.assert_array_equal(found[name], x, name)
    names = [load_file(tmp_path / d / "model.safetensors").keys() for d in ("in", "out")]
    assert names[0] == names[1]
    if labels:
        assert again.config.id2label == dict(enumerate(labels))
        assert again.config.problem_type is None
        assert fp.load_model(tmp_path / "out").labels == labels


@pytest.mark.parametrize(
    ("family", "stored"),
    [("bert", torch.float16), ("gpt2", torch.bfloat16), ("vit", torch.float64)],
)
def test_other_precisions_are_read_as_float32(family, stored, tmp_path):
    reference = tiny_model(family).to(stored)
    model = fp.load_model(saved(reference, tmp_path / "stored"))
    expected = fp.load_model(saved(reference.float(), tmp_path / "float32"))
    assert {x.dtype for x in leaves(model).values()} == {jnp.dtype("float32")}
    assert_same_leaves(leaves(model), leaves(expected))


@pytest.mark.parametrize(
    ("family", "kind", "limit"),
    [
        *((family, "classification", 0.05) for family in ("bert", "deberta-v2", "vit")),
        ("gpt2", "causal_lm", 0.02),
        ("gemma2", "causal_lm", 0.03),
    ],
)
def test_bfloat16_compute_is_close_to_float32(family, kind, limit, tmp_path):
    reference = tiny_model(family, kind=kind, **layers(family, 1))
    model = fp.load_model(saved(reference, tmp_path), dtype="bfloat16")
    batch = padded_batch(reference.config)
    model = model.replace(frozen=model.compute_frozen())
    outputs = forward(model, batch)
    assert outputs.hidden.dtype == jnp.bfloat16
    assert outputs.logits.dtype == jnp.float32  # the head computes in float32
    expected, _ = torch_outputs(reference, batch)
    assert np.abs(expected).max() > 0.5
    rows = batch["attention_mask"].astype(bool) if expected.ndim == 3 else slice(None)
    difference = outputs.logits[rows] - expected[rows]
    # bfloat16 keeps 8 bits, 0.4 % a rounding; a wrong formula would be off by the values' size.
    if limit == 0.05:
        assert_close(difference, 0, atol=20 * 2**-8)  # 20 roundings of outputs of order one
    assert 1e-5 < np.linalg.norm(difference) / np.linalg.norm(expected[rows]) < limit
    # A step of the head below one of bfloat16 counts.
    start = {n: x.astype(jnp.bfloat16).astype(x.dtype) for n, x in model.trainable.items()}
    before = forward(model, batch, start).logits
    for name in (n for n in start if n.endswith("kernel")):
        after = forward(model, batch, start | {name: start[name] * (1 + 2**-10)}).logits
        assert np.any(after != before), name


@pytest.mark.parametrize("family", FAMILIES)
def test_all_layers_of_a_head_compute_in_float32(family):
    config, head = tiny_config(family, **layers(family, 1)), fp.heads.two_classifiers(3)
    module = abstract_module(config, head, dtype="bfloat16")
    paths = registry.FAMILIES[family].kinds[head.kind].head
    own = {p: getattr(m, "dtype", None) for p, m in submodules(module) if is_inside(p, paths)}
    assert own.items() >= {"second_classifier.dense": jnp.float32}.items()
    assert set(own.values()) == {None, jnp.float32}


def old_norms(stored, reference):
    """Norms have a gamma and a beta."""
    ends = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    for name in [*stored]:
        for new, old in ends.items():
            if name.endswith(new):
                stored[name.removesuffix(new) + old] = stored.pop(name)


def pretraining_of_deberta(stored, reference):
    """The published form: no classifier, unused heads and positions, old names of norms."""
    for name in [*stored]:
        if not name.startswith("deberta."):
            del stored[name]
    old_norms(stored, reference)
    stored |= {
        "lm_predictions.lm_head.dense.weight": torch.zeros(32, 32),
        "mask_predictions.dense.weight": torch.zeros(32, 32),
        "deberta.embeddings.position_embeddings.weight": torch.zeros(40, 32),
        "deberta.embeddings.position_ids": torch.zeros(1, 40),
    }


def gpt2_of_the_hub(stored, reference):
    """Without prefix, with causal masks and a stored output layer, and what another head had."""
    for name in [*stored]:
        stored[name.removeprefix("transformer.")] = stored.pop(name)
    stored["lm_head.weight"] = stored["wte.weight"].clone()
    stored["multiple_choice_head.summary.weight"] = torch.zeros(1, 32)
    for i in range(2):
        stored[f"h.{i}.attn.bias"] = torch.ones(1, 1, 40, 40).tril()
        stored[f"h.{i}.attn.masked_bias"] = torch.tensor(-1e4)


def old_llama(stored, reference):
    """Without prefix, and with the frequencies of the rotation."""
    for name in [*stored]:
        stored[name.removeprefix("model.")] = stored.pop(name)
    stored["layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)


def masked_distilbert(stored, reference):
    """A masked language model's."""
    for name in [*stored]:
        if not name.startswith("distilbert."):
            del stored[name]
    stored |= {
        "vocab_transform.weight": torch.zeros(32, 32),
        "vocab_layer_norm.weight": torch.ones(32),
        "vocab_projector.bias": torch.zeros(100),
        "distilbert.embeddings.position_ids": torch.arange(40)[None],
    }


def modules_of_vit(stored, reference):
    """Transformers writes older names, and reads the names of its present modules too."""
    assert "vit.encoder.layer.0.attention.attention.query.weight" in stored
    stored.clear()
    stored |= {name: x.clone() for name, x in reference.state_dict().items()}
    assert "vit.layers.0.attention.q_proj.weight" in stored


def no_pooler(stored, reference):
    """As ``AutoModel`` writes without a pooling layer."""
    for name in [*stored]:
        if not name.startswith("bert.") or "pooler" in name:
            del stored[name]


SAME = (None, ())
FORMS = [
    ("bert", "classification", old_norms, [SAME]),
    ("roberta", "classification", old_norms, [SAME]),
    (
        "bert", "classification", no_pooler,
        [(fp.heads.classification(3), ("bert.pooler", "classifier"))],
    ),
    (
        "deberta-v2", "classification", pretraining_of_deberta,
        [(fp.heads.two_classifiers(3), ("pooler", "second_classifier", "classifier"))],
    ),
    ("gpt2", "causal_lm", gpt2_of_the_hub, [SAME, (fp.heads.classification(3), ("score",))]),
    (
        "llama", "causal_lm", old_llama,
        [
            SAME,
            (fp.heads.classification(3), ("score",)),
            (fp.heads.span_classification(), ("qa_outputs",)),
        ],
    ),
    (
        "distilbert", "classification", masked_distilbert,
        [(fp.heads.classification(4), ("pre_classifier", "classifier"))],
    ),
    ("vit", "classification", modules_of_vit, [SAME]),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore::fedjax_peft.models.stored_head.HeadWarning")
@pytest.mark.parametrize(("family", "kind", "change", "loaded"), FORMS)
def test_every_form_of_a_checkpoint_has_the_same_leaves(family, kind, change, loaded, tmp_path):
    """With another head than the stored one, all leaves but those of the head."""
    reference = tiny_model(family, kind=kind)
    whole = leaves(fp.load_model(saved(reference, tmp_path)))
    stored = load_file(tmp_path / "model.safetensors")
    change(stored, reference)
    save_file(stored, tmp_path / "model.safetensors")
    for head, trained in loaded:
        model = fp.load_model(tmp_path, head=head)
        if head is None:
            assert_same_leaves(leaves(model), whole)
            continue
        assert model.head == trained
        assert set(model.kinds.values()) == {"head"}
        assert all(name.startswith(trained) for name in model.kinds)
        # The backbone's own name depends on the head.
        backbone, expected = (
            {n.partition(".")[2]: x for n, x in y.items()} for y in (model.frozen, whole)
        )
        heads = (*trained, "classifier", "lm_head")
        kept = [n.partition(".")[2] for n in whole if not n.startswith(heads)]
        assert_same_leaves(backbone, {name: expected[name] for name in kept})


BARE = {
    "bert": ("bert.pooler.dense", "classifier"),
    "distilbert": ("pre_classifier", "classifier"),
    "vit": ("classifier",),
}


@pytest.mark.parametrize("family", BARE)
def test_a_bare_encoder_gets_a_fresh_head(family, tmp_path):
    """As ``AutoModel`` saves it: without prefix and classifier."""
    reference = tiny_model(family)
    whole = fp.load_model(saved(reference, tmp_path / "whole"))
    names = load_file(saved(reference.base_model, tmp_path / "bare") / "model.safetensors")
    assert not any(n.startswith((reference.base_model_prefix, "classifier")) for n in names)
    model = fp.load_model(tmp_path / "bare", head=fp.heads.classification(3))
    assert_same_leaves(model.frozen, whole.frozen)
    kinds = {f"{module}.{leaf}": "head" for module in BARE[family] for leaf in ("bias", "kernel")}
    assert model.kinds == whole.kinds == kinds
    assert model.tokenizer is None
    # BERT's pooler is part of its head; training starts from that of the checkpoint.
    same = {n for n, x in model.trainable.items() if np.array_equal(x, whole.trainable[n])}
    pooler = {f"bert.pooler.dense.{leaf}" for leaf in ("bias", "kernel")}
    assert same == (pooler if family == "bert" else set())


def test_a_sharded_checkpoint(tmp_path):
    """With a stored copy of the tied head, which is no leaf; another matrix there is refused."""
    reference = tiny_model("llama", kind="causal_lm", tie_word_embeddings=True)
    reference.save_pretrained(tmp_path / "shards", max_shard_size="30KB")
    shards = sorted((tmp_path / "shards").glob("model-*.safetensors"))
    assert len(shards) > 1
    stored, table = load_file(shards[0]), reference.model.embed_tokens.weight.detach()
    save_file(stored | {"lm_head.weight": table.clone()}, shards[0])
    found, whole = (fp.load_model(x) for x in (shards[0].parent, saved(reference, tmp_path)))
    assert_same_leaves(leaves(found), leaves(whole))
    assert not any("lm_head" in name for name in found.frozen)
    save_file(stored | {"lm_head.weight": table + 0.1}, shards[0])
    refused(r"hold a lm_head\.weight that differs from the table", fp.load_model, shards[0].parent)


# ------------------------------------------------------------------------------- heads and padding


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_classifier_reads_the_rightmost_token_that_is_not_the_pad_token(family, tmp_path):
    """Many checkpoints pad with the end of text, which may stand inside a text, or be all of it."""
    reference = tiny_model(family)
    model = fp.load_model(saved(reference, tmp_path))
    batch = padded_batch(reference.config)
    batch["input_ids"][0, 5] = batch["input_ids"][1, 6] = batch["input_ids"][2, 0] = 3
    assert_equal(model, reference, batch)
    assert_equal(model, reference, flipped(batch))


@pytest.mark.parametrize("pad", [None, -1])
def test_without_a_pad_token_the_attention_mask_gives_the_length(pad, tmp_path):
    """-1 is in configs of the first Llama, whose tokenizer gets another token for padding."""
    family = "llama"
    reference = tiny_model(family, pad_token_id=None)
    saved(reference, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"pad_token_id": pad}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = fp.load_model(tmp_path)
    lengths = (13, 7, 1, 10)
    batch = padded_batch(parse_config(tiny_config(family))[1], lengths)
    logits = forward(model, batch).logits
    for row, length in enumerate(lengths):  # Hugging Face then takes single texts only
        one = {name: x[row : row + 1, :length] for name, x in batch.items()}
        assert_close(logits[row], torch_states(reference, one)[0][0], **EXACT)


@pytest.mark.parametrize("family", ["llama", "distilbert"])
def test_two_classifiers_read_the_last_token_or_an_encoder_s_first(family):
    model = fp.random_model(tiny_config(family), head=fp.heads.two_classifiers(3), dropout=0.0)
    batch = padded_batch(parse_config(tiny_config("llama"))[1], (5, 2))
    outputs, module = forward(model, batch), model.module()
    place = jnp.array([0, 0] if family == "distilbert" else [4, 1])
    read = outputs.hidden[jnp.arange(2), place]
    if family == "llama":
        np.testing.assert_array_equal(outputs.last, place)
    first = module.logits if family == "distilbert" else module.score
    assert_close(outputs.logits, first(read), **EXACT)
    assert_close(outputs.second, module.second_classifier(read), **EXACT)
    assert {name.split(".")[0] for name in model.kinds} == set(model.head)


BERT_RATES = {"hidden_dropout_prob": 0.3, "attention_probs_dropout_prob": 0.3}
BELOW = {
    "bert": BERT_RATES | {"classifier_dropout": 0.0},
    "deberta-v2": BERT_RATES | {"pooler_dropout": 0.0, "cls_dropout": 0.0},
    "distilbert": {"dropout": 0.3, "attention_dropout": 0.3, "seq_classif_dropout": 0.0},
    "vit": BERT_RATES,
}
"""Rates of dropout in the backbone, and none in the head."""


@pytest.mark.parametrize("family", BELOW)
def test_the_first_token_computed_alone_has_the_same_dropout_masks(family):
    """Logits come from the last layer computed for one token, ``hidden`` from that for all."""
    config = tiny_config(family, **BELOW[family]) | layers(family, 1)
    model = fp.random_model(config, head=fp.heads.classification(3))
    batch = padded_batch(FAMILIES[family].config(**FAMILIES[family].shape))
    trained = forward(model, batch, key=jax.random.key(7))
    assert_close(trained.logits, model.module().logits(trained.hidden[:, 0]), **EXACT)
    other = forward(model, batch, key=jax.random.key(8))
    assert np.abs(other.logits - trained.logits).max() > 0.1


# ------------------------------------------------------------------------------ prompt and prefix


@pytest.mark.parametrize(
    ("family", "kind", "config"),
    [
        ("distilbert", "classification", {}),
        ("deberta-v2", "classification", {"position_biased_input": True, "type_vocab_size": 2}),
        ("gpt2", "classification", {}),
        ("gemma2", "causal_lm", {}),
    ],
)
def test_tokens_after_a_prompt(family, kind, config, tmp_path):
    """Gemma scales the embeddings of tokens, but not those of a prompt, as in PEFT."""
    reference = tiny_model(family, kind=kind, **config, **layers(family, 1))
    model = fp.attach(fp.load_model(saved(reference, tmp_path)), fp.peft.prompt_tuning(3))
    rows, batch = random(3, 32), padded_batch(reference.config, lengths=(9, 4))
    trained = {n: rows if n.endswith(".prompt") else x for n, x in model.trainable.items()}
    outputs = forward(model, batch, trained)
    given = tensors(batch)
    with torch.no_grad():
        tokens = reference.get_input_embeddings()(given.pop("input_ids"))
        before = {n: torch.full((2, 3), int(n == "attention_mask")) for n in given}
        expected = reference(
            inputs_embeds=torch.cat([torch.tensor(rows).expand(2, 3, 32), tokens], dim=1),
            output_hidden_states=True,
            **{name: torch.cat([before[name], x], dim=1) for name, x in given.items()},
        )
        logits = expected.logits
        if (family, kind) == ("gpt2", "classification"):  # whose head needs the ids
            logits = reference.score(expected.hidden_states[-1])[[0, 1], [11, 6]]
    real = batch["attention_mask"].astype(bool)
    if kind == "causal_lm":
        assert_close(outputs.logits[real], logits[:, 3:].numpy()[real], **EXACT)
    else:
        assert_close(outputs.logits, logits.numpy(), **EXACT)
    for got, x in zip(outputs.states, expected.hidden_states, strict=True):
        shown = np.ones_like(real) if family == "deberta-v2" else real
        assert_close(np.asarray(got)[shown], x[:, 3:].numpy()[shown], **EXACT)


@pytest.mark.parametrize(
    ("family", "kind", "heads", "width"),
    [("gpt2", "classification", 4, 8), ("qwen3", "causal_lm", 2, 16)],
)
def test_every_token_sees_a_prefix(family, kind, heads, width, tmp_path):
    """Qwen's heads are grouped."""
    reference = tiny_model(family, kind=kind)
    model = fp.attach(fp.load_model(saved(reference, tmp_path)), fp.peft.prefix_tuning(3))
    batch = padded_batch(reference.config, lengths=(9, 4))
    cache, trained = DynamicCache(), dict(model.trainable)
    for i in range(2):
        stacked = []
        for name, x in (
            ("key", random(3, heads, width) + i),
            ("value", random(3, heads, width) - i),
        ):
            (leaf,) = (n for n in trained if f".{i}." in n and n.endswith(f"prefix_{name}"))
            trained[leaf] = x.reshape(3, heads * width)
            stacked.append(torch.tensor(x).expand(2, 3, heads, width).transpose(1, 2))
        cache.update(*stacked, i)
    mask = np.pad(batch["attention_mask"], ((0, 0), (3, 0)), constant_values=1)
    with torch.no_grad():
        expected = reference(
            input_ids=tensors(batch)["input_ids"],
            attention_mask=torch.tensor(mask),
            position_ids=torch.arange(9)[None],  # our text keeps its positions
            past_key_values=cache,
        ).logits.numpy()
    rows = batch["attention_mask"].astype(bool) if expected.ndim == 3 else slice(None)
    got = np.asarray(forward(model, batch, trained).logits)
    assert_close(got[rows], expected[rows], **EXACT)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_layer_has_the_places_of_adapters_prefixes_and_norms(family):
    module = abstract_module(tiny_config(family), fp.heads.classification(3))
    places = [x.place for _, x in submodules(module, Residual)]
    assert sorted(places) == ["attention"] * 2 + ["feed_forward"] * 2
    slots = len(list(submodules(module, PrefixSlot)))
    assert slots == (0 if family == "deberta-v2" else 2)
    model = abstract_model(
        tiny_config(family), fp.peft.layer_norm(), head=fp.heads.classification(3)
    )
    assert not any(name.endswith((".scale", ".offset")) for name in model.frozen)
    found = submodules(module, nnx.LayerNorm)
    norms = [norm for path, norm in found if not path.startswith("head.")]  # ModernBERT's
    count = sum((norm.scale is not None) + (norm.bias is not None) for norm in norms)
    count += len(list(submodules(module, RMSNorm)))
    assert sum(kind == "adapter" for kind in model.kinds.values()) == count > 0


def test_a_config_without_architectures_is_a_language_model(tmp_path):
    path = saved(tiny_model("gpt2", kind="causal_lm"), tmp_path) / "config.json"
    config = json.loads(path.read_text())
    del config["architectures"]
    path.write_text(json.dumps(config))
    model = fp.load_model(tmp_path)
    assert model.head == model.labels == ()
    assert not model.trainable  # a tied head is frozen, and no leaf
    assert not any("lm_head" in name for name in model.frozen)
