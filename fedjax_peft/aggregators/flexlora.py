"""FlexLoRA (Bai et al. 2024): average full-rank products of any ranks, redistribute by SVD.

    ΔW̄ = Σ w_k s A_k B_k,   U Σ Vᵀ = svd(ΔW̄)
    client i gets  A = U_{:r_i},   B = Σ_{:r_i} V_{:r_i}ᵀ / s

It is FRA-LoRA with the singular values in B, for clients of different ranks. Factors are padded
with zeros to the largest rank. A client's own directions are the first ones: these have the largest
singular values. The paper scales each client's product by α/r_k; here the scale is the same for all
clients, α/r with the largest rank r.

This follows the paper and the authors' code, which agree.
"""

from fedjax_peft.aggregators.fra import by_svd
from fedjax_peft.contracts import Aggregator
from fedjax_peft.contracts.arguments import Count
from fedjax_peft.contracts.part import part


@part
def flexlora(rank: Count | None = None, *, error: bool = True) -> Aggregator:
    """FlexLoRA: averaged LoRA products of any ranks, truncated by SVD to each client's rank.

    Leaves outside of LoRA pairs (a head) are averaged. All uploads of a cohort are held in memory
    at once.

    Args:
      rank: directions kept; by default the adapter's own rank.
      error: measure the error, and the share of the spectrum that is kept.

    Raises:
      InputError: on use, a model without LoRA pairs, or a rank above the adapter's.
    """
    return by_svd("flexlora", rank, "B", error)._replace(unmasked_policy="zero")
