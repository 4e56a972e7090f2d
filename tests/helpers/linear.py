"""Softmax regression, a model of two leaves.

The reference engine compiles each operation for each shape, so few leaves make it quick. The local
training is also easy to do in NumPy.
"""

import jax.numpy as jnp
import numpy as np

import fedjax_peft as fp

FEATURES, CLASSES = 5, 3


def model() -> fp.Model:
    """Returns the model with random weights."""
    rng = np.random.default_rng(0)
    trainable = {
        "head.bias": jnp.asarray(rng.normal(0, 0.5, CLASSES), jnp.float32),
        "head.kernel": jnp.asarray(rng.normal(0, 0.5, (FEATURES, CLASSES)), jnp.float32),
    }

    def apply(frozen, trainable, batch, key, train):
        logits = batch["x"] @ trainable["head.kernel"] + trainable["head.bias"][None]
        return fp.contracts.Outputs(logits, batch["x"][:, None])

    kinds = dict.fromkeys(trainable, "head")
    bound = fp.Model(apply, {}, trainable, kinds, None)
    return bound.replace(name="linear", labels=("class 0", "class 1", "class 2"))


def gradient(leaves, x, labels):
    """Returns the gradient of the mean cross-entropy."""
    logits = x @ leaves["head.kernel"] + leaves["head.bias"]
    p = np.exp(logits - logits.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    error = (p - np.eye(CLASSES)[labels]) / len(x)
    return {"head.bias": error.sum(axis=0), "head.kernel": x.T @ error}
