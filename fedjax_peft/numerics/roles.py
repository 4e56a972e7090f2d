"""Roles of trainable leaves: which are shared, private or fixed.

A role rule is a regular expression that is searched in ``"kind:name"`` of a leaf, such as
``"adapter:bert.encoder.layer.0.attention.self.query.lora_a"``.
"""

import re
from collections.abc import Mapping
from typing import Literal

from fedjax_peft.contracts import Roles
from fedjax_peft.support.errors import InputError, nearest

HeadPolicy = Literal["shared", "private", "frozen"]
"""``shared``: trained and averaged. ``private``: trained, never sent. ``frozen``: not trained."""


def head_roles(head: HeadPolicy, *, adapters: Literal["shared", "private"] = "shared") -> Roles:
    """Returns the rules for a head policy, with all adapters in one role."""
    if head == adapters:  # one rule, because a model may have adapters only, or a head only
        return Roles(**{head: ("^(adapter|head):",)})
    return Roles(**{adapters: ("^adapter:",), "fixed" if head == "frozen" else head: ("^head:",)})


def dual_roles(head: HeadPolicy) -> Roles:
    """Returns the rules for a head policy, with global adapters shared and private ones private."""
    return with_head(
        head, shared=r"^adapter:.*\.global_adapter\.", private=r"^adapter:.*\.private_adapter\."
    )


def with_head(head: HeadPolicy, *, shared: str, private: str) -> Roles:
    """Returns the rules for a head policy, with a rule of shared and one of private adapters.

    One rule covers the head and adapters, because a language model has no trained head.
    """
    match head:
        case "shared":
            return Roles(shared=(f"{shared}|^head:",), private=(private,))
        case "private":
            return Roles(shared=(shared,), private=(f"{private}|^head:",))
        case "frozen":
            return Roles(shared=(shared,), private=(private,), fixed=("^head:",))


def assign_roles(kinds: Mapping[str, str], roles: Roles) -> dict[str, list[str]]:
    """Returns ``{"fixed": names, "private": names, "shared": names}``, each sorted.

    Args:
      kinds: leaf name -> kind (``Model.kinds``: ``adapter``, ``head`` or ``fixed``).
      roles: the rules. ``fixed`` is tried before ``private`` before ``shared``, so general rules,
        such as ``"^adapter:"``, should be those of ``shared``. A leaf of kind ``fixed`` is always
        fixed.

    Raises:
      InputError: a leaf that no rule covers, a rule that covers no leaf, or a rule whose leaves all
        have another role already.
    """
    by_role = {"fixed": roles.fixed, "private": roles.private, "shared": roles.shared}
    rules = [("fixed", "^fixed:")]
    rules += [(role, rule) for role, its_rules in by_role.items() for rule in its_rules]
    names = {f"{kind}:{name}": name for name, kind in sorted(kinds.items())}
    matches = {item: [full for full in names if re.search(item[1], full)] for item in rules}
    owner: dict[str, tuple[str, str]] = {}
    for item in rules:
        for full in matches[item]:
            owner.setdefault(full, item)
    uncovered = [full for full in names if full not in owner]
    if uncovered:
        raise InputError(
            f"No role rule covers the trainable leaf {uncovered[0]!r}"
            f" ({len(uncovered)} leaves in all). Each must be shared, private or fixed."
        )
    for role, rule in rules[1:]:
        found = matches[role, rule]
        if not found:
            raise InputError(
                f"The {role} rule {rule!r} matches no trainable leaf. {nearest(rule, names)}"
            )
        if all(owner[full][0] != role for full in found):
            other, earlier = owner[found[0]]
            raise InputError(
                f"The {role} rule {rule!r} contradicts the {other} rule {earlier!r}, which comes"
                f" first: {found[0]!r} ({len(found)} leaves in all) cannot be both."
            )
    result: dict[str, list[str]] = {role: [] for role in by_role}
    for full, name in names.items():
        result[owner[full][0]].append(name)
    return {role: sorted(leaves) for role, leaves in result.items()}
