"""Writes the golden checkpoints of tiny Llamas that ``bitsandbytes`` 0.50.2 has quantised.

``bitsandbytes`` is not among the test tools. With it, torch and transformers 5.23 installed:

    python tests/golden/prequantized_golden.py     # writes bitsandbytes/nf4, fp4 and int8

Beside each checkpoint, ``values.safetensors`` has the weights as bitsandbytes dequantises them, in
float32.
"""

from pathlib import Path

import bitsandbytes as bnb
import torch
from bitsandbytes import functional
from safetensors.torch import save_file
from transformers import BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

FOLDER = Path(__file__).parent / "bitsandbytes"
SHAPE = {
    "vocab_size": 24,
    "hidden_size": 64,
    "intermediate_size": 96,  # its blocks of 64 go over two outputs
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
}
HOW = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "fp4": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
    "int8": {"load_in_8bit": True},
}


def dequantised(layer: torch.nn.Module) -> torch.Tensor:
    """Returns the weights of a layer, float32 ``[out, in]``."""
    if isinstance(layer, bnb.nn.Linear4bit):
        state = layer.weight.quant_state
        state.dtype = torch.float32
        return functional.dequantize_4bit(layer.weight.data, state)
    scales = layer.weight.SCB if layer.state.SCB is None else layer.state.SCB
    return functional.int8_vectorwise_dequant(layer.weight.data, scales)


def main() -> None:
    torch.manual_seed(0)
    plain = LlamaForCausalLM(LlamaConfig(**SHAPE))
    plain.save_pretrained(FOLDER / "plain")
    for name, how in HOW.items():
        made = LlamaForCausalLM.from_pretrained(
            FOLDER / "plain", quantization_config=BitsAndBytesConfig(**how), device_map="cpu"
        )
        made.save_pretrained(FOLDER / name)
        layers = {
            path: layer
            for path, layer in made.named_modules()
            if isinstance(layer, bnb.nn.Linear4bit | bnb.nn.Linear8bitLt)
        }
        values = {f"{path}.weight": dequantised(layer) for path, layer in layers.items()}
        save_file(
            {k: v.float().contiguous() for k, v in values.items()},
            FOLDER / name / "values.safetensors",
        )
    for file in (FOLDER / "plain").iterdir():
        file.unlink()
    (FOLDER / "plain").rmdir()


if __name__ == "__main__":
    main()
