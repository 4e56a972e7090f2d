"""Adapters in Hugging Face PEFT's file format, for ``PeftModel.from_pretrained``.

A directory holds ``adapter_config.json`` and ``adapter_model.safetensors``. An adapter fits the
original checkpoint, whatever its initial values were. ``labels.json`` has ``id2label`` and
``label2id`` of the head: PEFT's config has no field for the names of classes, and transformers
would take a directory with a ``config.json`` for a whole model.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_peft.contracts import Params
from fedjax_peft.models.base import Model
from fedjax_peft.models.hub import origin
from fedjax_peft.models.modules import submodule, submodules
from fedjax_peft.models.names import source_name
from fedjax_peft.models.registry import FAMILIES
from fedjax_peft.peft.cores import CoreLinear
from fedjax_peft.peft.io.files import (
    LABELS,
    Tensors,
    head_tensors,
    to_torch,
    write_json,
    write_tensors,
)
from fedjax_peft.peft.io.layouts import LAYOUTS
from fedjax_peft.peft.lora import by_pattern, scaling
from fedjax_peft.peft.lora_sum import LoRASumLinear
from fedjax_peft.support.errors import InputError

_Content = tuple[Tensors, dict[str, Any]]
"""(tensors by torch name, config fields)."""

_TASKS = {
    "ForSequenceClassification": "SEQ_CLS",
    "ForTokenClassification": "TOKEN_CLS",
    "ForQuestionAnswering": "QUESTION_ANS",
    "LMHeadModel": "CAUSAL_LM",
    "ForCausalLM": "CAUSAL_LM",
}
"""The end of Hugging Face's class name -> PEFT's task type. PEFT has none for images."""


def write_peft(
    model: Model,
    params: Params,
    directory: Path,
    *,
    architecture: str,
    base_model: str | None = None,
) -> None:
    """Writes an adapter and its head into an existing directory, as Hugging Face PEFT does.

    Args:
      model: with a method attached that the format can hold; its ``trainable`` holds the initial
        values.
      architecture: ``registry.class_name`` of the model.
    """
    contents = {"ia3": _ia3, "prompt_tuning": _prompt}
    contents |= dict.fromkeys(("lora_sb", "lora_sum", "lora_xs", "ravan"), _product)
    contents |= dict.fromkeys(LAYOUTS, _by_layout)
    tensors, config = contents.get(model.method.name, _low_rank)(model, params)
    # PEFT wraps the model in two modules, or in one module for a prompt. What layers share is in
    # the outer one.
    prefix = "base_model." if model.method.name == "prompt_tuning" else "base_model.model."
    outer = {n: "" if n == "prompt_embeddings" else "base_model." for n in tensors if "." not in n}
    whole = {outer.get(n, prefix) + n: x for n, x in tensors.items()}
    whole |= {prefix + n: x for n, x in head_tensors(model, params).items()}
    config |= {
        "task_type": next((t for end, t in _TASKS.items() if architecture.endswith(end)), None),
        "base_model_name_or_path": base_model or origin(model),
        "modules_to_save": sorted(model.head) or None,
        "inference_mode": True,
    }
    tensors = {n: np.ascontiguousarray(x) for n, x in whole.items()}
    write_tensors(directory / "adapter_model.safetensors", tensors)
    write_json(directory / "adapter_config.json", config)
    if model.labels:
        names = dict(enumerate(model.labels))
        labels = {"id2label": names, "label2id": {name: i for i, name in names.items()}}
        write_json(directory / LABELS, labels)


# ----------------------------------------------------------------------------- the methods' files


def _low_rank(model: Model, params: Params) -> _Content:
    """Returns the contents of a LoRA or DoRA adapter.

    After ``init="svd"`` or ``"qr"`` the trained factors are added to the residual ``W - s·A₀B₀``.
    The adapter of the original W is then ``s·(AB - A₀B₀) = s·[A, A₀][B; -B₀]``, exact and of twice
    the rank.
    Updates of parts of a fused projection become one update of the summed rank, exact too: ``[A_q,
    A_v]``, and each B in the columns of its part.
    """
    options = model.method.options
    sparse = [n for n, x in params.items() if n.endswith(".sparse_values") and np.any(x)]
    if sparse:
        raise InputError(
            f"A LoRA cannot hold the sparse values of SLoRA's first stage ({sparse[0]!r} and"
            f" {len(sparse) - 1} others): export with format='merged', or train until the second"
            " stage."
        )
    fused = options["parts"] is not None
    names = sorted(n.removesuffix(".lora_a") for n in params if n.endswith(".lora_a"))
    sites: dict[str, list[str]] = {}
    for name in names:
        sites.setdefault(name.rpartition(".")[0] if fused else name, []).append(name)
    # Only unchanged factors keep the form of rsLoRA; s is the same in both forms.
    rslora = options["rslora"] and not fused and not model.method.start_shapes_frozen

    tensors, ranks, alphas = {}, {}, {}
    for path, updates in sites.items():
        alpha = by_pattern(options["alpha_pattern"], path, options["alpha"])
        rank = by_pattern(options["rank_pattern"], path, options["rank"])
        scale = scaling(rank, alpha, options["rslora"])
        factors = {name: _factors(model, params, name, scale) for name in updates}
        a, b = _joined(model, path, factors) if fused else factors[path]
        tensors[f"{path}.lora_A.weight"] = a.T
        tensors[f"{path}.lora_B.weight"] = b.T
        ranks[path] = a.shape[1]
        alphas[path] = (
            alpha if a.shape[1] == rank and rslora == options["rslora"] else (scale * a.shape[1])
        )
        if model.method.name == "dora":
            tensors[f"{path}.lora_magnitude_vector"] = to_torch(params[f"{path}.lora_magnitude"])
    return tensors, {
        **_lora_config(model, ranks, alphas),
        "use_rslora": rslora,
        "use_dora": model.method.name == "dora",
        "lora_dropout": options["dropout"],
    }


def _lora_config(
    model: Model, ranks: Mapping[str, int], alphas: Mapping[str, float]
) -> dict[str, Any]:
    """Returns the config of a plain LoRA, from the ranks and alphas of its layers by path."""
    rank, alpha = (Counter(x.values()).most_common(1)[0][0] for x in (ranks, alphas))
    return {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": alpha,
        "rank_pattern": {path: r for path, r in ranks.items() if r != rank},
        "alpha_pattern": {path: x for path, x in alphas.items() if x != alpha},
        "use_rslora": False,
        "use_dora": False,
        "lora_dropout": 0.0,
        "target_modules": list(ranks),
        "fan_in_fan_out": _stored_as_ours(model, ranks),
        "init_lora_weights": True,
        "bias": "none",
    }


def _factors(
    model: Model, params: Params, path: str, scale: float
) -> tuple[np.ndarray, np.ndarray]:
    """Returns (A ``[in, r]``, B ``[r, out]``) such that ``s·AB`` is added to the checkpoint."""

    def leaf(values: Params, name: str) -> np.ndarray:
        return to_torch(values[f"{path}.{name}"])

    # The file holds one s for all directions; here directions may differ (0: not owned).
    share = leaf(params, "lora_scale") / np.float32(scale)
    a, b = leaf(params, "lora_a"), share[:, None] * leaf(params, "lora_b")
    if model.method.start_shapes_frozen:
        a = np.concatenate([a, leaf(model.trainable, "lora_a")], axis=1)
        b = np.concatenate([b, -leaf(model.trainable, "lora_b")], axis=0)
    return a, b


def _joined(
    model: Model, path: str, factors: dict[str, tuple[np.ndarray, np.ndarray]]
) -> tuple[np.ndarray, np.ndarray]:
    """Returns one A ``[in, Σr]`` and B ``[Σr, out]`` for the updates of a projection's parts."""
    parts = submodule(model.module(), path).base.parts
    rows = []
    for name, (_, b) in factors.items():
        blocks = [b if f"{path}.{part}" == name else np.zeros_like(b) for part in parts]
        rows.append(np.concatenate(blocks, axis=1))
    return np.concatenate([a for a, _ in factors.values()], axis=1), np.concatenate(rows, axis=0)


