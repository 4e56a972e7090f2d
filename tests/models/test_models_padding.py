"""In training, the output for a text does not depend on its padding, even with dropout.

The engine relies on this: it runs a step at the shortest of a few padded lengths.
"""

import jax
import numpy as np
import pytest
from closeness import assert_close
from tiny import trained
from torch_reference import FAMILIES, layers

import fedjax_peft as fp

pytestmark = pytest.mark.slow

TEXTS = ("bert", "roberta", "deberta-v2", "distilbert", "gpt2")
LENGTHS = np.array([7, 2, 9, 1])


def batch(length):
    """The same texts, padded with token 1."""
    mask = np.arange(length)[None] < LENGTHS[:, None]
    tokens = np.random.default_rng(0).integers(5, 40, (len(LENGTHS), LENGTHS.max()))
    ids = np.full(mask.shape, 1, np.int32)
    ids[:, : LENGTHS.max()][mask[:, : LENGTHS.max()]] = tokens[mask[:, : LENGTHS.max()]]
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize(
    ("family", "method"),
    [
        *[(family, fp.lora(rank=2, dropout=0.3)) for family in TEXTS],
        ("lstm", None),
        ("bert", fp.peft.houlsby(size=4)),
        ("bert", fp.peft.prefix_tuning(tokens=3)),
        ("roberta", fp.peft.prompt_tuning(tokens=3)),
    ],
    ids=lambda x: x if isinstance(x, str) else type(x).__name__,
)
@pytest.mark.sample("roberta-Method0", "deberta-v2-*", "lstm-*")
def test_padding_has_no_effect_in_training(family, method):
    head = fp.heads.causal_lm() if family == "lstm" else fp.heads.classification(3)
    config = {"model_type": family, "initializer_range": 0.3}
    if family == "lstm":
        config |= {"vocab_size": 100, "embedding_size": 8, "hidden_size": 16}
    else:
        config |= FAMILIES[family].shape | layers(family, 1) | {"pad_token_id": 1}
    model = fp.random_model(config, head=head, dropout=0.3)
    if method is not None:
        model = fp.attach(model, method)
    trainable, apply = trained(model), jax.jit(model.apply, static_argnums=4)

    def run(length, key):
        outputs = apply(model.frozen, trainable, batch(length), jax.random.key(key), True)
        real = batch(9)["attention_mask"]
        logits = outputs.logits[:, :9] * real[..., None] if family == "lstm" else outputs.logits
        return np.asarray(logits), np.asarray(outputs.hidden[:, :9]) * real[..., None]

    short, long, other = run(9, 0), run(24, 0), run(9, 1)
    for a, b, c in zip(short, long, other, strict=True):
        assert_close(a, b, atol=2e-5)  # large weights, and a softmax over other lengths
        assert np.abs(a - c).max() > 0.05, "there is dropout"
