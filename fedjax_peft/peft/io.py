"""Adapters in Hugging Face PEFT's file format, for ``PeftModel.from_pretrained``."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

from fedjax_peft.assets import ASSETS
from fedjax_peft.errors import InputError
from fedjax_peft.files import replace_file
from fedjax_peft.models.base import Model
from fedjax_peft.models.hf import FAMILIES, source_name
from fedjax_peft.peft.lora import scaling
from fedjax_peft.typing import Params

__all__ = ["export_peft"]


def export_peft(
    model: Model, params: Params, directory: str | Path, *, base_model: str | None = None
) -> Path:
    """Writes a LoRA adapter and its head as Hugging Face PEFT does; returns the directory.

    The adapter fits the original checkpoint, whatever the start was. After ``init="svd"`` the
    trained factors stand on the residual ``W - s·A₀B₀``, so what is written is
    ``s·(AB - A₀B₀) = s·[A, A₀][B; -B₀]``, an exact adapter of twice the rank.

    Args:
      model: what was trained; its ``trainable`` holds the initial values.
      params: the trained leaves, such as ``Run.params``.
      directory: where ``adapter_config.json`` and ``adapter_model.safetensors`` go.
      base_model: recorded as the base model's hub id or path; by default where it came from.

    Raises:
      InputError: a model without LoRA, or not from a Hugging Face checkpoint; leaves of another
        model.
    """
    _check(model, params)
    family = FAMILIES[model.config["model_type"]]
    options = model.method.options
    scale = scaling(options["rank"], options["alpha"], options["rslora"])
    paths = sorted(n.removesuffix(".lora_a") for n in params if n.endswith(".lora_a"))
    tensors: dict[str, np.ndarray] = {}
    for path in paths:
        a, b = _factors(model, params, path, scale)
        tensors[f"{path}.lora_A.weight"] = a.T
        tensors[f"{path}.lora_B.weight"] = b.T
    rank = tensors[f"{paths[0]}.lora_A.weight"].shape[0]
    for leaf, kind in model.kinds.items():
        if kind == "head":
            name, transposed = source_name(leaf, family)
            value = np.asarray(params[leaf], np.float32)
            tensors[name] = value.T if transposed else value

    came_from = ASSETS[model.name].hub if model.name in ASSETS else model.name
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS",
        "base_model_name_or_path": base_model or came_from,
        "r": rank,
        # The scale stays s: rsLoRA's alpha / sqrt(r) too is written as alpha / r.
        "lora_alpha": scale * rank,
        "use_rslora": False,
        "lora_dropout": options["dropout"],
        "target_modules": paths,
        "modules_to_save": sorted(model.head),
        "init_lora_weights": True,
        "bias": "none",
        "fan_in_fan_out": False,
        "rank_pattern": {},
        "alpha_pattern": {},
        "inference_mode": True,
    }
    target = Path(directory)
    target.mkdir(parents=True, exist_ok=True)
    whole = {f"base_model.model.{n}": np.ascontiguousarray(x) for n, x in tensors.items()}
    replace_file(target / "adapter_model.safetensors", save(whole, metadata={"format": "pt"}))
    text = json.dumps(config, indent=2, sort_keys=True) + "\n"
    replace_file(target / "adapter_config.json", text.encode())
    return target


def _check(model: Model, params: Params) -> None:
    if model.method is None or model.method.name != "lora":
        attached = "no method" if model.method is None else repr(model.method.name)
        raise InputError(
            f"Only LoRA can be written in Hugging Face PEFT's format; the model has {attached}"
            " attached."
        )
    if model.config.get("model_type") not in FAMILIES:
        raise InputError(
            "Hugging Face PEFT's format needs the module names of a Hugging Face model, and this"
            f" model is of no such family ({', '.join(FAMILIES)})."
        )
    if strange := sorted(params.keys() ^ model.trainable.keys()):
        raise InputError(
            f"These parameters are not this model's: {strange[0]!r} is in one of them only"
            f" ({len(strange)} leaves in all)."
        )


def _factors(
    model: Model, params: Params, path: str, scale: float
) -> tuple[np.ndarray, np.ndarray]:
    """Returns (A ``[in, r]``, B ``[r, out]``) such that ``s·AB`` is added to the checkpoint."""

    def leaf(values: Params, name: str) -> np.ndarray:
        return np.asarray(values[f"{path}.{name}"], np.float32)

    # The file holds one s for all directions; a direction may have its own (0: not owned).
    share = leaf(params, "lora_scale") / np.float32(scale)
    a, b = leaf(params, "lora_a"), share[:, None] * leaf(params, "lora_b")
    if model.method.start_shapes_frozen:
        a = np.concatenate([a, leaf(model.trainable, "lora_a")], axis=1)
        b = np.concatenate([b, -leaf(model.trainable, "lora_b")], axis=0)
    return a, b