def _product(model: Model, params: Params) -> _Content:
    """Returns the contents of a LoRA with what layers with ``factors`` add to W; s is 1."""
    module, tensors = model.replace(trainable=dict(params)).module(), {}
    ranks: dict[str, int] = {}
    for path, site in sorted(submodules(module, (CoreLinear, LoRASumLinear)), key=itemgetter(0)):
        a, b = site.factors()
        tensors[f"{path}.lora_A.weight"] = to_torch(a, transposed=True)
        tensors[f"{path}.lora_B.weight"] = to_torch(b, transposed=True)
        ranks[path] = a.shape[1]
    return tensors, _lora_config(model, ranks, ranks)


def _by_layout(model: Model, params: Params) -> _Content:
    """Returns the contents of a method of which each layer has its own tensors."""
    layout, _ = LAYOUTS[model.method.name]
    ends = {end: f".{leaf}" for end, (leaf, _) in layout.tensors.items()}
    first = next(iter(ends.values()))
    paths = sorted(n.removesuffix(first) for n in params if n.endswith(first))
    stored = _stored_as_ours(model, paths)
    if stored and not layout.in_conv1d:
        raise InputError(
            f"Hugging Face PEFT has {layout.peft_type} for torch.nn.Linear alone, and the layers of"
            f" {model.config['model_type']} are of the class Conv1D: export with format='merged'."
        )
    tensors: Tensors = {}
    for end, leaf in ends.items():
        found = {f"{path}.{end}": np.asarray(params[path + leaf]).T for path in paths}
        if end in layout.shared:  # the layers have slices of one tensor
            found = {end: max(found.values(), key=np.size)}
        tensors |= found
    options = {field: model.method.options[name] for field, (name, _) in layout.options.items()}
    stored_as = {"fan_in_fan_out": stored} if layout.in_conv1d else {}
    config = {"peft_type": layout.peft_type, "target_modules": paths, **layout.constant}
    return tensors, config | stored_as | options


