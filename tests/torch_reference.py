"""The reference that our models are held against: tiny random Hugging Face models in torch.

Every parameter is random, biases and layer norms too, and the scale is such that logits are of
order one: a tolerance of 1e-5 then means something.
"""

from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    RobertaConfig,
    RobertaForSequenceClassification,
)

transformers.utils.logging.disable_progress_bar()

FAMILIES = {
    "bert": (BertConfig, BertForSequenceClassification),
    "roberta": (RobertaConfig, RobertaForSequenceClassification),
}
SHAPE = {
    "vocab_size": 100,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 40,
}


def tiny_model(family: str, *, classes: int = 3, seed: int = 0, **config):
    """Returns a random classifier in evaluation mode."""
    make_config, make_model = FAMILIES[family]
    model = make_model(make_config(num_labels=classes, **(SHAPE | config))).eval()
    return randomised(model, seed)


def randomised(model, seed: int = 0):
    """Returns the model with all parameters drawn afresh."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            mean = 1.0 if name.endswith("LayerNorm.weight") else 0.0
            parameter.copy_(mean + 0.2 * torch.randn(parameter.shape, generator=generator))
    return model


def saved(model, directory: Path) -> Path:
    """Returns the directory, now with the model's checkpoint."""
    model.save_pretrained(directory)
    return directory


def padded_batch(config, lengths: tuple[int, ...] = (13, 7, 1, 10), seed: int = 0) -> dict:
    """Returns columns of token ids with real padding: the config's pad id under mask 0."""
    rng = np.random.default_rng(seed)
    shape = (len(lengths), max(lengths))
    mask = np.arange(shape[1])[None] < np.array(lengths)[:, None]
    ids = np.where(mask, rng.integers(5, config.vocab_size, shape), config.pad_token_id)
    types = rng.integers(0, config.type_vocab_size, shape) * mask
    return {
        "input_ids": ids.astype(np.int32),
        "attention_mask": mask.astype(np.int32),
        "token_type_ids": types.astype(np.int32),
    }


def torch_outputs(model, batch: dict) -> tuple[np.ndarray, np.ndarray]:
    """Returns the logits and the last hidden states."""
    tensors = {name: torch.tensor(x, dtype=torch.long) for name, x in batch.items()}
    with torch.no_grad():
        outputs = model(**tensors, output_hidden_states=True)
    return outputs.logits.numpy(), outputs.hidden_states[-1].numpy()
