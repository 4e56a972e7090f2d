"""Modes of an encoder with a global and a private adapter at each site, as a tree transformation.

Apart from the adapters themselves (:mod:`fedjax_peft.peft.dual`), because algorithms use it and see
plain leaves only.
"""

import re
from typing import Literal

import jax.numpy as jnp

from fedjax_peft.errors import InputError, nearest
from fedjax_peft.typing import Params

__all__ = ["MODES", "Mode", "mode"]

Mode = Literal["dual", "global", "private"]
"""Of the encoder: with both adapters, or with one alone."""

MODES: dict[Mode, dict[str, int]] = {
    "dual": {"global": 1, "private": 1},
    "global": {"global": 2, "private": 0},
    "private": {"global": 0, "private": 2},
}
"""Mode of the encoder -> factor on what each adapter adds, beside the ½ of the mean."""


def mode(params: Params, which: Mode) -> Params:
    """Returns leaves with which the encoder runs with both adapters or as if it had one alone.

    One alone has the coefficient 1 (FedMCP Eq 2), not ½. The other's up-projection is zero, so it
    adds nothing and all its leaves get a gradient of exactly zero. Only that projection is scaled:
    the trees may be stacked, and ``which`` is fixed when a function is compiled.

    Args:
      params: trainable leaves of a model with :func:`dual` attached.
      which: ``dual`` (h + ½ f_g + ½ f_p), ``global`` (h + f_g) or ``private`` (h + f_p).

    Raises:
      InputError: an unknown mode, or leaves without a pair of adapters.
    """
    if which not in MODES:
        raise InputError(f"There is no mode {which!r}. {nearest(which, MODES)}")
    rule = re.compile(r"\.(global|private)_adapter\.up\.")
    ups = {name: found[1] for name in params if (found := rule.search(name))}
    if not ups:
        raise InputError("These parameters have no global and private adapters: attach dual().")
    scaled = {}
    for name, x in params.items():
        factor = MODES[which][ups[name]] if name in ups else 1
        scaled[name] = factor * x if factor else jnp.zeros_like(x)
    return scaled
