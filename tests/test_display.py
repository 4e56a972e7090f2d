"""User text is made safe to print."""

from pathlib import Path

import pytest
from internals import display, nearest

import fedjax_peft as fp


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[31mred\x07", "\\x1b[31mred\\x07"),
        ("a\nb\tc\r\x85", "a\\nb\\tc\\r\\x85"),
        ("lone \ud800", "lone \\ud800"),
        ("\u202egnp.exe", "\\u202egnp.exe"),
        ("Ølgod, 東京\u3000区, می\u200cخواهم", "Ølgod, 東京\u3000区, می\u200cخواهم"),
        ("$\\frac{", "$\\frac{"),
    ],
)
def test_unprintable_characters_are_escaped(text, shown):
    assert display.printable(text) == shown
    shown.encode()


def test_one_line_has_no_breaks_and_no_escapes():
    assert display.one_line(" a\n\x1b[31m\u2028b \ud800\u202e c ") == "a [31m b c"


def test_a_path_is_an_argument_of_a_command_whatever_its_name():
    for path, written in {
        "runs/lr": "runs/lr",
        "a b's": """'a b'"'"'s'""",
        "-v": "./-v",
        "- v": "'./- v'",
    }.items():
        assert display.argument(path) == display.argument(Path(path)) == written


def test_shortened_text_keeps_both_ends():
    text = display.shorten("start" + 1000 * "x" + "end", 80)
    assert len(text) < 120
    assert text.startswith("start")
    assert text.endswith("end")


def test_one_thing_is_no_plural():
    assert display.counted(1, "worker") == "1 worker"
    assert [display.counted(n, "run") for n in (0, 1200)] == ["0 runs", "1,200 runs"]


def test_show_survives_every_value():
    nested = []
    for _ in range(100_000):
        nested = [nested]
    assert "nested too deeply" in display.show(nested)
    assert "too long to write" in display.show(10**5000)
    assert display.show("\x1b") == "'\\x1b'"
    assert len(display.show("x" * 10**6)) < 200


def test_an_error_is_safe_to_print_and_of_bounded_length():
    error = fp.InputError(f"There is no x named '\x1b[2J{'y' * 10_000}'.\nKnown: a.")
    assert "\x1b" not in str(error)
    assert len(str(error)) < 1000
    assert str(error).endswith("\nKnown: a.")
    assert len(str(fp.InputError(" ".join(["word"] * 10_000)))) < 7000
    assert str(fp.InputError("Short, and left  as it is.")) == "Short, and left  as it is."


def test_the_words_of_an_unknown_name_are_known_ones():
    """A key such as ``time_model`` is looked for as the table ``time`` too."""
    assert nearest("time_model", ["data", "model", "time"]) == "Did you mean 'model' or 'time'?"
    assert nearest("time", ["data", "time_model"]).startswith("Known: ")


def test_the_nearest_name_of_a_very_long_one_is_found_quickly():
    assert nearest("x" * 10**7, ["fedavg"]) == "Known: fedavg."
