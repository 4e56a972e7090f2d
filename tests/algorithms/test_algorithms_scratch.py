"""The baselines without pretraining learn in federated training from random weights."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from internals import Task

import fedjax_peft as fp
from fedjax_peft import heads

pytestmark = pytest.mark.slow

VOCAB = 12


def next_word() -> Task:
    """Returns the task of the following token, in batches of ``input_ids`` ``[batch, length]``."""

    def losses(outputs, batch):
        targets = batch["input_ids"][:, 1:]
        values = optax.softmax_cross_entropy_with_integer_labels(outputs.logits[:, :-1], targets)
        mask = jnp.broadcast_to(batch["mask"][:, None], targets.shape)
        return jnp.sum(jnp.where(mask, values, 0.0)), jnp.sum(mask, dtype=jnp.float32)

    return Task(losses, lambda outputs, batch: {"loss": losses(outputs, batch)})


def counting(examples):
    """Returns sequences that count up from a random start, modulo the vocabulary."""
    start = np.random.default_rng(0).integers(0, VOCAB, (examples, 1))
    ids = (start + np.arange(8)) % VOCAB
    return fp.Dataset({"input_ids": ids.astype(np.int32)}, name="counting")


@pytest.mark.parametrize("kind", ["rnn", "lstm"])
@pytest.mark.sample("lstm")
def test_recurrent_models_learn_the_next_word(kind):
    shape = {"vocab_size": VOCAB, "embedding_size": 8, "hidden_size": 16, "num_layers": 1}
    model = fp.random_model({"model_type": kind, **shape}, head=heads.causal_lm())
    data = counting(64)
    clients = fp.partition.iid(np.arange(64), clients=4, seed=0)
    result = fp.simulate(
        model,
        fp.algorithms.fedavg(optax.adam(3e-2)),
        type(clients)(data, clients.indices),
        task=next_word(),
        rounds=6,
        clients_per_round=4,
        batch_size=8,
    )
    assert result.metrics[-1]["train_loss"] < result.metrics[1]["train_loss"] - 1
    assert result.metrics[1]["bytes_up"] == 4 * 4 * sum(x.size for x in model.trainable.values())


def test_a_cnn_learns_images():
    config = {"model_type": "cnn", "image_size": 8, "num_channels": 1, "hidden_size": 16}
    model = fp.random_model(config | {"channels": [4, 8]}, head=heads.classification(2))
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 2, 48).astype(np.int32)
    images = rng.normal(0, 0.3, (48, 1, 8, 8)) + labels[:, None, None, None]
    columns = {"pixel_values": images.astype(np.float32), "labels": labels}
    data = fp.Dataset(columns, ("dark", "bright"), "images")
    clients = fp.partition.dirichlet(data, clients=3, alpha=1.0, seed=0)
    options = {
        "rounds": 3,
        "clients_per_round": 3,
        "batch_size": 8,
        "evaluation": fp.Evaluation(every=3),
        "placement": fp.Placement(lanes=1),
    }
    result = fp.simulate(
        model, fp.algorithms.fedavg(optax.adam(1e-2)), clients, test=data, **options
    )
    assert result.metrics[-1]["test_accuracy"] > 0.9
