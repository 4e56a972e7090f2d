"""FedAvg over LoRA in one short file: a communication round without the engine.

``python experiments/minimal/fedavg_flat.py`` prints the test accuracy after every round (a minute
on two CPU cores, no download). ``fp.simulate`` computes the same numbers with many clients side by
side in one compiled program; ``tests/test_fedavg_flat.py`` compares the two.
"""

import jax
import jax.numpy as jnp
import optax

import fedjax_peft as fp
from fedjax_peft.numerics.random import client_key, host_rng, stream

SEED, ROUNDS, PER_ROUND, BATCH = 0, 6, 4, 16


def cross_entropy(model, params, batch, key, train):
    """Returns the mean cross entropy and the accuracy on a batch."""
    logits = model.apply(model.frozen, params, batch, key, train).logits
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
    return losses.mean(), (logits.argmax(-1) == batch["labels"]).mean()


def fedavg(model, clients, test, optimizer):
    """Yields (leaves of the global model, test loss, test accuracy) after every round."""
    # The backbone is frozen. Only the LoRA factors A and B and the head have gradients.
    trained = [name for name, kind in model.kinds.items() if kind != "fixed"]
    fixed = {name: x for name, x in model.trainable.items() if name not in trained}

    @jax.jit
    def local_step(params, opt_state, batch, key):
        def loss(params):
            return cross_entropy(model, {**fixed, **params}, batch, key, train=True)[0]

        updates, opt_state = optimizer.update(jax.grad(loss)(params), opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    @jax.jit
    def evaluate(params):
        return cross_entropy(model, {**fixed, **params}, test.columns, None, train=False)

    server = {name: model.trainable[name] for name in trained}
    for round_index in range(1, ROUNDS + 1):
        # 1. The server samples the cohort, without replacement.
        rng = host_rng(SEED, "cohort", round_index)
        cohort = sorted(rng.choice(len(clients), PER_ROUND, replace=False).tolist())

        uploads, sizes = [], []
        for client in cohort:
            # 2. Each client starts from the broadcast leaves, with a new optimizer state ...
            params, opt_state = server, optimizer.init(server)
            rows = host_rng(SEED, "order", round_index, client).permutation(clients.indices[client])
            key = client_key(stream(SEED, "clients"), round_index, client)

            # 3. ... and trains for one epoch on its own examples, in shuffled batches.
            for step, start in enumerate(range(0, len(rows), BATCH), start=1):
                batch = {n: x[rows[start : start + BATCH]] for n, x in clients.data.columns.items()}
                step_key = jax.random.fold_in(key, step)  # for the dropout
                params, opt_state = local_step(params, opt_state, batch, step_key)
            if len(rows):
                uploads.append(params)
                sizes.append(len(rows))

        # 4. The server averages the uploads, weighted by the clients' numbers of examples.
        weights = jnp.array(sizes, jnp.float32)
        stacked = {name: jnp.stack([upload[name] for upload in uploads]) for name in trained}
        server = {name: jnp.average(x, axis=0, weights=weights) for name, x in stacked.items()}
        loss, accuracy = evaluate(server)
        yield server, float(loss), float(accuracy)


def problem():
    """Returns a tiny model with LoRA attached, ten non-IID clients, a test set and an optimizer."""
    model = fp.attach(fp.testing.tiny_model(classes=4), fp.lora(rank=4), seed=SEED)
    train, test = fp.testing.tiny_dataset(1600), fp.testing.tiny_dataset(200, seed=1)
    clients = fp.partition.dirichlet(train, clients=10, alpha=5.0, seed=SEED)
    return model, clients, test, optax.adamw(1e-2)


if __name__ == "__main__":
    for round_index, (_, loss, accuracy) in enumerate(fedavg(*problem()), start=1):
        print(f"round {round_index}: test loss {loss:.4f}, test accuracy {accuracy:.3f}")
