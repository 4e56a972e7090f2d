"""VeRA: ``y = x W + ((x A) ∘ d) B ∘ b``; only the vectors d and b train (Kopiczko et al. 2024).

A and B are random, and all adapted layers share them. They follow from the key schedule, so all
clients draw the same and only vectors travel: r + out numbers a layer.

* Layers of different sizes share the first rows of A ``[largest in, r]`` and the first columns of B
  ``[r, largest out]``, as in Hugging Face PEFT.
* Entries are uniform in ±sqrt(6 / fan), with the fan of PEFT: A's largest input, and r for B. The
  paper says Kaiming, and leaves the sharing among sizes open.
* d starts at ``d_initial`` and b at 0, so the start changes nothing.
* Averages of d and b are not the average of ``A diag(d) B diag(b)``, as with LoRA's factors.
* In memory each layer has its part of A and B, once for all clients and lanes:
  4 r (in + out) bytes. Runs keep them in their files; a file of PEFT holds them once.

Checked against Hugging Face PEFT 0.21: forward, backward, merged, and files in both directions. A
file without A and B (``save_projection=False``) is refused: torch's generator would be needed.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from fedjax_peft.contracts import Key
from fedjax_peft.contracts.arguments import Count, Fraction, Positive
from fedjax_peft.contracts.part import part
from fedjax_peft.models.base import AdapterConst, AdapterParam
from fedjax_peft.models.layers import Dropout
from fedjax_peft.numerics.random import stream
from fedjax_peft.peft.base import (
    Defaults,
    Layout,
    Method,
    find_linear,
    listed,
    replace_module,
)
from fedjax_peft.peft.cores import CoreLinear

LAYOUT = Layout(
    "VERA",
    {
        "vera_lambda_d": ("vera_lambda_d", "r"),
        "vera_lambda_b": ("vera_lambda_b", "out"),
        "vera_A": ("vera_a", "r in"),
        "vera_B": ("vera_b", "out r"),
    },
    {"r": ("rank", 256), "vera_dropout": ("dropout", 0.0), "d_initial": ("d_initial", 0.1)},
    {"save_projection": True},
    shared=("vera_A", "vera_B"),
    in_conv1d=True,
)


class VeRALinear(CoreLinear):
    """A linear layer with the update ``((x A) ∘ d) B ∘ b``; A and B never change."""

    def __init__(self, base: Any, a: Array, b: Array, d_initial: float, dropout: float):
        self.base = base
        self.vera_a = AdapterConst(a)
        self.vera_b = AdapterConst(b)
        self.vera_lambda_d = AdapterParam(jnp.full(a.shape[1], d_initial))
        self.vera_lambda_b = AdapterParam(jnp.zeros(b.shape[1]))
        self.dropout = Dropout(dropout)

    def factors(self) -> tuple[Array, Array]:
        """Returns (``A diag(d)`` ``[in, r]``, ``B diag(b)`` ``[r, out]``)."""
        d, b = self.vera_lambda_d[...], self.vera_lambda_b[...]
        return self.vera_a[...] * d[None], self.vera_b[...] * b[None]


@part
def vera(
    rank: Count = 256,
    *,
    targets: str | Sequence[str] | None = None,
    dropout: Fraction = 0.0,
    d_initial: Positive = 0.1,
) -> Method:
    """VeRA (Kopiczko et al. 2024): two trained vectors a layer around shared random matrices.

    The other arguments are those of :func:`fedjax_peft.lora`.

    Args:
      rank: r; it may be above a layer's sides. A layer trains r + out numbers.
      dropout: the dropout rate on the input of the change.
      d_initial: the start of d; the paper recommends at most 0.1.

    Raises:
      InputError: when it is attached, a target that matches nothing.
    """

    def attach(module: nnx.Module, defaults: Defaults, key: Key, head: Sequence[str]) -> nnx.Module:
        sites = find_linear(module, targets, defaults, head)
        n_in, n_out = (max(site.kernel.shape[i] for site in sites.values()) for i in (0, 1))

        def draw(name: str, fan: int, shape: tuple[int, int]) -> Array:
            bound = (6 / fan) ** 0.5
            return jax.random.uniform(stream(key, "vera", name), shape, minval=-bound, maxval=bound)

        a, b = draw("a", n_in, (n_in, rank)), draw("b", rank, (rank, n_out))
        for path, site in sites.items():
            rows, columns = site.kernel.shape
            layer = VeRALinear(site, a[:rows], b[:, :columns], d_initial, dropout)
            replace_module(module, path, layer)
        return module

    options = {"rank": rank, "targets": listed(targets), "dropout": dropout}
    return Method("vera", {**options, "d_initial": d_initial}, attach)
