"""The reference for our models: tiny Hugging Face models in torch with random weights.

All parameters are random, including biases and layer norms. Their scale makes the logits of order
one, so that a tolerance of 1e-5 is meaningful.
"""

import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from transformers import (
    BertConfig,
    CamembertConfig,
    DebertaV2Config,
    Dinov2Config,
    DistilBertConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    ModernBertConfig,
    Qwen2Config,
    Qwen3Config,
    RobertaConfig,
    SmolLM3Config,
    ViTConfig,
    XLMRobertaConfig,
)

transformers.utils.logging.disable_progress_bar()
torch.set_num_threads(1)  # on matrices this small, threads mostly wait for each other

SHAPE = {
    "vocab_size": 100,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 40,
}
SPECIAL = dict.fromkeys((f"{name}_token_id" for name in ("bos", "eos", "cls", "sep")), 4)
"""Token ids that transformers wants inside the vocabulary; no model reads them."""
VIT_SHAPE = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "image_size": 16,
    "patch_size": 4,
}

DEBERTA = SHAPE | {
    "relative_attention": True,
    "position_buckets": 4,
    "max_relative_positions": -1,
    "pos_att_type": ["p2c", "c2p"],
    "share_att_key": True,
    "norm_rel_ebd": "layer_norm",
    "position_biased_input": False,
}
"""DeBERTaV3's form; few buckets, so that most of them are logarithmic."""


DECODER = SHAPE | {"num_key_value_heads": 2, "pad_token_id": 3}
WINDOW = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
"""A window that is shorter than the texts, in the second layer."""
GEMMA = DECODER | {"head_dim": 16, "sliding_window": 4, "query_pre_attn_scalar": 24}


class Family(NamedTuple):
    """How to make a tiny model of a family in torch."""

    config: Any
    name: str
    """As Hugging Face begins its class names."""
    shape: dict
    embeddings: str | None
    """Our leaf of the token embedding table (``{}``: the name of the backbone); None for a model of
    images."""
    kinds: tuple[str, ...] = ("classification", "token_classification", "span_classification")


FAMILIES = {
    "bert": Family(BertConfig, "Bert", SHAPE, "bert.embeddings.word_embeddings.embedding"),
    "deberta-v2": Family(
        DebertaV2Config, "DebertaV2", DEBERTA, "deberta.embeddings.word_embeddings.embedding"
    ),
    "modernbert": Family(
        ModernBertConfig,
        "ModernBert",
        SHAPE | {"num_hidden_layers": 2, "local_attention": 6, "pad_token_id": 3} | SPECIAL,
        "model.embeddings.tok_embeddings.embedding",
    ),
    "roberta": Family(
        RobertaConfig, "Roberta", SHAPE, "roberta.embeddings.word_embeddings.embedding"
    ),
    "distilbert": Family(
        DistilBertConfig,
        "DistilBert",
        {
            "vocab_size": 100,
            "dim": 32,
            "n_layers": 2,
            "n_heads": 4,
            "hidden_dim": 64,
            "max_position_embeddings": 40,
        },
        "distilbert.embeddings.word_embeddings.embedding",
    ),
    "gpt2": Family(
        GPT2Config,
        "GPT2",
        {
            "vocab_size": 100,
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 40,
            "pad_token_id": 3,
            "bos_token_id": 4,
            "eos_token_id": 4,
        },
        "transformer.wte.embedding",
        ("classification", "token_classification", "span_classification", "causal_lm"),
    ),
    "llama": Family(
        LlamaConfig,
        "Llama",
        DECODER,
        "{}.embed_tokens.embedding",
        ("classification", "token_classification", "span_classification", "causal_lm"),
    ),
    **{
        family: Family(config, name, shape, "{}.embed_tokens.embedding", ("causal_lm",))
        for family, config, name, shape in (
            ("mistral", MistralConfig, "Mistral", DECODER | {"sliding_window": 4}),
            ("qwen2", Qwen2Config, "Qwen2", DECODER | WINDOW | {"tie_word_embeddings": True}),
            ("qwen3", Qwen3Config, "Qwen3", DECODER | {"head_dim": 16}),
            ("smollm3", SmolLM3Config, "SmolLM3", DECODER | {"no_rope_layer_interval": 2}),
            ("gemma2", Gemma2Config, "Gemma2", GEMMA),
            ("gemma3_text", Gemma3TextConfig, "Gemma3", GEMMA | {"sliding_window_pattern": 2}),
        )
    },
    "vit": Family(ViTConfig, "ViT", VIT_SHAPE, None, ("classification",)),
    "dinov2": Family(
        Dinov2Config,
        "Dinov2",
        {k: v for k, v in VIT_SHAPE.items() if k != "intermediate_size"}
        | {"mlp_ratio": 2, "use_mask_token": False},
        None,
        ("classification",),
    ),
}
RENAMED = {
    family: FAMILIES["roberta"]._replace(config=config, name=name)
    for family, config, name in (
        ("xlm-roberta", XLMRobertaConfig, "XLMRoberta"),
        ("camembert", CamembertConfig, "Camembert"),
    )
}
"""Other names of a family, which the grids over families leave out."""
CLASSES = {
    "classification": ("TextForSequenceClassification", "ForSequenceClassification"),
    "token_classification": ("ForTokenClassification",),
    "span_classification": ("ForQuestionAnswering",),
    "causal_lm": ("LMHeadModel", "ForCausalLM"),
    "image": ("ForImageClassification",),
}
HEADS = [(family, kind) for family, f in FAMILIES.items() for kind in f.kinds]


