"""FedRot-LoRA (Zhang et al. 2026): clients rotate their factors before these are averaged.

    client:  (A_k, B_k) ← optimizer steps on F_k from (A, B)
             R_k = argmin ‖A_k R - A‖_F  (even rounds)  or  ‖Rᵀ B_k - B‖_F  (odd rounds),  RᵀR = I
                 = U Vᵀ,   U Σ Vᵀ = svd(A_kᵀ A)  or  svd(B_k Bᵀ)            (orthogonal Procrustes)
             A_k ← A_k R_k,   B_k ← R_kᵀ B_k                                  the product stays
    server:  A ← Σ w_k A_k,   B ← Σ w_k B_k

(A, B) is what the client received. LoRA's factors are only known up to a rotation of its
directions, (A R)(Rᵀ B) = A B, so clients that learned the same update may hold factors that cancel
in a mean. Nothing more is sent than in FedAvg, and ``fedavg`` is the method without the rotation.

The first round does not rotate: at LoRA's start B = 0, and all clients still have the same A. The
authors' code then begins with A, as here; ``first="B"`` begins with B.

``strength`` λ below 1 rotates less: R_k ← the orthogonal matrix nearest to (1 - λ) I + λ R_k. A
reflection (det R_k = -1) has no such path from I, so R_k is then the best rotation: the column of U
with the smallest singular value changes its sign. With λ = 1 reflections stay.

Decisions where the source is silent: a client that learned nothing does not rotate. A client of a
smaller rank (``client_ranks``) rotates among the directions that it owns.

This was written from the paper's abstract and the authors' code (github.com/haoran-zh/FedRot-LoRA),
which agree, and checked against a loop over clients that transcribes the code's formulas.
"""

from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array

from fedjax_peft import contracts as c
from fedjax_peft.algorithms.checks import checked, lora_model
from fedjax_peft.algorithms.common import Local
from fedjax_peft.algorithms.fedavg import averaging, client
from fedjax_peft.contracts.arguments import Share
from fedjax_peft.numerics.hyperparameters import is_traced
from fedjax_peft.numerics.linalg import svd
from fedjax_peft.numerics.lowrank import matmul, pairs
from fedjax_peft.numerics.roles import HeadPolicy, head_roles


@checked
def fedrot(
    optimizer: c.Optimizer,
    *,
    strength: Share = 1.0,
    first: Literal["A", "B"] = "A",
    aggregator: c.Aggregator | None = None,
    head: HeadPolicy = "shared",
    weights: c.Weights = "size",
) -> c.Algorithm:
    """FedRot-LoRA: clients rotate LoRA's factors towards the received ones before the average.

    Args:
      strength: λ, from 0 (no rotation) to 1 (the best orthogonal matrix).
      first: the factor that round 2 aligns, ``A`` or ``B``; the other one is aligned in round 3,
        and so on in turn.

    Raises:
      InputError: a kept optimizer; on use, a model without LoRA.
    """
    even = first == "A"

    def bound(context: c.ClientContext) -> c.ClientUpdate:
        inner = client(optimizer, context)

        def init(broadcast: c.Params, private: c.Params, key: c.Key) -> Local:
            return inner.init(broadcast, private, key)._replace(start=broadcast)

        def final(local: Local) -> tuple[c.Params, c.Params]:
            on_a = (context.round_index % 2 == 0) == even
            upload, turns = local.shared, context.round_index > 1
            aligned = _aligned(upload, local.start, context.fixed, on_a, strength)
            return {n: jnp.where(turns, aligned[n], x) for n, x in upload.items()}, local.private

        return c.ClientUpdate(init, inner.step, final)

    algorithm = averaging("fedrot", optimizer, head_roles(head), aggregator)
    return algorithm._replace(
        client=bound,
        weights=weights,
        check=lora_model("fedrot"),
        incompatible={
            c.Feature.KEPT_OPTIMIZER: "In FedRot-LoRA a client rotates its factors at the end of a"
            " round, and moments of earlier rounds belong to the factors before that. Use 'fedavg'."
        },
    )


def _aligned(
    upload: c.Params, received: c.Params, fixed: c.Params, on_a: Array, strength: float | Array
) -> c.Params:
    """Returns the upload with every pair (A_k, B_k) rotated towards the received (A, B).

    Args:
      fixed: the fixed leaves; a direction that the client does not own has ``lora_scale`` 0.
      on_a: whether A is aligned (else B), a bool scalar.
    """
    found = pairs(upload)
    most = max(upload[a].shape[1] for a, _ in found.values())
    matrices = []
    for path, (a, b) in found.items():
        by_a, by_b = matmul(upload[a].T, received[a]), matmul(upload[b], received[b].T)
        own = fixed[f"{path}.lora_scale"] != 0 if f"{path}.lora_scale" in fixed else None
        matrices.append(_bordered(jnp.where(on_a, by_a, by_b), own, most))
    # One matrix at a time, because concurrent batched LAPACK calls deadlock small CPU thread pools.
    turns = jax.lax.map(lambda m: _rotation(m, strength), jnp.stack(matrices))
    new = dict(upload)
    for turn, (a, b) in zip(turns, found.values(), strict=True):
        rank = upload[a].shape[1]
        moved = jnp.any(upload[a] != received[a]) | jnp.any(upload[b] != received[b])
        r = jnp.where(moved, turn[:rank, :rank], jnp.eye(rank))
        new[a], new[b] = matmul(upload[a], r), matmul(r.T, upload[b])
    return {n: x.astype(upload[n].dtype) for n, x in new.items()}


def _bordered(matrix: Array, own: Array | None, size: int) -> Array:
    """Returns ``[size, size]``: the matrix among own directions, and a multiple of I elsewhere.

    The orthogonal factor of a block-diagonal matrix is block-diagonal, and that of a positive
    multiple of I is I: the other directions do not rotate. The multiple is larger than all
    singular values of the matrix, so that the smallest of all is one of the matrix.

    Args:
      matrix: ``[r, r]``.
      own: bool ``[r]``; None: all.
    """
    rank = matrix.shape[0]
    mask = jnp.ones(rank, bool) if own is None else own
    mask = jnp.pad(mask, (0, size - rank))
    inner = jnp.pad(matrix.astype(jnp.float32), (0, size - rank))
    inner = jnp.where(mask[:, None] & mask[None], inner, 0.0)
    norm = jnp.sqrt(jnp.sum(inner**2))
    return inner + jnp.diag(jnp.where(mask, 0.0, jnp.where(norm > 0, 2 * norm, 1.0)))


def _rotation(matrix: Array, strength: float | Array) -> Array:
    """Returns R of a matrix ``A_kᵀ A`` or ``B_k Bᵀ``, ``[r, r]``."""
    u, _, vt = svd(matrix)
    best = matmul(u, vt)
    if not is_traced(strength) and strength == 1:
        return best
    reflects = jnp.linalg.det(best) < 0
    proper = matmul(u, vt.at[-1].multiply(jnp.where(reflects, -1.0, 1.0)))
    u, _, vt = svd((1 - strength) * jnp.eye(len(matrix)) + strength * proper)
    return jnp.where(strength == 1, best, matmul(u, vt))
