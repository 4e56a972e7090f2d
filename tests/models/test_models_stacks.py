"""``scan_layers``: a scan over stacked blocks gives the numbers and names of separate blocks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from closeness import assert_close
from internals import abstract_model
from shallow import simplify
from tiny import trained

import fedjax_peft as fp

pytestmark = pytest.mark.slow

IDS = jax.random.randint(jax.random.key(3), (3, 9), 3, 40)
BATCH = {"input_ids": IDS, "attention_mask": jnp.arange(9)[None] < jnp.array([[9], [5], [7]])}
GPT2 = {
    "model_type": "gpt2",
    "vocab_size": 40,
    "n_embd": 16,
    "n_layer": 3,
    "n_head": 2,
    "n_positions": 16,
    "initializer_range": 0.2,
}
# A local layer, a global one, and so on; the last two are not stacked.
GEMMA = {
    "model_type": "gemma3_text",
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 6,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "sliding_window": 3,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "attention_dropout": 0.1,
    "initializer_range": 0.2,
}


@functools.cache
def pair(family="gpt2", remat="none", **options):
    """Returns a language model without a scan, and one with a scan and recomputation."""
    config = {"gpt2": GPT2, "gemma3": GEMMA}[family]
    options["head"] = fp.heads.causal_lm()
    scanned = fp.random_model(config, scan_layers=True, remat=remat, **options)
    return fp.random_model(config, **options), scanned


def moved(model):
    """Returns the model with adapters that are not zero."""
    return model.replace(trainable=trained(model))


def gradients(model):
    def loss(trainable, frozen):
        outputs = model.apply(frozen, trainable, BATCH, jax.random.key(7), True)
        return jnp.sum(jax.nn.log_softmax(outputs.logits)[..., 0]), outputs.states

    return jax.jit(jax.value_and_grad(loss, has_aux=True))(model.trainable, model.compute_frozen())


def assert_trees_close(found, expected, tolerance=1e-5):
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        y = np.asarray(y, np.float32)
        assert_close(x, y, atol=tolerance * (np.abs(y).max() + 0.1), rtol=0)


@pytest.mark.parametrize(
    ("family", "options", "tolerance"),
    [
        ("gpt2", {"remat": "blocks"}, 1e-5),
        pytest.param("gpt2", {"remat": "dots"}, 1e-5, marks=pytest.mark.exhaustive),
        pytest.param("gpt2", {"quantize": "nf4"}, 1e-5, marks=pytest.mark.exhaustive),
        pytest.param("gemma3", {}, 1e-5, marks=pytest.mark.exhaustive),
        # In bfloat16 both differ from float32 by up to .04, and so from each other by up to .08.
        pytest.param("gpt2", {"dtype": "bfloat16"}, 0.2, marks=pytest.mark.exhaustive),
    ],
    ids=["blocks", "dots", "nf4", "pattern", "bfloat16"],
)
def test_outputs_and_gradients_are_the_same(family, options, tolerance):
    """With dropout, whose masks are the same too."""
    plain, scanned = (
        moved(fp.attach(m, fp.lora(rank=2, dropout=0.1))) for m in pair(family, **options)
    )
    assert list(scanned.trainable) == list(plain.trainable)
    assert_trees_close(gradients(scanned), gradients(plain), tolerance)


@pytest.mark.parametrize(
    "method",
    [
        fp.peft.dora(rank=2),
        fp.peft.ia3(),
        fp.peft.prefix_tuning(tokens=2),
        fp.peft.houlsby(size=3),
        fp.peft.bitfit(),
    ],
    ids=lambda method: method.name,
)
@pytest.mark.sample("dora", "prefix_tuning")
def test_methods(method):
    """Over a pattern of local and global layers, and over one of equal layers."""
    family = "gemma3" if method.name == "dora" else "gpt2"
    plain, scanned = (moved(fp.attach(model, method)) for model in pair(family))
    assert list(scanned.trainable) == list(plain.trainable)
    apply = [
        jax.jit(lambda b, m=m: m.apply(m.frozen, m.trainable, b, None, False).hidden)
        for m in (plain, scanned)
    ]
    assert_trees_close(apply[1](BATCH), apply[0](BATCH))


def test_frozen_leaves_are_held_stacked_and_not_copied():
    plain, scanned = pair()
    name = "transformer.h.0-1.mlp.c_fc.kernel"
    expected = [plain.frozen[f"transformer.h.{i}.mlp.c_fc.kernel"] for i in range(2)]
    np.testing.assert_array_equal(scanned.frozen[name], jnp.stack(expected))
    assert not any(f".{i}." in leaf for leaf in scanned.frozen for i in range(2))
    assert scanned.counts() == plain.counts()
    assert scanned.nbytes() == plain.nbytes()
    assert fp.attach(scanned, fp.lora(rank=2)).frozen[name] is scanned.frozen[name]
    module = scanned.module()
    np.testing.assert_array_equal(module.transformer.h[1].mlp.c_fc.kernel[...], expected[1])
    # Biases are vectors, which stay float32, although the stack of them is a matrix.
    assert pair(dtype="bfloat16")[1].compute_frozen()["transformer.h.0-1.ln_1.bias"].dtype == "f4"


def test_a_pattern_is_stacked_by_its_period():
    """Two local layers, one global one, and so on; the last three are not stacked."""
    kinds = ["sliding_attention"] * 2 + ["full_attention"]
    config = GEMMA | {"num_hidden_layers": 9, "layer_types": kinds * 3}
    model = abstract_model(config, head=fp.heads.causal_lm(), scan_layers=True)
    found = {name.split(".")[2] for name in model.frozen if name.startswith("model.layers.")}
    assert found == {"0-3-3", "1-4-3", "2-5-3", "6", "7", "8"}


def test_the_backward_pass_reads_the_inputs_of_the_blocks_alone():
    """And no stack of gradients of all hidden states, of which the head reads the last one."""
    model = fp.random_model(GPT2, head=fp.heads.causal_lm(), scan_layers=True, remat="blocks")
    model = fp.attach(model, fp.lora(rank=2))

    def loss(trainable):
        hidden = model.apply(model.frozen, trainable, BATCH, jax.random.key(7), True).hidden
        return jnp.sum(jnp.square(hidden))

    traced = jax.make_jaxpr(jax.grad(loss))(model.trainable)
    backward = [x for x in traced.eqns if x.primitive.name == "scan" and x.params["reverse"]]
    assert len(backward) == 1
    shapes = [x.aval.shape for x in backward[0].invars]
    assert shapes.count((2, *IDS.shape, 16)) == 1


def test_runs_checkpoints_and_exports(tmp_path, monkeypatch):
    """A run, its resumption, and a merged export, which is that of the model without a scan."""
    simplify(monkeypatch)
    config, head = (
        {**fp.testing.tiny_model().config, "num_hidden_layers": 3},
        fp.heads.classification(4),
    )
    plain, model = (
        fp.attach(
            fp.random_model(config, head=head, scan_layers=scan, dropout=0.0), fp.lora(rank=2)
        )
        for scan in (False, True)
    )
    options = {"clients_per_round": 2, "local_steps": 2, "batch_size": 4, "out": tmp_path / "run"}
    given = (
        model,
        fp.algorithms.fedavg(optax.sgd(0.1)),
        fp.partition.iid(fp.testing.tiny_dataset(48), 3),
    )
    fp.simulate(*given, rounds=1, **options)
    run = fp.simulate(*given, rounds=2, **options, resume=True)
    assert run.params.keys() == plain.trainable.keys()
    assert any(np.abs(x - plain.trainable[name]).max() > 1e-3 for name, x in run.params.items())
    loaded = fp.load_run(tmp_path / "run")
    assert loaded.model.recipe["scan_layers"]
    assert_trees_close(loaded.params, run.params, 0)
    merged, expected = fp.merge(run.model, run.params), fp.merge(plain, run.params)
    assert list(merged.frozen) == list(expected.frozen)
    assert_trees_close(merged.frozen, expected.frozen)


def test_blocks_of_different_forms_are_refused():
    with pytest.raises(fp.InputError, match=r"transformer\.h\.1 differs from transformer\.h\.0"):
        fp.attach(pair()[1], fp.lora(rank=2, targets=r"transformer\.h\.0\.attn\.c_attn"))


def test_algorithms_that_add_to_frozen_weights_are_refused():
    model = fp.random_model(
        {**fp.testing.tiny_model().config, "num_hidden_layers": 4},
        head=fp.heads.classification(4),
        scan_layers=True,
    )
    model = fp.attach(model, fp.lora(rank=2))
    clients = fp.partition.iid(fp.testing.tiny_dataset(24), 2, seed=0)
    with pytest.raises(fp.InputError, match="scan_layers"):
        fp.simulate(model, fp.algorithms.flora(optax.sgd(0.1)), clients, rounds=1, batch_size=4)