def tiny_model(
    family: str, *, kind: str = "classification", classes: int = 3, seed: int = 0, **config
):
    """Returns a random model with a head, in evaluation mode."""
    f = {**FAMILIES, **RENAMED}[family]
    labels = {} if kind in ("span_classification", "causal_lm") else {"num_labels": classes}
    image = kind == "classification" and f.embeddings is None
    make = class_of(f.name, "image" if image else kind)
    # Eager attention is the formula as the papers have it, and works for any mask.
    model = make(f.config(attn_implementation="eager", **labels, **(f.shape | config))).eval()
    return randomised(model, seed)


def layers(family: str, number: int) -> dict[str, int]:
    """Returns the config field of a family that holds the number of layers."""
    (field,) = {"num_hidden_layers", "n_layers", "n_layer"} & FAMILIES[family].shape.keys()
    return {field: number}


def class_of(name: str, kind: str) -> Any:
    """Returns Hugging Face's class."""
    for end in CLASSES[kind]:
        if hasattr(transformers, name + end):
            return getattr(transformers, name + end)
    raise AttributeError(name, kind)


NORM = re.compile(r"(LayerNorm|layer_norm|ln_\w|layernorm\w*|norm)\.weight$")


def randomised(model, seed: int = 0):
    """Returns the model with all parameters drawn afresh."""
    generator = torch.Generator().manual_seed(seed)
    centred = model.config.model_type.startswith("gemma")  # whose norms scale by 1 + weight
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            mean = 1.0 if NORM.search(name) and not centred else 0.0
            parameter.copy_(mean + 0.2 * torch.randn(parameter.shape, generator=generator))
    return model


def saved(model, directory: Path) -> Path:
    """Returns the directory, now with the model's checkpoint."""
    model.save_pretrained(directory)
    return directory


def padded_batch(config, lengths: tuple[int, ...] = (13, 7, 1, 10), seed: int = 0) -> dict:
    """Returns columns of token ids with real padding: the config's pad id under mask 0.

    For a model of images: as many images of its size.
    """
    rng = np.random.default_rng(seed)
    if hasattr(config, "image_size"):
        size = np.broadcast_to(config.image_size, 2)
        pixels = rng.normal(size=(len(lengths), config.num_channels, *size))
        return {"pixel_values": pixels.astype(np.float32)}
    shape = (len(lengths), max(lengths))
    mask = np.arange(shape[1])[None] < np.array(lengths)[:, None]
    ids = np.where(mask, rng.integers(5, config.vocab_size, shape), config.pad_token_id)
    batch = {"input_ids": ids.astype(np.int32), "attention_mask": mask.astype(np.int32)}
    if getattr(config, "type_vocab_size", 0):
        types = rng.integers(0, config.type_vocab_size, shape) * mask
        batch["token_type_ids"] = types.astype(np.int32)
    return batch


def left_padded(lengths: tuple[int, ...], seed: int = 0, vocabulary: int = 100):
    """Returns token ids and the mask ``[texts, longest]`` of texts with padding before them."""
    rng, longest = np.random.default_rng(seed), max(lengths)
    mask = np.arange(longest)[None] >= longest - np.array(lengths)[:, None]
    ids = np.where(mask, rng.integers(5, vocabulary, mask.shape), 3).astype(np.int32)
    return ids, mask


def tensors(batch: dict) -> dict:
    """Returns a batch for torch."""
    return {
        name: torch.tensor(x) if x.dtype.kind == "f" else torch.tensor(x, dtype=torch.long)
        for name, x in batch.items()
    }


def logits_of(outputs):
    """Returns the logits of a torch model's outputs, those of start and end stacked as ours are."""
    if hasattr(outputs, "start_logits"):
        return torch.stack([outputs.start_logits, outputs.end_logits], dim=-1)
    return outputs.logits


def log_likelihood(model, context, then) -> tuple[float, bool]:
    """Returns the sum of log-probabilities of tokens after others, and whether they are greedy."""
    with torch.no_grad():
        logits = model(torch.tensor([[*context, *then]])).logits[0, len(context) - 1 : -1]
    log = torch.log_softmax(logits, -1).numpy()
    return log[np.arange(len(then)), then].sum(), (log.argmax(-1) == then).all()


def torch_states(model, batch: dict) -> tuple[np.ndarray, list[np.ndarray]]:
    """Returns the logits and the hidden states of all layers."""
    with torch.no_grad():
        outputs = model(**tensors(batch), output_hidden_states=True)
    return logits_of(outputs).numpy(), [x.numpy() for x in outputs.hidden_states]


def torch_outputs(model, batch: dict) -> tuple[np.ndarray, np.ndarray]:
    """Returns the logits and the last hidden states, after the final layer norm if there is one."""
    logits, _ = torch_states(model, batch)
    with torch.no_grad():
        return logits, model.base_model(**tensors(batch)).last_hidden_state.numpy()
