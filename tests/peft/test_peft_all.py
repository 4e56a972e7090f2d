"""What every PEFT method must hold: a new one is tested by being listed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closeness import assert_close
from flax import nnx
from internals import TINY_BERT, TokenEmbed, attach_module, default_targets
from refusals import refusals, refused
from tiny import BATCH, logits, tiny, trained

import fedjax_peft as fp
from fedjax_peft import peft

pytestmark = pytest.mark.slow

MARKED = {
    "bitfit": peft.bitfit(),
    "bitfit-paper": peft.bitfit(["query", "intermediate.dense"]),
    "layer_norm": peft.layer_norm(),
    "full": peft.full(),
    "head_only": peft.head_only(),
}
"""Methods that train leaves of the model itself, so merging changes no bit."""
MERGED = {
    "lora": peft.lora(4, alpha=6.0),
    "lora-gaussian": peft.lora(4, init="gaussian"),
    "lora_sum": peft.lora_sum(2, names=("a", "b"), alpha=3.0, rank_pattern={"value": 1}),
    "dora": peft.dora(4, alpha=6.0, rslora=True, targets=["query", "dense"]),
    "dora-gaussian": peft.dora(4, alpha=6.0, init="gaussian"),
    "lora_with_base": peft.lora_with_base(4),
    "ia3": peft.ia3(),
    "lora_sb": peft.lora_sb(4),
    "ravan": peft.ravan(4, heads=3),
    "ravan-normal": peft.ravan(4, heads=3, init="normal"),
    "slora": peft.slora(4, density=0.1),
    "hira": peft.hira(4),
    "lora_xs": peft.lora_xs(4, sigma=0.0),
    "miss": peft.miss(5),
    "oft": peft.oft(8),
    "oft-exact": peft.oft(16, block_share=True, neumann=False, targets=["query", "dense"]),
    "shira": peft.shira(4),
    "vera": peft.vera(48),
    **MARKED,
}
UNMERGED = {
    "dual_lora": peft.dual_lora(2),
    "lora_experts": peft.lora_experts(2, experts=2),
    "houlsby": peft.houlsby(4),
    "opendelta": peft.opendelta(),
    "dual": peft.dual(),
    "prompt_tuning": peft.prompt_tuning(2),
    "prefix_tuning": peft.prefix_tuning(2),
}
METHODS = MERGED | UNMERGED
NEUTRAL = [*MERGED, "dual_lora", "lora_experts"]
"""Methods whose start has no effect."""


def assert_same(name, got, expected):
    if name.startswith("dora"):  # it divides by norms, and multiplies by them
        assert_close(got, expected, rtol=0, atol=1e-5)
    else:
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("name", NEUTRAL)
def test_the_start_changes_no_logit(name):
    assert_same(name, logits(fp.attach(tiny(), METHODS[name])), logits(tiny()))


@pytest.mark.parametrize("name", METHODS)
def test_a_bfloat16_model_trains_float32_and_computes_in_bfloat16(name):
    """Small steps of a bfloat16 leaf would vanish."""
    plain = fp.random_model(TINY_BERT, head=fp.heads.classification(3), dtype="bfloat16")
    model = fp.attach(plain, METHODS[name])
    kinds = {x.dtype for x in model.trainable.values() if jnp.issubdtype(x.dtype, jnp.floating)}
    assert kinds == {jnp.dtype("float32")}
    given = (model.compute_frozen(), model.trainable, BATCH)
    outputs = jax.eval_shape(lambda *x: model.apply(*x, None, False), *given)
    assert outputs.hidden.dtype == jnp.bfloat16


@pytest.mark.parametrize("name", MERGED)
def test_a_merged_model_is_plain_and_gives_the_same_logits(name):
    model = fp.attach(tiny(), MERGED[name])
    params = trained(model)
    merged, expected = fp.merge(model, params), logits(model, params)
    assert np.abs(expected - logits(model)).max() > (0.01 if name in MARKED else 0.05)
    assert_close(logits(merged), expected, rtol=0, atol=0 if name in MARKED else 1e-5)
    assert merged.method is None
    assert merged.kinds == tiny().kinds
    assert merged.frozen.keys() == tiny().frozen.keys()


@pytest.mark.parametrize("name", UNMERGED)
def test_methods_that_cannot_be_merged(name):
    refused("cannot be merged", fp.merge, fp.attach(tiny(), UNMERGED[name]))


@pytest.mark.parametrize("name", METHODS)
def test_nothing_is_adapted_twice(name):
    """Neither a model, nor a module with a method inside; marked leaves must be those of layers."""
    method, defaults = METHODS[name], default_targets(tiny().config)
    refused(f"already has '{method.name}'", fp.attach, fp.attach(tiny(), method), method)
    with pytest.raises(fp.InputError, match=r"already has 'lora'|already has 'dora'"):
        fp.attach(fp.attach(tiny(), peft.dora(2) if name == "lora" else peft.lora(2)), method)
    first = peft.lora(2, targets=["query"]) if name in MARKED else method
    module = attach_module(tiny().module(), first, defaults, head=tiny().head)
    with pytest.raises(fp.InputError, match=r"already adapted|is already|already has a method"):
        attach_module(module, method, defaults, head=tiny().head)


@pytest.mark.parametrize("name", peft.__all__)
def test_config_files_find_a_method_by_its_name(name):
    if name in ("bottleneck", "pretrained"):  # of other forms
        return
    made = getattr(peft, name)()
    assert made.name == name


# -------------------------------------------------------------------------------------- refusals

IMPOSSIBLE = [
    (peft.lora, {"targets": "*query"}, r"'\*query', which is not a reg.* write targets=\[\.\.\.\]"),
    (peft.ia3, {"targets": "*query"}, r"targets has '\*query'"),
    (peft.lora, {"rank_pattern": {"*.query": 4}}, r"rank_pattern has '\*\.query'.*end of a path"),
    (peft.dora, {"alpha_pattern": {"(?i)query": 4.0}}, r"alpha_pattern has '\(\?i\)query'"),
    *[
        (peft.lora_sum, {"names": names}, "must be different names such as 'root'")
        for names in ((), ("a", "a"), ("base",), ("dropout",), ("merged",), ("not a name",))
    ],
    (peft.houlsby, {"activation": "gelu_neww"}, "'gelu_new'"),
    (peft.houlsby, {"scaling": 0.0}, "scaling = 0"),
    (peft.dual, {"reduction_factor": 16, "size": 4}, "Both reduction_factor = 16 and size = 4"),
    (peft.bottleneck, {"places": ["attention"], "targets": ["dense"]}, "Both places = .* targets"),
]


test_impossible_options = refusals(lambda make, options: make(**options), *IMPOSSIBLE)


UNFITTING = [
    (peft.lora(2, targets=["qurey"]), "'qurey'.*'query'"),
    (peft.lora(2, targets=[]), "targets="),
    (peft.lora(2, targets="encoder.*query"), "'encoder.*query'"),
    (peft.lora(2, targets="query"), r'write targets = \["query"\]'),
    (peft.lora(2, targets=["LayerNorm"]), "'LayerNorm'"),
    (peft.lora(2, targets=["classifier"]), "'classifier'"),  # of the head
    (peft.lora(33), r"rank = 33 .*'bert.encoder.layer.0.*\(32x32\)"),
    (peft.lora(2, parts=["q"]), "not a fused projection"),
    (peft.lora(2, rank_pattern={"valeu": 2}), "'valeu' matches no target"),
    (peft.lora(2, layers=[2]), "layers has 2, and the model has 2 blocks"),
    (peft.lora(2, targets=r".*layer\.1\..*query", layers=[0]), r"layers = \[0\] leaves no layer"),
    (peft.dora(2, targets=["query"], alpha_pattern={"value": 2.0}), "'value' matches no target"),
    (peft.ia3(["kye"]), "'kye'.*'key'"),
    (peft.ia3(["key"], ["valeu"]), "'valeu'.*'value'"),
    (peft.ia3(["key"], ["value"]), r"feed_forward = \['value'\] names none of the targets"),
    (peft.ravan(12, heads=3), "no room for 36 orthogonal directions"),
    (peft.lora_sb(33), "no room for 33"),
    (peft.lora_xs(33), "no room for 33"),
    (peft.miss(33), r"rank = 33 is above the 32 inputs of 'bert.encoder.layer.0"),
    (peft.oft(20), r"block_size = 20 does not divide the 32 inputs of .* do: 16, 32"),
    (peft.hira(33), r"rank = 33 .*\(32x32\)"),
    (peft.shira(17), r"1088 values of .*32x32 = 1024; at most rank = 16"),
    (peft.vera(targets=["qurey"]), "'qurey'.*'query'"),
    (peft.bitfit(["word_embeddings"]), "'word_embeddings'"),
    (peft.bitfit(["classifier"]), "'classifier'"),
    (peft.houlsby(2, targets=["residul"]), "'residual'"),
    (peft.pfeiffer(2, targets=["intermediate.dense"]), "no target is one .* is a linear layer"),
]


test_what_does_not_fit_the_model_is_refused = refusals(
    lambda method: fp.attach(tiny(), method), *UNFITTING
)


class Own(nnx.Module):
    """A user's module without slots, layer norms or biases."""

    def __init__(self, tables):
        rngs = nnx.Rngs(0)
        self.tables = nnx.List([TokenEmbed(5, 8, jnp.float32) for _ in range(tables)])
        self.hidden = nnx.Linear(8, 8, use_bias=False, rngs=rngs)
        self.out = nnx.Linear(8, 2, rngs=rngs)


test_places_that_a_module_of_ones_own_does_not_have = refusals(
    lambda method: fp.attach(fp.bind(Own(2), head=("out",)), method),
    (peft.lora(2), r"targets=.*hidden"),
    (peft.ia3(), "targets="),
    (peft.opendelta(), r"targets=\[...\].*'?hidden"),
    (peft.houlsby(2), r"attention or feed_forward.* has none.* targets=\[...\]"),
    (peft.prefix_tuning(), r"layers\.PrefixSlot"),
    (peft.prompt_tuning(), r"several \(tables.0, tables.1\)"),
    (peft.layer_norm(), "no layer norm"),
    (peft.bitfit(), "no bias"),
    (peft.dual_lora(2, targets=["hidden"]), r"dual_lora\(width=768\)"),
)


def test_modules_without_tables_heads_or_bodies():
    for tables, head, method, message in (
        (0, ("out",), peft.prompt_tuning(), "this one has none"),
        (0, (), peft.head_only(), "no head"),
        (0, ("hidden", "out"), peft.full(), "no parameter outside its head"),
    ):
        refused(message, fp.attach, fp.bind(Own(tables), head=head), method)
    refused(r"'outt'.*'out'", fp.bind, Own(0), head=("outt",))
