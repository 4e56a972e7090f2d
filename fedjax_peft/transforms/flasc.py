"""FLASC: sparse communication in both directions, dense local training (Kuo et al. 2024).

    clients receive   θ_0 + top_{d_down}(θ_t - θ_0)
    clients train all entries
    clients send      top_{d_up}(Δ_k)

The entries are chosen by magnitude, among all leaves together; nothing is remembered.

Decision: the paper's download keeps the largest entries of the weights themselves, with LoRA's A
among them. Here it keeps the largest entries of their change, since the start follows from the
seed; B starts at 0, so for B the two are the same.
"""

from fedjax_peft.contracts import Transform
from fedjax_peft.contracts.arguments import PositiveShare
from fedjax_peft.contracts.part import part
from fedjax_peft.numerics.hyperparameters import constants
from fedjax_peft.transforms.chain import chain
from fedjax_peft.transforms.downlink import downlink
from fedjax_peft.transforms.top_k import top_k


@part
@constants("up", "down")
def flasc(up: PositiveShare = 0.25, down: PositiveShare = 0.25) -> Transform:
    """Sends the largest entries of the change, and receives the largest of the model's (FLASC).

    On the wire, both ways: 32 bits for each entry, and indices or a bitmap, whichever is smaller.

    Args:
      up: share of the entries that a client sends. It cannot be a run-time value.
      down: share of the entries that it receives; likewise.
    """

    def sparse(share: float) -> Transform:
        return top_k(share, error_feedback=False, across_leaves=True)

    return chain(downlink(sparse(down)), sparse(up))._replace(name="flasc")
