"""EVA's start: directions of the most variance of torch's activations, and those of ``peft``."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from closeness import assert_close, roughly
from internals import activation_start
from peft import EvaConfig, LoraConfig
from peft.tuners.lora.eva import get_eva_state_dict
from refusals import refused
from tiny import logits, tiny
from torch_reference import padded_batch, saved, tensors, tiny_model

import fedjax_peft as fp

pytestmark = pytest.mark.slow

TARGETS, RANK = ["query", "value", "intermediate.dense", "output.dense"], 3
EVA = fp.lora(RANK, init="eva", targets=TARGETS)


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """A model of torch, its directory, batches, and the inputs of its layers."""
    model = tiny_model("bert")
    batches = [padded_batch(model.config, seed=seed) for seed in range(3)]
    inputs: dict[str, list[np.ndarray]] = {}

    def hook(name):
        def tell(layer, given, output):
            real = batch["attention_mask"].astype(bool)
            inputs.setdefault(name, []).append(given[0].detach().numpy()[real])

        return tell

    layers = [n for n, _ in model.named_modules() if n.endswith(tuple(TARGETS)) and "bert" in n]
    hooks = [model.get_submodule(name).register_forward_hook(hook(name)) for name in layers]
    with torch.no_grad():
        for batch in batches:
            model(**tensors(batch))
    for one in hooks:
        one.remove()
    directory = saved(model, tmp_path_factory.mktemp("eva"))
    return model, directory, batches, {n: np.concatenate(x) for n, x in inputs.items()}


def test_directions_are_those_of_the_activations(reference):
    """Of all real tokens, whatever the batches; padded examples do not count."""
    _, directory, batches, inputs = reference
    model = fp.attach(fp.load_model(directory), EVA)
    padded = {n: np.concatenate([x, x[:2]]) for n, x in batches[2].items()}
    padded["mask"] = np.arange(6) < 4
    started = activation_start(model, [*batches[:2], padded])
    again = activation_start(model, [padded, *batches[:2]])
    assert len(inputs) == 2 * 5
    for name, x in inputs.items():
        x = x.astype(np.float64) - x.mean(axis=0)
        _, s, vt = np.linalg.svd(x)
        a = np.asarray(started.trainable[f"{name}.lora_a"])
        # Rounding turns a direction by its size divided by the distance of the eigenvalues.
        gap = np.min(np.diff(-(s[: RANK + 1] ** 2))) / s[0] ** 2
        assert_close(np.abs(vt[:RANK] @ a), np.eye(RANK), rtol=0, atol=1e-5 / gap)
        assert (a[np.abs(a).argmax(0), range(RANK)] > 0).all()
        assert_close(again.trainable[f"{name}.lora_a"], a, rtol=0, atol=1e-5 / gap)
    rest = [n for n in model.trainable if not n.endswith(".lora_a")]
    assert all(started.trainable[n] is model.trainable[n] for n in rest)


def test_the_subspace_is_that_of_peft(reference):
    """Its incremental PCA is randomised and of low rank, so the subspaces are nearly equal."""
    reference, directory, batches, _ = reference
    config = LoraConfig(
        r=RANK, target_modules=TARGETS, init_lora_weights="eva", eva_config=EvaConfig(rho=1.0)
    )
    loader = [tensors(batches[0])]
    theirs = get_eva_state_dict(reference, loader, config, show_progress_bar=False)
    ours = activation_start(fp.attach(fp.load_model(directory), EVA), batches[:1]).trainable
    for name, found in theirs.items():
        if name.startswith("bert.encoder"):
            overlap = np.linalg.norm(found.numpy() @ np.asarray(ours[f"{name}.lora_a"])) ** 2
            assert overlap == roughly(RANK, rel=0.02), name


def test_scanned_recomputed_and_fused_layers_give_the_same(reference):
    _, directory, batches, _ = reference
    plain = activation_start(fp.attach(fp.load_model(directory), EVA), batches[:1]).trainable
    model = fp.load_model(directory, scan_layers=True, remat="blocks")
    scanned = activation_start(fp.attach(model, EVA), batches[:1]).trainable
    for name, x in plain.items():
        if name.endswith("lora_a"):
            assert_close(scanned[name], x, rtol=0, atol=1e-3)
    gpt2 = fp.attach(tiny("gpt2"), fp.lora(2, init="eva", parts=["q", "v"]))
    batch = {n: x for n, x in batches[0].items() if n != "token_type_ids"}
    started = activation_start(gpt2, [batch]).trainable
    parts = [np.asarray(started[n]) for n in sorted(started) if n.endswith("lora_a")]
    assert len(parts) == 4
    np.testing.assert_array_equal(parts[0], parts[1])  # q and v read the same


def test_it_changes_no_output_and_a_run_without_it_warns():
    model = fp.attach(tiny(), EVA)
    np.testing.assert_array_equal(logits(model), logits(tiny()))
    assert "not EVA" in model.method.start_missing(model.trainable)
    batch = {"input_ids": jnp.arange(40).reshape(4, 10), "attention_mask": jnp.ones((4, 10))}
    started = activation_start(model, [batch])
    assert started.method.start_missing(started.trainable) is None
    np.testing.assert_array_equal(logits(started), logits(tiny()))


def test_what_it_cannot_use_is_refused():
    model, one = fp.attach(tiny(), EVA), {"input_ids": jnp.ones((1, 2), jnp.int32)}
    refused(r'fp\.lora\(init="eva"\)', activation_start, fp.attach(tiny(), fp.lora(2)), [one])
    refused(r'fp\.lora\(init="eva"\)', activation_start, tiny(), [one])
    refused("at least one batch", activation_start, model, [])
    one["attention_mask"] = jnp.ones((1, 2))
    refused(
        "more tokens than the rank 3, and the inputs of .* are 2", activation_start, model, [one]
    )
