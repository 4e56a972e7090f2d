"""LoRA-XS: ``y = x W + x A R B``; only the r x r core R is trained (Bałazy et al. 2024).

    U Σ Vᵀ = svd(W),   A = U_{:r} Σ_{:r},   B = V_{:r}ᵀ,   R ~ N(0, σ²)

A and B are frozen and follow from W, which all clients have, so only R travels, and its average is
exact. The layer is LoRA-SB's (:mod:`fedjax_peft.peft.lora_sb`), whose bases come from a gradient
instead; ``algorithms.fedsb`` averages these cores too.

* σ = 1e-5 as in the authors' code, so that the start changes almost nothing. At 0 it changes
  nothing, and R trains all the same.
* The authors' code multiplies by LoRA's alpha / r, which their formula does not have; here it is 1.
  Its SVD is a randomised one; here it is exact, with canonical signs.
* On a quantised base the SVD is that of the dequantised kernel.

Hugging Face PEFT 0.21 does not have it. Checked against a NumPy transcription of the formula;
``peft`` reads an export as a LoRA of rank r.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from fedjax_peft.contracts import Key
from fedjax_peft.contracts.arguments import Count, NotNegative
from fedjax_peft.contracts.part import part
from fedjax_peft.numerics.linalg import canonical, svd
from fedjax_peft.numerics.random import stream
from fedjax_peft.peft.base import Method, layer_method, listed
from fedjax_peft.peft.cores import sides
from fedjax_peft.peft.lora_sb import SBLinear


@part
def lora_xs(
    rank: Count = 64,
    *,
    targets: str | Sequence[str] | None = None,
    sigma: NotNegative = 1e-5,
) -> Method:
    """LoRA-XS (Bałazy et al. 2024): a trained r x r core between singular directions of W.

    The other arguments are those of :func:`fedjax_peft.lora`.

    Args:
      rank: r; a layer trains r² numbers.
      sigma: the standard deviation of the core's initial values.

    Raises:
      InputError: when it is attached, a target that matches nothing, or a rank above a matrix's
        side.
    """

    def layer(path: str, site: nnx.Linear, key: Key) -> SBLinear:
        sides(path, site, rank)
        u, s, vt = svd(site.kernel[...].astype(jnp.float32), full_matrices=False)
        u, s, vt = canonical(u[:, :rank], s[:rank], vt[:rank])
        core = sigma * jax.random.normal(stream(key, path, "core"), (rank, rank))
        return SBLinear(site, u * s[None], core, vt)

    options = {"rank": rank, "targets": listed(targets), "sigma": sigma}
    return layer_method("lora_xs", options, layer)
