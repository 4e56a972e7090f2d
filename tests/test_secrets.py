"""Secrets in addresses: hidden where they can be, and nothing else."""

import pytest
from internals import hidden_option, hide, without_secrets

import fedjax_peft as fp


@pytest.mark.parametrize(
    ("text", "hidden"),
    [
        ("https://user:secret@host:5000/x", "https://***@host:5000/x"),
        ("https://secret@host", "https://***@host"),
        ("https://:secret@host", "https://***@host"),
        ("https://u:a@b@host", "https://***@host"),
        ("https://u:se/cr?e#t@host/x", "https://***@host/x"),
        ("postgresql+psycopg2://u:secret@host/db", "postgresql+psycopg2://***@host/db"),
        ("https://host/?a=1&token=secret&b=2#c", "https://host/?a=1&token=***&b=2#c"),
        ("https://host/?access_token=secret", "https://host/?access_token=***"),
        ("https://host/x#api-key=secret", "https://host/x#api-key=***"),
        ("https://host/?sv=1&sig=s%2Bc", "https://host/?sv=1&sig=***"),
        ("https://host/?PASSWORD=secret", "https://host/?PASSWORD=***"),
        ("no http://u:p@a, nor ftp://u:p@b!", "no http://***@a, nor ftp://***@b!"),
        # Nothing to hide.
        ("http://127.0.0.1:5000/@x", "http://127.0.0.1:5000/@x"),
        ("http://host:80?mail=a@b", "http://host:80?mail=a@b"),
        ("http://host/a@b:c", "http://host/a@b:c"),
        ("sqlite:////tmp/a@b.db", "sqlite:////tmp/a@b.db"),
        ("user:secret@host", "user:secret@host"),
        ("https://host/?page=2&tokens_seen", "https://host/?page=2&tokens_seen"),
    ],
)
def test_addresses(text, hidden):
    assert hide(text) == hidden
    assert hide(hidden) == hidden
    assert str(fp.InputError(f"It is {text}")) == f"It is {hidden}"


def test_configs():
    """In the tables of trackers alone: other texts decide what is trained."""
    secret, hidden = "https://u:secret@host", "https://***@host"
    options = {"uri": secret, "api_key": "k", "more": [secret, 1], "tokens": 3, "project": "p"}
    known = {"uri": hidden, "api_key": "***", "more": [hidden, 1], "tokens": 3, "project": "p"}
    config = {
        "trackers": {"own": options},
        "methods": {"a": {"trackers": [{"name": "own", **options}]}},
        "sweep": {"grid": {"trackers.own.uri": [secret], "seed": [1]}},
        "data": {"template": secret, "token": "t"},
        "rounds": 2,
    }
    assert without_secrets(config) == {
        "trackers": {"own": known},
        "methods": {"a": {"trackers": [{"name": "own", **known}]}},
        "sweep": {"grid": {"trackers.own.uri": [hidden], "seed": [1]}},
        "data": {"template": secret, "token": "t"},
        "rounds": 2,
    }
    assert config["trackers"]["own"] is options
    assert hidden_option(options) is None
    assert hidden_option(known) == "uri"
