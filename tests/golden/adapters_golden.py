"""Writes the golden files: outputs and adapter files of AdapterHub's ``adapters`` 1.3.0 in torch.

``adapters`` needs another version of transformers than this library. It therefore has a separate
environment, and this script does not import the library:

    python -m venv env && env/bin/pip install torch==2.13.0 adapters==1.3.0
    env/bin/python tests/golden/adapters_golden.py                      # writes the files
    env/bin/python tests/golden/adapters_golden.py --check              # compares with them
    python tests/golden/adapterhub_exports.py DIR                       # ours, library environment
    env/bin/python tests/golden/adapters_golden.py --check-export DIR   # adapters reads ours

The output, for tiny models with random parameters everywhere, including layer norms and adapters:

    adapters/FAMILY/                the checkpoint, as save_pretrained writes it
    adapters/FAMILY/inputs.safetensors
    adapters/FAMILY/METHOD/         the adapter and its head, as save_adapter writes them
    adapters/FAMILY/METHOD/outputs.safetensors      logits and all hidden states
"""

import argparse
import json
import logging
import sys
import tempfile
import warnings
import zlib
from pathlib import Path

import adapters
import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file

HERE = Path(__file__).parent / "adapters"
TEXT = {
    "vocab_size": 50,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 16,
}
GPT2 = {
    "vocab_size": 50,
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 2,
    "n_positions": 16,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
DISTILBERT = {
    "vocab_size": 50,
    "dim": 16,
    "n_layers": 2,
    "n_heads": 2,
    "hidden_dim": 24,
    "max_position_embeddings": 16,
}
DEBERTA = TEXT | {
    "relative_attention": True,
    "position_buckets": 4,
    "pos_att_type": ["p2c", "c2p"],
    "share_att_key": True,
    "norm_rel_ebd": "layer_norm",
    "position_biased_input": False,
    "type_vocab_size": 0,
}
VIT = {name: x for name, x in TEXT.items() if name[:3] not in ("voc", "max")} | {
    "image_size": 12,
    "patch_size": 4,
}
MODELS = {
    "bert": ("BertForSequenceClassification", TEXT),
    "roberta": ("RobertaForSequenceClassification", TEXT),
    "distilbert": ("DistilBertForSequenceClassification", DISTILBERT),
    "deberta-v2": ("DebertaV2ForSequenceClassification", DEBERTA),
    "gpt2": ("GPT2LMHeadModel", GPT2),
    "gpt2-classifier": ("GPT2ForSequenceClassification", GPT2),
    "vit": ("ViTForImageClassification", VIT),
}
METHODS = {"houlsby": "double_seq_bn", "pfeiffer": "seq_bn"}
REDUCTION = 4
TOLERANCE = 1e-5


def build(family: str) -> torch.nn.Module:
    """Returns a tiny model in evaluation mode; its parameters are random by their names."""
    name, shape = MODELS[family]
    make = getattr(transformers, name)
    labels = {} if name.endswith("LMHeadModel") else {"num_labels": 3}
    config = make.config_class(attn_implementation="eager", **labels, **shape)
    return randomised(make(config).eval())


def randomised(model: torch.nn.Module, only: str = "") -> torch.nn.Module:
    """Returns the model with the parameters whose names contain ``only`` drawn afresh."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if only in name:
                rng = np.random.Generator(np.random.PCG64(zlib.crc32(name.encode())))
                norm = any(part in name.lower() for part in ("layernorm", "layer_norm", "ln_"))
                mean = 1.0 if norm and name.endswith("weight") else 0.0
                values = mean + 0.2 * rng.standard_normal(parameter.shape)
                parameter.copy_(torch.tensor(values, dtype=parameter.dtype))
    return model


def inputs(config: transformers.PretrainedConfig) -> dict[str, torch.Tensor]:
    """Returns images, or token ids with real padding."""
    rng = np.random.Generator(np.random.PCG64(0))
    if config.model_type == "vit":
        shape = (4, config.num_channels, config.image_size, config.image_size)
        return {"pixel_values": torch.tensor(rng.standard_normal(shape), dtype=torch.float32)}
    lengths = np.array([9, 5, 1, 7])
    mask = np.arange(lengths.max())[None] < lengths[:, None]
    ids = np.where(mask, rng.integers(5, config.vocab_size, mask.shape), config.pad_token_id)
    columns = {"input_ids": ids, "attention_mask": mask}
    if getattr(config, "type_vocab_size", 0):
        columns["token_type_ids"] = rng.integers(0, config.type_vocab_size, mask.shape) * mask
    return {name: torch.tensor(x.astype(np.int32)) for name, x in columns.items()}


def outputs(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns the logits and the hidden states of the embeddings and of every layer."""
    batch = {name: x if x.is_floating_point() else x.long() for name, x in batch.items()}
    with torch.no_grad():
        result = model(**batch, output_hidden_states=True)
    assert len(result.hidden_states) == model.config.num_hidden_layers + 1
    states = {f"states.{i}": x for i, x in enumerate(result.hidden_states)}
    return {name: x.contiguous() for name, x in {"logits": result.logits, **states}.items()}


def write(directory: Path) -> None:
    """Writes all golden files."""
    for family in MODELS:
        model = build(family)
        base = directory / family
        model.save_pretrained(base)
        (base / "generation_config.json").unlink(missing_ok=True)
        batch = inputs(model.config)
        save_file(batch, base / "inputs.safetensors")
        plain = outputs(model, batch)["logits"]
        for method, config in METHODS.items():
            # A model that has run once keeps its forward methods, whatever adapters puts there.
            model = build(family)
            adapters.init(model)
            model.add_adapter(
                method, config=adapters.AdapterConfig.load(config, reduction_factor=REDUCTION)
            )
            model.set_active_adapters(method)
            randomised(model, only=f"adapters.{method}.")
            model.save_adapter(base / method, method, use_safetensors=True)
            values = outputs(model, batch)
            assert (values["logits"] - plain).abs().max() > 0.1
            save_file(values, base / method / "outputs.safetensors")
        for file in base.rglob("*.json"):  # no trace of this machine
            text = file.read_text().replace(str(base), family)
            file.write_text(text.rstrip("\n") + "\n")


def check(directory: Path) -> list[str]:
    """Returns how the files differ from those that are written now."""
    problems = []
    with tempfile.TemporaryDirectory() as scratch:
        write(Path(scratch))
        now, then = (
            {f.relative_to(d) for d in [root] for f in d.rglob("*.*") if f.is_file()}
            for root in (Path(scratch), directory)
        )
        problems += [f"{file}: in one of them only" for file in sorted(now ^ then)]
        for file in sorted(now & then):
            new, old = Path(scratch, file), directory / file
            if file.suffix == ".json":
                if json.loads(new.read_text()) != json.loads(old.read_text()):
                    problems.append(f"{file}: differs")
                continue
            a, b = load_file(new), load_file(old)
            if a.keys() != b.keys():
                problems.append(f"{file}: other names")
                continue
            for name in a:
                if a[name].shape != b[name].shape or not torch.allclose(
                    a[name].double(), b[name].double(), rtol=0, atol=TOLERANCE
                ):
                    problems.append(f"{file}: {name} differs")
    return problems


def check_export(directory: Path) -> list[str]:
    """Returns how the outputs differ where ``adapters`` reads exported adapters.

    ``directory`` holds folders, each with a ``base`` checkpoint, an ``adapter`` and
    ``expected.safetensors``: inputs under ``inputs.``, and outputs.
    """
    problems = []
    folders = sorted(p for p in directory.iterdir() if p.is_dir())
    for folder in folders:
        config = json.loads((folder / "base" / "config.json").read_text())
        make = getattr(transformers, config["architectures"][0])
        model = make.from_pretrained(folder / "base", attn_implementation="eager").eval()
        adapters.init(model)
        info: dict[str, list[str]] = {}
        name = model.load_adapter(
            str(folder / "adapter"), set_active=True, use_safetensors=True, loading_info=info
        )
        problems += [f"{folder.name}: {what} {names}" for what, names in info.items() if names]
        if not any(f".{name}." in n for n, _ in model.named_parameters()):
            problems.append(f"{folder.name}: nothing loaded")
        expected = load_file(folder / "expected.safetensors")
        batch = {n[7:]: x for n, x in expected.items() if n.startswith("inputs.")}
        for what, got in outputs(model, batch).items():
            if what in expected:
                error = (got - expected[what]).abs().max().item()
                print(f"{folder.name}: {what}: largest difference {error:.1e}")
                if error > TOLERANCE:
                    problems.append(f"{folder.name}: {what} differs by {error:.1e}")
    return problems if folders else [f"{directory} holds no folders"]


def main() -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--check", action="store_true", help="compare with the files")
    mode.add_argument("--check-export", type=Path, metavar="DIR", help="read our exports")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity_error()
    logging.getLogger("adapters").setLevel(logging.ERROR)
    if not (arguments.check or arguments.check_export):
        write(HERE)
        return 0
    problems = check_export(arguments.check_export) if arguments.check_export else check(HERE)
    print("\n".join(problems) or "everything agrees")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
