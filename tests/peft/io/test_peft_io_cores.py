"""LoRA-SB, RAVAN, SLoRA and sums of LoRAs leave as one LoRA, or merged into the model."""

import pytest
from internals import export
from peft import PeftModel
from refusals import refused
from test_peft_io_export import CLASSES, assert_peft_reads, assert_same, auto, ours, theirs
from test_peft_io_merged import assert_merges
from tiny import trained
from torch_reference import layers, padded_batch, saved, tiny_model

import fedjax_peft as fp

pytestmark = pytest.mark.slow
METHODS = {
    "slora": fp.peft.slora(4, density=0.1),
    "lora_sb": fp.peft.lora_sb(4),
    "lora_sum": fp.peft.lora_sum(2, alpha=3.0, rank_pattern={"value": 1}),
    "ravan": fp.peft.ravan(4, heads=3),
}


@pytest.mark.parametrize(("name", "family"), [("lora_sum", "bert"), ("ravan", "gpt2")])
def test_peft_reads_the_product_as_a_lora(name, family, tmp_path):
    base = saved(tiny_model(family, classes=CLASSES, **layers(family, 1)), tmp_path / "base")
    assert_peft_reads(base, METHODS[name], tmp_path, family=family)


@pytest.mark.parametrize(("name", "family"), [("lora_sb", "gpt2"), ("slora", "bert")])
def test_transformers_reads_the_merged_checkpoint(name, family, tmp_path):
    base = saved(tiny_model(family, classes=CLASSES, **layers(family, 1)), tmp_path / "base")
    assert_merges(base, METHODS[name], tmp_path, family=family)


def test_peft_reads_slora_once_its_first_stage_has_ended(tmp_path):
    base = saved(tiny_model("bert", classes=CLASSES), tmp_path / "base")
    model = fp.attach(fp.load_model(base), METHODS["slora"])
    params = trained(model)
    refused("first stage", export, model, params, tmp_path / "refused")
    ended = {n: 0 * x if n.endswith(".sparse_values") else x for n, x in params.items()}
    adapter = export(model, ended, tmp_path / "adapter")
    reference = auto("bert", "classification").from_pretrained(base, attn_implementation="eager")
    batch = padded_batch(reference.config)
    reference = PeftModel.from_pretrained(reference, adapter)
    assert_same(theirs(reference, batch), ours(model, ended, batch), batch)
