"""The noise of the FRA-LoRA paper, literally. It gives no privacy guarantee.

    server:  ΔW̄ = Σ w_k A_k B_k + noise,   noise ~ N(0, std²) or Laplace;  then the truncation

Nothing is clipped, so a single client can change the average by any amount, and no amount of noise
hides that. The paper also states that the truncation passes the noise on unchanged. It does not:
the noise has full rank, and only its part in the kept directions remains. The field ``snr`` says
whether these directions are still those of the average.

:func:`fedjax_peft.privacy.central` over the aggregator ``fra`` adds noise in the same place, with a
guarantee.
"""

import math
import warnings
from typing import Any, Literal

import jax
import jax.numpy as jnp

from fedjax_peft.contracts.aggregator import Aggregated, Aggregator, Total
from fedjax_peft.contracts.algorithm import Algorithm
from fedjax_peft.contracts.arguments import Positive
from fedjax_peft.contracts.part import part
from fedjax_peft.contracts.privacy import Federation, Guarantee, Privacy
from fedjax_peft.contracts.server import RoundContext
from fedjax_peft.contracts.types import Params, PyTree
from fedjax_peft.numerics.hyperparameters import is_traced
from fedjax_peft.numerics.random import stream
from fedjax_peft.privacy import lifted as lifting
from fedjax_peft.privacy.laplace import laplace_noise
from fedjax_peft.privacy.mechanism import gaussian, signal_to_noise, summing

_NONE = (
    "The noise of the FRA-LoRA paper gives no privacy guarantee: uploads are not clipped, so one"
    " client can change the average by any amount. fp.privacy.central adds noise with a guarantee."
)


@part
def paper_noise(std: Positive, kind: Literal["gaussian", "laplace"] = "gaussian") -> Privacy:
    """The literal noise of the FRA-LoRA paper on the average product: no privacy guarantee.

    It is for comparisons with the paper only, and warns of that. Clients keep their weights. Where
    an aggregator sums products (FRA, FlexLoRA), the noise is on them alone; otherwise it is on
    every entry of the average. Rows gain ``privacy_noise_std``, and ``snr`` where products are
    truncated.

    Args:
      std: the standard deviation of the noise on an entry of the average.
      kind: the distribution of the noise.

    Raises:
      InputError: on use, as :func:`fedjax_peft.privacy.central`.
    """
    if not is_traced(std):
        warnings.warn(_NONE, stacklevel=2)

    def protect(algorithm: Algorithm, federation: Federation) -> Algorithm:
        return algorithm._replace(aggregator=_noisy(summing(algorithm), std, kind))

    return Privacy(
        "paper_noise",
        "client",
        protect,
        lambda federation, rounds: Guarantee(math.inf, 0.0),
        lambda federation: _NONE,
    )


def _noisy(base: Aggregator, std: Any, kind: str) -> Aggregator:
    """Returns the aggregator with noise on its average."""
    noise = gaussian(std) if kind == "gaussian" else laplace_noise(std / math.sqrt(2))

    def lift(upload: PyTree, template: PyTree, fixed: Params) -> PyTree:
        return lifting.streamed(base.lift(upload, template, fixed), base.name)

    def finish(total: Total, template: PyTree, context: RoundContext, state: PyTree) -> Aggregated:
        zeros = jax.tree.map(jnp.zeros_like, total.value)
        drawn, _ = noise.add(zeros, stream(context.key, "privacy"), (), context.round_index)
        products = lifting.is_product(lift(template, template, context.fixed))
        some = any(jax.tree.leaves(products))
        noisy = jax.tree.map(
            lambda x, e, product: x + total.weight * e if product or not some else x,
            *(total.value, drawn, products),
        )
        result = base.finish(total._replace(value=noisy), template, context, state)
        measured = {"privacy_noise_std": jnp.float32(std)}
        measured |= signal_to_noise(base, result.update, measured["privacy_noise_std"])
        return result._replace(metrics=result.metrics | measured)

    return base._replace(lift=lift, finish=finish, refactor=None)
