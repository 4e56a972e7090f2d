"""Fed-SB (Singhal et al. 2025): only the r x r core of LoRA-SB is trained and averaged.

    start:   A, R, B from the SVD of the first full gradient (:mod:`fedjax_peft.peft.lora_sb`)
    client:  R_k ← R;  for each local step:  R_k ← optimizer step on F_k(A, R_k, B)     A, B rest
    server:  R ← (1/K) Σ R_k              exact:  (1/K) Σ A R_k B = A ((1/K) Σ R_k) B

A client sends r² numbers for each adapted matrix, whatever the size of the model and the number of
clients. With differential privacy the noise on R is not multiplied by noise on another factor.

The mean is unweighted, as in the paper. The head is not part of the method; by default it is
trained and averaged here, with the same equal weights. The paper also lets clients have cores of
different ranks; here all have the same.

The authors' code of Fed-SB could not be read. The start was checked against their code of LoRA-SB,
and the average against the formula above, from the paper's abstract and project page.
"""

from fedjax_peft import contracts as c
from fedjax_peft.algorithms.checks import checked, model_with
from fedjax_peft.algorithms.fedavg import averaging
from fedjax_peft.numerics.roles import HeadPolicy, head_roles


@checked
def fedsb(
    optimizer: c.Optimizer,
    *,
    aggregator: c.Aggregator | None = None,
    head: HeadPolicy = "shared",
    weights: c.Weights = "uniform",
) -> c.Algorithm:
    """Fed-SB: the cores of ``lora_sb`` are trained and averaged; exact averages.

    Raises:
      InputError: on use, a model without LoRA-SB.
    """
    check = model_with(
        "'fedsb' averages the cores of LoRA-SB, and this model has none: attach fp.peft.lora_sb(),"
        " or use 'fedavg'.",
        r"\.sb_r$",
    )
    return averaging("fedsb", optimizer, head_roles(head), aggregator, weights=weights, check=check)
