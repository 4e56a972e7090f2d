"""Whole rank directions of LoRA: columns of ΔA with the rows of ΔB (structured sparsification).

    C(ΔA)_{:,i} = ΔA_{:,i},   C(ΔB)_{i,:} = ΔB_{i,:}      for the k chosen directions i, else 0

Chosen are, in each adapted layer, the directions with the largest ``‖Δa_i‖² + ‖Δb_i‖²``, whose loss
is smallest in the Euclidean norm; or those with the largest product of the two norms, a bound on
their share of ΔA·ΔB; or k drawn directions. A product cannot rank the directions where one factor
did not change, as in FFA-LoRA and RoLoRA: there, the other factor decides alone.
Checked against a NumPy transcription.
"""

from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array

from fedjax_peft.contracts import Key, Params, PyTree, Transform
from fedjax_peft.contracts.arguments import Count
from fedjax_peft.contracts.part import part
from fedjax_peft.numerics.random import stream
from fedjax_peft.transforms.compressing import compressor, index_bits

By = Literal["norm", "product", "random"]


@part
def top_directions(rank: Count, *, by: By = "norm", error_feedback: bool = True) -> Transform:
    """Sends ``rank`` directions of each LoRA pair: columns of A with the same rows of B.

    Other leaves, such as a head, are sent whole. On the wire: the entries of the directions, and
    for each pair which ones they are (indices or a bitmap; nothing if they are drawn at random with
    a seed that the server knows).

    Args:
      rank: directions to send; a pair of this rank or less is sent whole.
      by: ``norm``: largest sum of squared norms; ``product``: largest product of the norms;
        ``random``.
      error_feedback: whether clients add what was not sent to their next change.
    """

    def chosen(path: str, squares: list[Array], key: Key) -> Array:
        """Returns which directions of a pair are sent, bool ``[r]``."""
        if by == "random":
            score = jax.random.uniform(stream(key, path), squares[0].shape)
        else:
            score = jnp.sum(jnp.stack(squares), axis=0)
            if by == "product" and len(squares) == 2:
                both = squares[0] * squares[1]
                score = jnp.where(jnp.any(both > 0), both, score)
        places = jax.lax.top_k(score, min(rank, score.size))[1]
        return jnp.zeros(score.shape, bool).at[places].set(True)

    def encode(update: Params, memory: PyTree, key: Key) -> tuple[Params, PyTree]:
        made = update
        for path, factors in _factors(update).items():
            largest = jnp.max(jnp.stack([jnp.max(jnp.abs(update[n])) for n, _ in factors]))
            size = jnp.where(largest > 0, largest, 1.0)  # no square overflows or vanishes
            squares = [jnp.sum((update[n] / size) ** 2, axis=axis) for n, axis in factors]
            keep = chosen(path, squares, key)
            for name, axis in factors:
                made = {**made, name: jnp.where(jnp.expand_dims(keep, axis), update[name], 0)}
        return made, memory

    def wire(template: Params, wires: PyTree) -> PyTree:
        made = wires
        for factors in _factors(template).values():
            for place, (name, axis) in enumerate(factors):
                x, w = template[name], wires[name]
                full = x.shape[1 - axis]
                which = 0 if place or by == "random" else index_bits(min(rank, full), full)
                entries = min(rank, full) * x.shape[axis]
                made = {**made, name: w._replace(entries=entries, extra=w.extra + which)}
        return made

    return compressor("top_directions", encode, wire, feedback=error_feedback)


def _factors(leaves: Params) -> dict[str, list[tuple[str, int]]]:
    """Returns module path -> its LoRA factors: (leaf name, the axis that is not the rank)."""
    found: dict[str, list[tuple[str, int]]] = {}
    for name in leaves if isinstance(leaves, dict) else ():  # an array comes from a chain
        path, _, last = name.rpartition(".")
        if last in ("lora_a", "lora_b") and leaves[name].ndim == 2:
            found.setdefault(path, []).append((name, 0 if last == "lora_a" else 1))
    return found
