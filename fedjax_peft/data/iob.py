"""Words with IOB tags, checked and converted to IOB2."""

import re
from collections.abc import Sequence

from fedjax_peft.data.table import Table, require

TAG = re.compile("O|[BIESLUM]-.+")
_PLACES = {"E": "I", "S": "B", "L": "I", "U": "B", "M": "I"}


def without_ends(tag: str) -> str:
    """Returns a tag of BIOES (E: end, S: single), BILOU (L, U) or BMES (M) as one of IOB."""
    return _PLACES.get(tag[0], tag[0]) + tag[1:] if TAG.fullmatch(tag) else tag


def iob2(tags: Sequence[str]) -> list[str]:
    """Returns IOB2 tags: every entity starts with B-. In IOB1 (CoNLL-2003) only some do."""
    result = []
    tags = [*map(without_ends, tags)]
    for before, tag in zip(["O", *tags], tags, strict=False):
        starts = tag[0] == "I" and before[1:] != tag[1:]
        result.append(f"B{tag[1:]}" if starts else tag)
    return result


def sentences(table: Table) -> tuple[list[list[str]], list[list[str]]]:
    """Returns the words and the IOB2 tags of every sentence.

    The tags of the table may also be in IOB1, BIOES, BILOU or BMES form.

    Raises:
      InputError: a row (counted from 1) has other values, or not one tag for each word.
    """
    words = require(table, "tokens", (list, tuple), "a list of words")
    tags = require(table, "tags", (list, tuple), "a list of tags")
    for row, some, their in table.numbered(words, tags):
        if len(some) != len(their):
            raise table.error(row, f"has {len(some)} words but {len(their)} tags.")
        for word, tag in zip(some, their, strict=True):
            if not isinstance(word, str):
                raise table.error(row, f"has {word!r} in place of a word.")
            if not isinstance(tag, str) or not TAG.fullmatch(tag):
                forms = "Tags are O, B-type or I-type (IOB2), or in IOB1, BIOES or BILOU form."
                if isinstance(tag, int):
                    forms += " Numbers need the names of all tags, in order: label_names = [...]."
                raise table.error(row, f"has the tag {tag!r} at the word {word!r}. {forms}")
    return [list(row) for row in words], [iob2(row) for row in tags]
