"""RAVAN's layer: ``y = x W + Σ_i s_i x A_i H_i B_i``; H_i and s_i are trained (Raje et al. 2025).

Flax orientation: the paper's ``B_i H_i A_i`` (Eq 7) is the transpose of ``A_i H_i B_i`` here.

``[A_1 … A_h]`` has orthonormal columns, and ``[B_1; …; B_h]`` orthonormal rows (Gram-Schmidt over
all heads, section 3.1), so the heads act on different directions and the rank of the change is up
to h·r. With ``init="normal"`` the entries are normal; the paper leaves their variances open, and
here columns of A and rows of B have an expected squared length of 1, so they are nearly
orthonormal. H_i starts at 0 and s_i at 1.
"""

from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from fedjax_peft.contracts import Key
from fedjax_peft.contracts.arguments import Count
from fedjax_peft.contracts.part import part
from fedjax_peft.models.base import AdapterConst, AdapterParam
from fedjax_peft.numerics.random import stream
from fedjax_peft.peft.base import Method, layer_method, listed
from fedjax_peft.peft.cores import CoreLinear, orthonormal, sides


class RavanLinear(CoreLinear):
    """A linear layer with the update ``Σ_i s_i x A_i H_i B_i``; A and B never change.

    ``ravan_a`` is ``[heads, in, r]``, ``ravan_b`` ``[heads, r, out]``, ``ravan_h`` ``[heads, r,
    r]``, ``ravan_s`` ``[heads]``.
    """

    def __init__(self, base: nnx.Linear, a: Array, b: Array):
        heads, _, rank = a.shape
        self.base = base
        self.ravan_a = AdapterConst(a)
        self.ravan_b = AdapterConst(b)
        self.ravan_h = AdapterParam(jnp.zeros((heads, rank, rank)))
        self.ravan_s = AdapterParam(jnp.ones(heads))

    def factors(self) -> tuple[Array, Array]:
        """Returns (``[A_1 … A_h]``, ``[s_1 H_1 B_1; …; s_h H_h B_h]``)."""
        a, b, h = self.ravan_a[...], self.ravan_b[...], self.ravan_h[...]
        heads, n_in, rank = a.shape
        right = jnp.einsum("i,irq,iqo->iro", self.ravan_s[...], h, b, precision="highest")
        return a.transpose(1, 0, 2).reshape(n_in, heads * rank), right.reshape(heads * rank, -1)


@part
def ravan(
    rank: Count = 8,
    *,
    heads: Count = 4,
    targets: str | Sequence[str] | None = None,
    init: Literal["gram_schmidt", "normal"] = "gram_schmidt",
) -> Method:
    """RAVAN (Raje et al. 2025): several trained r x r cores, each between frozen bases.

    The other arguments are those of :func:`fedjax_peft.lora`.

    Args:
      rank: r of each head; a layer trains ``heads * (rank² + 1)`` numbers.
      heads: h.
      init: the start of the bases: orthonormal over all heads (``gram_schmidt``), or ``normal``.

    Raises:
      InputError: an impossible option here; when it is attached, a target that matches nothing, or
        ``heads * rank`` above a matrix's side with ``gram_schmidt``.
    """
    options = {"rank": rank, "heads": heads, "targets": listed(targets), "init": init}

    def bases(key: Key, size: int) -> Array:
        """Returns ``[heads, size, rank]``."""
        n = heads * rank
        if init == "gram_schmidt":
            columns = orthonormal(key, size, n)
        else:
            columns = jax.random.normal(key, (size, n)) / jnp.sqrt(size)
        return columns.reshape(size, heads, rank).transpose(1, 0, 2)

    def layer(path: str, site: nnx.Linear, key: Key) -> RavanLinear:
        n_in, n_out = sides(path, site, heads * rank if init == "gram_schmidt" else rank)
        a = bases(stream(key, path, "a"), n_in)
        return RavanLinear(site, a, bases(stream(key, path, "b"), n_out).transpose(0, 2, 1))

    return layer_method("ravan", options, layer)
