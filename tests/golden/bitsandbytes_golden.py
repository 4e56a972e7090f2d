"""Writes the golden file of quantised matrices: codes and scales of ``bitsandbytes`` 0.50.2.

``bitsandbytes`` is not among the test tools. With it and torch installed:

    python tests/golden/bitsandbytes_golden.py            # writes bitsandbytes/matrices.safetensors

Matrices are torch's ``[out, in]``. The code of the scales (``dynamic_map``) is stored as well.
"""

from pathlib import Path

import bitsandbytes.functional as functional
import torch
from safetensors.torch import save_file

FILE = Path(__file__).parent / "bitsandbytes" / "matrices.safetensors"


def main() -> None:
    torch.manual_seed(0)
    found = {"dynamic_map": functional.create_dynamic_map()}
    # One block of zeros; heavy tails; scales of many sizes.
    normal = torch.randn(40, 128)
    normal[3, :64] = 0
    tails = torch.randn(24, 192) ** 3 * torch.logspace(-2, 1, 24)[:, None]
    for name, matrix in {"normal": normal, "tails": tails}.items():
        codes, state = functional.quantize_4bit(
            matrix, blocksize=64, quant_type="nf4", compress_statistics=True
        )
        found |= {
            f"{name}.matrix": matrix,
            f"{name}.nf4.codes": codes.reshape(-1),
            f"{name}.nf4.scale_codes": state.absmax,
            f"{name}.nf4.scale_sizes": state.state2.absmax,
            f"{name}.nf4.scale_mean": state.offset.reshape(1),
            f"{name}.nf4.values": functional.dequantize_4bit(codes, state),
        }
        codes, scales, _ = functional.int8_vectorwise_quant(matrix)
        values = functional.int8_vectorwise_dequant(codes, scales)
        found |= {f"{name}.int8.codes": codes, f"{name}.int8.values": values}
    save_file({name: x.contiguous() for name, x in found.items()}, FILE)


if __name__ == "__main__":
    main()
