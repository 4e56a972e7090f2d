"""The rules by which several devices share the leaves of a family."""

import re

import pytest
from internals import abstract_model, frozen_axis, registry
from torch_reference import FAMILIES

import fedjax_peft as fp

FIRST = r"quer|key|val|[qkv]_(lin|proj)|Wqkv|c_attn|inter|lin1|fc1|c_fc|gate|up|Wi"
"""The first of two matrices."""


@pytest.mark.parametrize("family", FAMILIES)
def test_every_matrix_of_the_layers_is_split_by_a_rule(family):
    """Those of LoRA too, and every rule is about a leaf."""
    config = {"model_type": family, **FAMILIES[family].shape}
    model = abstract_model(config, fp.peft.lora(2), head=fp.heads.classification(3))
    names = [n for n, x in model.frozen.items() if len(x.shape) == 2 and re.search(r"\.\d+\.", n)]
    assert len(names) >= 8
    for name in names:
        axis = frozen_axis(name, model.frozen[name].shape, model.splits, 2)
        first = re.search(FIRST, name)
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
