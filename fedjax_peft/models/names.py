"""Names of the tensors of checkpoints, and the leaves that they fill."""

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Sequence

from fedjax_peft.models.family import Family
from fedjax_peft.support.errors import InputError

_WEIGHTS = ("kernel", "scale", "offset", "embedding")
"""The names of leaves that torch calls ``weight``."""

_WRAPPERS = {
    "_orig_mod": "torch.compile",
    "module": "DataParallel",
    "_fsdp_wrapped_module": "FSDP",
    "_checkpoint_wrapped_module": "activation checkpointing",
}
"""Part of a dotted name that no supported model has -> the wrapper in torch that adds it."""


def unwrapped(names: Iterable[str], where: str) -> dict[str, str]:
    """Returns name -> the name without the parts of wrappers, wherever they stand.

    Raises:
      InputError: two names become the same one.
    """
    found = {n: ".".join(p for p in n.split(".") if p not in _WRAPPERS) for n in names}
    check_distinct(found.items(), where)
    return found


def check_distinct(names: Iterable[tuple[str, str]], where: str) -> None:
    """Raises InputError if two names in a file, of pairs (name, meaning), mean the same tensor."""
    known: dict[str, str] = {}
    for name, meaning in names:
        if known.setdefault(meaning, name) != name:
            raise InputError(
                f"{where} holds both {known[meaning]} and {name}, which are names of one tensor"
                f" ({meaning}): delete one of them."
            )


def without_common_prefix(names: Iterable[str]) -> dict[str, str]:
    """Returns name -> the name without the dotted prefix that all names share.

    An encoder inside another module, as in Lightning or sentence-transformers, has such a prefix.
    A family's own prefix is put back by ``Family.renamed``.
    """
    parts = {name: name.split(".") for name in names}
    columns = zip(*(p[:-2] for p in parts.values()), strict=False)
    shared = sum(1 for _ in itertools.takewhile(lambda column: len({*column}) == 1, columns))
    return {name: ".".join(p[shared:]) for name, p in parts.items()}


def usual_start(names: Iterable[str]) -> str:
    """Returns the most frequent first part of dotted names, with its dot."""
    starts = Counter(f"{name.partition('.')[0]}." for name in names)
    return starts.most_common(1)[0][0] if starts else ""


def first_of(problems: Sequence[str], shown: int = 8) -> str:
    """Returns the first of some problems, and the number of the others."""
    more = f"; and {len(problems) - shown} more" if len(problems) > shown else ""
    return "; ".join(problems[:shown]) + more


def normal_names(tensors: Iterable[str], family: Family, where: str, tied: bool) -> dict[str, str]:
    """Returns for every tensor: the family's usual name -> its name in this checkpoint.

    Args:
      where: the checkpoint, for error messages.
      tied: whether the output layer of a language model is the table of token embeddings, which
        may then be stored under the name of either.
    """
    plain = unwrapped(tensors, where)
    bare = without_common_prefix(plain.values())
    usual = {key: substituted(bare[name], family.renamed) for key, name in plain.items()}
    check_distinct(usual.items(), where)
    names = {name: key for key, name in usual.items()}
    output, table = family.tied
    if tied and output in names:
        names.setdefault(table, names[output])
    return names


def source_name(leaf: str, family: Family) -> tuple[str, bool]:
    """Returns a leaf's checkpoint name and whether it is stored transposed."""
    stem, _, kind = leaf.rpartition(".")
    name = f"{stem}.weight" if kind in _WEIGHTS else leaf
    return name, leaf_of(name, family)[1]


def substituted(name: str, substitutions: Sequence[tuple[str, str]]) -> str:
    """Returns a name after regular expressions have been replaced, one after the other."""
    for pattern, replacement in substitutions:
        name = re.sub(pattern, replacement, name)
    return name


def leaf_of(normal: str, family: Family) -> tuple[str, bool]:
    """Returns the leaf that a tensor fills, and whether the tensor is stored transposed."""
    for pattern, template, transposed in family.weights:
        if found := re.fullmatch(pattern, normal):
            return found.expand(template), transposed
    return normal, False
