"""How to load an export with other libraries, notes on its files, and its model card."""

import json
from pathlib import Path
from typing import Any

from fedjax_peft.models.base import Model
from fedjax_peft.models.hub import origin
from fedjax_peft.models.registry import class_name
from fedjax_peft.peft.io.files import LABELS, Format
from fedjax_peft.support.display import markdown
from fedjax_peft.support.version import __version__

_TEXTS = ["The lamp works very well.", "The kettle broke at once."]
_TRIES: dict[str, tuple[list[Any], list[str]]] = {
    "AutoModelForSequenceClassification": (
        _TEXTS,
        [
            "    logits = model(**inputs).logits[0]",
            "print(text, '->', model.config.id2label[int(logits.argmax())])",
        ],
    ),
    "AutoModelForTokenClassification": (
        _TEXTS,
        [
            "    found = model(**inputs).logits[0].argmax(-1).tolist()",
            "tokens = tokenizer.convert_ids_to_tokens(inputs['input_ids'][0])",
            "print([(t, model.config.id2label[i]) for t, i in zip(tokens, found)])",
        ],
    ),
    "AutoModelForQuestionAnswering": (
        [("What works?", _TEXTS[0]), ("What broke?", _TEXTS[1])],
        [
            "    outputs = model(**inputs)",
            "start, end = int(outputs.start_logits.argmax()), int(outputs.end_logits.argmax())",
            "print(text, '->', tokenizer.decode(inputs['input_ids'][0][start : end + 1]))",
        ],
    ),
    "AutoModelForCausalLM": (
        _TEXTS,
        [
            "    written = model.generate(**inputs, max_new_tokens=20)[0]",
            "print(tokenizer.decode(written))",
        ],
    ),
}
"""Class -> the texts to try, and the lines that read one; the first is computed without gradients.
One text at a time needs no padding, for which some tokenizers have no token."""
_PIPELINES = {
    "AutoModelForSequenceClassification": "text-classification",
    "AutoModelForTokenClassification": "token-classification",
    "AutoModelForQuestionAnswering": "question-answering",
    "AutoModelForImageClassification": "image-classification",
    "AutoModelForCausalLM": "text-generation",
}
"""Class -> its pipeline. The ends of the names are those of the families' classes."""


def describe(model: Model, directory: str | Path, format: Format) -> str:
    """Returns a description of an export: its rank and why, and the lines that load it.

    Args:
      directory: of the export; for exports of several clients, the directory of one client.
    """
    lines = [*_notes(model, Path(directory), format), "Load it in Python:", ""]
    lines += [f"    {line}" if line else "" for line in snippet(model, directory, format)]
    return "\n".join(lines)


def snippet(
    model: Model, directory: str | Path, format: Format, base_model: str | None = None
) -> list[str]:
    """Returns the lines of Python that load an export of a model and try it with two texts."""
    auto, here, base = _auto_class(model), str(directory), base_model or origin(model)
    tries = None if model.tokenizer is None else _TRIES.get(auto)
    imports = [f"from transformers import {auto}{', AutoTokenizer' if tries else ''}"]
    names = f", id2label=dict(enumerate({list(model.labels)!r}))" if model.labels else ""
    if format == "merged":
        lines = [f"model = {auto}.from_pretrained({here!r})"]
    elif format == "adapterhub":
        imports.insert(0, "import adapters")
        lines = [
            f"model = {auto}.from_pretrained({base!r}{names})",
            "adapters.init(model)",
            f"model.load_adapter({here!r}, set_active=True, use_safetensors=True)",
        ]
    else:
        imports.insert(0, "from peft import PeftModel")
        if model.labels:
            imports = ["import json", "from pathlib import Path", *imports]
            labels = f"json.loads(Path({str(Path(here) / LABELS)!r}).read_text())"
            lines = [
                f"labels = {labels}['id2label']",
                "id2label = {int(i): name for i, name in labels.items()}",
                "label2id = {name: i for i, name in id2label.items()}",
            ]
            names = ", id2label=id2label, label2id=label2id"
        else:
            lines = []
        lines += [
            f"base = {auto}.from_pretrained({base!r}{names})",
            f"model = PeftModel.from_pretrained(base, {here!r}).eval()",
        ]
    if tries is None:
        return [*imports, *lines]
    inputs, shown = tries
    return [
        "import torch",
        *imports,
        *lines,
        f"tokenizer = AutoTokenizer.from_pretrained({here!r})",
        f"for text in {inputs!r}:",
        "    inputs = tokenizer(text, return_tensors='pt')"
        if isinstance(inputs[0], str)
        else "    inputs = tokenizer(*text, return_tensors='pt')",
        "    with torch.no_grad():",
        *(f"    {line}" for line in shown),
    ]


def card(model: Model, format: Format, base_model: str | None = None) -> str:
    """Returns the text of a model card, ``README.md``: what was trained, and how to load it."""
    found = fields(model, format, base_model)
    # JSON is YAML, also of strange names.
    lines = [f"{name}: {json.dumps(value)}" for name, value in found.items()]
    return "\n".join(["---", *lines, "---", "", *body(model, format, base_model)])


def fields(model: Model, format: Format, base_model: str | None = None) -> dict[str, Any]:
    """Returns the metadata of a model card that follow from the model."""
    libraries = {"peft": "peft", "adapterhub": "adapters", "merged": "transformers"}
    auto = _auto_class(model)
    return {
        "base_model": base_model or origin(model),
        "library_name": libraries[format],
        **({"pipeline_tag": _PIPELINES[auto]} if auto in _PIPELINES else {}),
        "tags": ["fedjax_peft", "federated-learning", _method_name(model)],
    }


def body(model: Model, format: Format, base_model: str | None = None) -> list[str]:
    """Returns the lines of a model card that follow from the model: a title, and how to load it."""
    base, name, counts = base_model or origin(model), _method_name(model), model.counts()
    return [
        f"# {markdown(name)} of {markdown(base)}, trained by federated learning",
        "",
        f"Trained in a simulation with fedjax_peft {__version__}: {counts['adapter']:,} parameters"
        f" of adapters and {counts['head']:,} of the head.",
        *([f"Classes: {markdown(', '.join(model.labels))}."] if model.labels else []),
        "",
        "In this folder:",
        "",
        "```python",
        *snippet(model, ".", format, base_model),
        "```",
        "",
    ]


def _method_name(model: Model) -> str:
    return "full" if model.method is None else model.method.name


def _auto_class(model: Model) -> str:
    name = class_name(model)
    ends = {auto: auto.removeprefix("AutoModel") for auto in _PIPELINES}
    return next((auto for auto, end in ends.items() if name.endswith(end)), "AutoModelForCausalLM")


def _notes(model: Model, directory: Path, format: Format) -> list[str]:
    """Returns sentences on the rank in the file, for a low-rank adapter."""
    low_rank = ("lora", "dora", "lora_sb", "lora_sum", "lora_xs", "ravan", "slora")
    if format != "peft" or model.method is None or model.method.name not in low_rank:
        return []
    rank = json.loads((directory / "adapter_config.json").read_text())["r"]
    if model.method.name in ("lora_sb", "lora_xs", "ravan"):
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
