"""What must be refused: a call, and the part of the message that names the thing."""

import pytest

import fedjax_peft as fp


def refused(part, call, /, *arguments, **options):
    """Asserts that a call raises an ``InputError`` in whose message a pattern is found."""
    with pytest.raises(fp.InputError, match=part):
        call(*arguments, **options)


def refusals(call, *rows):
    """Returns a test with a case for each row: arguments of the call, then the message's part."""

    @pytest.mark.parametrize("row", rows, ids=[row[-1] for row in rows])
    def test(row):
        refused(row[-1], call, *row[:-1])

    return test
