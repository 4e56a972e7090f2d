"""FFA-LoRA (Sun et al. 2024): A is fixed at its shared start, only B is trained.

    start:   A_0, the same for all clients
    client:  B_k ← B;  for each local step:  B_k ← optimizer step on F_k(A_0, B_k)
    server:  B ← Σ w_k B_k                       exact:  Σ w_k s A_0 B_k = s A_0 (Σ w_k B_k)

Half of LoRA's traffic, and no aggregation error. The paper does not say how the head is treated; it
is trained and averaged here unless told otherwise. Checked against the formula above, and against
what two public implementations freeze and average.
"""

import optax

from fedjax_peft.algorithms.checks import checked, lora_model
from fedjax_peft.algorithms.common import Weights
from fedjax_peft.algorithms.fedavg import averaging
from fedjax_peft.roles import HeadPolicy, head_roles
from fedjax_peft.typing import Aggregator, Algorithm

__all__ = ["ffa"]


@checked
def ffa(
    optimizer: optax.GradientTransformation,
    *,
    aggregator: Aggregator | None = None,
    head: HeadPolicy = "shared",
    weights: Weights = "size",
) -> Algorithm:
    """FFA-LoRA: only B is trained and averaged, A stays at its start; exact averages.

    Args:
      optimizer: the clients' optimizer.

    Raises:
      InputError: on use, a model without LoRA.
    """
    rules = head_roles(head)
    rules = rules._replace(fixed=(*rules.fixed, r"\.lora_a$"))
    algorithm = averaging("ffa", optimizer, rules, aggregator)
    return algorithm._replace(weights=weights, check=lora_model("ffa"))
