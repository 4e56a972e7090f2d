"""What every PEFT method must hold: a new one is tested by being listed."""

import numpy as np
import pytest
from closeness import assert_close
from tiny import logits, tiny, trained

from fedjax_peft import peft
from fedjax_peft.models.registry import default_targets
from fedjax_peft.peft.base import attach, attach_module, merge
from fedjax_peft.support.errors import InputError

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
    "ia3": peft.ia3(),
    "lora_sb": peft.lora_sb(4),
    "ravan": peft.ravan(4, heads=3),
    "ravan-normal": peft.ravan(4, heads=3, init="normal"),
    "slora": peft.slora(4, density=0.1),
    **MARKED,
}
UNMERGED = {
    "dual_lora": peft.dual_lora(2),
    "houlsby": peft.houlsby(4),
    "opendelta": peft.opendelta(),
    "dual": peft.dual(),
    "prompt_tuning": peft.prompt_tuning(2),
    "prefix_tuning": peft.prefix_tuning(2),
}
METHODS = MERGED | UNMERGED
NEUTRAL = [*MERGED, "dual_lora"]
"""Methods whose start has no effect."""


def assert_same(name, got, expected):
    if name.startswith("dora"):  # it divides by norms, and multiplies by them
        assert_close(got, expected, rtol=0, atol=1e-5)
    else:
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("name", NEUTRAL)
def test_the_start_changes_no_logit(name):
    assert_same(name, logits(attach(tiny(), METHODS[name])), logits(tiny()))


@pytest.mark.parametrize("name", MERGED)
def test_a_merged_model_is_plain_and_gives_the_same_logits(name):
    model = attach(tiny(), MERGED[name])
    params = trained(model)
    merged, expected = merge(model, params), logits(model, params)
    assert np.abs(expected - logits(model)).max() > (0.01 if name in MARKED else 0.05)
    assert_close(logits(merged), expected, rtol=0, atol=0 if name in MARKED else 1e-5)
    assert merged.method is None
    assert merged.kinds == tiny().kinds
    assert merged.frozen.keys() == tiny().frozen.keys()


@pytest.mark.parametrize("name", UNMERGED)
def test_methods_that_cannot_be_merged(name):
    with pytest.raises(InputError, match="cannot be merged"):
        merge(attach(tiny(), UNMERGED[name]))


@pytest.mark.parametrize("name", METHODS)
def test_nothing_is_adapted_twice(name):
    """Neither a model, nor a module with a method inside; marked leaves must be those of layers."""
    method, defaults = METHODS[name], default_targets(tiny().config)
    with pytest.raises(InputError, match=f"already has '{method.name}'"):
        attach(attach(tiny(), method), method)
    with pytest.raises(InputError, match=r"already has 'lora'|already has 'dora'"):
        attach(attach(tiny(), peft.dora(2) if name == "lora" else peft.lora(2)), method)
    first = peft.lora(2, targets=["query"]) if name in MARKED else method
    module = attach_module(tiny().module(), first, defaults, head=tiny().head)
    with pytest.raises(InputError, match=r"already adapted|is already|already has a method"):
        attach_module(module, method, defaults, head=tiny().head)


@pytest.mark.parametrize("name", peft.__all__)
def test_config_files_find_a_method_by_its_name(name):
    if name in ("bottleneck", "gradient_start", "pretrained"):  # of other forms
        return
    made = getattr(peft, name)()
    assert made.name == name
