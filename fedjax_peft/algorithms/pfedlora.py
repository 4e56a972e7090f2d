"""pFedLoRA (Yi et al. 2023): clients share a small LoRA and keep models of their own.

    client:  θ_k ← θ
             first  E_m passes:  ω_k ← optimizer steps on F_k(ω_k, θ_k), θ_k rests
             then   E_a passes:  θ_k ← optimizer steps on F_k(ω_k, θ_k), ω_k rests
             send θ_k
    server:  θ ← Σ w_k θ_k,   w_k ∝ n_k

θ are LoRA's factors, and ω_k everything else that is trained: the weights of the adapted layers and
the head (:func:`fedjax_peft.peft.lora_with_base`). Training in turns carries knowledge both ways:
the received adapter teaches the client's model, and the client's model teaches the adapter.

In the paper the models ω_k have different architectures, and only the adapter has the same form
everywhere. Here all clients have the same architecture, with values of their own: clients are
lanes of one program. This is the paper's homogeneous case.

Decisions where the source is silent: a round's local steps are divided between the two parts as in
FedRep (``fedrep``), which this is, with the adapter in the place of the body and all other leaves
in that of the head. Both parts use the same optimizer. A client predicts with the received adapter.

This was written from the paper's abstract and summaries (its full text could not be read), and
checked against a loop over clients.
"""

from fedjax_peft import contracts as c
from fedjax_peft.algorithms.checks import checked, model_with
from fedjax_peft.algorithms.fedrep import fedrep
from fedjax_peft.contracts.arguments import Count
from fedjax_peft.numerics.roles import with_head


@checked
def pfedlora(
    optimizer: c.Optimizer,
    *,
    model_epochs: Count = 1,
    adapter_epochs: Count = 1,
    aggregator: c.Aggregator | None = None,
    weights: c.Weights = "size",
) -> c.Algorithm:
    """pFedLoRA: a shared LoRA, and models of the clients' own (needs ``peft.lora_with_base``).

    Args:
      optimizer: the clients' optimizer, for both parts.
      model_epochs: E_m, the share of a round's local steps on the client's own model, in proportion
        to ``adapter_epochs``.
      adapter_epochs: E_a, the share on the adapter; run with ``epochs`` = the sum of both.

    Raises:
      InputError: on use, a model without ``peft.lora_with_base``.
    """
    algorithm = fedrep(
        optimizer,
        head_epochs=model_epochs,
        body_epochs=adapter_epochs,
        aggregator=aggregator,
        weights=weights,
    )
    own = r"^adapter:.*\.base\.(kernel|bias)$"
    roles = with_head("private", shared=r"^adapter:.*\.lora_[ab]$", private=own)
    check = model_with(
        "pfedlora needs a model with LoRA whose adapted layers are trained too: attach"
        " peft.lora_with_base(). For a private head alone there is 'fedrep'.",
        *(r"\.base\.kernel$", r"\.lora_a$"),
    )
    return algorithm._replace(name="pfedlora", roles=roles, check=check)
