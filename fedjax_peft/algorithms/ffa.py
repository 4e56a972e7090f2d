"""FFA-LoRA (Sun et al. 2024): A is fixed at its common initial value, only B is trained.

    start:   A_0, the same for all clients
    client:  B_k ← B;  for each local step:  B_k ← optimizer step on F_k(A_0, B_k)
    server:  B ← Σ w_k B_k                       exact:  Σ w_k s A_0 B_k = s A_0 (Σ w_k B_k)

The traffic is half of LoRA's, and there is no aggregation error. The paper does not specify how the
head is treated; by default it is trained and averaged here. This was checked against the formula
above, and against two public implementations: they freeze and average the same leaves.
"""

from fedjax_peft import contracts as c
from fedjax_peft.algorithms.checks import checked, lora_model
from fedjax_peft.algorithms.fedavg import averaging
from fedjax_peft.numerics.roles import HeadPolicy, head_roles


@checked
def ffa(
    optimizer: c.Optimizer,
    *,
    aggregator: c.Aggregator | None = None,
    head: HeadPolicy = "shared",
    weights: c.Weights = "size",
) -> c.Algorithm:
    """FFA-LoRA: only B is trained and averaged, A keeps its initial value; exact averages.

    Raises:
      InputError: on use, a model without LoRA.
    """
    rules = head_roles(head)
    rules = rules._replace(fixed=(*rules.fixed, r"\.lora_a$"))
    check = lora_model("ffa")
    return averaging("ffa", optimizer, rules, aggregator, weights=weights, check=check)
