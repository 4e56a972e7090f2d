"""``placement.reuse``: training from kept hidden states, and training with all blocks."""

import functools

import jax
import numpy as np
import optax
import pytest
import tiny
from closeness import approx, assert_close
from internals import abstract_model, completing
from refusals import refusals, refused
from shallow import simplify
from torch_reference import FAMILIES, layers

import fedjax_peft as fp
from fedjax_peft.models.reuse import STORED, split

pytestmark = [pytest.mark.slow, pytest.mark.lengths]

STILL = {
    "num_hidden_layers": 2,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
DATA, TEST = fp.testing.tiny_dataset(24), fp.testing.tiny_dataset(10, seed=1)
CLIENTS = fp.partition.iid(DATA, 3)


@functools.cache
def model(layers=(-1,), **config):
    bare = fp.testing.tiny_model(**{**STILL, **config})
    # The dropout of an adapter may stay, and is the same with and without reuse.
    return fp.attach(bare, fp.lora(2, layers=layers, dropout=0.1))


def session(reuse, **placement):
    return fp.session(
        model(),
        fp.algorithms.fedavg(optax.sgd(0.5)),
        CLIENTS,
        batch_size=4,
        placement=fp.Placement(reuse=reuse, lanes=1, length_buckets=2, **placement),
    )


def trained(reuse, **placement):
    made = session(reuse, **placement)
    state = made.init(3)
    for _ in range(2):
        state, _ = made.step(state)
    return made, made.evaluate(state, TEST), state.server


def test_training_and_evaluation_are_those_of_all_blocks(monkeypatch):
    simplify(monkeypatch)
    whole, scores, params = trained("none")
    before = whole.evaluate(whole.init(3), TEST)
    assert abs(scores["loss"] - before["loss"]) > 0.3, "training has changed the model"
    made, found, server = trained("exact", examples="host")
    for name, x in params.items():
        # Values of order one after four steps; each gradient sums 48 tokens in float32.
        assert_close(server[name], x, rtol=0, atol=1e-5)
    assert found == approx(scores, abs=1e-5)
    for length in (8, 17):  # texts that are padded to another length than those of the training
        other = fp.testing.tiny_dataset(10, seed=1, length=length)
        states = (x.init(3)._replace(server=params) for x in (made, whole))
        one, all_blocks = (x.evaluate(s, other) for x, s in zip((made, whole), states, strict=True))
        assert one == approx(all_blocks, abs=1e-5)
    # The program has neither the embeddings nor the first block.
    assert all("layer.1." in n for n in made.setup.frozen)
    assert len(made.setup.frozen) == 4 < len(whole.setup.frozen)
    stored = made.columns[STORED]
    assert (stored.shape, str(stored.dtype)) == ((24, 12, 32), "float32")
    assert isinstance(stored, np.memmap)
    half = session("bfloat16", examples="device").columns[STORED]
    assert (half.shape, str(half.dtype)) == ((24, 12, 32), "bfloat16")
    assert not isinstance(half, np.memmap)
    # bfloat16 keeps 8 bits: rounding alone is off by up to 2**-8.
    assert_close(half.astype("f4"), stored, rtol=4 * 2**-8, atol=0)


@pytest.mark.parametrize("family", ["gpt2", "llama", "vit"])
@pytest.mark.sample("llama", "vit")
def test_every_family_goes_on_from_the_kept_states(family):
    shape = {"model_type": family, **FAMILIES[family].shape, **layers(family, 3)}
    shape |= {"tie_word_embeddings": True} if family == "llama" else {}
    head = fp.heads.causal_lm() if family in ("gpt2", "llama") else fp.heads.classification(3)
    bare = fp.random_model(shape, head=head, dropout=0.0)
    adapted = fp.attach(bare, fp.lora(2, layers=[1, 2]))
    rng = np.random.default_rng(0)
    mask = np.arange(8) < np.array([[3], [8]])
    batch = {"input_ids": rng.integers(1, 40, (2, 8)), "attention_mask": mask}
    if family == "vit":
        batch = {"pixel_values": rng.integers(0, 255, (2, 3, 16, 16)).astype(np.uint8)}
    parts = split(adapted, batch)
    assert (parts.below, parts.blocks) == (1, 3)

    @jax.jit
    def both(frozen, trainable):
        states = parts.states({**frozen, **trainable}, batch)
        few = {name: frozen[name] for name in parts.above.frozen}
        again = parts.above.apply(few, trainable, {**batch, STORED: states}, None, False)
        return adapted.apply(frozen, trainable, batch, None, False), again, states

    whole, again, states = both(adapted.frozen, tiny.trained(adapted))
    assert states.shape[1:] == parts.state.shape
    assert_close(again.logits, whole.logits, rtol=1e-5, atol=1e-5)
    assert_close(again.hidden, whole.hidden, rtol=1e-5, atol=1e-5)
    lost = adapted.frozen.keys() - parts.above.frozen.keys()
    tied = {"gpt2": "transformer.wte.embedding", "llama": "model.embed_tokens.embedding"}
    assert tied.get(family) not in lost
    assert any(".0." in name for name in lost)
    assert not any(".1." in name or ".2." in name for name in lost)


def test_the_head_alone_keeps_the_last_block():
    bare = fp.attach(fp.testing.tiny_model(**STILL | {"num_hidden_layers": 3}), fp.peft.head_only())
    assert split(bare, DATA.columns).below == 2


test_what_changes_below_is_refused = refusals(
    lambda options: split(model(**options), DATA.columns),
    ({"layers": (0, 1)}, r"'bert\.encoder\.layer\.0\..*lora_a' is trained in the first block"),
    ({"hidden_dropout_prob": 0.1}, "after 1 of 2 blocks, and the dropout .* every step"),
)


def test_models_without_blocks_are_refused():
    shape = {"model_type": "lstm", "vocab_size": 64, "hidden_size": 4}
    plain = abstract_model(shape, head=fp.heads.causal_lm())
    refused("this model has no blocks", split, plain, DATA.columns)
    with pytest.raises(fp.InputError, match="forward pass of this one is another function"):
        split(model().replace(apply=lambda *inputs: None), DATA.columns)


def test_changed_examples_and_completions_are_refused():
    for error, options in {
        "the attack 'backdoor' changes examples": {
            "attack": fp.attacks.backdoor(0.5, token=9, target=1)
        },
        "completes prompts with the whole model": {
            "task": fp.tasks.classification()._replace(generate=completing)
        },
        "reuse = 'yes' is unknown": {},
    }.items():
        with pytest.raises(fp.InputError, match=error):
            fp.session(
                *(model(), fp.algorithms.fedavg(optax.sgd(0.1)), CLIENTS),
                placement=fp.Placement(reuse="exact" if options else "yes"),
                **options,
            )
