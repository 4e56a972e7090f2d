"""Local training of LoRA is that of ``peft`` with torch's AdamW: losses and trained weights."""

import jax
import numpy as np
import optax
import pytest
import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from torch_reference import padded_batch, saved, tiny_model

from fedjax_peft import tasks
from fedjax_peft.algorithms.fedavg import client
from fedjax_peft.models.hf import load_model
from fedjax_peft.peft import lora
from fedjax_peft.peft.base import attach
from fedjax_peft.typing import Problem

STEPS, RANK, ALPHA = 5, 4, 6.0
ADAMW = {"weight_decay": 0.05, "eps": 1e-7}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}

# peft 0.21 asks transformers 5 for an attribute that it has renamed.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")


def to_torch(leaf: str) -> str:
    """Returns peft's name of a trained leaf."""
    stem, _, kind = leaf.rpartition(".")
    named = {"lora_a": "lora_A.weight", "lora_b": "lora_B.weight", "kernel": "weight"}
    return f"base_model.model.{stem}.{named.get(kind, kind)}"


def leaves_of(reference, names):
    """Returns peft's trained tensors as our leaves."""
    state = get_peft_model_state_dict(reference)
    assert state.keys() == {to_torch(name) for name in names}
    return {name: state[to_torch(name)].detach().numpy().T.copy() for name in names}


def put_leaves(reference, leaves):
    """Sets peft's trained tensors to our leaves."""
    state = {to_torch(name): torch.tensor(np.asarray(x).T.copy()) for name, x in leaves.items()}
    set_peft_model_state_dict(reference, state)


def train_ours(model, start, batches):
    """Returns the losses and the trained leaves of the library's own local steps."""
    fixed = {name: x for name, x in model.trainable.items() if model.kinds[name] == "fixed"}

    def apply(params, batch, key, train):
        return model.apply(model.frozen, {**fixed, **params}, batch, key, train)

    optimizer = optax.adamw(1e-2, b1=0.9, b2=0.98, **ADAMW)
    update = client(optimizer, Problem(apply, tasks.classification()))
    state, losses = update.init(start, {}, jax.random.key(0)), []
    step = jax.jit(update.step)
    for batch in batches:
        state, metrics = step(state, batch, jax.random.key(1))
        losses.append(float(metrics["loss"][0] / metrics["loss"][1]))
    return losses, update.final(state)[0]


def train_torch(reference, batches):
    reference.train()
    parameters = [p for p in reference.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-2, betas=(0.9, 0.98), **ADAMW)
    losses = []
    for batch in batches:
        tensors = {name: torch.tensor(x, dtype=torch.long) for name, x in batch.items()}
        loss = reference(**tensors).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("init", ["kaiming", "svd"])
@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_five_steps(family, init, tmp_path):
    base = tiny_model(family, **NO_DROPOUT)
    model = attach(load_model(saved(base, tmp_path)), lora(RANK, alpha=ALPHA, init=init))
    config = LoraConfig(
        r=RANK,
        lora_alpha=ALPHA,
        target_modules=["query", "value"],
        task_type="SEQ_CLS",
        modules_to_save=list(model.head),
    )
    reference = get_peft_model(base, config)
    names = [name for name, kind in model.kinds.items() if kind != "fixed"]
    rng = np.random.default_rng(0)

    # A start that both have, with a B that is not zero: from peft to us, or from us to peft.
    if init == "kaiming":
        start = leaves_of(reference, names)
        for name, x in start.items():
            if name.endswith("lora_b"):
                start[name] = rng.normal(0, 0.2, x.shape).astype(np.float32)
    else:
        start = {name: model.trainable[name] for name in names}
        with torch.no_grad():
            for name, x in model.frozen.items():
                if name.endswith(".base.kernel"):
                    site = base.get_submodule(name.removesuffix(".base.kernel"))
                    site.base_layer.weight.copy_(torch.tensor(np.asarray(x).T))
    put_leaves(reference, start)

    batches = [
        padded_batch(base.config, seed=seed) | {"labels": rng.integers(0, 3, 4).astype(np.int32)}
        for seed in range(STEPS)
    ]
    losses, trained = train_ours(model, start, batches)
    np.testing.assert_allclose(losses, train_torch(reference, batches), rtol=1e-4)
    expected = leaves_of(reference, names)
    for name in names:
        size, moved, off = map(
            np.linalg.norm,
            (expected[name], expected[name] - start[name], trained[name] - expected[name]),
        )
        assert moved > 1e-2 * size
        assert off < min(1e-4 * size, 1e-3 * moved), name
