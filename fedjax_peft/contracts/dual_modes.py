"""Modes of an encoder with a global and a private adapter at each site, as a tree transformation.

This module is separate from the adapters (:mod:`fedjax_peft.peft.dual`), because algorithms use it
and must not import flax.
"""

import re
from typing import Literal

import jax.numpy as jnp

from fedjax_peft.contracts import Params
from fedjax_peft.support.errors import InputError, check_known

Mode = Literal["dual", "global", "private"]
"""The mode of the encoder: with both adapters, or with only one of them."""

MODES: dict[Mode, dict[str, int]] = {
    "dual": {"global": 1, "private": 1},
    "global": {"global": 2, "private": 0},
    "private": {"global": 0, "private": 2},
}
"""Mode of the encoder -> factor on the output of each adapter, in addition to the ½ of the mean."""


def mode(params: Params, which: Mode) -> Params:
    """Returns leaves that make the encoder use both adapters, or only one of them.

    A single adapter has the coefficient 1 (FedMCP Eq. 2), not ½. The up-projection of the other
    adapter is set to zero, so its output is zero and all its leaves have zero gradient. Only the
    up-projections are scaled. The leaves can be stacked over clients.

    Args:
      params: trainable leaves of a model with :func:`dual` attached.
      which: ``dual`` (h + ½ f_g + ½ f_p), ``global`` (h + f_g) or ``private`` (h + f_p). It is a
        Python string, fixed when a function is compiled.

    Raises:
      InputError: the mode is unknown, or the leaves contain no pair of adapters.
    """
    check_known("mode", which, MODES)
    rule = re.compile(r"\.(global|private)_adapter\.up\.")
    ups = {name: found[1] for name in params if (found := rule.search(name))}
    if not ups:
        raise InputError("These parameters have no global and private adapters: attach dual().")
    scaled = {}
    for name, x in params.items():
        factor = MODES[which][ups[name]] if name in ups else 1
        scaled[name] = factor * x if factor else jnp.zeros_like(x)
    return scaled
