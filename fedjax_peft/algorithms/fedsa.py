"""FedSA-LoRA (Guo et al. 2025): A is shared, B stays on its client.

    client:  A_k ← A, B_k is kept;  for each local step:  (A_k, B_k) ← optimizer step on F_k
    server:  A ← Σ w_k A_k

The authors find that A learns common knowledge and B learns client-specific knowledge. They keep
the classifier private too; this is also the default here. The traffic is half of LoRA's. Every
client predicts with its personal model, so an aggregation error is not defined. This was checked
against the configuration in the authors' code: ``lora_B`` and the classifier are local.
"""

from fedjax_peft import contracts as c
from fedjax_peft.aggregators import mean
from fedjax_peft.algorithms.checks import checked, lora_model
from fedjax_peft.algorithms.fedavg import averaging
from fedjax_peft.numerics.roles import HeadPolicy, with_head


@checked
def fedsa(
    optimizer: c.Optimizer,
    *,
    aggregator: c.Aggregator | None = None,
    head: HeadPolicy = "private",
    weights: c.Weights = "size",
) -> c.Algorithm:
    """FedSA-LoRA: A is shared, B and the head stay on the client; personal models.

    Raises:
      InputError: on use, a model without LoRA.
    """
    rules = with_head(head, shared=r"\.lora_a$", private=r"\.lora_b$")
    combine, check = aggregator or mean(error=False), lora_model("fedsa")
    return averaging("fedsa", optimizer, rules, combine, weights=weights, check=check)
