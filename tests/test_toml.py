"""Reading and writing TOML."""

import datetime
import re
import tomllib

import pytest
from internals import read_config, toml
from refusals import refused


def test_files_are_read_as_utf8(tmp_path):
    file = tmp_path / "a.toml"
    file.write_text("a.b = 'ä'", encoding="utf-8")
    assert toml.read_toml(file) == {"a": {"b": "ä"}}
    file.write_text("a.b = 'ä'", encoding="utf-8-sig")  # as of Windows' editors, with a mark
    assert toml.read_toml(file) == {"a": {"b": "ä"}}
    with pytest.raises(OSError, match=re.escape(str(tmp_path))):
        toml.read_toml(tmp_path)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"a = ", "Invalid value"),
        (b"a = '\xff'", "invalid start byte"),
        (b"a = " + b"[" * 5000, "nested too deeply"),
        (b"a = " + b"9" * 5000, "4300 digits"),
    ],
)
def test_errors_of_files_give_the_reason(tmp_path, content, reason):
    file = tmp_path / "config.toml"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=reason):
        toml.read_toml(file)
    refused(rf"config.toml is not valid TOML: .*{reason}", read_config, tmp_path)


def test_values_of_a_command_line():
    assert toml.parse_value("[1, 2.5, 'a']") == [1, 2.5, "a"]
    assert toml.parse_value("2020-01-02") == datetime.date(2020, 1, 2)
    assert toml.parse_value(" svd ") == "svd"
    assert toml.parse_value("runs/my run") == "runs/my run"
    for text in ("[" * 5000, "9" * 5000):
        with pytest.raises(ValueError, match=r"deeply|digits"):
            toml.parse_value(text)


@pytest.mark.parametrize(
    "value",
    [
        *("a  b", 'say "hi"', "[ 1, ]", "two\nlines", 3, 0.5, True),
        *([], [["a, ]"], [1, 2]], {}, {"a": 1, "b c": {"": [{"ä.b": "}"}]}}, [{"a": {}}, 1]),
    ],
)
def test_literals_are_one_line_and_read_back(value):
    text = toml.literal(value)
    assert "\n" not in text
    assert tomllib.loads(f"x = {text}")["x"] == value == toml.parse_value(text)
