"""Every client trains alone: the baseline that federated training has to beat.

    client:  v_k ← optimizer steps on F_k, from where its last round ended;  nothing is sent

It also fine-tunes the result of another run, see :mod:`fedjax_peft.algorithms.fedbabu`.
"""

from typing import Literal

from fedjax_peft import contracts as c
from fedjax_peft.aggregators import mean
from fedjax_peft.algorithms.checks import checked
from fedjax_peft.algorithms.fedavg import averaging
from fedjax_peft.numerics.roles import head_roles

Trained = Literal["all", "head", "adapters"]
"""Which leaves are trained; the others stay as they are."""


@checked
def local(optimizer: c.Optimizer, *, train: Trained = "all") -> c.Algorithm:
    """Baseline without federation: every client trains alone, nothing is sent.

    Args:
      train: everything, the ``head`` only, or the ``adapters`` only.
    """
    rules = trained_as("private", train)
    return averaging("local", optimizer, rules, mean(error=False))


def trained_as(role: Literal["shared", "private"], train: Trained) -> c.Roles:
    """Returns roles by which the trained leaves have one role, and the others are fixed."""
    if train == "all":
        return head_roles(role, adapters=role)
    if train == "adapters":
        return head_roles("frozen", adapters=role)
    return c.Roles(**{role: ("^head:",), "fixed": ("^adapter:",)})
