"""Parameter-efficient fine-tuning: one file per method."""

# activation_start and gradient_start are not in __all__: they are no methods, but starts of one.
from fedjax_peft.peft.activation_start import activation_start as activation_start
from fedjax_peft.peft.bottleneck import bottleneck, houlsby, opendelta, pfeiffer
from fedjax_peft.peft.dora import dora
from fedjax_peft.peft.dual import dual
from fedjax_peft.peft.dual_lora import dual_lora
from fedjax_peft.peft.hira import hira
from fedjax_peft.peft.ia3 import ia3
from fedjax_peft.peft.io.pretrained import pretrained
from fedjax_peft.peft.lora import lora
from fedjax_peft.peft.lora_experts import lora_experts
from fedjax_peft.peft.lora_sb import gradient_start as gradient_start
from fedjax_peft.peft.lora_sb import lora_sb
from fedjax_peft.peft.lora_sum import lora_sum
from fedjax_peft.peft.lora_with_base import lora_with_base
from fedjax_peft.peft.lora_xs import lora_xs
from fedjax_peft.peft.miss import miss
from fedjax_peft.peft.mixed_lora import mixed_lora
from fedjax_peft.peft.oft import oft
from fedjax_peft.peft.prefix import prefix_tuning
from fedjax_peft.peft.prompt import prompt_tuning
from fedjax_peft.peft.ravan import ravan
from fedjax_peft.peft.selective import bitfit, full, head_only, layer_norm
from fedjax_peft.peft.shira import shira
from fedjax_peft.peft.slora import slora
from fedjax_peft.peft.vera import vera

__all__ = [
    "bitfit",
    "bottleneck",
    "dora",
    "dual",
    "dual_lora",
    "full",
    "head_only",
    "hira",
    "houlsby",
    "ia3",
    "layer_norm",
    "lora",
    "lora_experts",
    "lora_sb",
    "lora_sum",
    "lora_with_base",
    "lora_xs",
    "miss",
    "mixed_lora",
    "oft",
    "opendelta",
    "pfeiffer",
    "prefix_tuning",
    "pretrained",
    "prompt_tuning",
    "ravan",
    "shira",
    "slora",
    "vera",
]
