"""FlexLoRA (Bai et al. 2024): average full-rank products of any ranks, redistribute by SVD.

    ΔW̄ = Σ w_k s A_k B_k,   U Σ Vᵀ = svd(ΔW̄)
    client i gets  A = U_{:r_i},   B = Σ_{:r_i} V_{:r_i}ᵀ / s

It is FRA-LoRA with the singular values in B, for clients of different ranks: factors are padded
with zeros to the largest rank, and a client's own directions are the first ones, which are those of
the largest singular values. The paper scales each client's product by α/r_k; here a direction has
the same scale for all, α/r of the largest rank.

From the paper and the authors' code, which agree.
"""

from fedjax_peft.aggregators.fra import truncating
from fedjax_peft.typing import Aggregator

__all__ = ["flexlora"]


def flexlora(rank: int | None = None, *, error: bool = True) -> Aggregator:
    """FlexLoRA: averaged LoRA products of any ranks, cut by SVD to every client's own.

    What is not a LoRA pair (a head) is averaged. The uploads of a cohort are all held at once.

    Args:
      rank: directions kept; by default the adapter's own rank.
      error: measure the error, and the share of the spectrum that is kept.

    Raises:
      InputError: on use, a model without LoRA pairs, or a rank above the adapter's.
    """
    return truncating("flexlora", rank, "B", error)._replace(unmasked_policy="zero")
