"""The papers' parameter counts, from configs only, without allocating the models."""

import math

import pytest

from fedjax_peft import peft
from fedjax_peft.errors import InputError
from fedjax_peft.models import heads
from fedjax_peft.models.heads import classification
from fedjax_peft.peft.base import attach, count
from fedjax_peft.testing import tiny_model

pytestmark = pytest.mark.slow

BASE = {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
}
ROBERTA = {
    "model_type": "roberta",
    **BASE,
    "vocab_size": 50265,
    "max_position_embeddings": 514,
    "type_vocab_size": 1,
}
DEBERTA = {
    "model_type": "deberta-v2",
    **BASE,
    "vocab_size": 128100,
    "max_position_embeddings": 512,
    "type_vocab_size": 0,
    "relative_attention": True,
    "position_buckets": 256,
    "max_relative_positions": -1,
    "norm_rel_ebd": "layer_norm",
    "share_att_key": True,
    "pos_att_type": "p2c|c2p",
    "position_biased_input": False,
    "layer_norm_eps": 1e-7,
}
GPT2 = {"model_type": "gpt2", "vocab_size": 50257, "n_embd": 768, "n_layer": 12, "n_head": 12}
VIT = {"model_type": "vit", **BASE, "image_size": 224, "patch_size": 16}
TEXT = pytest.mark.parametrize("config", [ROBERTA, DEBERTA], ids=["roberta", "deberta"])


def adapter(config, method, head=None):
    """Returns the number of parameters that a method adds or trains, without the head."""
    return count(config, method, head=head or classification(2))["adapter"]


def mib(parameters):
    """Returns mebibytes in float32, cut to two decimals as the paper prints them."""
    return math.floor(parameters * 4 / 2**20 * 100) / 100


# ------------------------------------------------------------------------------ FeDeRA, Table 1 ff.


def test_full_models():
    roberta, deberta = (count(c, head=classification(2))["frozen"] for c in (ROBERTA, DEBERTA))
    assert (roberta, deberta) == (124_055_040, 183_831_552)
    assert adapter(ROBERTA, peft.full()) == roberta
    assert adapter(DEBERTA, peft.full()) == deberta


def test_biases():
    assert adapter(ROBERTA, peft.bitfit()) == 102_144
    # One more layer norm on the relative embeddings, and no bias elsewhere that RoBERTa lacks.
    assert adapter(DEBERTA, peft.bitfit()) == 102_912


@TEXT
def test_houlsby(config):
    assert adapter(config, peft.houlsby()) == 24 * 74_544 == 1_789_056


@TEXT
def test_lora(config):
    assert adapter(config, peft.lora(32)) == 1_179_648
    assert adapter(config, peft.lora(32, init="svd")) == 1_179_648


@pytest.mark.parametrize(
    ("rank", "parameters"), [(3, 110_592), (48, 1_769_472), (64, 2_359_296), (128, 4_718_592)]
)
def test_lora_budgets(rank, parameters):
    assert adapter(ROBERTA, peft.lora(rank)) == 36_864 * rank == parameters


@pytest.mark.parametrize(
    ("size", "parameters"),
    [(2, 92_208), (3, 129_096), (32, 1_198_848), (64, 2_379_264), (128, 4_740_096)],
)
def test_adapter_budgets(size, parameters):
    assert adapter(ROBERTA, peft.houlsby(size=size)) == 36_888 * size + 18_432 == parameters


def test_head():
    counts = count(ROBERTA, peft.lora(8), head=classification(20))
    assert counts["head"] == 605_972
    assert count(ROBERTA, peft.head_only(), head=classification(20))["adapter"] == 0


# ------------------------------------------------------------------------------------- FRA-LoRA


