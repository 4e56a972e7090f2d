"""The rules by which several devices share the leaves of a family."""

import re

import pytest

import fedjax_peft as fp
from fedjax_peft.engine.sharding import frozen_axis
from fedjax_peft.models import heads, registry
from fedjax_peft.peft.base import abstract_model
from fedjax_peft.testing import TINY_BERT

CONFIGS = {
    "bert": {**TINY_BERT},
    "roberta": {**TINY_BERT, "model_type": "roberta"},
    "distilbert": {"vocab_size": 64, "dim": 32, "hidden_dim": 64, "n_layers": 2, "n_heads": 4},
    "deberta-v2": {**TINY_BERT, "relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
    "gpt2": {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "pad_token_id": 0},
    "llama": {**TINY_BERT, "num_key_value_heads": 2},
    "qwen3": {**TINY_BERT, "num_key_value_heads": 2, "head_dim": 8},
    "gemma3_text": {**TINY_BERT, "num_key_value_heads": 2, "head_dim": 8},
    "vit": {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 64, "image_size": 8, "patch_size": 4,
    },
}  # fmt: skip


@pytest.mark.parametrize("family", CONFIGS)
def test_every_matrix_of_the_layers_is_split_by_a_rule(family):
    """Those of LoRA too, and every rule is about a leaf."""
    config = {**CONFIGS[family], "model_type": family}
    model = abstract_model(config, fp.peft.lora(2), head=heads.classification(3))
    names = [n for n, x in model.frozen.items() if len(x.shape) == 2 and re.search(r"\.\d+\.", n)]
    assert len(names) >= 8
    for name in names:
        axis = frozen_axis(name, model.frozen[name].shape, model.splits, 2)
        first = re.search(r"quer|key|val|[qkv]_(lin|proj)|c_attn|inter|lin1|fc1|c_fc|gate|up", name)
        assert axis == (1 if first else 0), name
    for pattern, _ in model.splits:
        if pattern.endswith(("kernel", "embedding")) and not pattern.startswith("lm_head"):
            assert any(re.fullmatch(pattern, name) for name in model.frozen), pattern
    adapters = [n for n in model.trainable if n.endswith("lora_b")]
    assert adapters
    for name in adapters:
        assert any(re.fullmatch(pattern, name) for pattern, _ in model.splits), name


def test_attaching_keeps_the_rules():
    model = fp.testing.tiny_model()
    assert model.splits == registry.FAMILIES["bert"].splits
    assert fp.attach(model, fp.peft.lora(2)).splits == model.splits
