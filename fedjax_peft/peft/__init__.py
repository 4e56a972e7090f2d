"""Parameter-efficient fine-tuning: one file per method."""

from fedjax_peft.peft.bottleneck import bottleneck, houlsby, opendelta, pfeiffer
from fedjax_peft.peft.dora import dora
from fedjax_peft.peft.dual import dual
from fedjax_peft.peft.ia3 import ia3
from fedjax_peft.peft.io.pretrained import pretrained
from fedjax_peft.peft.lora import lora
from fedjax_peft.peft.prefix import prefix_tuning
from fedjax_peft.peft.prompt import prompt_tuning
from fedjax_peft.peft.selective import bitfit, full, head_only, layer_norm

__all__ = [
    "bitfit",
    "bottleneck",
    "dora",
    "dual",
    "full",
    "head_only",
    "houlsby",
    "ia3",
    "layer_norm",
    "lora",
    "opendelta",
    "pfeiffer",
    "prefix_tuning",
    "pretrained",
    "prompt_tuning",
]