def test_fra_set_up():
    counts = count(ROBERTA, peft.lora(16), head=classification(2))
    assert counts == {"adapter": 589_824, "head": 592_130, "frozen": 124_055_040}
    assert counts["frozen"] + counts["head"] == 124_647_170  # what the paper calls the total
    assert counts["adapter"] + counts["head"] == 1_181_954
    # The paper prints 1,774,084: PEFT keeps the original head beside the trained copy.
    assert counts["adapter"] + 2 * counts["head"] == 1_774_084


# --------------------------------------------------------------------------------------- FedMCP


def test_fedmcp_footprint():
    whole = 124_645_632  # RoBERTa with the pooler that a classifier has no use for
    one = adapter(ROBERTA, peft.houlsby(size=16))
    two = adapter(ROBERTA, peft.dual(size=16))
    assert (one, two) == (608_640, 2 * 608_640)
    assert round(100 * one / whole, 4) == 0.4883
    assert round(100 * two / whole, 3) == 0.977
    shares = {
        0.244: peft.pfeiffer(size=16),
        0.718: peft.pfeiffer(size=48),
        1.435: peft.houlsby(size=48),
        0.237: peft.lora(8),
        0.473: peft.lora(16),
    }
    for share, method in shares.items():
        assert round(100 * adapter(ROBERTA, method) / whole, 3) == share


# --------------------------------------------------------------------------- FedAdapters, Table 12


def test_adapters_of_gpt2_and_vit():
    for config, head in ((GPT2, heads.causal_lm()), (VIT, classification(100))):
        pfeiffer, houlsby = (
            adapter(config, peft.pfeiffer(), head),
            adapter(config, peft.houlsby(), head),
        )
        assert (pfeiffer, mib(pfeiffer)) == (894_528, 3.41)
        assert (houlsby, mib(houlsby)) == (1_789_056, 6.82)
        lora = adapter(config, peft.lora(8), head)
        assert (lora, mib(lora)) == (294_912, 1.12)


def test_lora_on_parts_of_c_attn_has_the_size_of_lora_on_the_whole():
    assert adapter(GPT2, peft.lora(8, parts=["q", "v"]), heads.causal_lm()) == 294_912


def test_gpt2():
    counts = count(GPT2, peft.lora(8), head=heads.causal_lm())
    assert counts == {"adapter": 294_912, "head": 0, "frozen": 124_439_808}
    assert mib(counts["frozen"]) == 474.70
    # The paper's figure holds the adapter and twelve masks of 1024 x 1024 bytes too.
    masks = 12 * 1024**2 / 4
    assert mib(counts["frozen"] + counts["adapter"] + masks) == 487.82


def test_vit():
    counts = count(VIT, peft.lora(8), head=classification(100))
    assert counts == {"adapter": 294_912, "head": 76_900, "frozen": 85_798_656}
    pooler = 768 * 768 + 768  # which a classifier has no use for, and the paper's figure holds
    full = counts["frozen"] + counts["head"] + pooler
    assert (mib(full), mib(full + counts["adapter"])) == (329.84, 330.96)


@pytest.mark.parametrize(("kind", "size"), [("rnn", 219.34), ("lstm", 241.87)])
def test_recurrent_models(kind, size):
    config = {"model_type": kind, "vocab_size": 54_175}
    total = sum(count(config, head=heads.causal_lm()).values())
    assert round(total * 4 / 2**20, 2) == size  # rounded here, where the other rows are cut


# ------------------------------------------------------------------------------- the counter itself


def test_counts_are_those_of_the_real_model():
    model = attach(tiny_model(5), peft.houlsby(reduction_factor=4))
    counted = count(model.config, peft.houlsby(reduction_factor=4), head=classification(5))
    assert counted == model.counts()
    in_bytes = count(
        model.config, peft.houlsby(reduction_factor=4), head=classification(5), in_bytes=True
    )
    assert in_bytes == model.nbytes() == {kind: 4 * n for kind, n in counted.items()}


def test_counting_has_the_errors_of_attaching():
    with pytest.raises(InputError, match="'qeury'"):
        count(ROBERTA, peft.lora(8, targets=["qeury"]), head=classification(2))
