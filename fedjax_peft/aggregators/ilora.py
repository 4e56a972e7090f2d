"""ILoRA's aggregation (Zhou et al. 2025): a QR decomposition of the averaged LoRA products.

    ΔW̄ = Σ w_k s A_k B_k,      ΔW̄ᵀ = Q R                 (the paper's matrices are [out, in])
    B ← (Q_{:, :r})ᵀ,          A ← (R_{:r, :})ᵀ / s

The products are averaged exactly: the clients' factors are concatenated. The diagonal of R is not
negative, which makes the decomposition unique where it can be. A client of rank r_k takes the first
r_k directions, which are the decomposition for that rank. Together with ``peft.lora(init="qr")``,
the same decomposition of the pretrained weights, this is ILoRA over
:func:`fedjax_peft.algorithms.fedavg`.

The first r columns of Q span the first r columns of ΔW̄ᵀ, the changes for the first r **input
features**, because the decomposition has no pivoting. So ``s A B = ΔW̄ Bᵀ B`` is the projection of
the changes of all input features on the changes of the first r. It is ΔW̄ itself if these span all
others; ΔW̄ then has a rank of at most r. Clients that differ make the rank larger, and what is kept
then depends on the order of the input features: it is not the best approximation of rank r, which
is that of :func:`fedjax_peft.aggregators.flexlora`. The paper says that its aggregation preserves
the information of all clients; ``aggregation_error`` and ``spectrum_kept`` measure what is lost.

Only the first r columns are decomposed, and ``R = Qᵀ ΔW̄ᵀ``. Without ``error`` no dense matrix is
formed.

The paper also has AdamW with control variates that know the rank. It is left out here: a text with
its formulas could not be found. This was written from the abstract, a public review and a
public reimplementation (github.com/boyi-liu/FedLLM-Factory), and checked against a dense QR
decomposition in NumPy.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

from fedjax_peft.aggregators.fra import Truncated, Truncation, truncating
from fedjax_peft.contracts import Aggregator
from fedjax_peft.contracts.part import part
from fedjax_peft.numerics.linalg import orthonormal_rows
from fedjax_peft.numerics.lowrank import matmul


@part
def ilora(*, error: bool = True) -> Aggregator:
    """ILoRA: averaged LoRA products of any ranks, cut to each client's rank by a QR decomposition.

    Leaves outside of LoRA pairs (a head) are averaged. The factors of all uploads of a cohort are
    held in memory at once.

    Args:
      error: measure the error, and the share of the squared norm that is kept; it needs one dense
        matrix for each adapted layer.

    Raises:
      InputError: on use, a model without LoRA pairs.
    """
    truncation = Truncation(partial(_of_factors, error=error), _of_products)
    aggregator = truncating("ilora", truncation, error=error)
    return aggregator._replace(unmasked_policy="zero")


def _of_factors(a: Array, b: Array, weights: Array, scales: Array, *, error: bool) -> Truncated:
    _, clients, n_in, r = a.shape
    n_out = b.shape[-1]

    def one(arguments: tuple[Array, ...]) -> tuple[Array, ...]:
        a, b, s = arguments
        left = (a * weights[:, None, None]).transpose(1, 0, 2).reshape(n_in, clients * r)
        right = b.reshape(clients * r, n_out)
        new_b = orthonormal_rows(matmul(left[:r], right))
        new_a = matmul(left, matmul(right, new_b.T))
        if not error:
            return new_a, new_b, *(jnp.zeros(()),) * 3
        return new_a, new_b, *_sizes(matmul(left, right), new_a, new_b, s)

    # One matrix at a time, because concurrent batched LAPACK calls deadlock small CPU thread pools.
    return jax.lax.map(one, (a, b, scales))


def _of_products(products: Array, scales: Array, r: int) -> Truncated:
    def one(arguments: tuple[Array, Array]) -> tuple[Array, ...]:
        product, s = arguments
        new_b = orthonormal_rows(product[:r])
        new_a = matmul(product, new_b.T)
        return new_a, new_b, *_sizes(product, new_a, new_b, s)

    return jax.lax.map(one, (products, scales))  # one at a time, as in _of_factors


def _sizes(exact: Array, a: Array, b: Array, s: Array) -> tuple[Array, ...]:
    """Returns the Frobenius error, the largest absolute error, and the norm of ``s exact``."""
    off = s * (matmul(a, b) - exact)
    norm = s * jnp.sqrt(jnp.sum(exact**2))
    return jnp.sqrt(jnp.sum(off**2)), jnp.max(jnp.abs(off)), norm
