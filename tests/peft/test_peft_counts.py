"""The papers' parameter counts, from configs only, without allocating the models."""

import functools
import math

import pytest

import fedjax_peft as fp
from fedjax_peft import peft

pytestmark = pytest.mark.slow

CONFIGS = {
    "roberta": {"model_type": "roberta", "max_position_embeddings": 514, "type_vocab_size": 1},
    "deberta": {
        "model_type": "deberta-v2",
        "relative_attention": True,
        "position_buckets": 256,
        "norm_rel_ebd": "layer_norm",
        "share_att_key": True,
        "pos_att_type": "p2c|c2p",
        "position_biased_input": False,
    },
    "gpt2": {"model_type": "gpt2"},
    "vit": {"model_type": "vit"},
    **{kind: {"model_type": kind, "vocab_size": 54_175} for kind in ("rnn", "lstm")},
}
"""The sizes are the defaults, those of the base models."""


def whole(model, method="", /, *, layers=None, classes=2, **options):
    """Returns the counts of a method with options on a model, which may have fewer layers."""
    head = (
        fp.heads.causal_lm()
        if model in ("gpt2", "rnn", "lstm")
        else fp.heads.classification(classes)
    )
    fewer = {"n_layer" if model == "gpt2" else "num_hidden_layers": layers} if layers else {}
    method = getattr(peft, method)(**options) if method else None
    return fp.count(CONFIGS[model] | fewer, method, head=head)


@functools.cache
def counts(model, method, /, **options):
    """Returns the counts for twelve layers that are alike, from those for one and for two."""
    one, two = (whole(model, method, layers=n, **options) for n in (1, 2))
    return {kind: n + 11 * (two[kind] - n) for kind, n in one.items()}


def adapter(model, method, **options):
    """Returns the number of parameters that a method adds or trains, without the head."""
    return counts(model, method, **options)["adapter"]


def mib(parameters):
    """Returns mebibytes in float32, cut to two decimals as the paper prints them."""
    return math.floor(parameters * 4 / 2**20 * 100) / 100


@pytest.mark.parametrize(("model", "size"), [("roberta", 124_055_040), ("deberta", 183_831_552)])
def test_full_models(model, size):
    assert counts(model, "houlsby")["frozen"] == size
    assert counts(model, "full") == counts(model, "houlsby") | {"adapter": size, "frozen": 0}


# FeDeRA's Table 1 and its budgets; FedAdapters' Table 12.
ADAPTERS = [
    ("roberta", "bitfit", {}, 102_144),
    # One more layer norm on the relative embeddings, and no bias elsewhere that RoBERTa lacks.
    ("deberta", "bitfit", {}, 102_912),
    *((model, "houlsby", {}, 24 * 74_544) for model in ("roberta", "deberta", "gpt2")),
    *((model, "pfeiffer", {}, 894_528) for model in ("roberta", "vit")),
    *((model, "opendelta", {}, 608_640) for model in ("deberta", "gpt2", "vit")),
    *(("roberta", "houlsby", {"size": size}, 36_888 * size + 18_432) for size in (2, 16)),
    ("roberta", "lora", {"rank": 8}, 36_864 * 8),
    ("deberta", "lora", {"rank": 32, "init": "svd"}, 1_179_648),
    ("gpt2", "lora", {"rank": 8, "parts": ("q", "v")}, 294_912),
]


@pytest.mark.parametrize(("model", "method", "options", "expected"), ADAPTERS)
def test_adapters(model, method, options, expected):
    assert adapter(model, method, **options) == expected


def test_head():
    found = counts("roberta", "head_only", classes=20)
    assert found == {"adapter": 0, "head": 605_972, "frozen": 124_055_040}


def test_fedmcp_footprint():
    whole = 124_645_632  # RoBERTa with the pooler that a classifier has no use for
    one, two = (adapter("roberta", method, size=16) for method in ("houlsby", "dual"))
    assert (one, two) == (608_640, 2 * 608_640)
    assert round(100 * one / whole, 4) == 0.4883
    assert round(100 * two / whole, 3) == 0.977
    shares = {
        0.244: adapter("roberta", "pfeiffer", size=16),
        0.718: adapter("roberta", "pfeiffer"),  # of size 48, as the next
        1.435: adapter("roberta", "houlsby"),
        0.237: adapter("roberta", "lora", rank=8),
        0.473: adapter("roberta", "lora", rank=16),
    }
    for share, parameters in shares.items():
        assert round(100 * parameters / whole, 3) == share


def test_gpt2():
    found = counts("gpt2", "lora", rank=8)
    assert found == {"adapter": 294_912, "head": 0, "frozen": 124_439_808}
    assert mib(found["frozen"]) == 474.70
    # The paper's figure holds the adapter and twelve masks of 1024 x 1024 bytes too.
    masks = 12 * 1024**2 / 4
    assert mib(found["frozen"] + found["adapter"] + masks) == 487.82


def test_vit():
    found = counts("vit", "lora", rank=8, classes=100)
    assert found == {"adapter": 294_912, "head": 76_900, "frozen": 85_798_656}
    pooler = 768 * 768 + 768  # which a classifier has no use for, and the paper's figure holds
    full = found["frozen"] + found["head"] + pooler
    assert (mib(full), mib(full + found["adapter"])) == (329.84, 330.96)


@pytest.mark.parametrize(("kind", "size"), [("rnn", 219.34), ("lstm", 241.87)])
def test_recurrent_models(kind, size):
    total = sum(whole(kind).values())
    assert round(total * 4 / 2**20, 2) == size  # rounded here, where the other rows are cut


def test_layers_are_alike():
    assert whole("roberta", "houlsby") == counts("roberta", "houlsby")


def test_counts_are_those_of_the_real_model():
    model = fp.attach(fp.testing.tiny_model(5), peft.houlsby(reduction_factor=4))
    counted = fp.count(
        model.config, peft.houlsby(reduction_factor=4), head=fp.heads.classification(5)
    )
    assert counted == model.counts()
    assert model.nbytes() == {kind: 4 * n for kind, n in counted.items()}
