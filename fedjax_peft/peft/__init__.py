"""Parameter-efficient fine-tuning: one file per method."""

from fedjax_peft.peft.lora import lora

__all__ = ["lora"]
