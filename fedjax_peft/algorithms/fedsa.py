"""FedSA-LoRA (Guo et al. 2025): A is shared, B stays with its client.

    client:  A_k ← A, B_k as it was;  for each local step:  (A_k, B_k) ← optimizer step on F_k
    server:  A ← Σ w_k A_k

The authors find that A learns common knowledge and B knowledge of one client. They keep the
classifier private as well; so does the default here. Half of LoRA's traffic. Every client predicts
with a model of its own, so an aggregation error is not defined. Checked against the configuration
in the authors' code: ``lora_B`` and the classifier are local.
"""

import optax

from fedjax_peft.aggregators import mean
from fedjax_peft.algorithms.checks import checked, lora_model
from fedjax_peft.algorithms.common import Weights
from fedjax_peft.algorithms.fedavg import averaging
from fedjax_peft.roles import HeadPolicy
from fedjax_peft.typing import Aggregator, Algorithm, Roles

__all__ = ["fedsa"]


@checked
def fedsa(
    optimizer: optax.GradientTransformation,
    *,
    aggregator: Aggregator | None = None,
    head: HeadPolicy = "private",
    weights: Weights = "size",
) -> Algorithm:
    """FedSA-LoRA: A is shared, B and the head stay with their client; personal models.

    Args:
      optimizer: the clients' optimizer.

    Raises:
      InputError: on use, a model without LoRA.
    """
    a, b, heads = r"\.lora_a$", r"\.lora_b$", "^head:"
    rules = {
        "shared": Roles(shared=(a, heads), private=(b,)),
        "private": Roles(shared=(a,), private=(b, heads)),
        "frozen": Roles(shared=(a,), private=(b,), fixed=(heads,)),
    }[head]
    algorithm = averaging("fedsa", optimizer, rules, aggregator or mean(error=False))
    return algorithm._replace(weights=weights, check=lora_model("fedsa"))
