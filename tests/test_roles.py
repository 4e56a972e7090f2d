"""Rules assign a role to each leaf."""

import pytest
from internals import assign_roles, dual_roles, head_roles
from refusals import refused

import fedjax_peft as fp

KINDS = {
    "head.bias": "head",
    "layer.lora_a": "adapter",
    "layer.lora_b": "adapter",
    "layer.lora_scale": "fixed",
}


def test_special_role_rules_take_precedence_over_general_ones():
    roles = fp.contracts.Roles(shared=("^adapter:", "^head:"), private=("lora_b$",))
    assert assign_roles(KINDS, roles) == {
        "fixed": ["layer.lora_scale"],
        "private": ["layer.lora_b"],
        "shared": ["head.bias", "layer.lora_a"],
    }
    frozen = assign_roles(KINDS, fp.contracts.Roles(shared=("^adapter:",), fixed=("^head:",)))
    assert frozen["fixed"] == ["head.bias", "layer.lora_scale"]


def test_roles_must_cover_every_leaf():
    with pytest.raises(fp.InputError, match=r"'head:head\.bias' \(1 leaves in all\)"):
        assign_roles(KINDS, fp.contracts.Roles(shared=("^adapter:",)))


def test_errors_name_a_role_rule_without_a_match():
    roles = fp.contracts.Roles(shared=("^adapter:", "^head:"), private=("head:head.bios",))
    refused(r"private rule 'head:head\.bios' .*'head:head\.bias'", assign_roles, KINDS, roles)


def test_roles_that_contradict_each_other_are_named():
    roles = fp.contracts.Roles(shared=("^adapter:", "^head:"), private=("^head:",))
    refused(r"shared rule '\^head:' contradicts the private rule", assign_roles, KINDS, roles)


@pytest.mark.parametrize(
    ("head", "adapters", "shared", "private", "fixed"),
    [
        ("shared", "shared", ["adapter", "head"], [], []),
        ("private", "shared", ["adapter"], ["head"], []),
        ("frozen", "shared", ["adapter"], [], ["head"]),
        ("private", "private", [], ["adapter", "head"], []),
        ("shared", "private", ["head"], ["adapter"], []),
    ],
)
def test_roles_of_a_head_policy(head, adapters, shared, private, fixed):
    kinds = {"adapter": "adapter", "head": "head"}
    expected = {"shared": shared, "private": private, "fixed": fixed}
    assert assign_roles(kinds, head_roles(head, adapters=adapters)) == expected


def test_one_rule_serves_a_model_without_a_head_or_without_adapters():
    for kind in ("adapter", "head"):
        assert assign_roles({"x": kind}, head_roles("shared"))["shared"] == ["x"]


@pytest.mark.parametrize("head", ["shared", "private", "frozen"])
def test_roles_of_dual_adapters(head):
    kinds = {"a.global_adapter.up": "adapter", "a.private_adapter.up": "adapter", "head": "head"}
    found = assign_roles(kinds, dual_roles(head))
    assert "a.global_adapter.up" in found["shared"]
    assert "a.private_adapter.up" in found["private"]
    assert "head" in found["fixed" if head == "frozen" else head]
