"""OFT: ``y = (x R) W`` with a trained rotation R of the inputs (Qiu et al. 2023, 2025).

R = diag(R_1, ..., R_k) has orthogonal blocks of ``block_size`` inputs. Each comes from a
skew-symmetric Q by Cayley's transform, whose upper triangle is trained and starts at 0, so R = I::

    neumann:   R = I + 2 Q + 2 Q² + ... + 2 Q^(t-2) + Q^(t-1)     t terms of a series (OFTv2)
    exact:     R = (I - Q) (I + Q)⁻¹

* The two have opposite signs of Q in Hugging Face PEFT, which this file follows, so that its files
  mean the same. The series is close to a rotation for small Q alone.
* PEFT changes a block size that does not divide the inputs, with a warning; here it is refused,
  with the nearest ones. PEFT's ``coft`` (rotations near I) and ``r`` (the number of blocks instead
  of their size) are refused in files; its ``module_dropout`` has no effect in 0.21.
* R multiplies W, so averages of Q are no averages of weights; for small Q they nearly are.
* The input is rotated in float32, also in a bfloat16 model, in which I + 2 Q would lose Q.

Checked against Hugging Face PEFT 0.21: forward, backward, merged, and files in both directions.
"""

from collections.abc import Sequence
from typing import Annotated, Any

import jax.numpy as jnp
import numpy as np
from annotated_types import Ge
from flax import nnx
from jax import Array

from fedjax_peft.contracts import Key
from fedjax_peft.contracts.part import part
from fedjax_peft.models.base import AdapterParam
from fedjax_peft.numerics.linalg import solve
from fedjax_peft.peft.base import Adapted, Layout, Method, layer_method, listed
from fedjax_peft.peft.lora import frozen_output
from fedjax_peft.support.errors import InputError

LAYOUT = Layout(
    "OFT",
    {"oft_R.weight": ("oft_r", "blocks n")},
    {
        "oft_block_size": ("block_size", 32),
        "block_share": ("block_share", False),
        "use_cayley_neumann": ("neumann", True),
        "num_cayley_neumann_terms": ("terms", 5),
    },
    {"r": 0, "coft": False},
)


class OFTLinear(Adapted):
    """A linear layer whose input is rotated in blocks. ``base`` is frozen.

    ``oft_r`` ``[n, blocks]`` has the upper triangles of the blocks' Q, row by row; one for all
    blocks if they share it.
    """

    def __init__(self, base: Any, block: int, shared: bool, terms: int | None):
        self.base, self.block, self.terms = base, block, terms
        blocks = 1 if shared else base.kernel.shape[0] // block
        self.oft_r = AdapterParam(jnp.zeros((block * (block - 1) // 2, blocks)))

    def rotations(self) -> Array:
        """Returns R's blocks, ``[blocks, block, block]``, in float32."""
        values, size = self.oft_r[...].T, self.block
        upper = jnp.zeros((len(values), size, size)).at[:, *np.triu_indices(size, 1)].set(values)
        q, one = upper - upper.transpose(0, 2, 1), jnp.eye(size)[None]
        if self.terms is None:
            # (I - Q) (I + Q)⁻¹; the two commute, so it is (I + Q)⁻¹ (I - Q) as well.
            rotations: Array = solve(one + q, one - q)
        else:
            power, rotations = q, one + 2 * q
            for _ in range(self.terms - 3):
                power = jnp.matmul(power, q, precision="highest")
                rotations = rotations + 2 * power
            rotations = rotations + jnp.matmul(power, q, precision="highest")
        blocks = self.base.kernel.shape[0] // size
        return jnp.broadcast_to(rotations, (blocks, size, size))

    def __call__(self, x: Array) -> Array:
        """Returns the layer's output for ``x`` ``[..., in]``."""
        blocks = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, self.block)
        rotated = jnp.einsum("...kb,kbc->...kc", blocks, self.rotations())
        return frozen_output(self.base, rotated.reshape(x.shape).astype(x.dtype))

    def merged(self) -> nnx.Module:
        """Returns the linear layer of ``R W``."""
        kernel = self.base.kernel[...]
        blocks = kernel.reshape(-1, self.block, kernel.shape[1])
        rotated = jnp.einsum("kbc,kco->kbo", self.rotations(), blocks, precision="highest")
        return self.with_kernel(rotated.reshape(kernel.shape))


@part
def oft(
    block_size: Annotated[int, Ge(2)] = 32,
    *,
    targets: str | Sequence[str] | None = None,
    block_share: bool = False,
    neumann: bool = True,
    terms: Annotated[int, Ge(4)] = 5,
) -> Method:
    """OFT (Qiu et al. 2023): a trained rotation of each adapted layer's input, in blocks.

    The other arguments are those of :func:`fedjax_peft.lora`.

    Args:
      block_size: b, the inputs of a block; it divides each layer's. A layer trains (b - 1) / 2
        numbers for each input.
      block_share: whether all blocks of a layer have one rotation.
      neumann: whether the rotation is a truncated series (OFTv2); otherwise it is exact.
      terms: the terms of the series.

    Raises:
      InputError: when it is attached, a target that matches nothing, or a block size that does not
        divide a layer's inputs.
    """

    def layer(path: str, site: nnx.Linear, key: Key) -> OFTLinear:
        n_in = site.kernel.shape[0]
        if n_in % block_size:
            fitting = [b for b in range(2, n_in + 1) if n_in % b == 0]
            near = [b for b in fitting if b < block_size][-1:]
            near += [b for b in fitting if b > block_size][:1]
            raise InputError(
                f"block_size = {block_size} does not divide the {n_in} inputs of {path!r}; the"
                f" nearest that do: {', '.join(map(str, near))}."
            )
        return OFTLinear(site, block_size, block_share, terms if neumann else None)

    options = {"block_size": block_size, "targets": listed(targets), "block_share": block_share}
    return layer_method("oft", {**options, "neumann": neumann, "terms": terms}, layer)