def _ia3(model: Model, params: Params) -> _Content:
    module = model.module()
    paths = sorted(n.removesuffix(".ia3_l") for n in params if n.endswith(".ia3_l"))
    inner = [path for path in paths if submodule(module, path).feed_forward]
    tensors = {}
    for path in paths:
        scale = to_torch(params[f"{path}.ia3_l"])
        tensors[f"{path}.ia3_l"] = scale[None] if path in inner else scale[:, None]
    return tensors, {
        "peft_type": "IA3",
        "target_modules": paths,
        "feedforward_modules": inner,
        "fan_in_fan_out": _stored_as_ours(model, paths),
        "init_ia3_weights": True,
    }


def _prompt(model: Model, params: Params) -> _Content:
    (leaf,) = (n for n, kind in model.kinds.items() if kind == "adapter")
    tokens, width = params[leaf].shape
    return {"prompt_embeddings": to_torch(params[leaf])}, {
        "peft_type": "PROMPT_TUNING",
        "num_virtual_tokens": tokens,
        "token_dim": width,
        "num_transformer_submodules": 1,
        "prompt_tuning_init": "RANDOM",
    }


def _stored_as_ours(model: Model, paths: Iterable[str]) -> bool:
    """Returns whether the checkpoint stores the kernels ``[in, out]``, as GPT-2's Conv1D does."""
    family = FAMILIES[model.config["model_type"]]
    return not any(source_name(f"{path}.kernel", family)[1] for path in paths)
