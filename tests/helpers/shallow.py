"""Fixtures for files that compile rounds of the tiny encoder, which is not what they are about.

Its programs then compile in a third of the time. A file imports the fixture that it uses.
"""

import contextlib

import jax.numpy as jnp
import pytest
from internals import bert, figure_files

from fedjax_peft import testing

SHALLOW = {"num_hidden_layers": 1, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}

__all__ = [
    "draw_nothing",
    "no_drawings",
    "shallow",
    "shallow_encoder",
    "simple_encoder",
    "simplify",
]


@contextlib.contextmanager
def shallow():
    """Changes what ``testing.write_tiny_checkpoint`` writes: one layer and no dropout."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SHALLOW.items():
            patch.setitem(testing.TINY_BERT, name, value)
        yield


@pytest.fixture(autouse=True, scope="module")
def shallow_encoder():
    """Changes what ``testing.write_tiny_checkpoint`` writes."""
    with shallow():
        yield


def draw_nothing(patch: pytest.MonkeyPatch) -> None:
    """Makes every figure an empty one, for tests that do not look at figures."""
    patch.setattr(figure_files, "render", lambda *figure: b"<svg></svg>")


def simplify(patch: pytest.MonkeyPatch) -> None:
    """Gives the encoder one layer, which has all modules of BERT's and calls query and value.

    Figures are empty too.
    """

    def call(layer, x, mask, queries=None):
        attention, real = layer.attention.self, mask[:, 0, 0, :, None]
        mean = jnp.sum(x * real, axis=1, keepdims=True) / jnp.sum(real, axis=1, keepdims=True)
        x = x[:, :queries]
        return x + jnp.tanh(attention.query(x)) * attention.value(mean)

    for name, value in SHALLOW.items():
        patch.setitem(testing.TINY_BERT, name, value)
    patch.setattr(bert.Layer, "__call__", call)
    draw_nothing(patch)


@pytest.fixture(scope="module")
def no_drawings():
    """Makes every figure an empty one, see :func:`draw_nothing`."""
    with pytest.MonkeyPatch.context() as patch:
        draw_nothing(patch)
        yield


@pytest.fixture(scope="module")
def simple_encoder():
    """Makes the encoder as simple as it can be, see :func:`simplify`."""
    with pytest.MonkeyPatch.context() as patch:
        simplify(patch)
        yield
