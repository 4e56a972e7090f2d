"""A tiny model and tiny data for tests and examples, without a download."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_peft.data.dataset import Dataset
from fedjax_peft.models.base import Model
from fedjax_peft.models.checkpoint import save_checkpoint
from fedjax_peft.models.heads import causal_lm, classification
from fedjax_peft.models.registry import random_model

__all__ = [
    "TINY_BERT",
    "TINY_LLAMA",
    "tiny_dataset",
    "tiny_model",
    "write_tiny_checkpoint",
    "write_tiny_language_model",
    "write_tiny_texts",
]

TINY_BERT: dict[str, Any] = {
    "model_type": "bert",
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 32,
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
    # Larger than the usual 0.02, so that the signal of this narrow model survives two layers.
    "initializer_range": 0.15,
}
"""The ``config.json`` of :func:`tiny_model`."""

TINY_LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 261,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
    "initializer_range": 0.15,
}
"""The ``config.json`` of :func:`write_tiny_language_model`."""

_CHAT = (
    "{% for message in messages %}<|{{ message.role }}|>"
    "{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content }}<|end|>{% endgeneration %}"
    "{% else %}{{ message.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def tiny_model(classes: int = 4, *, seed: int = 0, **config: Any) -> Model:
    """Returns a two-layer BERT classifier with random weights.

    Args:
      classes: number of classes.
      seed: the seed of the weights.
      **config: fields of the ``config.json`` that replace those of :data:`TINY_BERT`.
    """
    return random_model({**TINY_BERT, **config}, head=classification(classes), seed=seed)


def tiny_dataset(
    examples: int = 96, *, classes: int = 4, length: int = 12, vocab: int = 64, seed: int = 0
) -> Dataset:
    """Returns a text-like data set that a model can learn: each class prefers certain tokens.

    The examples have different lengths and are padded with token 0.
    """
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, classes, examples).astype(np.int32)
    preferred = 8 + labels[:, None] * 8 + rng.integers(0, 8, (examples, length))
    other = rng.integers(8, vocab, (examples, length))
    tokens = np.where(rng.random((examples, length)) < 0.5, preferred, other)
    mask = np.arange(length) < rng.integers(length // 2, length + 1, examples)[:, None]
    tokens[:, 0] = 1
    columns = {
        "input_ids": np.where(mask, tokens, 0).astype(np.int32),
        "attention_mask": mask,
        "labels": labels,
    }
    return Dataset(columns, tuple(f"class {i}" for i in range(classes)), "tiny")


def write_tiny_checkpoint(directory: str | Path, *, seed: int = 0) -> Path:
    """Writes a tiny BERT encoder without a head, and a tokenizer, in the format of Hugging Face.

    The vocabulary has the words ``w0`` to ``w58`` of :func:`write_tiny_texts`.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    directory = Path(directory)
    model = tiny_model(seed=seed)
    save_checkpoint(model.frozen, model.config, directory, ())
    special = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]"]
    words = [*special, *(f"w{i}" for i in range(64 - len(special)))]
    vocabulary = {word: i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 1), ("[SEP]", 2)],
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    names = dict(zip(("pad", "cls", "sep", "unk", "mask"), special, strict=True))
    config = {f"{kind}_token": word for kind, word in names.items()}
    config["eos_token"] = "[SEP]"  # GPT-2 needs an end token
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    (directory / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return directory


def write_tiny_language_model(directory: str | Path, *, seed: int = 0, **config: Any) -> Path:
    """Writes a tiny Llama with random weights, and a tokenizer with a chat template.

    The tokenizer has one token for each byte, so it reads any text. Its special tokens are
    ``<|pad|>``, ``<|end|>``, ``<|system|>``, ``<|user|>`` and ``<|assistant|>``.

    Args:
      directory: where to.
      seed: the seed of the weights.
      **config: fields of the ``config.json`` that replace those of :data:`TINY_LLAMA`.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    directory = Path(directory)
    model = random_model({**TINY_LLAMA, **config}, head=causal_lm(), seed=seed)
    save_checkpoint({**model.frozen, **model.trainable}, model.config, directory, ())
    special = ["<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
    tokens = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(special)
    backend.save(str(directory / "tokenizer.json"))
    settings = {
        "pad_token": special[0],
        "eos_token": special[1],
        "chat_template": _CHAT,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return directory


def write_tiny_texts(
    directory: str | Path, *, train: int = 200, test: int = 100, classes: int = 4
) -> Path:
    """Writes ``train.jsonl`` and ``test.jsonl`` with texts of the form of :func:`tiny_dataset`."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    for seed, (split, examples) in enumerate({"train": train, "test": test}.items()):
        data = tiny_dataset(examples, classes=classes, vocab=58, seed=seed)
        with (directory / f"{split}.jsonl").open("w", encoding="utf-8") as file:
            for ids, mask, label in zip(
                data.columns["input_ids"], data.columns["attention_mask"], data.labels, strict=True
            ):
                text = " ".join(f"w{i}" for i in ids[mask])
                file.write(json.dumps({"text": text, "label": f"class {label}"}) + "\n")
    return directory
