"""SHiRA: ``y = x (W + S)`` with a trained sparse S of a high rank (Bhardwaj et al. 2024).

S has r (in + out) values, as many numbers as a LoRA of rank r, at places of the kernel that never
change. Here they are drawn for each layer from the key schedule, SHiRA-Rand: all clients draw the
same, so only the values travel, and their average is exact. The paper's other masks (by magnitude,
gradient or SNIP) are not here; Hugging Face PEFT leaves them to functions of the user too, and a
file with any places can be read.

A step forms S for each lane, one dense matrix at a time for each adapted layer.

Checked against Hugging Face PEFT 0.21: forward, backward, merged, and files in both directions.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from fedjax_peft.contracts import Key
from fedjax_peft.contracts.arguments import Count
from fedjax_peft.contracts.part import part
from fedjax_peft.models.base import AdapterConst, AdapterParam
from fedjax_peft.numerics.random import stream
from fedjax_peft.peft.base import Adapted, Layout, Method, layer_method, listed
from fedjax_peft.peft.lora import frozen_output
from fedjax_peft.support.errors import InputError

LAYOUT = Layout(
    "SHIRA",
    {"shira_weight": ("shira_weight", "n"), "shira_indices": ("shira_indices", "2 n")},
    {"r": ("rank", 32)},
)


class SHiRALinear(Adapted):
    """A linear layer with a sparse change. ``base`` is frozen.

    ``shira_weight`` ``[n]`` are the values, which start at 0; ``shira_indices`` ``[n, 2]`` are the
    output and the input of each.
    """

    def __init__(self, base: Any, indices: Array):
        self.base = base
        self.shira_indices = AdapterConst(indices)
        self.shira_weight = AdapterParam(jnp.zeros(len(indices)))

    def __call__(self, x: Array) -> Array:
        """Returns the layer's output for ``x`` ``[..., in]``."""
        y = frozen_output(self.base, x)
        return y + x.astype(y.dtype) @ self.sparse().astype(y.dtype)

    def sparse(self) -> Array:
        """Returns S, ``[in, out]``, in float32."""
        outputs, inputs = self.shira_indices[...].T
        zeros = jnp.zeros(self.base.kernel.shape)
        return zeros.at[inputs, outputs].set(self.shira_weight[...], unique_indices=True)

    def merged(self) -> nnx.Module:
        """Returns the linear layer of ``W + S``."""
        return self.with_kernel(self.base.kernel[...] + self.sparse())


def random_places(key: Key, shape: Sequence[int], count: int) -> Array:
    """Returns different random places of a matrix in their order: flat, int32 ``[count]``."""
    places = jax.random.choice(key, shape[0] * shape[1], (count,), replace=False)
    return jnp.sort(places).astype(jnp.int32)


@part
def shira(rank: Count = 32, *, targets: str | Sequence[str] | None = None) -> Method:
    """SHiRA (Bhardwaj et al. 2024): trained values at fixed random places of each weight.

    The other arguments are those of :func:`fedjax_peft.lora`.

    Args:
      rank: r; a layer trains as many values as a LoRA of this rank.

    Raises:
      InputError: when it is attached, a target that matches nothing, or a rank with more values
        than a weight has.
    """

    def layer(path: str, site: nnx.Linear, key: Key) -> SHiRALinear:
        n_in, n_out = site.kernel.shape
        count = rank * (n_in + n_out)
        if count > n_in * n_out:
            raise InputError(
                f"rank = {rank} means {count} values of {path!r}, which has {n_in}x{n_out} ="
                f" {n_in * n_out}; at most rank = {n_in * n_out // (n_in + n_out)} fits."
            )
        places = random_places(stream(key, path, "places"), (n_in, n_out), count)
        return SHiRALinear(site, jnp.stack([places % n_out, places // n_out], axis=1))

    return layer_method("shira", {"rank": rank, "targets": listed(targets)}, layer)
