"""Generators of damaged and unusual inputs.

``make test`` generates a few examples, always the same ones. ``make fuzz`` sets ``FUZZ_EXAMPLES``
and generates that number of new examples for every fuzzer.
"""

import contextlib
import copy
import json
import os
from datetime import timedelta

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

import fedjax_peft as fp

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "0"))

STRINGS = [
    *(
        "",
        " ",
        "\x1b[2J\x07",
        "$\\frac{",
        "[/red]",
        "a\nb\r\t",
        "\u202e\u2028",
        "\x00",
        "../..",
        "~x",
    ),
    *("x" * 3000, "東京", "null", "nan", "-1", "1e400", "/dev/null/x", "%s{}", "\\", '"', "#", "="),
]
NUMBERS = [
    *(0, -1, 1, 2, 2**31, 2**53, 2**63, 2**64, -(2**63), 10**30, 10**400),
    *(0.5, -0.0, 1e-320, 1e308, float("inf"), float("-inf"), float("nan")),
]
VALUES = [
    *STRINGS,
    *NUMBERS,
    *(None, True, False, [], {}, [[]], [None], {"": {}}, {"a": [1, "x"]}, [1, 2, 3], ["a"]),
    *("\ud800", [[[[[[[[[[]]]]]]]]]], {"name": "fedavg"}, {"name": []}),
]
BYTES = [
    *(b"\x00", b"\xff\xfe", b"\xed\xa0\x80", b"\n", b",", b'"', b"{", b"}", b"[", b"]", b"\x1b[2J"),
    *(
        b"1" * 5000,
        b"[" * 3000,
        b'{"a":' * 3000,
        b"\r",
        b"\xef\xbb\xbf",
        b"\x1f\x8b\x08",
        b"PK\x03\x04",
    ),
    *(b"NaN", b"-Infinity", b"1e999", b'"\\ud800"', b"null", b"= ", b"'''", b"#"),
]


def fuzz(examples):
    """Returns the settings of a fuzzer with this number of examples in ``make test``."""
    return settings(
        max_examples=EXAMPLES or examples,
        derandomize=not EXAMPLES,
        database=None,
        deadline=timedelta(minutes=2),  # an example that takes longer hangs
        suppress_health_check=list(HealthCheck),
        print_blob=bool(EXAMPLES),
    )


@contextlib.contextmanager
def refused_or_fine():
    """Accepts an InputError whose message is safe to print; other exceptions fail the test."""
    try:
        yield
    except fp.InputError as error:
        message = str(error)
        assert message
        assert len(message) < 8000
        assert all(c.isprintable() or c.isspace() or c in "\u200c\u200d" for c in message)
        assert "\x1b" not in message
        message.encode()


@st.composite
def damaged(draw, content):
    """Returns bytes that differ from ``content`` in one to three places."""
    data = bytearray(content)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(data)))
        end = min(len(data), at + draw(st.integers(0, 40)))
        match draw(st.sampled_from(["cut", "remove", "insert", "flip", "double", "replace"])):
            case "cut":
                del data[at:]
            case "remove":
                del data[at:end]
            case "insert":
                data[at:at] = draw(st.sampled_from(BYTES) | st.binary(min_size=1, max_size=8))
            case "flip" if at < len(data):
                data[at] ^= 1 << draw(st.integers(0, 7))
            case "double":
                data[at:at] = data[at:end]
            case _:
                data[at:end] = draw(st.sampled_from(BYTES))
    return bytes(data)


@st.composite
def damaged_json(draw, content):
    """Returns a JSON document with one to three values replaced, removed, or under other names."""
    document = copy.deepcopy(content)
    for _ in range(draw(st.integers(1, 3))):
        node, parents = document, []
        while isinstance(node, dict | list) and node and draw(st.integers(0, 4)):
            keys = list(node) if isinstance(node, dict) else list(range(len(node)))
            key = draw(st.sampled_from(keys))
            parents.append((node, key))
            node = node[key]
        if not parents:
            continue
        holder, key = parents[-1]
        match draw(st.sampled_from(["replace", "replace", "remove", "rename"])):
            case "remove":
                del holder[key]
            case "rename" if isinstance(holder, dict):
                holder[draw(st.sampled_from(STRINGS))] = holder.pop(key)
            case _:
                holder[key] = copy.deepcopy(draw(st.sampled_from(VALUES)))
    return document


def dumped(document):
    """Returns a document as bytes of JSON; a lone surrogate is escaped, NaN written as NaN."""
    return json.dumps(document).encode()
