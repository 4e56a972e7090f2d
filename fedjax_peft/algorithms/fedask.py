"""FedASK (Wen et al. 2025): the average LoRA product from two sketches of every client's product.

    client:   (A_k, B_k) ← optimizer steps on F_k from the received (A, B), or on B alone
    stage 1:  Y_k = (A_k B_k)ᵀ Ω,      Q R = qr(Σ w_k Y_k)           Ω: [in, r + p], standard normal
    stage 2:  P_k = A_k B_k Q,         U Σ Vᵀ = svd(Σ w_k P_k)
    server:   A ← U_{:r} √Σ_{:r},      B ← √Σ_{:r} (Q V_{:r})ᵀ

(The paper writes the transposes: its matrices are [out, in].) Clients send Y_k, receive Q, and
send P_k; the server never has their factors. ``Q Qᵀ`` projects on the rows of the average product,
as in a randomised SVD. If its rank is at most r + p, the sums give its SVD exactly, and the result
is that of FRA-LoRA (``aggregators.fra``). With ``train="B"`` all A_k are equal, the average has a
rank of at most r, and it is kept whole for any p, as in FedSVD (``fedsvd``), which has no √Σ in A.

Noise belongs to local training (``fp.privacy.example``) with ``train="B"``, the paper's private
form: noise in both factors would be squared in their product. The paper clips the gradient by the
weight and multiplies the noisy gradient with A; here the gradient by B is clipped, and noise is
added to it. Sketches are functions of what was trained with noise, so they cost no privacy.

Decisions where the paper is silent: Ω is drawn once, as in the authors' code, here from
``sketch_seed``, and each matrix has its own. LoRA's s stays outside. Directions whose singular
value is 0 get B = 0 and an A that can train again, as in FRA-LoRA. Weights are those of FedAvg, as
in the code; the paper has 1/K. The head is trained and averaged. Clients of unequal ranks
(``client_ranks``) take the first directions, as in FlexLoRA.

The upload counts both sketches. The download counts A and B, and not Q, which is fetched in the
middle of the round: ``out (r + p)`` numbers for each matrix more.

Written from the paper's abstract, a public summary with its formulas, and the authors' code
(github.com/FLEECERmw/PrivacyFedLLM); checked against the code's steps in NumPy over dense matrices.
"""

from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array

from fedjax_peft import contracts as c
from fedjax_peft.aggregators.fra import (
    Truncated,
    Truncation,
    factored,
    truncated_products,
    truncating,
)
from fedjax_peft.algorithms.checks import checked, lora_model
from fedjax_peft.algorithms.fedavg import averaging, client
from fedjax_peft.contracts.aggregator import Stacked
from fedjax_peft.contracts.arguments import FromZero
from fedjax_peft.numerics import tree
from fedjax_peft.numerics.linalg import qr, svd
from fedjax_peft.numerics.lowrank import factors_apart, matmul
from fedjax_peft.numerics.random import stream
from fedjax_peft.numerics.roles import HeadPolicy, head_roles


@checked
def fedask(
    optimizer: c.Optimizer,
    *,
    train: Literal["both", "B"] = "both",
    oversampling: FromZero = 4,
    sketch_seed: FromZero = 0,
    error: bool = True,
    head: HeadPolicy = "shared",
    weights: c.Weights = "size",
) -> c.Algorithm:
    """FedASK: the average product comes from two sketches, and gives both factors of LoRA.

    Args:
      train: the factors that clients train: ``both``, or ``B`` alone, for training with noise.
      oversampling: p, the columns of a sketch beyond LoRA's rank; the paper finds 2 to 4 enough.
      sketch_seed: for Ω, which is the same in all rounds.
      error: measure what the result loses of the exact average; it needs one dense matrix for each
        adapted layer.

    Raises:
      InputError: a kept optimizer; on use, a model without LoRA, or an upload transform.
    """
    aggregator = _double_sketch(oversampling, sketch_seed, error)
    algorithm = averaging("fedask", optimizer, head_roles(head), aggregator, weights=weights)
    if train == "B":
        algorithm = algorithm._replace(
            client=lambda context: client(optimizer, context, lambda n: not n.endswith(".lora_a"))
        )
    return algorithm._replace(
        check=lora_model("fedask"),
        incompatible={
            c.Feature.TRANSFORMS: "Clients of FedASK send sketches of their products and not their"
            " factors, which a transform would compress. Use fewer columns (oversampling), or"
            " 'fedsvd'.",
            c.Feature.CLIENT_PRIVACY: "The server of FedASK has sums of sketches and no sum of the"
            " clients' products, to which noise would be added. Add noise to local training"
            " (fp.privacy.example) with train = 'B', or use 'fedavg' with the aggregator 'fra'.",
            c.Feature.KEPT_OPTIMIZER: "In FedASK the server factors LoRA's products anew in every"
            " round, so moments of earlier rounds belong to other factors. Use 'ffa' or 'fedavg'.",
        },
    )


def _double_sketch(oversampling: int, seed: int, error: bool) -> c.Aggregator:
    """Returns the aggregator of stages 1 and 2."""

    def factors(a: Array, b: Array, weights: Array, scales: Array) -> Truncated:
        matrices, _, n_in, r = a.shape
        key = stream(seed, "fedask", f"{n_in} {r}")
        omegas = jax.random.normal(key, (matrices, n_in, r + oversampling))

        def one(arguments: tuple[Array, ...]) -> tuple[Array, ...]:
            a, b, s, omega = arguments
            left = (a * weights[:, None, None]).transpose(1, 0, 2).reshape(n_in, -1)
            right = b.reshape(left.shape[1], -1)
            q, _ = qr(matmul(right.T, matmul(left.T, omega)))
            u, sigma, vt = svd(matmul(left, matmul(right, q)), full_matrices=False)
            row = matmul(vt[:r], q.T)
            new_a, new_b = factored(u[:, :r], s * sigma[:r], row, s, r, "balanced")
            if not error:
                return new_a, new_b, *(jnp.zeros(()),) * 3
            exact = s * matmul(left, right)
            off = s * matmul(new_a, new_b) - exact
            lost, whole = (jnp.sqrt(jnp.sum(x**2)) for x in (off, exact))
            return new_a, new_b, lost, jnp.max(jnp.abs(off)), whole

        # One matrix at a time, because concurrent batched LAPACK calls deadlock small thread pools.
        return jax.lax.map(one, (a, b, scales, omegas))

    def wire_bytes(lifted: c.PyTree) -> int:
        if isinstance(lifted, Stacked):  # whole uploads, of which some are hostile
            rest, pairs = factors_apart(lifted.value, "fedask")
        else:
            rest, pairs = lifted["rest"], lifted["products"]
        sketches = [
            (a.shape[1] + oversampling) * (a.shape[0] + b.shape[1]) for a, b in pairs.values()
        ]
        return tree.nbytes(rest) + 4 * sum(sketches)

    # No sum of products is formed, so the second function of the truncation is not called.
    aggregator = truncating("fedask", Truncation(factors, truncated_products), error=error)
    return aggregator._replace(unmasked_policy="zero", wire_bytes=wire_bytes, refactor=None)
