"""RAVAN (Raje et al. 2025): several cores H_i with scales s_i; the products s_i H_i are averaged.

    start:   A_i, B_i orthonormal over all heads,  H_i ← 0        (:mod:`fedjax_peft.peft.ravan`)
    round:   s_i ← 1                                              (Algorithm 1, line 6)
    client:  (H_i, s_i)_k ← optimizer steps on F_k with  W + Σ_i s_i A_i H_i B_i        (Eq 7)
    server:  H_i ← (1/K) Σ (s_i H_i)_k                                                  (Eq 8)

The bases never change, so the average is exact: that of ``A_i (s_i H_i)_k B_i``. The scales let a
client use some heads more than others within a round. They are not sent: they are 1 again at the
start of each round, and what they did is in H.

The mean is unweighted, as in the paper. All heads are trained by every client; the paper's choice
of some heads for weak clients (``SELECTHEADS``) is not implemented. Scales have the optimizer and
the learning rate of the cores. While H_i = 0, s_i has no gradient. The head of the model is trained
and averaged by default.

This follows the text of the paper. The authors published no code that we know; an independent
public implementation agrees, up to weights by size.
"""

import jax.numpy as jnp

from fedjax_peft import contracts as c
from fedjax_peft.algorithms.checks import checked, model_with
from fedjax_peft.algorithms.common import Local, replace_server
from fedjax_peft.algorithms.fedavg import averaging, client
from fedjax_peft.numerics.roles import HeadPolicy, head_roles


@checked
def ravan(
    optimizer: c.Optimizer,
    *,
    aggregator: c.Aggregator | None = None,
    head: HeadPolicy = "shared",
    weights: c.Weights = "uniform",
) -> c.Algorithm:
    """RAVAN: LoRA cores between fixed bases, each with a scale of its own; exact averages.

    Args:
      aggregator: how the products of scale and core combine; by default their mean.

    Raises:
      InputError: a kept optimizer; on use, a model without RAVAN's layers.
    """
    algorithm = averaging("ravan", optimizer, head_roles(head), aggregator)
    return algorithm._replace(
        client=lambda context: _client(optimizer, context),
        # The server keeps the shared leaves without the scales, which are 1.
        server=replace_server()._replace(init=_folded, params=_with_scales),
        model=lambda broadcast, private: {**_with_scales(broadcast), **private},
        weights=weights,
        check=model_with(
            "'ravan' averages the cores of RAVAN's layers, and this model has none: attach"
            " fp.peft.ravan(), or use 'fedavg'.",
            r"\.ravan_h$",
        ),
        incompatible={
            c.Feature.KEPT_OPTIMIZER: "In RAVAN a client's scales become a part of its cores at the"
            " end of a round, so gradients of earlier rounds belong to other cores and scales. Use"
            " 'fedsb'."
        },
    )


def _client(optimizer: c.Optimizer, context: c.ClientContext) -> c.ClientUpdate:
    inner = client(optimizer, context)

    def init(broadcast: c.Params, private: c.Params, key: c.Key) -> Local:
        return inner.init(_with_scales(broadcast), private, key)

    def final(local: Local) -> tuple[c.Params, c.Params]:
        upload, private = inner.final(local)
        return _folded(upload), private

    return c.ClientUpdate(init, inner.step, final)


def _folded(leaves: c.Params) -> c.Params:
    """Returns the leaves with every scale multiplied into its core, and without scales."""
    new = {name: x for name, x in leaves.items() if not name.endswith(".ravan_s")}
    for name, scales in leaves.items():
        if name not in new:
            core = f"{name.removesuffix('.ravan_s')}.ravan_h"
            new[core] = scales[:, None, None] * new[core]
    return new


def _with_scales(leaves: c.Params) -> c.Params:
    """Returns the leaves with a scale of 1 for every core."""
    cores = {n: x for n, x in leaves.items() if n.endswith(".ravan_h")}
    return {
        **leaves,
        **{f"{n.removesuffix('.ravan_h')}.ravan_s": jnp.ones(len(x)) for n, x in cores.items()},
    }
