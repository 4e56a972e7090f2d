"""LoRA-SB: ``y = x W + x A R B``; only the square core R is trained (Ponkshe et al. 2024).

Flax orientation: the paper's ``B R A`` is the transpose of ``A R B`` here.

    g  = Σ over examples of ∂F/∂W                     at the pretrained weights
    U Σ Vᵀ = svd(-η sign(g)),   A = U_{:r},   R = Σ_{:r},   B = V_{:r}ᵀ

so that training starts after the best rank-r form of the first step of full fine-tuning with Adam,
whose first step is ``-η sign(g)``. A and B have orthonormal columns and rows, so a gradient step of
R is the projection of the full gradient: the scale s of LoRA is not needed and is 1.

:func:`lora_sb` alone has no examples: A and B are then random and orthonormal, and R is 0.
:func:`gradient_start` sets the values above; in a config ``peft.gradient_start`` does. In a
federation (Fed-SB, :func:`fedjax_peft.algorithms.fedsb`) the gradients of all clients are summed
before the sign is taken, as the authors' code does over processes. This happens once, before the
first round, and is not part of a run's traffic. It has no noise: a run with differential privacy
needs public examples.

Checked against the authors' code of LoRA-SB. It takes η as the rate of the first warm-up step, and
an approximate SVD; here it is exact.
"""

from collections.abc import Callable, Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from fedjax_peft.contracts import Batch, Key, Params, Task
from fedjax_peft.contracts.arguments import Count, Positive, strict
from fedjax_peft.contracts.part import part
from fedjax_peft.models.base import AdapterConst, AdapterParam, Model
from fedjax_peft.numerics.linalg import canonical, svd
from fedjax_peft.numerics.random import stream
from fedjax_peft.peft.base import Method, layer_method, listed
from fedjax_peft.peft.cores import CoreLinear, orthonormal, sides
from fedjax_peft.support.errors import InputError


class SBLinear(CoreLinear):
    """A linear layer with the update ``x A R B``; A and B never change."""

    def __init__(self, base: nnx.Linear, a: Array, r: Array, b: Array):
        self.base = base
        self.sb_a = AdapterConst(a)
        self.sb_r = AdapterParam(r)
        self.sb_b = AdapterConst(b)

    def factors(self) -> tuple[Array, Array]:
        """Returns (A ``[in, r]``, R B ``[r, out]``)."""
        return self.sb_a[...], jnp.matmul(self.sb_r[...], self.sb_b[...], precision="highest")


@part
def lora_sb(rank: Count = 64, *, targets: str | Sequence[str] | None = None) -> Method:
    """LoRA-SB (Ponkshe et al. 2024): a trained r x r core between two frozen bases.

    The bases are random and orthonormal until ``fp.peft.gradient_start`` replaces them, in a config
    ``peft.gradient_start``. A run without it warns.

    The other arguments are those of :func:`fedjax_peft.lora`.

    Args:
      rank: r; a layer trains r² numbers.

    Raises:
      InputError: a rank below 1 here; when it is attached, a target that matches nothing, or a rank
        above a matrix's side.
    """

    def layer(path: str, site: nnx.Linear, key: Key) -> SBLinear:
        n_in, n_out = sides(path, site, rank)
        a = orthonormal(stream(key, path, "a"), n_in, rank)
        b = orthonormal(stream(key, path, "b"), n_out, rank).T
        return SBLinear(site, a, jnp.zeros((rank, rank)), b)

    options = {"rank": rank, "targets": listed(targets)}
    return layer_method("lora_sb", options, layer, start_missing=_start_missing)


def _start_missing(trainable: Params) -> str | None:
    """Returns that the bases are random where all cores are zero, else None."""
    if any(np.any(x) for name, x in trainable.items() if name.endswith(".sb_r")):
        return None
    return (
        "The bases of lora_sb are random, so this is not LoRA-SB or Fed-SB, whose bases come from a"
        " gradient: model = fp.peft.gradient_start(model, clients.sample(50, 16), task,"
        " step=0.01), or in a config peft.gradient_start = 0.01."
    )


@strict
def gradient_start(model: Model, batches: Iterable[Batch], task: Task, *, step: Positive) -> Model:
    """Returns the model with LoRA-SB's start, from the gradient of the frozen kernels.

    Args:
      model: with :func:`lora_sb` attached.
      batches: examples, such as ``clients.sample(50, batch_size=16)``; 50 in all are enough for the
        authors.
      task: whose loss is derived.
      step: η, the length of the first step; the learning rate, or a part of it.

    Raises:
      InputError: the model has no LoRA-SB, there are no batches, or they lack a column.
    """
    paths = sorted(n.removesuffix(".sb_r") for n in model.trainable if n.endswith(".sb_r"))
    if model.method is None or model.method.name != "lora_sb":
        raise InputError("gradient_start is for a model with fp.peft.lora_sb() attached.")
    gradient = _gradient(model, task, paths)
    total: Params = {}
    for batch in batches:
        try:
            one = gradient(model.frozen, batch)
        except KeyError as error:
            raise InputError(
                f"gradient_start reads the column {error}, and the batches have only"
                f" {', '.join(batch)}. Sample them from data that the task has prepared:"
                " task.prepare(model, clients.data, clients.indices)."
            ) from None
        total = jax.tree.map(jnp.add, total, one) if total else one
    if not total:
        raise InputError("gradient_start needs at least one batch of examples.")
    trainable = dict(model.trainable)
    for path in paths:
        rank = model.trainable[f"{path}.sb_r"].shape[0]
        trainable |= _start(path, total[path], rank, step)
    return model.replace(trainable=trainable)


def _gradient(model: Model, task: Task, paths: Sequence[str]) -> Callable[[Params, Batch], Params]:
    """Returns a compiled function: the gradient of the sum of a batch's losses by the kernels.

    It is that of an R ``[in, out]`` between identities, which is the kernel's, also where the
    kernel is quantised.
    """
    sides = {p: (model.trainable[f"{p}.sb_a"], model.trainable[f"{p}.sb_b"]) for p in paths}
    shapes = {p: (a.shape[0], b.shape[1]) for p, (a, b) in sides.items()}
    ones = {size: jnp.eye(size) for shape in shapes.values() for size in shape}
    rest = {n: x for n, x in model.trainable.items() if ".sb_" not in n}
    bases = {f"{p}.sb_a": ones[n_in] for p, (n_in, _) in shapes.items()}
    bases |= {f"{p}.sb_b": ones[n_out] for p, (_, n_out) in shapes.items()}

    def loss(changes: Params, frozen: Params, leaves: Params, batch: Batch) -> Array:
        cores = {f"{path}.sb_r": x for path, x in changes.items()}
        return task.loss(model.apply(frozen, {**leaves, **cores}, batch, None, False), batch)[0]

    derive = jax.jit(jax.grad(loss))
    zeros = {path: jnp.zeros(shape) for path, shape in shapes.items()}
    return lambda frozen, batch: derive(zeros, frozen, {**rest, **bases}, batch)


def _start(path: str, gradient: Array, rank: int, step: float) -> Params:
    u, sigma, vt = svd(-step * jnp.sign(gradient), full_matrices=False)
    u, sigma, vt = canonical(u[:, :rank], sigma[:rank], vt[:rank])
    return {f"{path}.sb_a": u, f"{path}.sb_r": jnp.diag(sigma), f"{path}.sb_b": vt}
