"""What must be refused: a call, and the part of the message that names the thing."""

import pytest

import fedjax_peft as fp


def refused(part, call, /, *arguments, **options):
    """Asserts that a call raises an ``InputError`` in whose message a pattern is found."""
    with pytest.raises(fp.InputError, match=part):
        call(*arguments, **options)
