"""The toy problem with the layers of LoRA-SB, RAVAN and SLoRA."""

import jax
import jax.numpy as jnp
import numpy as np
import toy
from internals import REFERENCE, InstanceWeighted

HEADS = 2


def _model(kinds, shapes, factors):
    """Returns the toy model with other adapters, none of them zero.

    Args:
      kinds: leaf -> kind.
      shapes: leaf -> shape.
      factors: function of the leaves: (L, R), whose product is added to the kernel.
    """
    plain, rng = toy.lora_model(dropout=0), np.random.default_rng(3)
    leaves = {n: jnp.float32(rng.normal(0, 0.5, shape)) for n, shape in shapes.items()}
    trainable = {**leaves, **{n: plain.trainable[n] for n in toy.HEAD}}

    def apply(frozen, params, *rest):
        left, right = factors(params)
        a, b = "layer.lora_a", "layer.lora_b"
        given = {a: left, b: right, "layer.lora_scale": jnp.ones(left.shape[1])}
        return plain.apply(frozen, {**params, **given}, *rest)

    kinds = {**kinds, **dict.fromkeys(toy.HEAD, "head")}
    return plain.replace(apply=apply, trainable=trainable, kinds=kinds)


def sb_model():
    """Returns the model with LoRA-SB's layer."""
    kinds = {"layer.sb_a": "fixed", "layer.sb_b": "fixed", "layer.sb_r": "adapter"}
    shapes = {
        "layer.sb_a": (toy.FEATURES, toy.RANK),
        "layer.sb_b": (toy.RANK, toy.WIDTH),
        "layer.sb_r": (toy.RANK, toy.RANK),
    }
    return _model(kinds, shapes, lambda p: (p["layer.sb_a"] @ p["layer.sb_r"], p["layer.sb_b"]))


def ravan_model():
    """Returns the model with RAVAN's layer; its scales are not 1."""
    fixed, trained = ("ravan_a", "ravan_b"), ("ravan_h", "ravan_s")
    kinds = {f"layer.{n}": "fixed" for n in fixed} | {f"layer.{n}": "adapter" for n in trained}
    shapes = {
        "layer.ravan_a": (HEADS, toy.FEATURES, toy.RANK),
        "layer.ravan_b": (HEADS, toy.RANK, toy.WIDTH),
        "layer.ravan_h": (HEADS, toy.RANK, toy.RANK),
        "layer.ravan_s": (HEADS,),
    }

    def factors(p):
        cores = p["layer.ravan_s"][:, None, None] * p["layer.ravan_h"]
        left = jnp.concatenate([p["layer.ravan_a"][i] @ cores[i] for i in range(HEADS)], axis=1)
        return left, p["layer.ravan_b"].reshape(HEADS * toy.RANK, toy.WIDTH)

    return _model(kinds, shapes, factors)


def slora_model():
    """Returns the model with SLoRA's layer; its values are not zero."""
    plain, rng = toy.lora_model(dropout=0), np.random.default_rng(3)
    index, values, kernel = "layer.sparse_index", "layer.sparse_values", "layer.base.kernel"
    places = np.sort(rng.choice(toy.FEATURES * toy.WIDTH, 7, replace=False))
    given = {index: jnp.int32(places), values: jnp.float32(rng.normal(0, 0.5, 7))}

    def apply(frozen, params, *rest):
        flat = frozen[kernel].reshape(-1).at[params[index]].add(params[values])
        return plain.apply({kernel: flat.reshape(toy.FEATURES, toy.WIDTH)}, params, *rest)

    kinds = {**plain.kinds, index: "fixed", values: "adapter"}
    return plain.replace(apply=apply, trainable={**plain.trainable, **given}, kinds=kinds)


def pair_model():
    """Returns the model with FedDPA's pair of LoRAs and instance weights."""
    plain = toy.lora_model()
    kinds, trainable, _ = toy.several_loras(plain, ("global_adapter", "private_adapter"), 3)
    kinds |= {"layer.adapter_weight": "fixed", REFERENCE: "adapter"}
    trainable |= {"layer.adapter_weight": jnp.zeros(()), REFERENCE: jnp.zeros(toy.WIDTH)}

    def apply(frozen, params, batch, key, train):
        weight = params["layer.adapter_weight"]
        weight = weight.reshape(-1, 1) if weight.ndim else weight
        shares = {"global_adapter": 1 - weight, "private_adapter": weight}
        hidden = toy.hidden_of(frozen, params, batch["x"], shares)
        if train:
            kept = jax.random.bernoulli(key, 0.8, hidden.shape)
            hidden = jnp.where(kept, hidden / 0.8, 0.0)
        return toy.read_out(params, hidden)

    return plain.replace(apply=InstanceWeighted(apply), trainable=trainable, kinds=kinds)


MODELS = {
    "feddpa_f": pair_model,
    "feddpa_t": pair_model,
    "slora": slora_model,
    "fedsb": sb_model,
    "ravan": ravan_model,
}
"""Algorithm -> its model."""
