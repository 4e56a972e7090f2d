"""Label flipping (Tolpegin et al. 2020; Fang et al. 2020): hostile clients train on wrong labels.

    y  ←  C - 1 - y          of C classes; or one class only: y = source  →  target

The clients follow the protocol otherwise. The examples of all clients stay as they are on the
device; the labels are changed inside the local step.
"""

import jax.numpy as jnp
from jax import Array

from fedjax_peft.attacks.common import check_class, check_labels, make_attack, on_batches
from fedjax_peft.contracts import Algorithm, Attack, Batch, Federation, Wrapped
from fedjax_peft.contracts.arguments import FromZero, Share
from fedjax_peft.contracts.part import part
from fedjax_peft.support.errors import InputError


@part
def label_flip(
    share: Share,
    *,
    source: FromZero | None = None,
    target: FromZero | None = None,
    seed: FromZero = 0,
) -> Attack:
    """Hostile clients train on wrong labels: class c becomes class ``classes - 1 - c``.

    Training metrics of hostile clients are about these labels.

    Args:
      share: the share of hostile clients, ``round(share * clients)`` of them.
      source: change only examples of this class; needs ``target``.
      target: the class that they are given.
      seed: chooses the hostile clients.

    Raises:
      InputError: one of ``source`` and ``target`` alone; on use, examples without labels, or a
        class that does not exist.
    """
    if (source is None) != (target is None):
        raise InputError(
            "label_flip needs both source and target, or neither of them: class c then becomes"
            " class classes - 1 - c."
        )

    def wrap(algorithm: Algorithm, federation: Federation, who: Array) -> Wrapped:
        check_labels("label_flip", federation)
        for name, value in (("source", source), ("target", target)):
            if value is not None:
                check_class("label_flip", name, value, federation)

        def change(batch: Batch, hostile: Array) -> Batch:
            labels = batch["labels"]
            if source is None or target is None:
                # Tokens without a label have a negative one.
                wrong = jnp.where(labels < 0, labels, federation.classes - 1 - labels)
            else:
                wrong = jnp.where(labels == source, target, labels)
            return {**batch, "labels": jnp.where(hostile, wrong, labels).astype(labels.dtype)}

        return on_batches(algorithm, who, change)

    return make_attack("label_flip", share, seed, wrap)
