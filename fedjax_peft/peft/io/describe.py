"""How to load an export with other libraries, and notes on its files."""

import json
from pathlib import Path

from fedjax_peft.models.base import Model
from fedjax_peft.models.hub import origin
from fedjax_peft.models.registry import class_name
from fedjax_peft.peft.io.export import Format
from fedjax_peft.peft.io.hfpeft import LABELS

__all__ = ["describe", "snippet"]

_AUTO = (
    "ForSequenceClassification",
    "ForTokenClassification",
    "ForQuestionAnswering",
    "ForImageClassification",
)
"""Ends of Hugging Face's class names that ``AutoModel...`` has too."""


def describe(model: Model, directory: str | Path, format: Format) -> str:
    """Returns a description of an export: its rank and why, and the lines that load it.

    Args:
      model: the exported model.
      directory: of the export; for exports of several clients, the directory of one client.
      format: of the export.
    """
    lines = [*_notes(model, Path(directory), format), "Load it in Python:", ""]
    lines += [f"    {line}" if line else "" for line in snippet(model, directory, format)]
    return "\n".join(lines)


def snippet(model: Model, directory: str | Path, format: Format) -> list[str]:
    """Returns the lines of Python that load an export of a model."""
    auto, here, base = _auto_class(model), str(directory), origin(model)
    if format == "merged":
        return [f"from transformers import {auto}", f"model = {auto}.from_pretrained({here!r})"]
    if format == "adapterhub":
        return [
            "import adapters",
            f"from transformers import {auto}",
            f"model = {auto}.from_pretrained({base!r}, num_labels={len(model.labels) or None})",
            "adapters.init(model)",
            f"model.load_adapter({here!r}, set_active=True)",
        ]
    named = bool(model.labels)
    labels = f"json.loads(Path({str(Path(here) / LABELS)!r}).read_text())"
    return [
        *(["import json", "from pathlib import Path"] if named else []),
        "from peft import PeftModel",
        f"from transformers import {auto}",
        *([f"labels = {labels}['id2label']"] if named else []),
        *(["id2label = {int(i): name for i, name in labels.items()}"] if named else []),
        *(["label2id = {name: i for i, name in id2label.items()}"] if named else []),
        f"base = {auto}.from_pretrained("
        f"{base!r}{', id2label=id2label, label2id=label2id' if named else ''})",
        f"model = PeftModel.from_pretrained(base, {here!r})",
    ]


def _auto_class(model: Model) -> str:
    name = class_name(model)
    found = next((end for end in _AUTO if name.endswith(end)), None)
    return f"AutoModel{found}" if found else "AutoModelForCausalLM"


def _notes(model: Model, directory: Path, format: Format) -> list[str]:
    """Returns sentences on the rank in the file, for a low-rank adapter."""
    low_rank = ("lora", "dora", "lora_sb", "lora_sum", "ravan", "slora")
    if format != "peft" or model.method is None or model.method.name not in low_rank:
        return []
    rank = json.loads((directory / "adapter_config.json").read_text())["r"]
    if model.method.name in ("lora_sb", "ravan"):
        return [f"LoRA of rank {rank}: the products of bases and trained cores."]
    trained = model.method.options["rank"]
    if model.method.name == "lora_sum":
        names = ", ".join(model.method.options["names"])
        return [f"LoRA of rank {rank}: the sum of the LoRAs {names} of rank {trained}."]
    reasons = []
    if model.method.options["parts"] is not None:
        reasons.append("the updates of the parts of a fused projection are joined into one")
    if model.method.start_shapes_frozen:
        reasons.append(
            "the trained factors started from a part of the weights, and as many directions again"
            " take that start away, so that the adapter fits the original checkpoint"
        )
    why = f", trained with rank {trained}: {'; '.join(reasons)}" if reasons else ""
    return [f"LoRA of rank {rank}{why}."]
