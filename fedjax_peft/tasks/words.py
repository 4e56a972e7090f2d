"""The words of texts, for the scores that compare words; two rules, by name.

``rouge_score`` has the rules of the English scripts: runs of a to z and 0 to 9 (Google's
``rouge_score``) for ROUGE-L, and SQuAD's normalisation for exact match and F1.

``unicode`` has the same rules for the texts that these are made for. Where one of two compared
texts has a letter beyond a to z (ROUGE-L), or beyond the Latin script (exact match and F1):

* Both texts are compared by Unicode's NFKC and case folding, so that composed and decomposed
  accents, and full and half width, are equal. Invisible characters are left out.
* All punctuation of Unicode counts as punctuation, as in MLQA (Lewis et al. 2020).
* A character of a script without spaces, with its marks, is a word, and so is a symbol such as an
  emoji. These are the scripts for which Unicode's annex 29 has no rule (Chinese, Japanese, Thai,
  Lao, Khmer, Burmese and others). MLQA and CMRC 2018 count Chinese characters too. A segmenter
  would need a dictionary for each language, and scores would depend on its version.
"""

import re
import string
import unicodedata
from collections.abc import Iterable

_ARTICLES = ("a", "an", "the")
_LETTERS = ("Lu", "Ll", "Lt", "Lm", "Lo", "Mn", "Mc", "Nd")
_WITHOUT_SPACES = (
    *("CJK", "IDEOGRAPHIC", "HIRAGANA", "KATAKANA", "BOPOMOFO", "YI "),
    *("THAI", "LAO", "KHMER", "MYANMAR", "TAI ", "NEW TAI"),
)
"""How Unicode's names of the characters of these scripts begin."""


def rouge_words(answer: str, gold: str, tokenizer: str = "unicode") -> tuple[list[str], list[str]]:
    """Returns the words of two texts, in lower case, for ROUGE-L."""
    plain = _ascii_words(gold)
    if tokenizer == "unicode" and (not plain or _beyond_ascii(answer) or _beyond_ascii(gold)):
        return _unicode_words(answer), _unicode_words(gold)
    return _ascii_words(answer), plain


def answer_words(answer: str, gold: str, tokenizer: str = "unicode") -> tuple[list[str], list[str]]:
    """Returns the words of two normalised texts, for exact match and F1."""
    if tokenizer == "unicode":
        answer, gold = (unicodedata.normalize("NFC", text) for text in (answer, gold))
        if beyond_latin(answer) or beyond_latin(gold):
            return _unicode_answer(answer), _unicode_answer(gold)
    return squad_words(answer), squad_words(gold)


def squad_words(text: str) -> list[str]:
    """Returns the words of an answer without ASCII punctuation and articles, in lower case."""
    plain = text.lower().translate(_PUNCTUATION)
    return re.sub(rf"\b({'|'.join(_ARTICLES)})\b", " ", plain).split()


_PUNCTUATION = str.maketrans("", "", string.punctuation)


def has_words(gold: str, tokenizer: str = "unicode") -> bool:
    """Returns whether a gold answer has a word that ROUGE-L can find in an answer."""
    return bool(rouge_words("", gold, tokenizer)[1])


def rule_for(golds: Iterable[str], tokenizer: str = "unicode") -> str:
    """Returns the name of the rule that these gold answers are scored by."""
    english = all(_ascii_words(gold) and not _beyond_ascii(gold) for gold in golds)
    return "rouge_score" if english else tokenizer


def beyond_latin(text: str) -> bool:
    """Returns whether a text has a letter or a digit of another script than Latin."""
    return _beyond_ascii(text) and any(
        unicodedata.category(c) in _LETTERS and not unicodedata.name(c, "").startswith(_LATIN)
        for c in text
        if not c.isascii()
    )


_LATIN = ("LATIN", "COMBINING", "VARIATION SELECTOR", "MODIFIER")


def _beyond_ascii(text: str) -> bool:
    """Returns whether a text has a letter, a mark or a digit beyond ASCII."""
    return not text.isascii() and any(
        unicodedata.category(c) in _LETTERS and not _is_invisible(c)
        for c in text
        if not c.isascii()
    )


def _ascii_words(text: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", text.lower())


def _unicode_words(text: str) -> list[str]:
    return _apart(c if _counts(c) else " " for c in _folded(text))


def _unicode_answer(text: str) -> list[str]:
    plain = _folded(text).translate(_PUNCTUATION)
    words = _apart(c for c in plain if unicodedata.category(c)[0] != "P")
    return [word for word in words if word not in _ARTICLES]


def _folded(text: str) -> str:
    """Returns a text as Unicode compares texts without regard to case (NFKC_Casefold)."""
    plain = unicodedata.normalize("NFKC", "".join(c for c in text if not _is_invisible(c)))
    return unicodedata.normalize("NFKC", plain.casefold())


def _apart(characters: Iterable[str]) -> list[str]:
    """Returns the words of a text: what is between spaces, and each character that is a word."""
    text, alone = "", False
    for c in characters:
        if unicodedata.category(c)[0] != "M":  # a mark stays with its character
            before, alone = alone, _is_word(c)
            text += " " * (before or alone)
        text += c
    return text.split()


def _counts(c: str) -> bool:
    """Returns whether a character belongs to a word."""
    return unicodedata.category(c)[0] in "LMN" or _is_word(c)


def _is_word(c: str) -> bool:
    """Returns whether a character is a word: a symbol, or of a script without spaces."""
    if c.isascii():
        return False
    kind = unicodedata.category(c)
    return kind in ("So", "Sc", "Sm") or (
        kind[0] in "LN" and unicodedata.name(c, "").startswith(_WITHOUT_SPACES)
    )


def _is_invisible(c: str) -> bool:
    """Returns whether a character changes how others look, such as a joiner."""
    name = unicodedata.name(c, "")
    return unicodedata.category(c) == "Cf" or name.startswith("VARIATION SELECTOR")
