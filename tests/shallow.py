"""A fixture for files that compile rounds of the tiny encoder: it has one layer and no dropout.

Its programs then compile in half the time. Files import it, and it is used by all their tests.
"""

import pytest

from fedjax_peft import testing

SHALLOW = {
    "num_hidden_layers": 1,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}

__all__ = ["shallow_encoder"]


@pytest.fixture(autouse=True, scope="module")
def shallow_encoder():
    """Changes what ``testing.write_tiny_checkpoint`` writes."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SHALLOW.items():
            patch.setitem(testing.TINY_BERT, name, value)
        yield
