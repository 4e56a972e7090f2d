"""Attacks of hostile clients: one file per attack, each a wrapper of any algorithm (``Attack``)."""

from fedjax_peft.attacks.alie import alie
from fedjax_peft.attacks.backdoor import backdoor
from fedjax_peft.attacks.gaussian import gaussian
from fedjax_peft.attacks.ipm import ipm
from fedjax_peft.attacks.label_flip import label_flip
from fedjax_peft.attacks.min_max import min_max
from fedjax_peft.attacks.scaled import scaled
from fedjax_peft.attacks.sign_flip import sign_flip

__all__ = ["alie", "backdoor", "gaussian", "ipm", "label_flip", "min_max", "scaled", "sign_flip"]
